"""The 2-norm of a tree laid out over a mesh, with one small all-reduce for each axis that splits anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functitan.sharding.move import Partial, Replicate, complete, from_local, to_local
from functitan.sharding.ops import mesh_of, spread


def global_norm(leaves: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The norm of all leaves together, a replicated 0-dim DTensor.

    Sums of squares are added over the axes that split a leaf and over no others: what is replicated counts once.
    """
    mesh = mesh_of(*leaves)
    squares: dict[tuple[bool, ...], list[Tensor]] = {}
    for leaf in leaves:
        leaf = spread(leaf, mesh)
        placements = complete(leaf.placements)
        norm = torch.linalg.vector_norm(to_local(leaf, placements), dtype=dtype)
        squares.setdefault(tuple(p.is_shard() for p in placements), []).append(norm.square())
    sums = {split: torch.stack(parts).sum() for split, parts in squares.items()}
    for axis in range(mesh.ndim):
        split = [key for key in sums if key[axis]]
        if split:
            parts = [Partial() if i == axis else Replicate() for i in range(mesh.ndim)]
            vector = from_local(torch.stack([sums[key] for key in split]), mesh, parts, (len(split),))
            sums |= dict(zip(split, to_local(vector, [Replicate()] * mesh.ndim).unbind(0)))
    total = torch.stack(list(sums.values())).sum().sqrt()
    return from_local(total, mesh, [Replicate()] * mesh.ndim, ())
