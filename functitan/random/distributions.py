"""Samples from distributions, with the names, arguments and values of ``jax.random``.

All functions take a key, uint32 ``[2]``, and live on the key's device. ``region``, ``(start, size)`` for every dim of
``shape``, asks for that slice of the global array alone; tensor parameters (``p``, ``minval``, ...) are then those of
the region. Integers and uniforms of up to 32 bits equal JAX's to the bit; what goes through a logarithm or a polynomial
agrees to about 1e-6 of its size (float16: to a rounding).

Errors are a TypeError for a wrong key, shape or kind of argument and a ValueError for a wrong dtype, range or region.
The values of tensor parameters are not checked, since that would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from functitan.random.special import erf, erf_inv, fma, round_to
from functitan.random.threefry import Region, bits, check_params, check_shape, draw, split, words64

Real = float | Tensor

# Random bits drawn, and mantissa bits kept of them. JAX draws 8 bits where the mantissa has fewer than 8.
_FLOATS = {torch.float32: (32, 23), torch.bfloat16: (8, 7), torch.float16: (16, 10), torch.float64: (64, 52)}
_INTS = (torch.int32, torch.uint32, torch.int16, torch.uint16, torch.int8, torch.uint8)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minval: Real = 0.0,
    maxval: Real = 1.0,
    *,
    region: Region | None = None,
) -> Tensor:
    """Uniform values in ``[minval, maxval)``.

    Args:
        key: uint32 ``[2]``.
        shape: the shape of the global array.
        dtype: torch.float32, bfloat16, float16 or float64.
        minval, maxval: numbers, or tensors that broadcast to the result.
        region: ``(start, size)`` for every dim of ``shape``: compute only that slice.

    Raises:
        ValueError: ``minval > maxval``, a bound that is not finite in ``dtype``, or another dtype.
    """
    check_float("random.uniform", dtype)
    largest = torch.finfo(dtype).max
    if not _tensors(minval, maxval) and not -largest <= minval <= maxval <= largest:
        raise ValueError(
            f"random.uniform: minval must not exceed maxval, and both must be finite in {dtype}, "
            f"got minval={minval}, maxval={maxval}"
        )
    return draw(
        "random.uniform",
        key,
        shape,
        region,
        lambda x0, x1: _scale(_unit(x0, x1, dtype), minval, maxval),
        params=(minval, maxval),
    )


def normal(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32, *, region: Region | None = None
) -> Tensor:
    """Standard normal values, ``sqrt(2) * erf_inv(u)`` of a uniform ``u`` in (-1, 1); arguments as :func:`uniform`."""
    check_float("random.normal", dtype)
    lowest = -1.0 + torch.finfo(dtype).eps / 2  # the number next to -1
    return draw(
        "random.normal", key, shape, region, lambda x0, x1: _sqrt2_erf_inv(_scale(_unit(x0, x1, dtype), lowest, 1.0))
    )


def truncated_normal(
    key: Tensor,
    lower: Real,
    upper: Real,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    region: Region | None = None,
) -> Tensor:
    """Standard normal values within the open interval ``(lower, upper)``; not scaled to a standard deviation of 1.

    Args:
        lower, upper: numbers, or tensors that broadcast to the result.
        shape: the shape of the global array; by default that of ``lower`` and ``upper`` together.

    Raises:
        ValueError: ``lower >= upper``.
    """
    check_float("random.truncated_normal", dtype)
    if not _tensors(lower, upper) and not lower < upper:
        raise ValueError(f"random.truncated_normal: lower must be below upper, got lower={lower}, upper={upper}")
    if shape is None:
        shape = torch.broadcast_shapes(*(value.shape for value in _tensors(lower, upper)))
    low, high = (_as_tensor(value, dtype, key) for value in (lower, upper))
    sqrt2 = _as_tensor(math.sqrt(2.0), dtype, key)
    minval, maxval = _erf(low / sqrt2), _erf(high / sqrt2)
    # Rounding may give a bound itself, or infinity where erf(upper / sqrt(2)) rounds to 1.
    lowest, highest = _next_up(low.detach()), -_next_up(-high.detach())
    return draw(
        "random.truncated_normal",
        key,
        shape,
        region,
        lambda x0, x1: _sqrt2_erf_inv(_scale(_unit(x0, x1, dtype), minval, maxval)).clamp(lowest, highest),
        params=(lower, upper),
    )


def exponential(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32, *, region: Region | None = None
) -> Tensor:
    """Values with the density ``exp(-x)`` on ``x >= 0``; arguments as :func:`uniform`."""
    check_float("random.exponential", dtype)
    return draw("random.exponential", key, shape, region, lambda x0, x1: -torch.log1p(-_unit(x0, x1, dtype)))


def gumbel(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32, *, region: Region | None = None
) -> Tensor:
    """Values with the density ``exp(-(x + exp(-x)))``, by JAX's default mode "low"; arguments as :func:`uniform`."""
    check_float("random.gumbel", dtype)
    tiny = torch.finfo(dtype).tiny

    def finish(x0: Tensor, x1: Tensor) -> Tensor:
        return -torch.log(-torch.log(_scale(_unit(x0, x1, dtype), tiny, 1.0)))

    return draw("random.gumbel", key, shape, region, finish)


