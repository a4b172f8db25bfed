"""DTensors and their local parts: the three ways between them, each with its gradient, and every collective's cause.

An operator that says how it is split runs in three steps: :func:`to_local` brings each input to the placements that
it wants, plain torch computes on what this rank holds, and :func:`from_local` says what the result is. Gradients go
the same way back. All redistribution of functitan happens in :func:`move`, axis by axis and in an order of its own
choosing, because the order decides how many bytes are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from functitan.precision import Precision
from functitan.sharding import layout
from functitan.sharding.labels import label_of, labelled
from sharding_specs.region import chunk

Placements = tuple[Placement, ...]

# Its advice, given by every rank, is for who writes redistributions: move() orders its own.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def move(x: DTensor, target: Sequence[Placement]) -> DTensor:
    """``x`` in other placements; no gradient passes (see :func:`redistribute`).

    Sums are scattered before others are completed, and those before anything is gathered: every step sends the least.
    """
    target = tuple(target)
    for step in _steps(x.placements, target):
        x = x.redistribute(placements=step)
    return x


def _steps(source: Placements, target: Placements) -> list[Placements]:
    """The placements on the way, one axis changed at a time."""
    changed = [i for i, (a, b) in enumerate(zip(source, target)) if a != b]
    if len(changed) < 2:
        return [target] if changed else []
    if _nests_differently(source, target, changed):
        return [target]  # shards within shards change their order: DTensor knows how
    # Outer shards are made before the inner ones that lie in them, and gathered after them.
    kinds = [[i for i in changed if _kind(source[i], target[i]) == kind] for kind in range(4)]
    order = [*kinds[0], *kinds[1], *kinds[2], *reversed(kinds[3])]
    steps, now = [], list(source)
    for i in order:
        now[i] = target[i]
        steps.append(tuple(now))
    return steps


def _kind(a: Placement, b: Placement) -> int:
    if a.is_partial():
        return 0 if b.is_shard() else 1
    return 2 if a.is_replicate() else 3


def _nests_differently(source: Placements, target: Placements, changed: list[int]) -> bool:
    """Whether a dim is split over several axes of which some change: then the steps depend on one another."""
    for placements in (source, target):
        for i in changed:
            dims = [p.dim for p in placements if p.is_shard()]
            if placements[i].is_shard() and dims.count(placements[i].dim) > 1:
                return True
    return False


def complete(placements: Sequence[Placement]) -> Placements:
    """The same without partial sums: what was to be added is added, on every rank."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(x: DTensor, target: Placements) -> DTensor:
        return move(x, target) if x.placements != target else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: DTensor) -> None:
        ctx.source = inputs[0].placements

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return move(grad, complete(ctx.source)), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        x: DTensor, target: Placements, grad_target: Placements, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Tensor:
        with labelled(label_of(x.to_local())):
            if x.dtype != dtype:
                x = x.to(dtype)
            local = move(x, target).to_local()
            return local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, _, ctx.grad_target, _, ctx.reduce_dtype = inputs
        ctx.source, ctx.mesh, ctx.shape, ctx.dtype = x.placements, x.device_mesh, x.shape, x.dtype
        ctx.label = label_of(x.to_local())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor | None, None, None, None, None]:
        total = _wrap(grad, ctx.mesh, ctx.grad_target, ctx.shape)
        target = complete(ctx.source)
        with labelled(ctx.label):
            if any(p.is_partial() for p in ctx.grad_target) and total.dtype != ctx.reduce_dtype:
                total = total.to(ctx.reduce_dtype)
            total = move(total, target)
            return total.to(ctx.dtype) if total.dtype != ctx.dtype else total, None, None, None, None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
        return _wrap(local.view_as(local), mesh, placements, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: DTensor) -> None:
        ctx.placements = complete(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None]:
        return move(grad, ctx.placements).to_local(), None, None, None


def _wrap(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    if local.device.type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"a tensor on {local.device} is no part of one on a mesh of {mesh.device_type} devices; move it there first"
        )
    stride = stride_like(local, shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def stride_like(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of the whole shape, its dims nested as those of the local one are."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def redistribute(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``x`` in other placements, differentiable."""
    return _Redistribute.apply(x, tuple(placements))


def to_local(
    x: DTensor,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None = None,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """What this rank holds of ``x`` in the given placements, differentiable.

    Args:
        x: in any placements.
        placements: what the local computation wants.
        grad_placements: what the gradient of the result will be; None: as ``placements``. Where every rank uses the
            same values for other data, the gradients are partial sums.
        dtype: of the result; values are cast before they are sent. None: that of ``x``.
        reduce_dtype: in which partial gradients are added up; None: that of the result.
    """
    grad = tuple(placements) if grad_placements is None else tuple(grad_placements)
    dtype = dtype or x.dtype
    return _ToLocal.apply(x, tuple(placements), grad, dtype, reduce_dtype or dtype)


def use_parameter(
    x: DTensor,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`to_local` of a parameter: its gradients are added up over the ranks as the plan's precision says."""
    current = layout.current()
    precision = Precision() if current is None else current.plan.precision
    return to_local(x, placements, grad_placements, dtype=dtype, reduce_dtype=precision.reduce_dtype(x.dtype))


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of the whole ``shape`` of which every rank gives its part, differentiable."""
    return _FromLocal.apply(local, mesh, tuple(placements), torch.Size(shape))


def region(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, int], ...]:
    """``(start, size)`` in every dim of what this rank holds of a tensor: chunks as torch.chunk makes them."""
    starts, sizes = [0] * len(shape), list(shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            dim = placement.dim
            offset, sizes[dim] = chunk(sizes[dim], mesh.size(axis), mesh.get_local_rank(axis))
            starts[dim] += offset
    return tuple(zip(starts, sizes))


__all__ = [
    "DTensor", "Partial", "Placement", "Placements", "Replicate", "Shard", "complete", "from_local", "move",
    "redistribute", "region", "stride_like", "to_local", "use_parameter",
]  # fmt: skip
