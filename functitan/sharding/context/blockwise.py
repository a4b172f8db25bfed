"""Attention run by run: which slices of queries and keys a call takes, its mask, and the sums of what calls give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from functitan.sharding.context import blocks
from functitan.sharding.context.calls import Call, Pattern
from sharding_specs.context import Run

Part = tuple[Tensor, Tensor]


@frozen(eq=False)
class Side:
    """Queries or keys: where they stand.

    Attributes:
        runs: their places in the row, in the order in which they lie in memory.
        documents: int [batch, length], of each the document; None where there are none.
    """

    runs: tuple[Run, ...]
    documents: Tensor | None = None

    def span(self, which: tuple[int, int]) -> tuple[int, int]:
        """``(offset, length)`` in memory of the runs ``which[0]:which[1]``."""
        before = sum(length for _, length in self.runs[: which[0]])
        return before, sum(length for _, length in self.runs[slice(*which)])

    def slice(self, x: Tensor, which: tuple[int, int], dim: int = 1) -> Tensor:
        """The part of ``x`` of these runs."""
        offset, length = self.span(which)
        return x if length == x.shape[dim] else x.narrow(dim, offset, length)

    def places(self, which: tuple[int, int], device: torch.device) -> Tensor:
        """int64 [length]: the places in the row of these runs."""
        parts = [torch.arange(start, start + length, device=device) for start, length in self.runs[slice(*which)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self, x: Tensor, which: tuple[int, int], dim: int = 1) -> Sequence[Tensor]:
        """``x``, which is of these runs, run by run."""
        lengths = [length for _, length in self.runs[slice(*which)]]
        return (x,) if len(lengths) == 1 else x.split(lengths, dim)


@frozen(eq=False)
class Scores:
    """A part of the square of scores: the queries and keys that are here, and what is to be computed of them."""

    queries: Side
    keys: Side
    calls: tuple[Call, ...]
    pattern: Pattern
    scale: float

    def mask(self, call: Call, device: torch.device) -> Tensor | None:
        """bool [1 or batch, 1, seq, kv_seq] of a call; None of one that needs none."""
        from functitan.nn.visibility import attention_mask  # which calls what calls this

        if call.kind != "masked":
            return None
        documents = kv_documents = None
        if self.pattern.documents:
            documents = self.queries.slice(self.queries.documents, call.q)
            kv_documents = self.keys.slice(self.keys.documents, call.k)
        return attention_mask(
            self.queries.places(call.q, device), self.keys.places(call.k, device), causal=self.pattern.causal,
            window=self.pattern.window, documents=documents, kv_documents=kv_documents,
        )  # fmt: skip


def add_outputs(sums: list[Part | None], q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Part | None]:
    """Attention so far, run by run of the queries, with that to these keys."""
    sums = list(sums)
    for call in scores.calls:
        out, lse = blocks.attend(
            scores.queries.slice(q, call.q), scores.keys.slice(k, call.k), scores.keys.slice(v, call.k),
            scores.mask(call, q.device), call.kind == "causal", scores.scale,
        )  # fmt: skip
        parts = zip(scores.queries.parts(out, call.q), scores.queries.parts(lse, call.q, dim=2))
        for i, part in enumerate(parts, call.q[0]):
            sums[i] = blocks.merge(sums[i], part)
    return sums


def finished(sums: Sequence[Part | None], q: Tensor, queries: Side) -> Part:
    """The output of all queries in the dtype of q, and the log-sum-exp for backward."""
    parts = []
    for i, part in enumerate(sums):
        here = queries.slice(q, (i, i + 1))
        if part is None:  # whoever sees nothing at all
            lse = here.new_zeros((here.shape[0], here.shape[2], here.shape[1]), dtype=_wide(q.dtype))
            parts.append((torch.zeros_like(here), lse))
        else:
            parts.append(blocks.finish(*part, q.dtype))
    outs, lses = zip(*parts)
    return (outs[0], lses[0]) if len(parts) == 1 else (torch.cat(outs, 1), torch.cat(lses, 2))


@frozen(eq=False)
class Backward:
    """What the gradients of every call are made from, and of the queries alone: all [batch, seq, heads, …]."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def gradients(self, k: Tensor, v: Tensor, scores: Scores) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of q run by run of the queries, and of k and v run by run of the keys: None where none flows.

        In float32 (float64 of float64).
        """
        of_q: list[Any] = [None] * len(scores.queries.runs)
        of_k: list[Any] = [None] * len(scores.keys.runs)
        of_v: list[Any] = [None] * len(scores.keys.runs)
        for call in scores.calls:
            cut = scores.queries.slice
            grads = blocks.attend_backward(
                cut(self.grad, call.q), cut(self.q, call.q), scores.keys.slice(k, call.k),
                scores.keys.slice(v, call.k), cut(self.out, call.q), cut(self.lse, call.q, dim=2),
                scores.mask(call, k.device), call.kind == "causal", scores.scale,
            )  # fmt: skip
            sides = ((of_q, scores.queries, call.q), (of_k, scores.keys, call.k), (of_v, scores.keys, call.k))
            for total, (sums, side, which) in zip(grads, sides):
                for i, part in enumerate(side.parts(total.to(_wide(k.dtype)), which), which[0]):
                    sums[i] = added(sums[i], part)
        return of_q, of_k, of_v


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of what there is."""
    return b if a is None else a if b is None else a + b


def joined(parts: Sequence[Tensor | None], like: Tensor, side: Side) -> Tensor:
    """Runs together again: zeros where there is nothing, float32 (float64 of float64)."""
    filled = [
        torch.zeros_like(side.slice(like, (i, i + 1)), dtype=_wide(like.dtype)) if part is None else part
        for i, part in enumerate(parts)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
