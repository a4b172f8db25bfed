"""How each operator of ``functitan.nn`` runs over a mesh: which placements its inputs take, and what its result has.

One function an operator. Each decides axis by axis, brings the inputs there, computes on local tensors, and says what
the outcome is; no other communication happens in a model. The formulas stay in ``functitan.nn``: what is called here on
the local parts is what is called there on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functitan._torch import is_distributed
from functitan.sharding import layout
from functitan.sharding.context.order import axis_of, check_laid_out, check_order, in_layout_order
from functitan.sharding.move import (
    DTensor,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    complete,
    from_local,
    region,
    to_local,
    use_parameter,
)

if TYPE_CHECKING:
    from functitan.nn.visibility import Visibility


def mesh_of(*tensors: Tensor | None) -> DeviceMesh:
    """The mesh of the first DTensor among the operands."""
    return next(x.device_mesh for x in tensors if is_distributed(x))


def spread(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor is what every rank has: the DTensor that says so."""
    return x if is_distributed(x) else from_local(x, mesh, [Replicate()] * mesh.ndim, x.shape)


def whole_in(x: DTensor, *dims: int) -> Placements:
    """The placements of ``x`` with these dims gathered and its sums completed."""
    dims = tuple(dim % x.ndim for dim in dims)
    return tuple(Replicate() if p.is_shard() and p.dim in dims else p for p in complete(x.placements))


def _summed_over(placements: Placements) -> Placements:
    """The gradient placements of what every rank uses whole for its own part of such data: sums over the parts."""
    return tuple(Partial() if p.is_shard() else Replicate() for p in placements)


def _is_stored(mesh: DeviceMesh, axis: int, x: Placement) -> bool:
    """Whether a parameter split over this axis is gathered for use with ``x``, and not ``x`` for the parameter."""
    current = layout.current()
    if current is None or mesh.mesh_dim_names is None:
        return x.is_shard() and x.dim == 0
    return current.is_data_axis(mesh.mesh_dim_names[axis])


def linear(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor], n_in: int
) -> list[DTensor]:
    """The products of ``x`` with each weight, ``x`` being moved once where all of them want it alike.

    A weight split along its output splits the result; one split along what is contracted gives partial sums, to be
    completed where the result's layout is said (Megatron-LM, https://arxiv.org/abs/1909.08053).
    """
    mesh = mesh_of(x, *weights)
    x, weights = spread(x, mesh), [spread(w, mesh) for w in weights]
    n_outer = x.ndim - n_in
    moved: dict[tuple[Placements, Placements], Tensor] = {}
    results = []
    for w in weights:
        axes = [_contract(a, b, n_outer, n_in, _is_stored(mesh, i, a))
                for i, (a, b) in enumerate(zip(x.placements, complete(w.placements)))]  # fmt: skip
        x_to, w_to, y_as, x_grad, w_grad = (tuple(column) for column in zip(*axes))
        if (x_to, x_grad) not in moved:
            moved[x_to, x_grad] = to_local(x, x_to, x_grad)
        local_w = use_parameter(w, w_to, w_grad, dtype=x.dtype)
        y = product(moved[x_to, x_grad], local_w)
        results.append(from_local(y, mesh, y_as, (*x.shape[:n_outer], *w.shape[n_in:])))
    return results


def _contract(x: Placement, w: Placement, n_outer: int, n_in: int, stored: bool) -> tuple[Placement, ...]:
    """Of one axis: what ``x`` and the weight are brought to, the result, and the gradients of both."""
    if w.is_shard() and stored:
        w = Replicate()
    if w.is_shard() and w.dim >= n_in:
        return Replicate(), w, Shard(n_outer + w.dim - n_in), Partial(), w
    if w.is_shard():
        part = Shard(n_outer + w.dim)
        return part, w, Partial(), part, w
    if x.is_shard() and x.dim < n_outer:
        return x, w, x, x, Partial()
    if x.is_shard():
        part = Shard(x.dim - n_outer)
        return x, part, Partial(), x, part
    return Replicate(), Replicate(), Replicate(), Replicate(), Replicate()


def embedding(lookup: Callable[[Tensor, Tensor], Tensor], table: Tensor, ids: Tensor, dtype: torch.dtype) -> DTensor:
    """Rows by id. Of a table split along the vocabulary each rank gives the rows that it has, and zeros for others."""
    mesh = mesh_of(table, ids)
    table, ids = spread(table, mesh), spread(ids, mesh)
    axes = []
    for i in range(mesh.ndim):
        t, x = complete(table.placements)[i], complete(ids.placements)[i]
        if t.is_shard() and _is_stored(mesh, i, x):
            t = Replicate()
        if t.is_shard():
            axes.append((t, Replicate(), Partial() if t.dim == 0 else Shard(ids.ndim), t))
        else:
            axes.append((t, x, x, Partial() if x.is_shard() else Replicate()))
    table_to, ids_to, y_as, table_grad = (tuple(column) for column in zip(*axes))
    (start, size), _ = region(table.shape, mesh, table_to)
    rows, local_ids = use_parameter(table, table_to, table_grad, dtype), to_local(ids, ids_to)
    if size == table.shape[0]:
        y = lookup(rows, local_ids)
    else:
        y = _own_rows(lookup, rows, local_ids - start)
        legal = (local_ids >= 0) & (local_ids < table.shape[0])
        y = torch.where(legal.unsqueeze(-1), y, torch.nan)  # an id that no rank has the row of
    return from_local(y, mesh, y_as, (*ids.shape, table.shape[1]))


