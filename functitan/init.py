"""Initial values: ``initializer(key, shape, dtype) -> Tensor``, with the semantics of ``jax.nn.initializers``.

An initializer is plain data: it compares by value, prints as the call that makes it (``normal(0.02)``), and given
``region=`` computes only that slice of the array, bit-equal to the same slice of the whole (see
:mod:`functitan.random`), on the device of the key.

The ones that scale by fans take ``in_axis``, ``out_axis`` and ``batch_axis``, each a dim or a tuple of dims. A dim that
stacks layers belongs in ``batch_axis``, or the fan would grow with the depth of the model: for a weight of shape
``(layers, dim, heads, head_dim)`` say ``fan_in(in_axis=1, out_axis=(2, 3), batch_axis=0)``. Dims in none of the three
count as the receptive field of a convolution and multiply both fans, as in JAX.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import attrs
import torch
from torch import Tensor

from functitan import random
from functitan.random import Region
from functitan.random.distributions import check_float
from functitan.random.special import round_to
from functitan.random.threefry import check_region, check_shape

Axes = int | tuple[int, ...]
Mode = Literal["fan_in", "fan_out", "fan_avg", "fan_geo_avg"]
Distribution = Literal["truncated_normal", "normal", "uniform"]

# The standard deviation of the standard normal distribution truncated to (-2, 2).
_TRUNCATED_STDDEV = 0.87962566103423978


class Initializer(Protocol):
    """Makes a tensor of ``shape``, or of the sizes of ``region``: ``(start, size)`` for every dim of ``shape``."""

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor: ...


def param_key(base_key: Tensor, path: str) -> Tensor:
    """The key of the parameter at ``path`` (``layers/wq``): ``fold_in(base_key, crc32 of the path in UTF-8)``.

    Initial values thus depend neither on the order of declaration nor on which rank holds what. CRC-32 tells apart any
    two paths of one length that differ only within four consecutive bytes.
    """
    return random.fold_in(base_key, zlib.crc32(path.encode()))


def zeros() -> Initializer:
    return _Constant(0.0)


def ones() -> Initializer:
    return _Constant(1.0)


def constant(value: float) -> Initializer:
    return _Constant(value)


def normal(stddev: float = 1e-2) -> Initializer:
    """Normal values of mean 0 and standard deviation ``stddev``."""
    return _Normal(stddev)


def uniform(scale: float = 1e-2) -> Initializer:
    """Uniform values in ``[0, scale)``, as ``jax.nn.initializers.uniform``."""
    return _Uniform(scale)


def truncated_normal(stddev: float = 1e-2, lower: float = -2.0, upper: float = 2.0) -> Initializer:
    """Normal values truncated to ``(lower, upper)`` standard deviations, then multiplied by ``stddev``.

    As in JAX ``stddev`` is that before truncation: with the default bounds the values deviate by 0.88 of it.
    """
    return _TruncatedNormal(stddev, lower, upper)


def variance_scaling(
    scale: float,
    mode: Mode,
    distribution: Distribution,
    in_axis: Axes = -2,
    out_axis: Axes = -1,
    batch_axis: Axes = (),
) -> Initializer:
    """Values of mean 0 and variance ``scale / fan``, after truncation where ``distribution`` is "truncated_normal".

    Args:
        scale: positive.
        mode: which fan: of the inputs, of the outputs, or their arithmetic or geometric mean.
        distribution: "truncated_normal" (at 2 standard deviations), "normal" or "uniform".

    Raises:
        ValueError: here for a value that is not legal, and in the call for axes that do not fit the shape.
    """
    return _VarianceScaling(scale, mode, distribution, in_axis, out_axis, batch_axis)


def fan_in(scale: float = 1.0, in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = ()) -> Initializer:
    """Truncated normal values of variance ``scale / fan_in``; residual branches of deep models use a small scale."""
    return variance_scaling(scale, "fan_in", "truncated_normal", in_axis, out_axis, batch_axis)


def lecun_normal(in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = ()) -> Initializer:
    """Variance ``1 / fan_in`` (LeCun et al., "Efficient BackProp", 1998)."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_axis, out_axis, batch_axis)


def he_normal(in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = ()) -> Initializer:
    """Variance ``2 / fan_in``, for ReLU (He et al., "Delving Deep into Rectifiers", ICCV 2015)."""
    return variance_scaling(2.0, "fan_in", "truncated_normal", in_axis, out_axis, batch_axis)


def glorot_normal(in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = ()) -> Initializer:
    """Variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio, AISTATS 2010)."""
    return variance_scaling(1.0, "fan_avg", "truncated_normal", in_axis, out_axis, batch_axis)


def glorot_uniform(in_axis: Axes = -2, out_axis: Axes = -1, batch_axis: Axes = ()) -> Initializer:
    """Variance ``2 / (fan_in + fan_out)``, uniform (Glorot and Bengio, AISTATS 2010)."""
    return variance_scaling(1.0, "fan_avg", "uniform", in_axis, out_axis, batch_axis)


def _finite(instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"init: {attribute.name} must be finite, got {value}")


def _not_negative(instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"init: {attribute.name} must be finite and not negative, got {value}")


def _positive(instance: object, attribute: attrs.Attribute, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"init: {attribute.name} must be finite and positive, got {value}")


