"""Computes elementwise results a second time where the backward pass needs them, instead of keeping them until then.

Only what follows from one value that is kept anyway and is wanted by elementwise operators, such as the activation
of a gated MLP: inside a fused kernel it costs nothing and saves a round trip through memory. Without fusion, or to
feed a matrix product, it would cost a pass over memory. So it is done for TorchInductor.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from functitan.compiler.graphs import call, is_op, is_pure, ops, value

# A use so many nodes later is in another layer, or in the backward pass.
_FAR = 50
_SMALL_NUMEL = 16_384


def recompute_elementwise(graph: Graph, donated: Collection[int] = ()) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1) for node in graph.nodes}
    for node in list(ops(graph)):
        users = sorted(node.users, key=position.__getitem__)
        if not users or not _is_elementwise(node) or value(node).numel() < _SMALL_NUMEL:
            continue
        far = [user for user in users if position[user] - position[users[0]] > _FAR]
        if not far or not all(map(_is_elementwise, far)):
            continue
        if all(last_use[source] >= position[far[-1]] for source in node.all_input_nodes):
            with graph.inserting_before(far[0]):
                copy = call(graph, node.target, *node.args, **node.kwargs)
            for user in far:
                user.replace_input_with(node, copy)


def _is_elementwise(node: Node) -> bool:
    """Of operands of its own size: a broadcast one would bring another loop into the kernel."""
    if not is_op(node) or not is_pure(node) or value(node) is None or torch.Tag.pointwise not in node.target.tags:
        return False
    size = value(node).numel()
    sources = node.all_input_nodes
    return all(value(source) is not None and value(source).numel() == size for source in sources)
