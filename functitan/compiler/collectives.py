"""Questions about the collectives of a captured graph."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from functitan._torch import mark_of
from functitan.compiler.graphs import WAIT, is_op, ops, value
from functitan.sharding.labels import Label

_ops = torch.ops._c10d_functional
ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")


def communicates(node: Node) -> bool:
    """True for a collective and for the wait for one."""
    return is_op(node) and node.target.namespace in _NAMESPACES


def is_wait(node: Node) -> bool:
    """True for the wait for a collective, of any of torch's kinds."""
    return is_op(node) and node.target.overloadpacket.__name__ == "wait_tensor"


def is_collective(node: Node) -> bool:
    """True for an operator that sends, and not for the wait for one."""
    return communicates(node) and not is_wait(node)


def collectives(graph: Graph) -> list[Node]:
    """All of a graph, in the order in which they start."""
    return [node for node in ops(graph) if is_collective(node)]


def wait_of(node: Node) -> Node | None:
    """The wait for a collective; None where there is not just the one."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is WAIT else None


def label(node: Node) -> Label | None:
    """The parameter for whose sake a node is there."""
    return mark_of(node, "parameter")


def is_backward(node: Node) -> bool:
    """Whether a node was traced while gradients were taken."""
    return mark_of(node, "phase") == "backward"


def signature(graph: Graph) -> list[str]:
    """What all ranks must agree on: the kind of every collective, in order. Sizes may differ, where shards do."""
    return [
        f"{node.target.overloadpacket.__name__} of {str(val.dtype).removeprefix('torch.')}"
        + "".join(f" over {argument} ranks" for argument in node.args[1:] if isinstance(argument, int))
        for node in collectives(graph)
        if (val := value(node)) is not None
    ]


__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER", "WAIT", "collectives", "communicates", "is_backward", "is_collective",
    "is_wait", "label", "signature", "wait_of",
]  # fmt: skip
