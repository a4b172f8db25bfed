"""What a rank sends: the collectives of a captured graph, their sizes, and the bytes that cross the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import attrs
from attrs import frozen
from torch import Tensor
from torch.fx import Node

from functitan.compiler.collectives import is_collective

GroupAxes = Callable[[str], tuple[tuple[str, ...], int]]
"""The axes and the number of ranks of a process group, by its name."""


@frozen
class Collective:
    """One kind of call: all that have the same fields are counted together.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, or the operator's name;
            ``shift``: everything to one other rank, as in a ring.
        axes: the mesh axes that the group runs along; empty where it is no line or plane of the mesh.
        ranks: how many there are in the group.
        dtype: of what is sent.
        bytes_in: of this rank's input, for one call.
        bytes_out: of this rank's result, for one call.
        phase: "forward", "backward" or "update" (gradient norm, optimizer); None where the graph has no marks.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    dtype: str
    bytes_in: int
    bytes_out: int
    phase: str | None

    @property
    def wire_bytes(self) -> int:
        """What this rank sends in one call of the usual ring algorithms, rounded up.

        ``(n - 1) / n`` of the whole for a gather (of its output), a reduce-scatter and an all-to-all (of its input),
        twice that for an all-reduce: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. Any other
        kind counts its input once.
        """
        n = self.ranks
        whole = {
            "all_gather": self.bytes_out, "reduce_scatter": self.bytes_in, "all_to_all": self.bytes_in,
            "all_reduce": 2 * self.bytes_in,
        }.get(self.kind)  # fmt: skip
        return self.bytes_in if whole is None else -(-whole * (n - 1) // n)


@frozen
class CollectiveCount:
    """A kind of call and how often a rank makes it in a step."""

    call: Collective
    count: int

    @property
    def total_bytes(self) -> int:
        """Wire bytes of all calls."""
        return self.call.wire_bytes * self.count


def collective_of(node: Node, group_axes: GroupAxes, phase: str | None = None) -> Collective | None:
    """The facts of a node that is a collective, else None. A coalesced one counts as one call, all its bytes added.

    Args:
        node: of a captured graph, with the fake tensor of its result.
        group_axes: the axes and number of ranks of the group that it names.
        phase: see :class:`Collective`.
    """
    if not is_collective(node):
        return None
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args)) | node.kwargs
    group = given.get("group_name")
    axes, ranks = group_axes(group if isinstance(group, str) else group.group_name)
    inputs = [x for source in node.all_input_nodes if source is not given.get("out") for x in tensors_of(source)]
    outputs = tensors_of(node)
    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in inputs})
    kind = kind_of(node)
    if kind == "all_to_all" and ranks > 1 and sum(map(bool, given.get("input_split_sizes") or ())) == 1:
        kind = "shift"
    return Collective(
        kind=kind,
        axes=axes,
        ranks=ranks,
        dtype=", ".join(dtypes),
        bytes_in=sum(x.nbytes for x in inputs),
        bytes_out=sum(x.nbytes for x in outputs),
        phase=phase,
    )


def count(calls: Iterable[Collective]) -> tuple[CollectiveCount, ...]:
    """Equal calls together, in the order in which each kind is first made."""
    return tuple(CollectiveCount(call, n) for call, n in Counter(calls).items())


def tensors_of(node: Node) -> list[Tensor]:
    """The fake tensors of a node's results."""
    val = node.meta.get("val")
    return [x for x in (val if isinstance(val, (list, tuple)) else (val,)) if isinstance(x, Tensor)]


def line(near: Collective, far: Collective, steps: int) -> Collective:
    """The call of which ``near`` and ``far`` are the same one at two depths, ``steps`` depths beyond ``near``."""
    return attrs.evolve(
        near,
        bytes_in=near.bytes_in + steps * (far.bytes_in - near.bytes_in),
        bytes_out=near.bytes_out + steps * (far.bytes_out - near.bytes_out),
    )


def kind_of(node: Node) -> str:
    """What a collective is called in :class:`Collective`."""
    name = node.target.overloadpacket.__name__
    for ending in ("_", "_out", "_coalesced", "_single", "_tensor", "_into"):
        name = name.removesuffix(ending)
    return name
