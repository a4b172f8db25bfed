"""Dropout as a function of a key."""

from __future__ import annotations

import torch
from torch import Tensor

from functitan import random
from functitan._torch import is_distributed


def dropout(key: Tensor | None, x: Tensor, rate: float) -> Tensor:
    """Zeroes each element with probability ``rate`` and divides the others by ``1 - rate``.

    The mask depends on ``key`` and the position in ``x`` alone, so the same key gives the same mask on every mesh.

    Args:
        key: a functitan.random key, or None for no dropout (evaluation).
        x: floating, any shape.
        rate: in [0, 1).

    Raises:
        ValueError: the rate is outside [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate={rate} must be at least 0 and less than 1")
    if key is None or rate == 0.0:
        return x
    shape = tuple(x.shape)

    def drop(local: Tensor, region: random.Region | None) -> Tensor:
        keep = random.bernoulli(key, 1.0 - rate, shape, region=region)
        return torch.where(keep, local * (1.0 / (1.0 - rate)), 0.0)

    if is_distributed(x):
        from functitan.sharding import ops

        return ops.dropout(drop, x)
    return drop(x, None)
