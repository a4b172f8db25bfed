"""Param: everything about one parameter, declared once, where the layer is, before any tensor exists."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from attrs import field, frozen

from sharding_specs.problem import did_you_mean

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""The dtypes a parameter may have, and the bytes of one element."""


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        if any(isinstance(size, bool) for size in shape):
            raise TypeError
        return tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"a Param's shape is a tuple of ints, not {shape!r}") from None


def _names(names: Any) -> tuple[str | None, ...]:
    if isinstance(names, (tuple, list)) and all(name is None or (isinstance(name, str) and name) for name in names):
        return tuple(names)
    raise TypeError(f"a Param's names are a tuple with one logical name (or None) a dim, not {names!r}")


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@frozen
class Param:
    """One parameter: a leaf of the tree that a model declares.

    Sizes are only checked to be ints; ``check`` reports those below 1 with the parameter's path.

    Attributes:
      shape: the size of each dim of the whole parameter, before it is split.
      names: what each dim means ("embed", "heads", "mlp", ...), in the order of the shape; rules map these to mesh
        axes. None is a dim that is never split. "layers" is the dim along which equal layers are stacked.
      init: an initialiser ``(key, shape, dtype) -> tensor`` (see functitan.init); kept here, never called here.
      dtype: a key of DTYPE_BYTES; a torch or numpy dtype is turned into its name.
      decay: whether weight decay applies; None leaves it to the default rule of :attr:`decays`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: shape and names differ in length, or the dtype is unknown.
    """

    shape: tuple[int, ...] = field(converter=_shape)
    names: tuple[str | None, ...] = field(converter=_names)
    init: Callable[..., Any] = field()
    dtype: str = field(default="float32", converter=_dtype)
    decay: bool | None = field(default=None, validator=attrs.validators.optional(attrs.validators.instance_of(bool)))

    @names.validator
    def _one_name_a_dim(self, _, names: tuple[str | None, ...]) -> None:
        if len(names) != len(self.shape):
            raise ValueError(
                f"a Param of shape {self.shape} has {len(self.shape)} dims but {len(names)} names {names}; "
                "give one name a dim (None for a dim that is never split)"
            )

    @init.validator
    def _can_be_called(self, _, init: Any) -> None:
        if not callable(init):
            raise TypeError(f"a Param's init is a function (key, shape, dtype) -> tensor, not {init!r}")

    @dtype.validator
    def _is_known(self, _, dtype: str) -> None:
        if dtype not in DTYPE_BYTES:
            hint = did_you_mean(dtype, DTYPE_BYTES)
            raise ValueError(f"unknown dtype {dtype!r}; {hint} legal: {', '.join(DTYPE_BYTES)}")

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of the whole parameter."""
        return self.size * DTYPE_BYTES[self.dtype]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: ``decay`` if given, else whether it has 2 dims or more beside "layers".

        So norms and biases do not decay, also where they are stacked over layers.
        """
        if self.decay is not None:
            return self.decay
        return sum(name != "layers" for name in self.names) >= 2


def walk(tree: Any, prefix: str | None = None) -> Iterator[tuple[str, Any]]:
    """``(path, leaf)`` pairs of a tree of dicts, lists, tuples and None. Dict keys are sorted, as in JAX.

    Whatever is none of these is a leaf. None is no leaf. A path is joined by slashes: ``layers/wq``, ``blocks/0/wq``.
    """
    if tree is None:
        return
    if isinstance(tree, dict):
        # Keys of unlike types cannot be compared, so the type comes first; keys of one type sort as in JAX.
        children = [(key, tree[key]) for key in sorted(tree, key=lambda key: (type(key).__qualname__, key))]
    elif isinstance(tree, (list, tuple)):
        children = list(zip(getattr(tree, "_fields", range(len(tree))), tree))
    else:
        yield prefix or "", tree
        return
    for key, child in children:
        yield from walk(child, str(key) if prefix is None else f"{prefix}/{key}")


def param_leaves(tree: Any) -> list[tuple[str, Param]]:
    """The ``(path, Param)`` pairs of a tree of dicts, lists, tuples and None.

    Raises:
      TypeError: a leaf is not a Param; the message has its path.
    """
    leaves = list(walk(tree))
    for path, leaf in leaves:
        if not isinstance(leaf, Param):
            raise TypeError(f"{path or 'the tree'} is a {type(leaf).__qualname__}, not a Param")
    return leaves


def param_count(tree: Any) -> int:
    """The number of elements of all parameters of a tree."""
    return sum(param.size for _, param in param_leaves(tree))


def param_bytes(tree: Any) -> int:
    """The bytes of all parameters of a tree, each counted whole and once."""
    return sum(param.bytes for _, param in param_leaves(tree))
