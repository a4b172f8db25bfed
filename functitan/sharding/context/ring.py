"""Ring attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889): keys and values go round the ranks.

Of every block there is the running output and log-sum-exp; while a block is computed the next one is on its way. In
backward the gradients of keys and values travel behind them, and from the last rank that needs them go home. Forward
sends (cp - 1) times a rank's keys and values, less where a window ends sooner; backward the same again, and as many
gradients in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from functitan._torch import marked
from functitan.remat import kept
from functitan.sharding.context.blockwise import Backward, Scores, Side, add_outputs, added, finished, joined
from functitan.sharding.context.calls import Call, Pattern
from functitan.sharding.context.group import Group, wait
from sharding_specs.context import runs


@frozen
class Ring:
    """What a ring's ranks agree on.

    Attributes:
        group: the ranks.
        seq_len: of the whole sequence.
        layout: "contiguous" or "balanced".
        pattern: who sees whom.
        steps: the calls of each step of this rank: see ``calls.ring_calls``.
        scale: of the scores.
    """

    group: Group
    seq_len: int
    layout: str
    pattern: Pattern
    steps: tuple[tuple[Call, ...], ...]
    scale: float

    def scores(self, step: int, documents: Tensor | None) -> Scores:
        """What this rank computes at a step: its queries against the keys of rank ``rank - step``.

        Args:
            documents: int [batch, seq_len] of the whole sequence, in the order of the layout.
        """
        return Scores(self._side(0, documents), self._side(step, documents), self.steps[step], self.pattern, self.scale)

    def _side(self, step: int, documents: Tensor | None) -> Side:
        rank, part = (self.group.rank - step) % self.group.size, self.seq_len // self.group.size
        own = None if documents is None else documents.narrow(1, rank * part, part)
        return Side(runs(rank, self.group.size, self.seq_len, self.layout), own)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: [batch, seq, heads, head_dim] and k, v: [batch, seq, kv_heads, head_dim], this rank's part of the sequence.
        documents: int [batch, seq_len], of the whole sequence in the order of the layout; None where there are none.

    Returns:
        As ``q``.
    """
    return _RingAttention.apply(q, k, v, documents, ring)[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        return kept(_forward, q, k, v, documents, ring)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, documents, ctx.ring = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, documents, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        return *_backward(grad, *ctx.saved_tensors, ctx.ring), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
    sums: list[Any] = [None] * len(ring.scores(0, documents).queries.runs)
    last, travelling = len(ring.steps) - 1, None
    unread = []
    for step in range(len(ring.steps)):
        if step == 0 and last:
            travelling = ring.group.shift(torch.stack((k, v)), 1)
        elif step:
            pair = wait(travelling)
            travelling = ring.group.shift(pair, 1) if step < last else None
            k, v = pair.unbind(0)
            if not ring.steps[step]:
                unread.append(pair)
        with _once():
            sums = add_outputs(sums, q, k, v, ring.scores(step, documents))
    out, lse = finished(sums, q, ring.scores(0, documents).queries)
    return _behind(out, unread), lse


_calls = itertools.count(1)


def _once() -> AbstractContextManager[None]:
    """Within it, nothing is merged with what is the same elsewhere: not what arrives, which would be kept from forward
    to backward, nor a mask, which would be kept from the first layer to the last, one for each rank of cp."""
    return marked("remat", f"ring {next(_calls)}")


def _behind(x: Tensor, arrived: Sequence[Tensor]) -> Tensor:
    """``x``, whose graph reads what has arrived and is of no use to this rank.

    Without it the graph of a rank that sees nothing of these keys would be without their transport, which all ranks
    have to make together.
    """
    if arrived:
        never = torch.zeros((), dtype=torch.bool, device=x.device)
        for pair in arrived:
            x = torch.where(never, pair.flatten()[0].to(x.dtype), x)
    return x


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    whole = Backward(grad, q, out, lse)
    last, dtype = len(ring.steps) - 1, k.dtype
    with _once():  # sent again, so that nobody keeps what forward has brought
        travelling = ring.group.shift(torch.stack((k, v)), 1) if last else None
    scores = ring.scores(0, documents)
    with _once():
        of_q, own_k, own_v = whole.gradients(k, v, scores)
    own = torch.stack((joined(own_k, k, scores.keys), joined(own_v, v, scores.keys)))
    behind = None  # the gradients of the keys that are here next, on their way
    for step in range(1, last + 1):
        pair = wait(travelling)
        travelling = ring.group.shift(pair, 1) if step < last else None
        k, v = pair.unbind(0)
        scores = ring.scores(step, documents)
        with _once():
            more, of_k, of_v = whole.gradients(k, v, scores)
        of_q = [added(a, b) for a, b in zip(of_q, more)]
        total = torch.stack((joined(of_k, k, scores.keys), joined(of_v, v, scores.keys)))
        total = total if ring.steps[step] else _behind(total, [pair])
        if behind is not None:
            total = wait(behind) + total
        behind = ring.group.shift(total, 1 if step < last else -last)
    if behind is not None:
        own = own + wait(behind)
    own = own.to(dtype)
    return joined(of_q, q, scores.queries).to(q.dtype), own[0], own[1]
