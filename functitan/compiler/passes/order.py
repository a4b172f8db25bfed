"""Runs the optimizer parameter by parameter instead of operator by operator.

An optimizer written as ``tree.map`` after ``tree.map`` is traced with all first moments, then all second moments,
then all updates: its temporaries for the whole model are alive at once. Here the tail of the graph, all that comes
after the last matrix product, is cut into the components that share more than scalars (one a parameter), and emitted
a component at a time. Within a component and before the tail the order of the program is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from functitan._torch import OpOverload
from functitan.compiler.graphs import is_call, stable_sort, value

# Nodes up to this size are free to keep, and join nothing: step counts, norms, the learning rate.
_SCALAR_NUMEL = 1024


def order_by_component(graph: Graph, donated: Collection[int] = ()) -> None:
    nodes = list(graph.nodes)
    tail = _tail(nodes)
    components = _components(tail)
    first_seen: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if node in components:
            first_seen.setdefault(components[node], i)
    position = {node: i for i, node in enumerate(nodes)}
    roots = sorted(components, key=lambda node: (first_seen[components[node]], position[node]))

    head = [node for node in nodes if node not in tail and node.op != "output"]
    stable_sort(graph, [*head, *roots, *(node for node in nodes if node in tail)])


def _tail(nodes: list[Node]) -> set[Node]:
    """The nodes after the last heavy operator, in the order of the program.

    Not all from which none follows: the sum of two microbatches' gradients must stay before the third microbatch, or
    the gradients of all of them would be alive at the end.
    """
    last = max((i for i, node in enumerate(nodes) if _is_heavy(node)), default=-1)
    return {node for node in nodes[last + 1 :] if node.op == "call_function"}


def _is_heavy(node: Node) -> bool:
    """Whatever is neither elementwise, a view nor a reduction: products, attention, convolutions, collectives, and the
    stages of a pipeline."""
    if not isinstance(node.target, OpOverload):
        return is_call(node)
    packet = node.target.overloadpacket.__name__
    heavy = ("mm", "bmm", "addmm", "baddbmm", "convolution", "embedding_dense_backward")
    return packet in heavy or "attention" in packet or node.target.namespace != "aten"


def _components(tail: set[Node]) -> dict[Node, int]:
    """A number for each large node of the tail; nodes joined by a large tensor share it."""
    parent: dict[Node, Node] = {}

    def find(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in tail:
        if not _is_large(node):
            continue
        find(node)
        for source in node.all_input_nodes:
            if _is_large(source):
                parent[find(source)] = find(node)
    numbers: dict[Node, int] = {}
    components = {node: numbers.setdefault(find(node), len(numbers)) for node in tail if _is_large(node)}
    for node in tail:
        if not _is_large(node):
            # A reduction goes with what it reads, so that this can die.
            read = [components[source] for source in node.all_input_nodes if source in components and _is_large(source)]
            if read:
                components[node] = read[0]
    return components


def _is_large(node: Node) -> bool:
    val = value(node)
    return val is None or val.numel() > _SCALAR_NUMEL
