"""Gradient accumulation that gives the gradient of the whole batch: sum, then divide once.

Microbatches differ in how many valid tokens they have (padding, ignored labels), so the mean of their mean gradients
is not the gradient of the mean loss; ``optax.MultiSteps`` has that fault. Here what is accumulated is the **sum of the
gradients of summed losses** and the **sum of the weights** (counts of valid tokens), and there is one division.

>>> acc = zero_gradients(params)
>>> for batch in microbatches:
...     (_, count), grads = value_and_grad(loss_sum_and_count, has_aux=True)(params, batch)
...     acc = accumulate(acc, grads, count)
>>> grads = mean_gradients(acc)
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functitan import tree
from functitan.optim.base import GradientTransformation, at_least_float32, map_matching, zero_count, zeros_like


class AccumulatedGradients(NamedTuple):
    """Gradients of summed losses, in float32, and how many losses they are of, an int64 0-dim tensor."""

    total: Any
    weight: Tensor


class MultiStepsState(NamedTuple):
    """``mini_step``: how many microbatches of the present step have been seen, an int32 0-dim tensor."""

    mini_step: Tensor
    inner_state: Any
    accumulated: AccumulatedGradients


def zero_gradients(params: Any) -> AccumulatedGradients:
    """Nothing accumulated yet."""
    return AccumulatedGradients(zeros_like(params), zero_count(params).to(torch.int64))


def first_gradients(grads: Any, weight: int | Tensor) -> AccumulatedGradients:
    """The first microbatch, as :func:`accumulate` to :func:`zero_gradients` without adding to zeros."""
    _check_weight("first_gradients", weight)
    return AccumulatedGradients(tree.map(lambda g: g.to(at_least_float32(g.dtype)), grads), weight)


def accumulate(accumulated: AccumulatedGradients, grads: Any, weight: int | Tensor) -> AccumulatedGradients:
    """Adds one microbatch.

    Args:
        accumulated: what came before.
        grads: the gradients of the **sum** of the losses of the microbatch, not of their mean.
        weight: how many losses that sum has: an int or an integer 0-dim tensor.

    Raises:
        ValueError: the gradients do not fit, or the weight has dims or is negative.
        TypeError: the weight is no integer.
    """
    _check_weight("accumulate", weight)
    total = map_matching("accumulate", torch.add, accumulated.total, grads=grads)
    return AccumulatedGradients(total, accumulated.weight + weight)


def mean_gradients(accumulated: AccumulatedGradients) -> Any:
    """The gradients of the mean loss: total / weight; zeros where the weight is 0 (no valid token at all)."""
    weight = accumulated.weight
    divisor = torch.where(weight == 0, torch.ones_like(weight), weight)
    return tree.map(lambda g: g / divisor, accumulated.total)


def multi_steps(inner: GradientTransformation, every: int) -> GradientTransformation:
    """Applies ``inner`` once in ``every`` calls, to the gradient of the mean loss over all of them.

    Unlike ``optax.MultiSteps``, it is given gradients of summed losses and their weights, so that a microbatch counts
    by its valid tokens: ``update(grads, state, params, weight=count)``. It is the outermost transformation: what is
    chained inside (clipping, weight decay) sees whole batches. ``inner`` is computed in every call and its result
    selected, as a captured step has no branches; where the microbatches are at hand together, accumulate them in the
    step with :func:`accumulate`, which is cheaper.

    Returns:
        A transformation whose updates are zeros in all but each ``every``-th call.

    Raises:
        ValueError: ``every`` < 1; from ``update``, no weight.
        TypeError: ``every`` is no int.
    """
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"multi_steps: every must be an int >= 1, not {type(every).__name__} {every!r}")
    if every < 1:
        raise ValueError(f"multi_steps: every={every}; legal: an int >= 1")

    def init(params: Any) -> MultiStepsState:
        return MultiStepsState(zero_count(params), inner.init(params), zero_gradients(params))

    def update(
        updates: Any, state: MultiStepsState, params: Any = None, *, weight: int | Tensor | None = None
    ) -> tuple[Any, MultiStepsState]:
        if weight is None:
            raise ValueError(
                "multi_steps: update(grads, state, params, weight=count) needs the weight of the microbatch, the "
                "number of losses that were summed; make multi_steps the outermost transformation, as chain passes none"
            )
        accumulated = accumulate(state.accumulated, updates, weight)
        is_last = state.mini_step == every - 1

        def select(if_last: Any, otherwise: Any) -> Any:
            return tree.map(lambda a, b: torch.where(is_last, a, b), if_last, otherwise)

        new_updates, inner_state = inner.update(mean_gradients(accumulated), state.inner_state, params)
        return select(new_updates, tree.map(torch.zeros_like, new_updates)), MultiStepsState(
            mini_step=(state.mini_step + 1) % every,
            inner_state=select(inner_state, state.inner_state),
            accumulated=select(tree.map(torch.zeros_like, accumulated), accumulated),
        )

    return GradientTransformation(init, update)


def _check_weight(where: str, weight: Any) -> None:
    legal = "weight counts losses: an int or an integer 0-dim tensor"
    if isinstance(weight, Tensor):
        if weight.ndim:
            raise ValueError(f"{where}: {legal}; it has shape {tuple(weight.shape)}")
        if weight.is_floating_point() or weight.is_complex():
            raise TypeError(f"{where}: {legal}; its dtype is {str(weight.dtype).removeprefix('torch.')}")
    elif isinstance(weight, bool) or not isinstance(weight, numbers.Integral):
        raise TypeError(f"{where}: {legal}, not {type(weight).__name__} {weight!r}")
    elif weight < 0:
        raise ValueError(f"{where}: weight={weight}; legal: >= 0")
