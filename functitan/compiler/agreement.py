"""Ranks that captured different graphs would wait for each other for ever: they find out before the first run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from functitan._torch import FAKE_BACKEND
from functitan.compiler.collectives import signature


def check_same(what: str, x: Tensor, device: torch.device | str) -> None:
    """Raises RuntimeError on every rank where ``x``, an integer tensor, is not the same on all of them."""
    if _is_alone():
        return
    if not _is_same(x.detach().to(torch.int64).to(device)):
        raise RuntimeError(f"{what} is not the same on every rank, and has to be: give all of them one seed")


def _is_alone() -> bool:
    return FAKE_BACKEND in dist.get_backend_config() or dist.get_world_size() == 1


def _is_same(x: Tensor) -> bool:
    """Whether all ranks have the same int64 values."""
    low, high = x.clone(), x.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def check_agreement(graph: Graph, arguments: Sequence[str], name: str, device: torch.device | str) -> None:
    """Compares what every rank is about to run. All ranks must call it: one that captures alone waits for the others.

    Args:
        graph: of this rank; the kinds of its collectives, in order, must be those of the others.
        arguments: a line for each argument's leaf: whole shapes, layouts and static values.
        name: what errors call the function.
        device: of the process group's tensors.

    Raises:
        RuntimeError: on every rank, where they differ; names the first difference.
    """
    if _is_alone():
        return
    mine = [*(f"argument {line}" for line in arguments), *(f"collective {line}" for line in signature(graph))]
    digest = torch.tensor([zlib.crc32("\n".join(mine).encode()), len(mine)], dtype=torch.int64, device=device)
    if _is_same(digest):
        return
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for place, (a, b) in enumerate(zip_longest(everyone[0], theirs, fillvalue="nothing")):
            if a != b:
                raise RuntimeError(
                    f"jit({name}): the ranks captured different steps: rank 0 has {a}, rank {rank} has {b} (line "
                    f"{place + 1} of what they compare). The function must do the same on every rank: it may not "
                    "depend on the rank, on the time, or on shapes and static arguments that differ between ranks"
                )
