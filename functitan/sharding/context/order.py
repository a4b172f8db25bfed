"""Where the tokens of a sequence over cp stand: the order of the layout in force, and the natural one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functitan._torch import is_distributed
from functitan.sharding import layout
from functitan.sharding.move import Replicate, Shard, from_local
from sharding_specs.context import AXIS, ContextParallel, Run, all_runs, runs


def in_force() -> ContextParallel | None:
    """The method and layout of the plan in force on this thread; None where it splits no sequence over cp."""
    current = layout.current()
    return None if current is None else current.plan.context


def is_balanced() -> bool:
    """Whether what is in force lays sequences out in another order than the natural one."""
    chosen = in_force()
    return chosen is not None and chosen.layout == "balanced"


def axis_of(x: Tensor, dim: int) -> int | None:
    """The place among the mesh's axes of cp, where ``x`` is split along ``dim`` over it; else None."""
    if not is_distributed(x) or AXIS not in (x.device_mesh.mesh_dim_names or ()):
        return None
    axis = x.device_mesh.mesh_dim_names.index(AXIS)
    placement = x.placements[axis]
    return axis if placement.is_shard() and placement.dim == dim % x.ndim else None


def positions(x: Tensor, dim: int) -> Tensor:
    """int64 [seq], the place in the row of each token of ``x``, laid out over cp as ``x`` is along ``dim``."""
    seq_len, axis, chosen = x.shape[dim], axis_of(x, dim), in_force()
    order = "contiguous" if chosen is None else chosen.layout
    if axis is not None:
        mesh = x.device_mesh
        mine = runs(mesh.get_local_rank(axis), mesh.size(axis), seq_len, order)
        placements = [Shard(0) if i == axis else Replicate() for i in range(mesh.ndim)]
        return from_local(places(mine, x.device), mesh, placements, (seq_len,))
    if order == "contiguous":
        return torch.arange(seq_len, device=x.device)
    check_laid_out(x, "positions")
    everywhere = places(all_runs(layout.current().plan.mesh[AXIS], seq_len, order), x.device)
    return from_local(everywhere, x.device_mesh, [Replicate()] * x.device_mesh.ndim, (seq_len,))


def check_laid_out(x: Tensor, what: str) -> None:
    """Raises ValueError of a plain tensor along a sequence in balanced order: nobody knows which order it has."""
    if is_balanced() and not is_distributed(x):
        raise ValueError(
            f"{what}: a plain tensor {list(x.shape)} along the sequence, which the plan lays out over cp in balanced "
            "order: which order this one has is not known. Pass it in the batch through shard_batch, make places with "
            'nn.positions(tokens), or compile the plan with ContextParallel(layout="contiguous")'
        )


def check_order(x: Tensor) -> None:
    """Raises ValueError of attention to whole sequences in balanced order, whose causal mask is another one."""
    if is_balanced():
        raise ValueError(
            f"attention: the plan lays sequences out over cp in balanced order, and q {list(x.shape)} is not split "
            f'over cp along its sequence ({x.placements}): lay it out with constrain(q, ("batch", "seq", "heads", '
            '"head_dim")), or compile the plan with ContextParallel(layout="contiguous")'
        )


def in_layout_order(x: Tensor, span: Sequence[Run]) -> tuple[int, list[tuple[int, Run]]] | None:
    """Of a DTensor along a sequence in balanced order: that dim, and what this rank holds of it, run by run.

    Args:
        span: ``(start, size)`` in every dim of what this rank holds, in the order of the layout.

    Returns:
        ``(dim, [(offset in what it holds, run of places), …])``; None where the order is the natural one.
    """
    if not is_balanced():
        return None
    for dim in range(x.ndim):
        axis = axis_of(x, dim)
        if axis is not None:
            order = all_runs(x.device_mesh.size(axis), x.shape[dim], "balanced")
            return dim, natural_runs(*span[dim], order)
    return None


def places(of: Sequence[Run], device: torch.device) -> Tensor:
    """int64: the places of these runs, one after another."""
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in of])


def taken(x: Tensor, of: Sequence[Run], dim: int) -> Tensor:
    """The parts of a sequence in natural order that stand at these places."""
    return torch.cat([x.narrow(dim, start, length) for start, length in of], dim)


def natural(x: Tensor, order: Sequence[Run], dim: int) -> Tensor:
    """A whole sequence in the order of these runs -> in the natural one. Differentiable."""
    if list(order) == sorted(order):
        return x
    parts = x.split([length for _, length in order], dim)
    return torch.cat([part for _, part in sorted(zip(order, parts), key=lambda pair: pair[0])], dim)


def laid_out(x: Tensor, order: Sequence[Run], dim: int) -> Tensor:
    """The inverse of :func:`natural`."""
    if list(order) == sorted(order):
        return x
    inverse = dict(zip(sorted(order), x.split([length for _, length in sorted(order)], dim)))
    return torch.cat([inverse[run] for run in order], dim)


def natural_runs(offset: int, length: int, order: Sequence[Run]) -> list[tuple[int, Run]]:
    """The part ``offset … offset + length`` of a sequence in the order of these runs: ``(offset in the part, run)``."""
    found, before = [], 0
    for start, size in order:
        first, last = max(offset, before), min(offset + length, before + size)
        if first < last:
            found.append((first - offset, (start + first - before, last - first)))
        before += size
    return found
