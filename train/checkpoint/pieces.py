"""Which slices of which tensors a rank writes.

Each rank writes its own shards of DTensors; of what several ranks have alike, each writes a share, so that a snapshot
of the state takes no more memory than what is written from it. Large tensors are cut into pieces, so that a rank which
loads a part of one reads little more than that part. None of this needs communication.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

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


def own_pieces(tensors: dict[str, torch.Tensor], ranks: Ranks) -> list[Piece]:
    """The pieces that this rank writes, as views. Those of all ranks together are ``tensors``, each element once."""
    own = []
    for item in create_default_local_save_plan(tensors, is_coordinator=False).items:
        path = item.index.fqn
        tensor = tensors[path].detach()
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        replica, replicas = _replica(tensor, ranks)
        first = zlib.crc32(path.encode())  # not always replica 0, which would then write all small tensors
        for number, (piece, where) in enumerate(_cut(item)):
            if (first + number) % replicas == replica:
                own.append(Piece(piece, shard[where]))
    return own


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
    data, chunk = item.tensor_data, item.tensor_data.chunk
    count = math.ceil(math.prod(chunk.sizes) * data.properties.dtype.itemsize / PIECE_BYTES)
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
        place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        piece = dataclasses.replace(
            item,
            index=MetadataIndex(item.index.fqn, place.offsets),
            type=WriteItemType.SHARD,  # DCP allows a tensor of type TENSOR only one item
            tensor_data=dataclasses.replace(data, chunk=place),
        )
        yield piece, tuple(slice(start, stop) if d == dim else slice(0, size) for d, size in enumerate(chunk.sizes))


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
