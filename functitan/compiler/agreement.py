"""Ranks that captured different graphs would wait for each other for ever: they find out before the first run."""

from __future__ import annotations

import zlib
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.fx import Graph

from functitan._torch import FAKE_BACKEND
from functitan.compiler.collectives import signature


def check_agreement(graph: Graph, name: str, device: torch.device | str) -> None:
    """Compares the collectives of every rank's graph. All ranks must call it.

    Raises:
        RuntimeError: on every rank, where they differ; names the first difference.
    """
    if FAKE_BACKEND in dist.get_backend_config() or dist.get_world_size() == 1:
        return
    mine = signature(graph)
    digest = torch.tensor([zlib.crc32("\n".join(mine).encode()), len(mine)], dtype=torch.int64, device=device)
    low, high = digest.clone(), digest
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if torch.equal(low, high):
        return
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for place, (a, b) in enumerate(zip_longest(everyone[0], theirs, fillvalue="nothing")):
            if a != b:
                raise RuntimeError(
                    f"jit({name}): the ranks captured different steps: collective {place + 1} of rank 0 is {a}, of "
                    f"rank {rank} {b}. The function must do the same on every rank: it may not depend on the rank, on "
                    "the time, or on arguments that differ between ranks"
                )
