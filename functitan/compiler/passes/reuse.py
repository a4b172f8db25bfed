"""Writes elementwise results into a buffer that dies at that moment, donated inputs first.

This is what makes donation save memory: the new parameter is written over the old one in the last operator that reads
it. The operators called are the ``out=`` overloads of the same kernels, so the numbers are bit-equal.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable

import torch
from torch.fx import Graph, Node

from functitan._torch import OpOverload
from functitan.compiler.collectives import WAIT
from functitan.compiler.graphs import is_op, outputs, placeholders, storages, value


def reuse_buffers(graph: Graph, donated: Collection[int] = ()) -> None:
    inputs = placeholders(graph)
    given = {s for i, node in enumerate(inputs) if i in donated for s in storages(node)}
    borrowed = {s for i, node in enumerate(inputs) if i not in donated for s in storages(node)}
    borrowed |= {s for node in graph.nodes if node.op == "get_attr" for s in storages(node)}
    last_use = _last_uses(graph)
    # A fake tensor's storage says where the value lived when traced; a rewritten node lives where its target does.
    home: dict[Hashable, Hashable] = {}

    def homes(node: Node) -> set[Hashable]:
        return {home.get(s, s) for s in storages(node)}

    for node in list(graph.nodes):
        out_overload = _out_overload(node)
        if out_overload is None:
            continue
        dying = [
            source
            for source in node.all_input_nodes
            if _fits(source, node)
            and all(last_use[s] is node and s not in borrowed for s in homes(source))
            and sum(1 for other in node.all_input_nodes if homes(other) & homes(source)) == 1
        ]
        if not dying:
            continue
        target = max(dying, key=lambda source: bool(homes(source) & given))
        (target_home,) = homes(target)
        (own,) = storages(node)
        home[own] = target_home
        last_use[target_home] = last_use.pop(own, node)
        _write_into(graph, node, out_overload, target)


def _last_uses(graph: Graph) -> dict[Hashable, Node]:
    last: dict[Hashable, Node] = {}
    for node in graph.nodes:
        # What a collective reads is read until it has been waited for.
        sent = node.args[0].all_input_nodes if node.target is WAIT else ()
        for source in (*node.all_input_nodes, *sent, node):
            for s in storages(source):
                last[s] = node
    final = graph.output_node()
    for result in outputs(graph):
        if isinstance(result, Node):
            last.update(dict.fromkeys(storages(result), final))
    return last


def _fits(source: Node, node: Node) -> bool:
    """Whether ``node``'s result can be written over ``source``: same type and layout, and the whole of its buffer."""
    x, y = value(source), value(node)
    if x is None or y is None or x.dim() == 0:
        return False
    same = (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    return same and x.is_contiguous() and x.numel() * x.element_size() == x.untyped_storage().nbytes()


def _out_overload(node: Node) -> OpOverload | None:
    return _out_variant(node.target) if is_op(node) and value(node) is not None else None


@functools.cache
def _out_variant(op: OpOverload) -> OpOverload | None:
    """The overload of an elementwise operator that differs from it by an ``out`` argument alone."""
    if torch.Tag.pointwise not in op.tags or op._schema.is_mutable:
        return None
    if any(result.alias_info is not None for result in op._schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        overload = getattr(op.overloadpacket, name)
        arguments = overload._schema.arguments
        plain = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if plain == wanted and len(arguments) == len(plain) + 1 and arguments[-1].name == "out":
            return overload
    return None


def _write_into(graph: Graph, node: Node, overload: OpOverload, target: Node) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(overload, node.args, {**node.kwargs, "out": target})
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
