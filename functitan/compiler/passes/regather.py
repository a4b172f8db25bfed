"""Gathers parameters a second time for the backward pass, instead of keeping them whole since the forward pass.

What was gathered for a layer's forward is freed behind it, so that a rank holds the whole of one or two layers at a
time (ZeRO stage 3, Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 7.2.2). Kept is what is used again
before anything else is gathered: the output projection, last in forward and first in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection

import torch
from torch.fx import Graph, Node

from functitan.compiler.collectives import ALL_GATHER, WAIT, is_backward, label
from functitan.compiler.graphs import is_view, ops, stable_sort

_aten = torch.ops.aten
_COPIES = {_aten.cat.default, _aten.clone.default, _aten._to_copy.default, _aten.constant_pad_nd.default, WAIT}


def gather_again(graph: Graph, donated: Collection[int] = ()) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    gathers = _all_gathers(graph)

    def others_between(gather: Node, first: Node) -> bool:
        between = (other for other in gathers if position[gather] < position[other] < position[first])
        return any(label(other).unit != label(gather).unit for other in between)

    _gather_where(graph, others_between)


def gather_all_again(graph: Graph, donated: Collection[int] = ()) -> None:
    """As :func:`gather_again`, where backward does not follow forward at once: nothing is kept until then."""
    _gather_where(graph, lambda gather, first: True)


def _all_gathers(graph: Graph) -> list[Node]:
    return [node for node in ops(graph) if _gathers(node)]


def _gather_where(graph: Graph, wanted: Callable[[Node, Node], bool]) -> None:
    """Gathers again what is ``wanted(gather, first operator of backward that reads it)``."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    moved = False
    for gather in _all_gathers(graph):
        if is_backward(gather):
            continue
        chain = _made_of(_sources(gather))
        later = [(node, user) for node in chain for user in node.users if is_backward(user) and user not in chain]
        if later and wanted(gather, min((user for _, user in later), key=position.__getitem__)):
            _again(graph, chain, later)
            moved = True
    if moved:
        stable_sort(graph, list(graph.nodes))


def _sources(gather: Node) -> list[Node]:
    """The gather with the casts and paddings of the shard before it, which are not to be kept either; they first."""
    chain = [gather]
    while label(source := chain[-1].args[0]) == label(gather) and _rearranges(source):
        chain.append(source)
    return chain[::-1]


def _made_of(start: list[Node]) -> dict[Node, None]:
    """These and what forward makes of them by views, casts, further gathers and rearrangement alone."""
    chain: dict[Node, None] = dict.fromkeys(start)
    waiting = list(start)
    while waiting:
        for user in waiting.pop(0).users:
            if user not in chain and _rearranges(user) and not is_backward(user):
                if all(source in chain for source in user.all_input_nodes):
                    chain[user] = None
                    waiting.append(user)
    return chain


def _rearranges(node: Node) -> bool:
    return node.target is operator.getitem or node.target in _COPIES or is_view(node) or _gathers(node)


def _gathers(node: Node) -> bool:
    return node.target is ALL_GATHER and label(node) is not None


def _again(graph: Graph, chain: dict[Node, None], later: list[tuple[Node, Node]]) -> None:
    needed: set[Node] = set()
    waiting = [node for node, _ in later]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [source for source in node.all_input_nodes if source in chain]
    position = {node: i for i, node in enumerate(graph.nodes)}
    anchor = min((user for _, user in later), key=position.__getitem__)
    copies: dict[Node, Node] = {}
    for node in sorted(needed, key=position.__getitem__):
        with graph.inserting_before(anchor):
            copy = graph.node_copy(node, lambda source: copies.get(source, source))
        copy.meta = {**node.meta, "custom": {**(node.meta.get("custom") or {}), "phase": "backward"}}
        copies[node] = copy
    for node, user in later:
        user.replace_input_with(node, copies[node])