def _one_of(legal: Sequence[str]):
    def check(instance: object, attribute: attrs.Attribute, value: str) -> None:
        if value not in legal:
            raise ValueError(f"init: {attribute.name} must be one of {', '.join(legal)}, got {value!r}")

    return check


def _axes(value: Axes | Sequence[int]) -> Axes:
    return value if isinstance(value, int) else tuple(value)


@attrs.frozen(repr=False)
class _Constant:
    value: float = attrs.field(converter=float, validator=_finite)

    def __repr__(self) -> str:
        return {0.0: "zeros()", 1.0: "ones()"}.get(self.value, f"constant({self.value})")

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor:
        region = check_region("init", check_shape("init", shape), region)
        return torch.full(tuple(size for _, size in region), self.value, dtype=dtype, device=key.device)


@attrs.frozen(repr=False)
class _Normal:
    stddev: float = attrs.field(converter=float, validator=_not_negative)

    def __repr__(self) -> str:
        return f"normal({self.stddev})"

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor:
        return random.normal(key, shape, dtype, region=region) * round_to(self.stddev, dtype)


@attrs.frozen(repr=False)
class _Uniform:
    scale: float = attrs.field(converter=float, validator=_not_negative)

    def __repr__(self) -> str:
        return f"uniform({self.scale})"

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor:
        return random.uniform(key, shape, dtype, region=region) * round_to(self.scale, dtype)


@attrs.frozen(repr=False)
class _TruncatedNormal:
    stddev: float = attrs.field(converter=float, validator=_not_negative)
    lower: float = attrs.field(converter=float)
    upper: float = attrs.field(converter=float)

    @upper.validator
    def _check_bounds(self, attribute: attrs.Attribute, value: float) -> None:
        if not self.lower < value:
            raise ValueError(f"init: lower must be below upper, got lower={self.lower}, upper={value}")

    def __repr__(self) -> str:
        bounds = "" if (self.lower, self.upper) == (-2.0, 2.0) else f", {self.lower}, {self.upper}"
        return f"truncated_normal({self.stddev}{bounds})"

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor:
        sample = random.truncated_normal(key, self.lower, self.upper, shape, dtype, region=region)
        return sample * round_to(self.stddev, dtype)


@attrs.frozen(repr=False)
class _VarianceScaling:
    scale: float = attrs.field(converter=float, validator=_positive)
    mode: Mode = attrs.field(validator=_one_of(get_args(Mode)))
    distribution: Distribution = attrs.field(validator=_one_of(get_args(Distribution)))
    in_axis: Axes = attrs.field(converter=_axes)
    out_axis: Axes = attrs.field(converter=_axes)
    batch_axis: Axes = attrs.field(converter=_axes)

    def __repr__(self) -> str:
        defaults = {"in_axis": -2, "out_axis": -1, "batch_axis": ()}
        axes = (f", {name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value)
        return f"variance_scaling({self.scale}, {self.mode!r}, {self.distribution!r}{''.join(axes)})"

    def __call__(
        self, key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, region: Region | None = None
    ) -> Tensor:
        check_float("init", dtype)
        fan_in, fan_out = _fans(check_shape("init", shape), self.in_axis, self.out_axis, self.batch_axis)
        fan = {
            "fan_in": fan_in,
            "fan_out": fan_out,
            "fan_avg": (fan_in + fan_out) / 2,
            "fan_geo_avg": math.sqrt(fan_in * fan_out),
        }[self.mode]
        # JAX computes these numbers in the dtype of the parameter, so they are rounded at every step.
        variance = round_to(self.scale / fan, dtype)
        if self.distribution == "uniform":
            bound = round_to(math.sqrt(round_to(3 * variance, dtype)), dtype)
            return random.uniform(key, shape, dtype, -1.0, 1.0, region=region) * bound
        stddev = round_to(math.sqrt(variance), dtype)
        if self.distribution == "normal":
            return random.normal(key, shape, dtype, region=region) * stddev
        stddev = round_to(stddev / round_to(_TRUNCATED_STDDEV, dtype), dtype)
        return random.truncated_normal(key, -2.0, 2.0, shape, dtype, region=region) * stddev


def _fans(shape: tuple[int, ...], in_axis: Axes, out_axis: Axes, batch_axis: Axes) -> tuple[float, float]:
    """The numbers of inputs of an output and of outputs of an input, for a weight of this shape."""
    what = f"init: in_axis={in_axis}, out_axis={out_axis}, batch_axis={batch_axis}"
    axes = [(axis,) if isinstance(axis, int) else axis for axis in (in_axis, out_axis, batch_axis)]
    flat = [axis for group in axes for axis in group]
    if any(not -len(shape) <= axis < len(shape) for axis in flat):
        legal = f"legal are {-len(shape)} to {len(shape) - 1}" if shape else "a scalar has no fans, use normal()"
        raise ValueError(f"{what} do not fit shape {shape}: {legal}")
    if len({axis % len(shape) for axis in flat}) < len(flat):
        raise ValueError(f"{what} name a dim of shape {shape} twice")
    if 0 in shape:
        raise ValueError(f"init: shape {shape} has no elements, hence no fans")
    inputs, outputs, batch = (math.prod(shape[axis] for axis in group) for group in axes)
    receptive_field = math.prod(shape) / inputs / outputs / batch
    return inputs * receptive_field, outputs * receptive_field
