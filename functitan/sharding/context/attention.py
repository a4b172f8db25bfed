"""Attention over a sequence that is split over cp, by the method of the plan in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from functitan.sharding.context import ulysses
from functitan.sharding.context.all_gather import blockwise_attention
from functitan.sharding.context.blockwise import Scores, Side
from functitan.sharding.context.calls import Pattern, calls_of, ring_calls
from functitan.sharding.context.group import Group
from functitan.sharding.context.order import check_laid_out, in_force, laid_out, natural, places
from functitan.sharding.context.ring import Ring, ring_attention
from functitan.sharding.move import DTensor, Partial, Placements, Replicate, from_local, to_local
from sharding_specs.context import ContextParallel, all_runs, runs

if TYPE_CHECKING:
    from functitan.nn.visibility import Visibility

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def attention(
    attend: Attend, q: DTensor, k: DTensor, v: DTensor, sees: Visibility, mask: Tensor | None, *,
    placements: Placements, axis: int, scale: float, blockwise: bool,
) -> DTensor:
    """Attention of queries that are split over a mesh axis along their sequence.

    Args:
        attend: attention on plain tensors: ``attend(q, k, v, mask, causal)``.
        sees: who sees whom.
        mask: and of those, who may: a mask of the whole, in the order of the sequence.
        placements: of the queries, and of the result; keys and values are laid out in the same way.
        axis: the mesh's axis that splits the sequence.
        blockwise: False for what only ``attend`` can do: second derivatives.

    Raises:
        ValueError: no plan is in force, the length does not divide, or the mask does not go with the plan's layout.
    """
    chosen = _chosen(q)
    context = _Context(chosen, Group.of(q.device_mesh, axis), placements, axis, q.shape[1], scale)
    order = all_runs(context.group.size, q.shape[1], chosen.layout)  # refuses lengths that do not divide
    documents = context.documents(sees)
    if mask is not None or not blockwise or q.shape[1] != k.shape[1]:
        y = context.by_rows(attend, q, k, v, sees, documents, mask)
    elif chosen.method == "ulysses":
        y = context.by_heads(attend, q, k, v, sees, documents, order)
    elif chosen.method == "all_gather":
        y = context.gathered(q, k, v, sees, documents, order)
    else:
        y = context.ring(q, k, v, sees, documents)
    return from_local(y, q.device_mesh, placements, q.shape)


def _chosen(q: DTensor) -> ContextParallel:
    chosen = in_force()
    if chosen is None:
        raise ValueError(
            f"attention: the sequence of q {list(q.shape)} is split over cp ({q.placements}), and no plan is in force "
            "that says how it is laid out: run this inside ft.jit(fun, plan) or ft.use_plan(plan), with a plan whose "
            'rules split seq over cp'
        )
    return chosen


class _Context:
    """What the methods have in common: each takes DTensors and gives this rank's part of the result."""

    def __init__(
        self, chosen: ContextParallel, group: Group, placements: Placements, axis: int, seq_len: int, scale: float
    ) -> None:
        self.chosen, self.group, self.placements, self.axis = chosen, group, placements, axis
        self.seq_len, self.scale = seq_len, scale
        self.mine = runs(group.rank, group.size, seq_len, chosen.layout)

    def documents(self, sees: Visibility) -> Tensor | None:
        """int [batch, seq_len] of this rank's rows of the batch, in the order of the layout."""
        if sees.documents is None:
            return None
        from functitan.sharding.ops import spread  # which imports this module

        check_laid_out(sees.documents, "attention: documents")
        rows = [p if p.is_shard() and p.dim == 0 else Replicate() for p in self.placements]
        mesh = self.placements_mesh(sees.documents)
        return to_local(spread(sees.documents, mesh), rows)

    def placements_mesh(self, x: Tensor):
        from functitan.sharding import layout

        return layout.current().mesh

    def ring(self, q: DTensor, k: DTensor, v: DTensor, sees: Visibility, documents: Tensor | None) -> Tensor:
        pattern = _pattern(sees)
        steps = ring_calls(self.group.rank, self.group.size, self.seq_len, self.chosen.layout, pattern)
        ring = Ring(self.group, self.seq_len, self.chosen.layout, pattern, tuple(steps), self.scale)
        return ring_attention(*(to_local(x, self.placements) for x in (q, k, v)), documents, ring)

    def gathered(
        self, q: DTensor, k: DTensor, v: DTensor, sees: Visibility, documents: Tensor | None, order: tuple
    ) -> Tensor:
        keys = [natural(self.whole(x), order, 1) for x in (k, v)]
        own = None
        if documents is not None:
            size = self.seq_len // self.group.size
            own = documents.narrow(1, self.group.rank * size, size)
            documents = natural(documents, order, 1)
        pattern, there = _pattern(sees), tuple(sorted(order))
        calls = calls_of(self.mine, there, pattern)
        scores = Scores(Side(self.mine, own), Side(there, documents), calls, pattern, self.scale)
        return blockwise_attention(to_local(q, self.placements), *keys, scores)

    def by_heads(
        self, attend: Attend, q: DTensor, k: DTensor, v: DTensor, sees: Visibility, documents: Tensor | None,
        order: tuple,
    ) -> Tensor:
        moved = ulysses.to_heads([to_local(x, self.placements) for x in (q, k, v)], self.group)
        moved = [natural(x, order, 1) for x in moved]
        documents = None if documents is None else natural(documents, order, 1)
        mask = sees.with_documents(documents).whole_mask(self.seq_len, moved[0].device)
        y = attend(*moved, mask, sees.causal and mask is None)
        return ulysses.to_sequence(laid_out(y, order, 1), self.group)

    def by_rows(
        self, attend: Attend, q: DTensor, k: DTensor, v: DTensor, sees: Visibility, documents: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """This rank's queries against all keys, with the mask of its rows in memory."""
        from functitan.nn.visibility import attention_mask

        if mask is not None and self.chosen.layout == "balanced":
            raise ValueError(
                "attention: a mask of the whole sequence, which the plan lays out over cp in balanced order: say who "
                "sees whom with causal, window and documents (see nn.visibility), or compile the plan with "
                'ContextParallel(layout="contiguous")'
            )
        rows = None
        if sees.causal or sees.window is not None or documents is not None:
            size = self.seq_len // self.group.size
            own = None if documents is None else documents.narrow(1, self.group.rank * size, size)
            there = all_runs(self.group.size, self.seq_len, self.chosen.layout)
            rows = attention_mask(
                places(self.mine, q.device), places(there, q.device), causal=sees.causal, window=sees.window,
                documents=own, kv_documents=documents,
            )  # fmt: skip
        if mask is not None:
            given = self.rows_of(mask)
            rows = given if rows is None else rows & given
        return attend(to_local(q, self.placements), self.whole(k), self.whole(v), rows, False)

    def rows_of(self, mask: Tensor) -> Tensor:
        from functitan.sharding.ops import mask_placements, spread

        mask = spread(mask, self.placements_mesh(mask))
        return to_local(mask, mask_placements(mask, self.placements))

    def whole(self, x: DTensor) -> Tensor:
        """Keys or values of the whole sequence; their gradients are summed in float32 where they are scattered."""
        gathered = [Replicate() if i == self.axis else p for i, p in enumerate(self.placements)]
        grads = [Partial() if i == self.axis else p for i, p in enumerate(self.placements)]
        wide = torch.promote_types(x.dtype, torch.float32)
        return to_local(x, gathered, grads, reduce_dtype=wide)


def _pattern(sees: Visibility) -> Pattern:
    return Pattern(sees.causal, sees.window, sees.documents is not None)
