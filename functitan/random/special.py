"""Arithmetic that rounds as XLA's: ``erf`` and ``erf_inv`` in float32, so that normals agree with JAX's in the tails.

torch's own functions are as accurate, but round otherwise: ``torch.erfinv`` moves normals by up to 2e-5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# M. Giles, "Approximating the erfinv function", GPU Computing Gems 2, 2011: coefficients of the highest power first.
_ERF_INV_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip

# XLA's (and Eigen's) rational approximation: erf(x) = x * P(x**2) / Q(x**2), and 1 beyond the limit.
_ERF_LIMIT = 3.832506856900711
_ERF_P = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084)
_ERF_Q = (
    -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667,
    0.11098505178285362, 0.49746925110067538, 1.0,
)  # fmt: skip


def round_to(x: float, dtype: torch.dtype) -> float:
    """The number of ``dtype`` next to ``x``, ties to even, as a Python float: no tensor, so that nothing is traced."""
    if x == 0.0 or not math.isfinite(x):
        return float(x)
    info = torch.finfo(dtype)
    quantum = max(2.0 ** (math.frexp(x)[1] - 1) * info.eps, info.tiny * info.eps)
    return round(x / quantum) * quantum


def fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """``x * y + z`` of float32 values, rounded once, as by the fused instruction that XLA uses.

    The product is exact in float64. Rounding its sum to 53 bits and then to 24 differs from rounding once in some 1 in
    2**29 of the cases.
    """
    z = z.double() if isinstance(z, Tensor) else z
    return (x.double() * (y.double() if isinstance(y, Tensor) else y) + z).float()


def erf(x: Tensor) -> Tensor:
    """The error function of float32 ``x``, to the bit as XLA's except for rare roundings."""
    x = x.clamp(-_ERF_LIMIT, _ERF_LIMIT)
    square = x * x
    p, q = torch.full_like(x, _ERF_P[0]), torch.full_like(x, _ERF_Q[0])
    # float32 constants: a float64 one would not round as the float32 instruction does.
    for c in _ERF_P[1:]:
        p = fma(p, square, torch.full_like(x, c))
    for c in _ERF_Q[1:]:
        q = fma(q, square, torch.full_like(x, c))
    return (x * p / q).clamp(-1.0, 1.0)


def erf_inv(x: Tensor) -> Tensor:
    """The inverse error function of float32 ``x`` in [-1, 1], which is infinite at the ends."""
    w = -torch.log1p(-x * x)
    # The clamp keeps the gradient finite at w = 0, where that of the square root is not and the branch is not taken.
    tail = torch.sqrt(w.clamp(min=5.0)) - 3.0
    p = torch.where(w < 5.0, _horner(_ERF_INV_CENTRAL, w - 2.5), _horner(_ERF_INV_TAIL, tail))
    # Not x * inf, whose gradient would be NaN everywhere.
    return torch.where(x.abs() == 1.0, torch.full_like(x, torch.inf).copysign(x), p * x)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    p = coefficients[0] * x + coefficients[1]
    for c in coefficients[2:]:
        p = p * x + c
    return p
