"""Which slices of which tensors a rank writes.

Each rank writes its own shards of DTensors; of what several ranks have alike, each writes a share, so that a snapshot
of the state takes no more memory than what is written from it. Large tensors are cut into pieces, so that a rank which
loads a part of one reads little more than that part. None of this needs communication.

A rank's shard is one slice of the whole, but for layers that are split over the stages of a pipeline: stages may differ
in size, and a rank may have several, from different places. There it is one slice for each stage.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from functitan import Plan
from functitan.compiler.place import held_layers
from train.checkpoint.ranks import Ranks

PIECE_BYTES = 64 << 20
"""DCP reads a stored piece whole, whatever part of it is wanted: this is what loading holds beside the state."""


@attrs.frozen
class Piece:
    """A slice of one tensor, at most about ``PIECE_BYTES`` large."""

    item: WriteItem
    """DCP's description: the path, the place in the whole tensor, the dtype."""

    data: torch.Tensor
    """The slice itself: a view of the state, or a copy."""

    def copied(self) -> Piece:
        return Piece(self.item, self.data.to("cpu", copy=True))


def own_pieces(tensors: Mapping[str, torch.Tensor], ranks: Ranks, plan: Plan | None = None) -> list[Piece]:
    """The pieces that this rank writes, as views. Those of all ranks together are ``tensors``, each element once.

    Args:
        plan: what layers that are split over pp are laid out by. Raises ValueError where it is missing.
    """
    own = []
    for path, slices in _slices(tensors, plan, "give save the plan: save(step, state, plan)").items():
        replica, replicas = _replica(tensors[path], ranks)
        first = zlib.crc32(path.encode())  # not always replica 0, which would then write all small tensors
        pieces = ((piece, data[where]) for item, data in slices for piece, where in _cut(item))
        for number, (piece, data) in enumerate(pieces):
            if (first + number) % replicas == replica:
                own.append(Piece(piece, data))
    return own


def _slices(
    tensors: Mapping[str, torch.Tensor], plan: Plan | None, remedy: str
) -> dict[str, list[tuple[WriteItem, torch.Tensor]]]:
    """Of each tensor by path: the slices that this rank holds, as DCP describes them, and as views."""
    found: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {path: [] for path in tensors}
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=False).items:
        tensor = tensors[item.index.fqn].detach()
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        layers = held_layers(tensor, plan, remedy)
        if layers is None:
            found[item.index.fqn].append((item, shard))
            continue
        chunk = item.tensor_data.chunk  # right in every dim but that of the layers
        views = shard.split([stop - start for start, stop in layers])
        for (start, _), view in zip(layers, views):
            here = _at(item, (start, *chunk.offsets[1:]), view.shape)
            found[item.index.fqn].append((here, view))
    return found


def _at(item: WriteItem, offsets: Sequence[int], sizes: Sequence[int]) -> WriteItem:
    """``item``, of another part of the same tensor."""
    place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return dataclasses.replace(
        item,
        index=MetadataIndex(item.index.fqn, place.offsets),
        type=WriteItemType.SHARD,  # DCP allows a tensor of type TENSOR only one item
        tensor_data=dataclasses.replace(item.tensor_data, chunk=place),
    )


def _replica(tensor: torch.Tensor, ranks: Ranks) -> tuple[int, int]:
    """Which of how many ranks with the same shard this one is."""
    if not isinstance(tensor, DTensor):
        return ranks.rank, ranks.size
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            replica, replicas = replica * size + tensor.device_mesh.get_local_rank(axis), replicas * size
    return replica, replicas


def _cut(item: WriteItem) -> Iterator[tuple[WriteItem, tuple[slice, ...]]]:
    """``item`` cut along its longest dim, each piece with its place in the rank's own shard."""
    chunk = item.tensor_data.chunk
    count = math.ceil(math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize / PIECE_BYTES)
    if count <= 1:
        yield item, tuple(slice(0, size) for size in chunk.sizes)
        return
    dim = max(range(len(chunk.sizes)), key=lambda d: chunk.sizes[d])
    length = max(1, chunk.sizes[dim] // count)
    for start in range(0, chunk.sizes[dim], length):
        stop = min(start + length, chunk.sizes[dim])
        offsets, sizes = list(chunk.offsets), list(chunk.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        where = (slice(start, stop) if d == dim else slice(0, size) for d, size in enumerate(chunk.sizes))
        yield _at(item, offsets, sizes), tuple(where)


class PieceSavePlanner(dcp.DefaultSavePlanner):
    """A plan for DCP that is made already. That the ranks' pieces fill every tensor is checked by DCP on rank 0."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [piece.item for piece in pieces]
        self._data = {(piece.item.index.fqn, piece.item.index.offset): piece.data for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._data[index.fqn, index.offset]


class SliceLoadPlanner(dcp.DefaultLoadPlanner):
    """Fills tensors slice by slice from what is stored, wherever that was cut.

    Args:
        targets: by path; what they hold of the whole is written to.
        plan: as of :func:`own_pieces`.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], plan: Plan | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._slices = _slices(targets, plan, "give load the plan: load(path, like, plan=plan)")
        self._data = {
            (path, item.tensor_data.chunk.offsets): view
            for path, slices in self._slices.items()
            for item, view in slices
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for path, slices in self._slices.items():
            chunks = [item.tensor_data.chunk for item, _ in slices]
            items += create_read_items_for_chunk_list(path, self.metadata.state_dict_metadata[path], chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._data[index.fqn, index.offset]
