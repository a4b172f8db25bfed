"""A loss over a batch that is taken in parts: sums over the parts, and the gradient of the sum.

With a plan that has layers over ``pp`` the parts go through the pipeline's stages in the order of its schedule;
otherwise they are computed one after the other. The numbers are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from functitan import optim, random, tree
from functitan._torch import is_distributed
from functitan.sharding import layout
from functitan.transforms import value_and_grad

Loss = Callable[[Any, Any, Tensor | None], tuple[Tensor, Any]]
"""``loss(params, part, key) -> (value, aux)``: a **sum** over the part's tokens, and what else is to be summed."""


def sum_and_grad(loss: Loss, parts: int = 1) -> Callable[..., tuple[tuple[Tensor, Any], Any]]:
    """The sum of ``loss`` over the parts of a batch, and its gradient.

    Args:
        loss: see :data:`Loss`; ``aux`` is a tree of tensors, such as the count of valid tokens.
        parts: how many parts a batch is taken in; part ``i`` has the rows ``i, i + parts, …``, so that a rank's rows of
            each part are among its rows of the batch.

    Returns:
        ``f(params, batch, key=None) -> ((value, aux), gradients)``. ``batch`` is a tree of tensors [batch, …]; of the
        key each part gets one of its own. Gradients are sums in at least float32: divide once, see
        :func:`functitan.optim.mean_gradients`.

    Raises:
        ValueError: (at the call) the rows, on any rank, do not divide into the parts.
    """

    def run(params: Any, batch: Any, key: Tensor | None = None) -> tuple[tuple[Tensor, Any], Any]:
        if layout.pipelined() is not None:
            from functitan.compiler.pipeline.run import pipelined_sum_and_grad

            return pipelined_sum_and_grad(loss, parts, params, batch, key)
        sums, accumulated = [], None
        for part, part_key in _parts(batch, key, parts):
            value, grads = value_and_grad(loss, has_aux=True)(params, part, part_key)
            sums.append(value)
            if accumulated is None:
                accumulated = optim.first_gradients(grads, 1)
            else:
                accumulated = optim.accumulate(accumulated, grads, 1)
        return _added(sums), accumulated.total

    return run


def sum_over(loss: Loss, parts: int = 1) -> Callable[..., tuple[Tensor, Any]]:
    """As :func:`sum_and_grad` without gradients: ``f(params, batch, key=None) -> (value, aux)``."""

    def run(params: Any, batch: Any, key: Tensor | None = None) -> tuple[Tensor, Any]:
        if layout.pipelined() is not None:
            from functitan.compiler.pipeline.run import pipelined_sum

            return pipelined_sum(loss, parts, params, batch, key)
        return _added([loss(params, part, part_key) for part, part_key in _parts(batch, key, parts)])

    return run


def _added(sums: list[Any]) -> Any:
    return functools.reduce(lambda a, b: tree.map(torch.add, a, b), sums)


def _parts(batch: Any, key: Tensor | None, parts: int) -> list[tuple[Any, Tensor | None]]:
    keys = [None] * parts if key is None else list(random.split(key, parts))
    split = tree.map(lambda x: rows_by_part(x, parts), batch)
    return [(tree.map(lambda x, i=i: x[i], split), keys[i]) for i in range(parts)]


def rows_by_part(x: Tensor, parts: int) -> Tensor:
    """[batch, …] -> [parts, batch / parts, …].

    Raises:
        ValueError: the rows, of a DTensor those of this rank, do not divide into the parts.
    """
    here = x.to_local() if is_distributed(x) else x
    if here.shape[0] % parts:
        whose = f" ({here.shape[0]} on this rank)" if is_distributed(x) else ""
        raise ValueError(f"a batch of {x.shape[0]} rows{whose} does not divide into {parts} parts")
    return rearrange(x, "(b parts) ... -> parts b ...", parts=parts)
