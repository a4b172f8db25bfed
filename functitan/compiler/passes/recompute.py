"""Computes elementwise results a second time where the backward pass needs them, instead of keeping them until then.

Only what follows from values that are kept anyway: the activation and the product of a gated MLP, the output of a
norm. Inside a fused kernel this costs nothing and saves a round trip through memory, so it is done for TorchInductor;
without fusion it would cost a pass over memory each.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functitan.compiler.graphs import call, is_op, is_pure, is_view, ops, value

# A use so many nodes later is in another layer, or in the backward pass.
_FAR = 50
_SMALL_NUMEL = 16_384
_MAX_OPS = 4


def recompute_elementwise(graph: Graph, donated: Collection[int] = ()) -> None:
    position = {node: float(i) for i, node in enumerate(graph.nodes)}
    last_use = {node: max((position[user] for user in node.users), default=-1.0) for node in graph.nodes}
    copies: dict[Node, Node] = {}
    # From the end, so that what a later result needed computed again is there for an earlier one.
    for node in reversed(list(ops(graph))):
        users = sorted(node.users, key=position.__getitem__)
        if not users or not _is_cheap(node) or value(node).numel() < _SMALL_NUMEL:
            continue
        far = [user for user in users if position[user] - position[users[0]] > _FAR and user.op != "output"]
        if not far:
            continue
        at = position[far[0]]
        there = {original: copy for original, copy in copies.items() if position[copy] < at}
        chain = _chain(node, at, last_use, there)
        if chain is None:
            continue
        with graph.inserting_before(far[0]):
            for original in chain:
                args, kwargs = map_arg((original.args, original.kwargs), partial(_copy_of, there))
                there[original] = copies[original] = call(graph, original.target, *args, **kwargs)
                position[there[original]] = at - 0.5
        for user in far:
            user.replace_input_with(node, copies[node])
        last_use[node] = max(position[user] for user in node.users)


def _chain(node: Node, at: float, last_use: dict[Node, float], there: dict[Node, Node]) -> list[Node] | None:
    """What to compute again, inputs first, to have ``node`` at ``at``; None if that needs more than is kept anyway."""
    chain: dict[Node, None] = {}

    def visit(current: Node) -> bool:
        if current in chain or current in there:
            return True
        if current is not node and (current.op != "call_function" or last_use[current] >= at):
            return True  # kept until then anyway
        if not _is_cheap(current) or not all(visit(source) for source in current.all_input_nodes):
            return False
        chain[current] = None
        return True

    if not visit(node) or sum(not is_view(n) for n in chain) > _MAX_OPS:
        return None
    if chain and all(is_view(n) for n in chain) and not any(s in there for n in chain for s in n.all_input_nodes):
        return None  # views alone keep nothing
    return list(chain)


def _copy_of(copies: dict[Node, Node], node: Node) -> Node:
    return copies.get(node, node)


def _is_cheap(node: Node) -> bool:
    if not is_op(node) or not is_pure(node) or value(node) is None:
        return False
    return is_view(node) or torch.Tag.pointwise in node.target.tags
