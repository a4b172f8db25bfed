"""Attention to keys and values that every rank has gathered (Grattafiori et al., 2024,
https://arxiv.org/abs/2407.21783, section 3.3.2): their gradients are summed and scattered by who gathered them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functitan.remat import kept
from functitan.sharding.context.blockwise import Backward, Scores, add_outputs, finished, joined


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Attention without the parts of the square that nobody sees, and with masks of the others alone.

    Args:
        q: [batch, seq, heads, head_dim], at ``scores.queries``.
        k: [batch, kv_seq, kv_heads, head_dim], at ``scores.keys``; ``v`` as well.

    Returns:
        As ``q``.
    """
    return _Blockwise.apply(q, k, v, scores.queries.documents, scores.keys.documents, scores)[0]


class _Blockwise(torch.autograd.Function):
    """The documents are arguments so that nothing that is traced hides in ``scores``."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, kv_documents: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        return kept(_forward, q, k, v, scores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, _, _, ctx.scores = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        of_q, of_k, of_v = Backward(grad, q, out, lse).gradients(k, v, ctx.scores)
        queries, keys = ctx.scores.queries, ctx.scores.keys
        return (
            joined(of_q, q, queries).to(q.dtype), joined(of_k, k, keys).to(k.dtype), joined(of_v, v, keys).to(v.dtype),
            None, None, None,
        )  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    sums = add_outputs([None] * len(scores.queries.runs), q, k, v, scores)
    return finished(sums, q, scores.queries)
