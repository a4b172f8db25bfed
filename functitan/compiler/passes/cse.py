"""Merges nodes that compute the same thing, and drops those that compute nothing or that nobody reads.

Tracing a backward pass repeats transposes, casts and masks of the forward, and leaves a ``detach`` at every boundary
of autograd. What a remat computes again is never merged with the first run: keeping the two apart is its purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from functitan._torch import mark_of
from functitan.compiler.collectives import ALL_GATHER, WAIT
from functitan.compiler.graphs import drop_dead, is_pure, ops, value

_aten = torch.ops.aten
_IDENTITIES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
# A view to the shape that the tensor already has, or a permutation that moves nothing.
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default}


def merge_duplicates(graph: Graph, donated: Collection[int] = ()) -> None:
    _drop_identities(graph)
    seen: dict[Hashable, Node] = {}
    for node in ops(graph):
        if not is_pure(node):
            continue
        first = seen.setdefault(_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    drop_dead(graph)


def _drop_identities(graph: Graph) -> None:
    for node in ops(graph):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        same = node.target in _IDENTITIES or (node.target in _RESHAPES and _same_layout(node, source))
        if same:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _same_layout(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    return (
        x is not None
        and y is not None
        and (x.shape, x.stride(), x.storage_offset(), x.dtype) == (y.shape, y.stride(), y.storage_offset(), y.dtype)
    )


def _key(node: Node) -> Hashable:
    again = node.target is not WAIT and not _gathers_integers(node)
    region = mark_of(node, "remat") if again else None
    # What is gathered for one microbatch is not kept for the next.
    microbatch = mark_of(node, "pass") if node.target is ALL_GATHER else None
    return node.target, _frozen(node.args), _frozen(node.kwargs), region, microbatch


def _gathers_integers(node: Node) -> bool:
    """Such as the documents' numbers, which every layer reads: a few bytes a token, kept rather than sent again."""
    val = value(node)
    return node.target is ALL_GATHER and val is not None and not val.dtype.is_floating_point


def _frozen(argument: Any) -> Hashable:
    """A hashable form in which 1, 1.0 and True differ: they select different operators and dtypes."""
    if isinstance(argument, (list, tuple)):
        return tuple(_frozen(x) for x in argument)
    if isinstance(argument, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(argument.items()))
    if isinstance(argument, float):
        return float, argument.hex()  # tells 0.0 from -0.0
    return type(argument), argument