def bernoulli(
    key: Tensor, p: Real = 0.5, shape: Sequence[int] | None = None, *, region: Region | None = None
) -> Tensor:
    """True with probability ``p``: a bool tensor, by JAX's default mode "low".

    Args:
        p: a number in [0, 1], or a tensor that broadcasts to the result. The draw has its dtype (float32 for a number):
            probabilities are resolved to 2**-23 in float32, but only to 2**-7 in bfloat16.
        shape: the shape of the global array; by default that of ``p``.

    Raises:
        ValueError: ``p`` is outside of [0, 1].
    """
    if isinstance(p, Tensor):
        dtype = p.dtype
        check_float("random.bernoulli", dtype)
    else:
        dtype = torch.float32
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"random.bernoulli: p must be in [0, 1], got {p}")
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    return draw("random.bernoulli", key, shape, region, lambda x0, x1: _unit(x0, x1, dtype) < p, params=(p,))


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: int | Tensor,
    maxval: int | Tensor,
    dtype: torch.dtype = torch.int32,
    *,
    region: Region | None = None,
) -> Tensor:
    """Integers in ``[minval, maxval)``, by JAX's method: 64 random bits modulo the span, in 32-bit arithmetic.

    Args:
        minval, maxval: ints, or integer tensors that broadcast to the result; clipped to the range of ``dtype``.
        dtype: torch.int8, int16, int32, uint8, uint16 or uint32, as JAX has without 64-bit types. For an index use
            ``randint(...).to(torch.int64)``.

    Raises:
        ValueError: ``minval >= maxval`` (JAX gives ``minval``, and so do tensors here), or another dtype.
    """
    if dtype not in _INTS:
        raise ValueError(f"random.randint: dtype must be one of {_names(_INTS)}, got {dtype}")
    for name, value in (("minval", minval), ("maxval", maxval)):
        if isinstance(value, float) or isinstance(value, Tensor) and value.is_floating_point():
            raise TypeError(f"random.randint: {name} must be an integer, got {value!r}")
    if not _tensors(minval, maxval) and not minval < maxval:
        raise ValueError(f"random.randint: minval must be below maxval, got minval={minval}, maxval={maxval}")
    info = torch.iinfo(dtype)
    low, high = _clip(minval, info.min, info.max), _clip(maxval, info.min, info.max + 1)
    span = _clip(high - low, 1, 2**32)  # in int64, where it fits, a span of 2**32 does what 0 does in JAX's uint32
    multiplier = ((2**16 % span) ** 2 & 0xFFFFFFFF) % span  # 2**32 % span
    higher, lower = (bits(k, shape, region=region).to(torch.int64) for k in split(key).unbind(0))
    check_params("random.randint", higher.shape, (minval, maxval))
    offset = (((higher % span) * multiplier + lower % span) & 0xFFFFFFFF) % span
    return (low + offset).to(dtype)


def categorical(key: Tensor, logits: Tensor, axis: int = -1, shape: Sequence[int] | None = None) -> Tensor:
    """Indices (int64) drawn with replacement with the probabilities ``softmax(logits, axis)``.

    The index with the greatest ``logits + gumbel`` wins; it differs from JAX's only where two are within a rounding.

    Args:
        logits: unnormalised log-probabilities, of a float dtype, with at least one dim.
        axis: the dim of the categories.
        shape: the shape of the result, which must end in that of ``logits`` without ``axis``; that is the default.

    Raises:
        ValueError: ``shape`` does not end so, or ``axis`` is out of range.
    """
    if not isinstance(logits, Tensor):
        raise TypeError(f"random.categorical: logits must be a tensor, got {type(logits).__name__}")
    check_float("random.categorical", logits.dtype)
    if not -logits.dim() <= axis < logits.dim():
        raise ValueError(f"random.categorical: axis {axis} is out of range for logits of shape {tuple(logits.shape)}")
    axis %= logits.dim()
    batch = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    shape = batch if shape is None else check_shape("random.categorical", shape)
    lead = len(shape) - len(batch)
    if shape[max(lead, 0) :] != batch:
        raise ValueError(
            f"random.categorical: shape {shape} must end in {batch}, the shape of the logits without axis {axis}"
        )
    return torch.argmax(gumbel(key, (*shape[:lead], *logits.shape), logits.dtype) + logits, dim=lead + axis)


