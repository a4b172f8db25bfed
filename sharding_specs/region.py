"""Which slice of a whole array a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from sharding_specs.mesh import MeshSpec
from sharding_specs.partition import P, entry_axes
from sharding_specs.stages import stage_layers


def region(shape: Sequence[int], spec: P, mesh: MeshSpec, rank: int) -> tuple[tuple[int, int], ...]:
    """``(start, size)`` for every dim of an array of this shape: the slice that a rank of the mesh holds.

    Dims that do not divide are split as ``torch.chunk`` and DTensor split, axis by axis, outermost first: over k ranks
    the first ones get ceil(n / k), the last ones fewer or nothing; an empty shard starts where its dim, or the part
    that the outer axes left of it, ends. Layers over pp are split as the stages are: see :func:`stage_layers`.

    Args:
      shape: of the whole array.
      spec: its layout; dims beyond its entries are whole, and axes that the mesh lacks split nothing.

    Raises:
      ValueError: there is no such rank, the layout has more entries than the shape dims, or a stage has no layer.
    """
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has {len(spec)} entries for the {len(shape)} dims of shape {tuple(shape)}")
    place = mesh.coordinate(rank)
    slices = [(0, size) for size in shape]
    for dim, entry in enumerate(spec):
        for axis in entry_axes(entry):
            if axis in mesh:
                start, size = slices[dim]
                offset, size = _part(size, axis, mesh[axis], place[axis])
                slices[dim] = (start + offset, size)
    return tuple(slices)


def _part(size: int, axis: str, parts: int, index: int) -> tuple[int, int]:
    """Start and size of one part of a dim."""
    if axis == "pp":
        layers = stage_layers(size, parts)[index]
        return layers.start, len(layers)
    return chunk(size, parts, index)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """``(start, size)`` of one part of a dim as ``torch.chunk`` cuts it; an empty one starts at the end."""
    largest = -(-size // parts)
    start = min(index * largest, size)
    return start, min(largest, size - start)
