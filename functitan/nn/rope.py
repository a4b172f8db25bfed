"""Rotary position embedding (Su et al., "RoFormer", 2021), with the frequency scaling of Llama 3.1 and later."""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from functitan._torch import is_distributed


@attrs.frozen(kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary frequencies from the context it was pretrained on to a longer one."""

    factor: float = 8.0
    """How much wavelengths beyond the original context are stretched: 8 in Llama 3.1, 32 in 3.2; 1: not at all."""
    low_freq_factor: float = 1.0
    """Wavelengths longer than original_context / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths shorter than original_context / high_freq_factor are kept; those between are interpolated."""
    original_context: int = 8192
    """Length in tokens of the pretraining context (original_max_position_embeddings in Hugging Face configs)."""

    def validate(self) -> list[str]:
        """Every problem, in plain words; empty if there is none."""
        problems = []
        if self.factor < 1:
            problems.append(f"rope scaling: factor={self.factor} must be at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                f"rope scaling: low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.original_context < 1:
            problems.append(f"rope scaling: original_context={self.original_context} must be at least 1 token")
        return problems


class RotaryTable(NamedTuple):
    """Angles of every position, ready to be applied: made once, used by every layer."""

    cos: Tensor
    """[..., seq, 1, head_dim]: the cosines, twice."""
    sin: Tensor
    """[..., seq, 1, head_dim]: the sines, negated in the first half."""


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Radians per position of each pair of channels, ``theta ** (-2 i / head_dim)``, scaled as Llama 3.1 does.

    Returns:
        float32, [head_dim / 2].

    Raises:
        ValueError: head_dim is odd.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"rotary: head_dim={head_dim} must be even: channels are rotated in pairs")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.factor == 1:
        return frequencies
    # `apply_scaling` of Meta's llama-models, without its Python branches on values.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * frequencies / scaling.factor + smooth * frequencies


def rotary_table(
    positions: Tensor, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None
) -> RotaryTable:
    """Cosines and sines for :func:`rotary`, in float32: bfloat16 cannot tell neighbouring positions apart.

    Args:
        positions: [..., seq], each token's place in its document, from 0.
        head_dim: channels of a head, even.
        theta: the base of the frequencies.
        scaling: Llama 3.1's, or None.

    Raises:
        ValueError: head_dim is odd.
    """
    frequencies = rotary_frequencies(head_dim, theta, scaling, positions.device)
    angles = positions.unsqueeze(-1).unsqueeze(-1).to(torch.float32) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return RotaryTable(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotates channel ``i`` and channel ``i + head_dim / 2`` of every head by the position's angle ``i``.

    This "rotate half" layout is that of Hugging Face checkpoints. Meta's original files pair channels ``2 i`` and
    ``2 i + 1``: their query and key weights need a permutation first.

    Args:
        x: [batch, seq, heads, head_dim].
        table: from :func:`rotary_table`, for positions [batch, seq] or [seq].

    Returns:
        As ``x``, in its dtype; the arithmetic is in float32.

    Raises:
        ValueError: the table is for another head_dim or sequence.
    """
    cos, sin = table
    if x.ndim < 3 or cos.shape[-1] != x.shape[-1] or cos.shape[-3] not in (1, x.shape[-3]):
        raise ValueError(
            f"rotary: x {list(x.shape)} is [batch, seq, heads, head_dim], but the table {list(cos.shape)} is for "
            f"head_dim {cos.shape[-1]} and {cos.shape[-3]} positions; make the table from the positions of x"
        )
    if any(map(is_distributed, (x, cos, sin))):
        from functitan.sharding import ops

        return ops.rotate(_rotate, x, cos, sin)
    return _rotate(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin).to(x.dtype)
