"""MeshSpec: the named axes of a mesh of devices and their sizes, as data: no process group, no device."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import frozen

from sharding_specs.partition import Entry, entry_axes
from sharding_specs.problem import Problem, SpecError

STANDARD_AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Pipeline, replicated data, sharded data, expert, context and tensor parallel: the axes the compiler knows, in the
order in which the presets need them on a mesh."""


@frozen(init=False, repr=False)
class MeshSpec:
    """Ordered named axes, outermost first: ``MeshSpec(dp=2, fsdp=-1, tp=4)``.

    Devices are numbered row by row, so the last axis has neighbours. One size may be -1: what the device count
    leaves (see :meth:`resolve`). The axes of STANDARD_AXES have a strategy of their own; other names are allowed and
    split whatever the rules give to them. ``MeshSpec()`` is one device. Reads as a mapping: ``mesh["tp"]``,
    ``"tp" in mesh``, ``dict(mesh)``. Equal where axes, sizes and order are.

    Only types are checked here; sizes are checked by :meth:`problems`, so that every problem is reported at once.

    Raises:
      TypeError: a size is not an int.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, **sizes: int):
        for axis, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"the size of mesh axis {axis!r} is {size!r}; it must be an int")
        self.__attrs_init__(tuple(sizes), tuple(sizes.values()))

    def replace(self, **sizes: int) -> MeshSpec:
        """The mesh with some sizes changed, in the same order; new axes come last."""
        return MeshSpec(**{**dict(self), **sizes})

    @property
    def size(self) -> int:
        """The number of devices. Raises ValueError where an axis is still -1."""
        if -1 in self.sizes:
            raise ValueError(f"{self} has no size before resolve(device_count) has replaced the -1")
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The place of a rank along each axis: on ``MeshSpec(dp=2, tp=4)`` rank 5 is ``{"dp": 1, "tp": 1}``.

        Raises:
          ValueError: there is no such rank, or a size is still -1.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} on {self}; legal: 0 to {self.size - 1}")
        places = {}
        for axis, size in reversed(self.items()):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in self}

    def shards(self, entry: Entry) -> int:
        """Into how many parts an entry of a :class:`P` splits its dim; an axis that the mesh lacks counts 1."""
        return math.prod(self.get(axis, 1) for axis in entry_axes(entry))

    def describe(self, entry: Entry) -> str:
        """The axes of an entry that split, with their sizes, for messages: ``dp=2 x fsdp=4``."""
        return " x ".join(f"{axis}={self[axis]}" for axis in entry_axes(entry) if self.get(axis, 1) != 1)

    def resolve(self, device_count: int) -> MeshSpec:
        """The mesh on that many devices, with -1 replaced by what is left.

        Raises:
          SpecError: a ValueError that names the product and the device count where they do not fit, and every
            size that is not legal.
        """
        problems = self.problems(device_count)
        if problems:
            raise SpecError(problems)
        rest = math.prod(size for size in self.sizes if size != -1)
        return MeshSpec(**{axis: device_count // rest if size == -1 else size for axis, size in self.items()})

    def problems(self, device_count: int | None = None) -> list[Problem]:
        """Everything that is wrong with the sizes, by themselves and against the device count if it is known."""
        problems = [
            Problem(f"mesh/{axis}", f"size {size} is not positive", hint="use 1 or more, or -1 for what is left")
            for axis, size in self.items()
            if size < 1 and size != -1
        ]
        free = [axis for axis, size in self.items() if size == -1]
        if len(free) > 1:
            problems.append(
                Problem("mesh", f"{len(free)} axes are -1: {', '.join(free)}", hint="give all but one of them a size")
            )
        if device_count is None:
            problems += [
                Problem(
                    f"mesh/{axis}",
                    "size -1 means what the devices leave, but their number is not given",
                    hint="give the number of devices, or this size",
                )
                for axis in free[:1]
            ]
        elif device_count < 1:
            problems.append(Problem("devices", f"there are {device_count} devices", hint="at least one is needed"))
        elif not problems:
            problems += self._misfits(device_count, free)
        return problems

    def _misfits(self, device_count: int, free: list[str]) -> list[Problem]:
        fixed = {axis: size for axis, size in self.items() if size != -1}
        product = math.prod(fixed.values())
        shown = " x ".join(f"{axis}={size}" for axis, size in fixed.items()) or "no axis"
        shown = f"{shown} = {product}" if len(fixed) != 1 else shown
        if device_count % product == 0 and (free or product == device_count):
            return []
        if free:
            return [
                Problem(
                    "mesh",
                    f"{shown} does not divide {device_count} devices, so {free[0]}=-1 has no size",
                    "product of the other axes",
                    divisors(device_count),
                )
            ]
        options = " or ".join(
            f"{axis}={device_count * size // product}"
            for axis, size in fixed.items()
            if device_count * size % product == 0
        )
        hint = f"one change that fits: {options}" if options else "make one axis -1 to take what the others leave"
        return [Problem("mesh", f"{shown}, but there are {device_count} devices", "product", (device_count,), hint)]

    def __repr__(self) -> str:
        return f"MeshSpec({', '.join(f'{axis}={size}' for axis, size in self.items())})"

    def __getitem__(self, axis: str) -> int:
        if axis not in self.axes:
            raise KeyError(axis)
        return self.sizes[self.axes.index(axis)]

    def get(self, axis: str, default: int | None = None) -> int | None:
        return self[axis] if axis in self.axes else default

    def __contains__(self, axis: object) -> bool:
        return axis in self.axes

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def keys(self) -> tuple[str, ...]:
        return self.axes

    def values(self) -> tuple[int, ...]:
        return self.sizes

    def items(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.axes, self.sizes))


def divisors(number: int) -> tuple[int, ...]:
    """Every positive divisor of a positive number, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
