"""Questions about the collectives of a captured graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from functitan._torch import mark_of
from functitan.compiler.graphs import WAIT, is_op, ops, value
from functitan.sharding.labels import Label

_ops = torch.ops._c10d_functional
ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default


def is_collective(node: Node) -> bool:
    """True for an operator that sends, and not for the wait for one."""
    return is_op(node) and node.target.namespace == "_c10d_functional" and node.target is not WAIT


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


def stable_sort(graph: Graph, nodes: Sequence[Node]) -> None:
    """Puts the nodes of a graph into the given order, each as soon as what it reads is there.

    Raises:
        RuntimeError: a pass has made a node read what follows from it.
    """
    placed: set[Node] = set()
    ordered: list[Node] = []
    for root in nodes:
        stack, opened = [root], set()
        while stack:
            node = stack[-1]
            if node in placed:
                stack.pop()
                continue
            missing = [source for source in node.all_input_nodes if source not in placed]
            if missing:
                if node in opened:
                    raise RuntimeError(f"the graph has a cycle through {node.name} and {missing[0].name}")
                opened.add(node)
                stack.extend(reversed(missing))
                continue
            stack.pop()
            placed.add(node)
            ordered.append(node)
    anchor = graph._root
    for node in ordered:
        if anchor.next is not node:
            anchor.append(node)
        anchor = node


__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER", "WAIT", "collectives", "is_backward", "is_collective", "label",
    "signature", "stable_sort", "wait_of",
]  # fmt: skip
