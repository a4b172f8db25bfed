"""Elementwise nonlinearities."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` (also called swish), x: any shape."""
    return F.silu(x)


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``x * Phi(x)``, Phi the normal distribution function, or its tanh approximation (GPT-2's); x: any shape.

    JAX's default is the approximation; torch's, and this one, is the exact form.
    """
    return F.gelu(x, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of Shazeer, "GLU variants improve transformer" (2020), equation 6.

    Args:
        gate: [..., mlp].
        up: [..., mlp].

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
    return F.silu(gate) * up
