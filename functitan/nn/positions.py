"""The places of tokens in their rows, on every mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from functitan._torch import is_distributed


def positions(x: Tensor, dim: int = 1) -> Tensor:
    """The place in its row of each token, from 0: what ``torch.arange(x.shape[dim])`` is on one device.

    Where the sequence is split over the axis cp in balanced order, the tokens of ``x`` do not lie in the order of their
    places, and only this tells which is where.

    Args:
        x: [batch, seq, ...], such as the tokens.
        dim: which dim is the sequence.

    Returns:
        int64, [seq], laid out over cp as ``x`` is.

    Raises:
        ValueError: ``x`` is a plain tensor, and the plan in force has sequences in balanced order.
    """
    from functitan.sharding.layout import current

    if is_distributed(x) or (current() is not None and current().plan.context is not None):
        from functitan.sharding.context import order

        return order.positions(x, dim)
    return torch.arange(x.shape[dim], device=x.device)
