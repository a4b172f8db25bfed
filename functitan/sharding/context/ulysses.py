"""The split of a sequence moved to the heads and back (DeepSpeed-Ulysses, Jacobs et al., 2023,
https://arxiv.org/abs/2309.14509): between the two every rank has whole sequences of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functitan.sharding.context.group import Group


def to_heads(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """[batch, seq / ranks, heads, head_dim] of each -> [batch, seq, heads / ranks, head_dim], in one exchange.

    Raises:
        ValueError: a number of heads does not divide.
    """
    heads = [x.shape[2] for x in tensors]
    bad = [count for count in heads if count % group.size]
    if bad:
        legal = [n for n in range(1, min(heads) + 1) if all(count % n == 0 for count in heads)]
        raise ValueError(
            f"attention: ulysses splits heads over cp={group.size}, which does not divide {bad[0]} heads on this rank; "
            f"legal cp: {', '.join(map(str, legal))}; or use the method ring, which splits none"
        )
    # Rank by rank the heads of all of them, so that one message has what goes to one rank.
    parts = [x.unflatten(2, (group.size, -1)) for x in tensors]
    moved = _ToHeads.apply(torch.cat(parts, 3).flatten(2, 3), group)
    return list(moved.split([count // group.size for count in heads], 2))


def to_sequence(x: Tensor, group: Group) -> Tensor:
    """[batch, seq, heads / ranks, head_dim] -> [batch, seq / ranks, heads, head_dim]."""
    return _ToSequence.apply(x, group)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return _heads(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sequence(grad, ctx.group), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return _sequence(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _heads(grad, ctx.group), None


def _heads(x: Tensor, group: Group) -> Tensor:
    batch, seq, heads, width = x.shape
    sent = x.reshape(batch, seq, group.size, heads // group.size, width).permute(2, 0, 1, 3, 4)
    arrived = group.exchange(sent).permute(1, 0, 2, 3, 4)
    return arrived.reshape(batch, group.size * seq, heads // group.size, width)


def _sequence(x: Tensor, group: Group) -> Tensor:
    batch, seq, heads, width = x.shape
    sent = x.reshape(batch, group.size, seq // group.size, heads, width).permute(1, 0, 2, 3, 4)
    arrived = group.exchange(sent).permute(1, 2, 0, 3, 4)
    return arrived.reshape(batch, seq // group.size, group.size * heads, width)
