"""Starts a gather while the layer before computes, and completes a reduction while the next layer computes.

A gather starts as soon as the one before it has arrived: what it brings is on its way while the layer that has its
parameters runs, and at most two layers are whole at a time. A reduction is waited for when the next one starts, so
that one is always under way.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch.fx import Graph, Node

from functitan.compiler.collectives import ALL_GATHER, WAIT, collectives, label, wait_of
from functitan.compiler.graphs import is_view, stable_sort


def overlap_communication(graph: Graph, donated: Collection[int] = ()) -> None:
    marked = [node for node in collectives(graph) if label(node) is not None and wait_of(node) is not None]
    gathers = [node for node in marked if node.target is ALL_GATHER]
    reductions = [node for node in marked if node.target is not ALL_GATHER and not _follows_another(node)]
    if not marked:
        return
    order = list(graph.nodes)
    order = _gathers_ahead(order, gathers)
    order = _waits_behind(order, reductions)
    stable_sort(graph, order)


def _follows_another(reduction: Node) -> bool:
    """Whether it goes on with what another has reduced, over another axis: then it is part of what follows that one."""
    waiting = [reduction.args[0]]
    while waiting:
        node = waiting.pop()
        if node.target is WAIT and label(node) is not None:
            return True
        if label(node) is not None or is_view(node) or node.target is operator.getitem:
            waiting += node.all_input_nodes
    return False


def _gathers_ahead(order: list[Node], gathers: list[Node]) -> list[Node]:
    """Each gather right behind the arrival of the one before; the first where it was."""
    ahead = {wait_of(before): after for before, after in zip(gathers, gathers[1:])}
    moved = set(ahead.values())
    result: list[Node] = []
    for node in order:
        if node not in moved:
            result.append(node)
        if node in ahead:
            result.append(ahead[node])
    return result


def _waits_behind(order: list[Node], reductions: list[Node]) -> list[Node]:
    """What follows from a reduction only behind the start of the next one, as far as nothing else needs it before."""
    following = dict(zip(reductions, [*reductions[1:], None]))
    result: list[Node] = []
    held: set[Node] = set()
    waiting: list[Node] = []
    for node in order:
        if node in following:
            result.append(node)
            result += waiting  # behind the start of this one: the one before has had a layer's time
            held, waiting = set(), []
            if following[node] is not None:
                held = {wait_of(node)}
                continue
        if node in held or any(source in held for source in node.all_input_nodes):
            held.add(node)
            waiting.append(node)
        elif node not in following:
            result.append(node)
    return result + waiting
