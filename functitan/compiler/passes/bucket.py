"""Sends the parameters of a layer together: one gather, and one reduction of their gradients, for each layer.

A collective costs its latency whatever its size; a layer has a dozen parameters. Members of a bucket follow one another
in the program and belong to one unit of the parameter tree (a layer, or what stands beside the layers), one group of
ranks and one dtype. Their values lie in one buffer, rank by rank, and are taken apart behind it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Hashable, Sequence

import torch
from torch.fx import Graph, Node

from functitan._torch import mark_of
from functitan.compiler.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    collectives,
    is_backward,
    label,
    wait_of,
)
from functitan.compiler.graphs import call, dense, drop_dead, stable_sort, value

_aten = torch.ops.aten


def bucket_by_layer(graph: Graph, donated: Collection[int] = ()) -> None:
    merges = {ALL_GATHER: _gather, REDUCE_SCATTER: _reduce_scatter, ALL_REDUCE: _all_reduce}
    # Those of one group of ranks follow one another on their own, whatever others are sent meanwhile.
    kinds: dict[Hashable, list[Node]] = {}
    for node in collectives(graph):
        if node.target in merges and label(node) is not None and wait_of(node) is not None:
            kinds.setdefault((node.target, node.args[1:], value(node).dtype), []).append(node)
    for nodes in kinds.values():
        buckets = [list(run) for _, run in itertools.groupby(nodes, key=_unit)]
        buckets = [members for members in buckets if len(members) > 1 and _are_independent(members)]
        for members in buckets:
            merges[members[0].target](graph, members)
        if buckets:
            stable_sort(graph, list(graph.nodes))
            drop_dead(graph)


def _unit(node: Node) -> Hashable:
    """What the members of a bucket have in common."""
    return label(node).unit, mark_of(node, "pass"), is_backward(node)


def _are_independent(members: Sequence[Node]) -> bool:
    """Whether none of them needs another's result, directly or through what lies between the first and the last."""
    last = members[-1]
    seen: set[Node] = set()
    waiting: list[Node] = [user for member in members for user in member.users]
    stop = set(itertools.takewhile(lambda node: node is not last, _following(members[0]))) | {last}
    while waiting:
        node = waiting.pop()
        if node in members:
            return False
        if node not in seen and node in stop:
            seen.add(node)
            waiting += node.users
    return True


def _following(node: Node):
    while node.op != "output":
        node = node.next
        yield node


def _gather(graph: Graph, members: list[Node]) -> None:
    inputs = [member.args[0] for member in members]
    ranks = members[0].args[1]
    sizes = [value(x).numel() for x in inputs]
    with graph.inserting_before(members[0]):
        packed = call(graph, _aten.cat.default, [_flat(graph, x) for x in inputs])
        gathered = _collective(graph, members[0], packed)
        rows = call(graph, _aten.view.default, gathered, [ranks, sum(sizes)])
        parts = _split(graph, rows, sizes, dim=1)
        for member, x, part in zip(members, inputs, parts):
            _unpack(graph, wait_of(member), part, list(value(x).shape), ranks)


def _unpack(graph: Graph, wait: Node, part: Node, shape: list[int], ranks: int) -> None:
    """What was gathered of one member: [ranks, its elements] -> its whole shape, in one copy."""
    target, dim = _joined_along(wait, ranks)
    apart = call(graph, _aten.view.default, part, [ranks, *shape])
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    moved = call(graph, _aten.permute.default, apart, order) if dim else apart
    whole = call(graph, _aten.clone.default, moved, memory_format=torch.contiguous_format)
    result = call(graph, _aten.view.default, whole, [*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]])
    target.replace_all_uses_with(result)


def _joined_along(wait: Node, ranks: int) -> tuple[Node, int]:
    """Where a gather along another dim than the first ends: it is gathered along the first, cut and joined anew."""
    users = list(wait.users)
    if len(users) == 1 and users[0].target is _aten.split.Tensor and len(users[0].args) == 2:
        pieces = sorted(users[0].users, key=lambda piece: piece.args[1])
        joins = {user for piece in pieces for user in piece.users}
        if len(pieces) == ranks and len(joins) == 1:
            (join,) = joins
            if join.target is _aten.cat.default and list(join.args[0]) == pieces and len(join.args) == 2:
                return join, join.args[1] % value(join).ndim
    return wait, 0


def _reduce_scatter(graph: Graph, members: list[Node]) -> None:
    inputs = [member.args[0] for member in members]
    ranks = members[0].args[2]
    sizes = [value(member).numel() for member in members]
    with graph.inserting_before(members[-1]):
        rows = [call(graph, _aten.view.default, dense(graph, x), [ranks, n]) for x, n in zip(inputs, sizes)]
        packed = call(graph, _aten.view.default, call(graph, _aten.cat.default, rows, 1), [ranks * sum(sizes)])
        reduced = _collective(graph, members[-1], packed)
    _hand_out(graph, members, reduced, sizes)


def _all_reduce(graph: Graph, members: list[Node]) -> None:
    sizes = [value(member).numel() for member in members]
    with graph.inserting_before(members[-1]):
        packed = call(graph, _aten.cat.default, [_flat(graph, member.args[0]) for member in members])
        reduced = _collective(graph, members[-1], packed)
    _hand_out(graph, members, reduced, sizes)


def _hand_out(graph: Graph, members: list[Node], reduced: Node, sizes: list[int]) -> None:
    with graph.inserting_before(reduced.next):
        for member, part in zip(members, _split(graph, reduced, sizes, dim=0)):
            result = call(graph, _aten.view.default, part, list(value(member).shape))
            wait_of(member).replace_all_uses_with(result)


def _collective(graph: Graph, like: Node, packed: Node) -> Node:
    """The same collective of the packed values, and the wait for it; marked as what it replaces."""
    start = call(graph, like.target, packed, *like.args[1:])
    done = call(graph, wait_of(like).target, start)
    for node in (packed, start, done):
        node.meta["custom"] = like.meta.get("custom")
    return done


def _split(graph: Graph, x: Node, sizes: list[int], dim: int) -> list[Node]:
    pieces = call(graph, _aten.split_with_sizes.default, x, sizes, dim)
    return [call(graph, operator.getitem, pieces, i) for i in range(len(sizes))]


def _flat(graph: Graph, x: Node) -> Node:
    return call(graph, _aten.view.default, dense(graph, x), [math.prod(value(x).shape)])