def permutation(key: Tensor, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """``x`` shuffled along ``axis``; for an int, ``arange(x)`` shuffled (int64).

    Args:
        independent: shuffle every vector along ``axis`` on its own, instead of all alike.

    Raises:
        TypeError: ``x`` is neither an int nor a tensor with a dim.
        ValueError: a negative int, or ``axis`` out of range.
    """
    if isinstance(x, Tensor) and x.dim():
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"random.permutation: axis {axis} is out of range for x of shape {tuple(x.shape)}")
        if independent:
            return x.gather(axis, _shuffled_index(key, tuple(x.shape), axis % x.dim()))
        return x.index_select(axis, _shuffled_index(key, (x.shape[axis],), 0))
    if isinstance(x, Tensor) or not hasattr(x, "__index__"):
        raise TypeError(f"random.permutation: x must be an int or a tensor of at least one dim, got {x!r}")
    if x < 0:
        raise ValueError(f"random.permutation: x must not be negative, got {x}")
    return _shuffled_index(key, (x,), 0)


def _shuffled_index(key: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    """A permutation of the indices along ``axis`` for every vector: sorts by random 32-bit keys, as often as makes
    ties in all rounds together unlikely (JAX's rule: 3 * log(size) / log(2**32 - 1) rounds)."""
    size = math.prod(check_shape("random.permutation", shape))
    ones = [1] * len(shape)
    ones[axis] = -1
    index = torch.arange(shape[axis], device=key.device).reshape(ones).expand(shape)
    for _ in range(math.ceil(3 * math.log(max(1, size)) / math.log(2**32 - 1))):
        key, subkey = split(key).unbind(0)
        order = torch.sort(bits(subkey, shape).to(torch.int64), dim=axis, stable=True).indices
        index = index.gather(axis, order)
    return index


def _unit(x0: Tensor, x1: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in [0, 1): the first mantissa bits of the random ones, as a fraction."""
    width, mantissa = _FLOATS[dtype]
    word = words64(x0, x1) if width == 64 else x0 ^ x1
    return ((word >> (width - mantissa)) & ((1 << mantissa) - 1)).to(dtype) * 2.0**-mantissa


def _scale(unit: Tensor, minval: Real, maxval: Real) -> Tensor:
    """``unit * (maxval - minval) + minval`` with the roundings of JAX under XLA (on a CPU; the last step of float64
    may differ): the span in the dtype; then float32 fused, float16 in float32, bfloat16 step by step."""
    dtype = unit.dtype
    low, high = (value.to(dtype) if isinstance(value, Tensor) else round_to(value, dtype) for value in (minval, maxval))
    span = high - low
    if not isinstance(span, Tensor):
        span = round_to(span, dtype)
        if span == 0.0 or math.frexp(span)[0] == 0.5:  # by a power of two the product is exact: any way rounds alike
            return unit * span + low if low else unit * span
    if dtype == torch.float32:
        out = fma(unit, span, low)
    elif dtype == torch.float16:
        out = (unit.float() * span + low).to(dtype)
    else:
        out = unit * span + low
    return torch.maximum(out, low) if isinstance(low, Tensor) else out


def _sqrt2_erf_inv(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return math.sqrt(2.0) * torch.erfinv(x)
    return erf_inv(x.float()).to(x.dtype) * round_to(math.sqrt(2.0), x.dtype)


def _erf(x: Tensor) -> Tensor:
    return torch.erf(x) if x.dtype == torch.float64 else erf(x.float()).to(x.dtype)


def _next_up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def _as_tensor(x: Real, dtype: torch.dtype, like: Tensor) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=dtype, device=like.device)


def _clip(x: int | Tensor, low: int, high: int) -> int | Tensor:
    return x.to(torch.int64).clamp(low, high) if isinstance(x, Tensor) else min(max(x, low), high)


def _tensors(*values: Real) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))


def check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise ValueError(f"{name}: dtype must be one of {_names(tuple(_FLOATS))}, got {dtype}")
