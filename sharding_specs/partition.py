"""P: how the dims of one array are split over mesh axes, with the semantics of ``jax.sharding.PartitionSpec``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from attrs import frozen

Entry = None | str | tuple[str, ...]
"""The layout of one dim: not split, split over one axis, or over several with the first one outermost."""


def canonical(entry: Any) -> Entry:
    """One dim's entry in the form that JAX gives it: ``()`` is None, ``("x",)`` is ``"x"``, lists are tuples.

    Raises:
      TypeError: the entry is something else than None, an axis name, or a tuple of axis names.
    """
    if entry is None or (isinstance(entry, str) and entry):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(axis, str) and axis for axis in entry):
        return entry[0] if len(entry) == 1 else tuple(entry) or None
    raise TypeError(f"a dim is laid out by None, an axis name or a tuple of axis names, not by {entry!r}")


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The axes of one entry, outermost first: ``None`` has none."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


@frozen(init=False, repr=False)
class P:
    """The layout of an array: ``P("fsdp", None, ("cp", "tp"))`` has one entry a dim.

    As in JAX: dims beyond the entries are not split; ``P("x")`` and ``P(("x",))`` are equal, ``P("x")`` and
    ``P("x", None)`` are not, and no P equals a tuple; it prints as JAX's does. In two points it is stricter: an axis
    used twice is refused here and not only when the spec meets a mesh, and there is no UNCONSTRAINED (a plan fixes
    every dim).

    Raises:
      TypeError: an entry is not None, an axis name, or a tuple of axis names.
      ValueError: an axis is used twice.
    """

    partitions: tuple[Entry, ...]

    def __init__(self, *entries: Entry | list[str]):
        partitions = tuple(canonical(entry) for entry in entries)
        axes = [axis for entry in partitions for axis in entry_axes(entry)]
        repeated = sorted({axis for axis in axes if axes.count(axis) > 1})
        if repeated:
            raise ValueError(
                f"P({repr(partitions)[1:-1]}) uses axis {', '.join(map(repr, repeated))} more than once; "
                "an axis can split one dim only"
            )
        self.__attrs_init__(partitions)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that splits a dim, in the order of the dims."""
        return tuple(axis for entry in self.partitions for axis in entry_axes(entry))

    def __repr__(self) -> str:
        return f"P({repr(self.partitions)[1:-1]})"

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index):
        return self.partitions[index]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)
