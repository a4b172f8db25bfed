"""Large tensors are stored in pieces, so that a rank that loads a part of one reads little more than that part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

PIECE_BYTES = 64 << 20
"""DCP reads a stored piece whole, whatever part of it is wanted: this is what loading holds beside the state."""


class PieceSavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner, with every rank's shard cut into pieces of at most about ``PIECE_BYTES``.

    Replicas of a piece are written by one rank, and the pieces of a replicated tensor spread over the ranks.
    """

    def __init__(self) -> None:
        # flatten_state_dict is for nested trees; for a flat one it would only add a second table of names.
        super().__init__(flatten_state_dict=False)
        self._slices: dict[tuple[str, torch.Size], tuple[slice, ...]] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            for piece, where in _pieces(item):
                self._slices[piece.index.fqn, piece.index.offset] = where
                items.append(piece)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self.state_dict[index.fqn]
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return local[self._slices[index.fqn, index.offset]]


def _pieces(item: WriteItem) -> Iterator[tuple[WriteItem, tuple[slice, ...]]]:
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
        piece = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        where = tuple(slice(start, stop) if d == dim else slice(0, size) for d, size in enumerate(chunk.sizes))
        yield (
            dataclasses.replace(
                item,
                index=MetadataIndex(item.index.fqn, piece.offsets),
                type=WriteItemType.SHARD,  # DCP allows a tensor of type TENSOR only one item
                tensor_data=dataclasses.replace(data, chunk=piece),
            ),
            where,
        )
