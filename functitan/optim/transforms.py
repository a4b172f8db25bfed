"""The parts of which optimizers are chained; names, defaults and formulas are optax's.

Moments are float32 (float64 for float64 parameters) also where parameters are bfloat16, and what comes out of a
transformation that keeps moments is in that dtype; ``apply_updates`` rounds once, at the end. On a CPU every
operator is a pass over memory, so formulas are arranged for few of them: what is common to the whole tree (bias
corrections, the clipping factor) is computed once as a 0-dim tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functitan import tree
from functitan._torch import is_distributed
from functitan.optim.base import (
    EmptyState,
    GradientTransformation,
    ScalarOrSchedule,
    Schedule,
    at_least_float32,
    bias_correction,
    check_decay_rate,
    check_not_negative,
    check_number,
    check_scalar_or_schedule,
    increment,
    init_empty_state,
    map_matching,
    zero_count,
    zeros_like,
)
from functitan.optim.masking import MaskOrFn, default_decay_mask, masked


class ScaleByAdamState(NamedTuple):
    count: Tensor
    mu: Any
    nu: Any


class ScaleByLionState(NamedTuple):
    count: Tensor
    mu: Any


class TraceState(NamedTuple):
    trace: Any


class ScaleByScheduleState(NamedTuple):
    count: Tensor


class WeightDecaySchedule(NamedTuple):
    count: Tensor


def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980): ``m̂ / (sqrt(v̂ + eps_root) + eps)``.

    Args:
        b1: decay rate of the first moment ``m``, in [0, 1).
        b2: decay rate of the second moment ``v``, in [0, 1).
        eps: added to the root.
        eps_root: added under the root.
        mu_dtype: dtype in which ``m`` is kept; the arithmetic stays in float32. None: float32.
        nesterov: Nesterov momentum (Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).

    Raises:
        ValueError: a rate outside [0, 1), a negative eps; updates that do not fit the state (from ``update``).
    """
    check_decay_rate("scale_by_adam", "b1", b1)
    check_decay_rate("scale_by_adam", "b2", b2)
    check_not_negative("scale_by_adam", "eps", eps)
    check_not_negative("scale_by_adam", "eps_root", eps_root)

    def init(params: Any) -> ScaleByAdamState:
        return ScaleByAdamState(zero_count(params), zeros_like(params, mu_dtype), zeros_like(params))

    def update(updates: Any, state: ScaleByAdamState, params: Any = None) -> tuple[Any, ScaleByAdamState]:
        del params
        count = increment(state.count)
        c1, c2 = bias_correction(b1, count), bias_correction(b2, count)
        # (m/c1) / (sqrt(v/c2 + eps_root) + eps), with both corrections moved below the line and applied together.
        root_scale, root_offset = c1 / torch.sqrt(c2), c1 * eps
        under_root = c2 * eps_root if eps_root else None
        ahead = b1 * c1 / bias_correction(b1, increment(count)) if nesterov else None

        def leaf(g: Tensor, mu: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            g = g.to(nu.dtype)
            m = torch.lerp(mu.to(nu.dtype), g, 1 - b1)
            v = torch.addcmul(nu * b2, g, g, value=1 - b2)
            root = torch.sqrt(v if under_root is None else v + under_root)
            numerator = m if ahead is None else torch.add(m * ahead, g, alpha=1 - b1)
            return numerator / (root * root_scale + root_offset), m.to(mu.dtype), v

        new, mu, nu = map_matching("scale_by_adam", leaf, updates, mu=state.mu, nu=state.nu, outputs=3)
        return new, ScaleByAdamState(count, mu, nu)

    return GradientTransformation(init, update)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, mu_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Lion (Chen et al., https://arxiv.org/abs/2302.06675): the sign of ``b1·m + (1 - b1)·g``.

    Args:
        b1: how much of the momentum ``m`` is in the update, in [0, 1).
        b2: decay rate of ``m``, in [0, 1).
        mu_dtype: dtype in which ``m`` is kept; the arithmetic stays in float32. None: float32.

    Raises:
        ValueError: a rate outside [0, 1); updates that do not fit the state (from ``update``).
    """
    check_decay_rate("scale_by_lion", "b1", b1)
    check_decay_rate("scale_by_lion", "b2", b2)

    def init(params: Any) -> ScaleByLionState:
        return ScaleByLionState(zero_count(params), zeros_like(params, mu_dtype))

    def leaf(g: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        m = mu.to(at_least_float32(mu.dtype))
        g = g.to(m.dtype)
        return torch.sign(torch.lerp(m, g, 1 - b1)), torch.lerp(m, g, 1 - b2).to(mu.dtype)

    def update(updates: Any, state: ScaleByLionState, params: Any = None) -> tuple[Any, ScaleByLionState]:
        del params
        new, mu = map_matching("scale_by_lion", leaf, updates, mu=state.mu, outputs=2)
        return new, ScaleByLionState(increment(state.count), mu)

    return GradientTransformation(init, update)


def trace(
    decay: float, nesterov: bool = False, accumulator_dtype: torch.dtype | None = None
) -> GradientTransformation:
    """Momentum: ``t ← g + decay·t``; the update is ``t``, or ``g + decay·t`` once more with ``nesterov``.

    Args:
        decay: in [0, 1).
        accumulator_dtype: dtype in which ``t`` is kept. None: float32.

    Raises:
        ValueError: decay outside [0, 1); updates that do not fit the state (from ``update``).
    """
    check_decay_rate("trace", "decay", decay)

    def init(params: Any) -> TraceState:
        return TraceState(zeros_like(params, accumulator_dtype))

    def leaf(g: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        # A low-precision trace is added to in float32 and rounded only to be kept.
        g = g.to(at_least_float32(t.dtype))
        new = torch.add(g, t, alpha=decay)
        return torch.add(g, new, alpha=decay) if nesterov else new, new.to(t.dtype)

    def update(updates: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        del params
        new, kept = map_matching("trace", leaf, updates, trace=state.trace, outputs=2)
        return new, TraceState(kept)

    return GradientTransformation(init, update)


def add_decayed_weights(weight_decay: float | Schedule = 0.0, mask: MaskOrFn | None = None) -> GradientTransformation:
    """Adds ``weight_decay · params`` to the updates: decoupled weight decay where it comes after ``scale_by_adam``.

    **Norms and biases are not decayed by default.** optax decays everything; here ``mask=None`` goes by the number of
    dims and the names (:func:`default_decay_mask`). ``mask=decay_mask(declare(cfg))`` takes what the model declares,
    and ``mask=True`` decays every leaf.

    Args:
        weight_decay: a number >= 0, or a schedule of them.
        mask: True where weights decay: a tree of bools, a prefix of one, or a function of the parameters.

    Raises:
        ValueError: a negative weight decay; no parameters passed to ``update``.
    """
    if not callable(weight_decay):
        check_not_negative("add_decayed_weights", "weight_decay", weight_decay)

    def init(params: Any) -> WeightDecaySchedule | EmptyState:
        return WeightDecaySchedule(zero_count(params)) if callable(weight_decay) else EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("add_decayed_weights needs the parameters; call update(updates, state, params)")
        if callable(weight_decay):
            amount = weight_decay(state.count)
            new = map_matching("add_decayed_weights", lambda g, p: g + amount * p, updates, params=params)
            return new, WeightDecaySchedule(increment(state.count))
        if weight_decay == 0:
            return updates, state
        add = lambda g, p: torch.add(g, p, alpha=weight_decay)  # noqa: E731
        return map_matching("add_decayed_weights", add, updates, params=params), state

    return masked(GradientTransformation(init, update), default_decay_mask if mask is None else mask)


def global_norm(updates: Any) -> Tensor:
    """The 2-norm of all leaves together: a 0-dim tensor, float32 or wider; zero for a tree without leaves."""
    leaves = tree.leaves(updates)
    if any(map(is_distributed, leaves)):
        from functitan.sharding.norm import global_norm as over_mesh

        return over_mesh(leaves, max((at_least_float32(x.dtype) for x in leaves), key=lambda dtype: dtype.itemsize))
    norms = [torch.linalg.vector_norm(x, dtype=at_least_float32(x.dtype)) for x in leaves]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scales all updates by ``min(1, max_norm / global_norm)`` (Pascanu et al., https://arxiv.org/abs/1211.5063).

    A norm that is not finite gives updates that are not finite: clipping must not hide a broken step.

    Raises:
        ValueError: max_norm is not > 0.
    """
    check_number("clip_by_global_norm", "max_norm", max_norm, "> 0", lambda x: x > 0)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        del params
        norm = global_norm(updates)
        factor = torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)
        factor = factor + (norm - norm)  # NaN where the norm is not finite, also where finite elements overflow it
        return tree.map(lambda g: g * factor, updates), state

    return GradientTransformation(init_empty_state, update)


def scale(step_size: float | Tensor) -> GradientTransformation:
    """Multiplies every update by ``step_size``, a number or a 0-dim tensor."""

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        del params
        return tree.map(lambda g: g * step_size, updates), state

    return GradientTransformation(init_empty_state, update)


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiplies every update by ``step_size_fn(count)``, where count is 0 in the first call."""

    def init(params: Any) -> ScaleByScheduleState:
        return ScaleByScheduleState(zero_count(params))

    def update(updates: Any, state: ScaleByScheduleState, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        del params
        step_size = step_size_fn(state.count)
        return tree.map(lambda g: g * step_size, updates), ScaleByScheduleState(increment(state.count))

    return GradientTransformation(init, update)


def scale_by_learning_rate(learning_rate: ScalarOrSchedule, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiplies by ``-learning_rate``: a number, a 0-dim tensor, or a schedule of the count.

    To log the learning rate of step ``n`` (the first is 0), call the schedule: ``schedule(n)``.

    Args:
        learning_rate: >= 0.
        flip_sign: False to multiply by ``+learning_rate``.

    Raises:
        ValueError: a negative or non-finite number, or a tensor with dims.
    """
    check_scalar_or_schedule("scale_by_learning_rate", "learning_rate", learning_rate)
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: sign * learning_rate(count))
    return scale(sign * learning_rate)