def _own_rows(lookup: Callable[[Tensor, Tensor], Tensor], rows: Tensor, ids: Tensor) -> Tensor:
    if rows.shape[0] == 0:  # more ranks than rows: nothing to look up, and nothing that a gradient could flow to
        return rows.sum() + rows.new_zeros((*ids.shape, rows.shape[1]))
    mine = (ids >= 0) & (ids < rows.shape[0])
    return torch.where(mine.unsqueeze(-1), lookup(rows, torch.where(mine, ids, 0)), 0.0)


def normalise(fun: Callable[..., Tensor], x: Tensor, *scales: Tensor | None) -> DTensor:
    """``fun(x, *scales)`` over the last dim; the scales' gradients are summed over all that splits the rows."""
    mesh = mesh_of(x, *scales)
    x = spread(x, mesh)
    placements = whole_in(x, -1)
    whole = (Replicate(),) * mesh.ndim
    local = [
        None if s is None else use_parameter(spread(s, mesh), whole, _summed_over(placements), x.dtype)
        for s in scales
    ]
    return from_local(fun(to_local(x, placements), *local), mesh, placements, x.shape)


def attention(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Visibility,
    mask: Tensor | None,
    *,
    scale: float,
    blockwise: bool,
) -> DTensor:
    """Attention, each rank with its part of the batch, of the heads, and over cp of the queries' sequence.

    Query heads and key/value heads are split alike, so that a rank has the key/value heads of its query heads.

    Args:
        attend: attention on plain tensors: ``attend(q, k, v, mask, causal)``.
        sees, mask: who sees whom, and of those, who may.
        scale: of the scores.
        blockwise: whether attention over cp may be anything else than ``attend``.
    """
    mesh = mesh_of(q, k, v, mask, sees.documents)
    q, k, v = (spread(x, mesh) for x in (q, k, v))
    context = axis_of(q, 1)
    heads, placements = k.shape[2], []
    for i, p in enumerate(q.placements):
        by_heads = p.is_shard() and p.dim == 2 and heads % mesh.size(i) == 0
        if by_heads:
            heads //= mesh.size(i)  # what another axis may split further
        kept = by_heads or i == context or (p.is_shard() and p.dim == 0)
        placements.append(p if kept else Replicate())
    if context is not None:
        from functitan.sharding.context.attention import attention as over_context

        return over_context(
            attend, q, k, v, sees, mask, placements=tuple(placements), axis=context, scale=scale, blockwise=blockwise
        )
    check_order(q)
    whole, causal = sees.combined(mask, q.shape[1], q.device)
    local_mask = None
    if whole is not None:
        whole = spread(whole, mesh)
        local_mask = to_local(whole, mask_placements(whole, placements))
    y = attend(*(to_local(x, placements) for x in (q, k, v)), local_mask, causal)
    return from_local(y, mesh, placements, q.shape)


def mask_placements(mask: Tensor, placements: Sequence[Placement]) -> list[Placement]:
    """How a mask [batch, heads, seq, kv_seq] goes with queries [batch, seq, heads, head_dim] in these placements."""
    dims = {0: 0, 1: 2, 2: 1}
    return [Shard(dims[p.dim]) if p.is_shard() and mask.shape[dims[p.dim]] > 1 else Replicate() for p in placements]


def rotate(fun: Callable[..., Tensor], x: Tensor, *table: Tensor) -> DTensor:
    """Rotary embedding: the table [..., seq, 1, head_dim] is split as the batch and the sequence of ``x`` are."""
    mesh = mesh_of(x, *table)
    x = spread(x, mesh)
    placements = whole_in(x, -1)
    local = []
    for t in table:
        if t.ndim > 2 and t.shape[-3] > 1 and axis_of(x, -3) is not None:
            check_laid_out(t, "rotary: the table")
        t, ahead = spread(t, mesh), x.ndim - t.ndim
        local.append(
            to_local(
                t,
                [
                    Shard(p.dim - ahead) if p.is_shard() and p.dim >= ahead and t.shape[p.dim - ahead] > 1
                    else Replicate()
                    for p in placements
                ],
            )
        )  # fmt: skip
    return from_local(fun(to_local(x, placements), *local), mesh, placements, x.shape)


def dropout(fun: Callable[[Tensor, tuple], Tensor], x: DTensor) -> DTensor:
    """``fun(local, region)``: the mask of the region of the whole tensor that this rank holds.

    A sequence in balanced order is taken piece by piece, each with the region where it stands naturally.
    """
    placements = complete(x.placements)
    span = region(x.shape, x.device_mesh, placements)
    local = to_local(x, placements)
    pieces = in_layout_order(x, span)
    if pieces is None:
        y = fun(local, span)
    else:
        dim, runs = pieces
        y = torch.cat(
            [fun(local.narrow(dim, at, run[1]), (*span[:dim], run, *span[dim + 1 :])) for at, run in runs], dim
        )
    return from_local(y, x.device_mesh, placements, x.shape)
