"""Process groups: a fake one of any size, and which mesh axes a group of ranks runs along.

The private corners of torch.distributed that the cost model stands on are all in this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from functitan._torch import FAKE_BACKEND
from sharding_specs import MeshSpec


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Within it, this process is one rank of a process group of ``size``: enough to capture a step, not to run one.

    Its collectives return at once, with values that mean nothing. With ``size`` 1 there is no group, since a mesh of
    one device needs none.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process is in a process group already, or torch was built without distributed.
    """
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} of {size}; legal: 0 to {size - 1}")
    if size == 1:
        yield
        return
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed, which a mesh of several devices needs")
    if dist.is_initialized():
        raise RuntimeError(
            f"this process is rank {dist.get_rank()} of a process group of {dist.get_world_size()} "
            f"({dist.get_backend()}); a fake one can only be made in a process that is in none"
        )
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Else results of an operator in the next group of the same size would be on this one's mesh, which is equal.
        _clear_sharding_prop_cache()


def group_ranks(name: str) -> tuple[int, ...]:
    """The global ranks of the process group that a captured collective names.

    Raises:
        RuntimeError: there is none of that name: the graph was captured in a process group that has ended.
    """
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        group = _resolve_process_group(name)
    except (RuntimeError, LookupError, ValueError) as error:
        raise RuntimeError(
            f"there is no process group {name!r}: a graph can be explained only while the groups exist that it was "
            "captured in"
        ) from error
    return tuple(dist.get_process_group_ranks(group))


def axes_of(ranks: tuple[int, ...], mesh: MeshSpec) -> tuple[str, ...]:
    """The axes along which a group of ranks runs, in the mesh's order; empty where it is no whole line or plane of it.

    On ``MeshSpec(fsdp=2, tp=2)`` ranks 0 and 1 are ``("tp",)`` and all four are ``("fsdp", "tp")``.
    """
    if any(rank >= mesh.size for rank in ranks):
        return ()
    places = [mesh.coordinate(rank) for rank in ranks]
    axes = tuple(axis for axis in mesh if len({place[axis] for place in places}) > 1)
    return axes if mesh.shards(axes) == len(ranks) else ()
