"""Computes at capture what depends on no input: rotary angles of fixed positions, causal masks, bias tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functitan.compiler.collectives import communicates
from functitan.compiler.graphs import drop_dead, is_op, is_pure, ops, outputs, storages, value

# Of a constant and of each step on the way to it. A larger one is cheaper to compute again than to keep.
_LIMIT_BYTES = 16 * 2**20
# Made by writing once, which is no more than reading a kept one; and scalars made from Python numbers.
_aten = torch.ops.aten
_CREATIONS = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.full.default, _aten.zeros.default,
    _aten.ones.default, _aten.empty.memory_format, _aten.scalar_tensor.default, _aten.new_zeros.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.expand.default,
}  # fmt: skip


def fold_constants(graph: Graph, donated: Collection[int] = ()) -> None:
    module = graph.owning_module
    constant = _constants(graph)
    returned = {s for result in outputs(graph) if isinstance(result, Node) for s in storages(result)}
    values: dict[Node, Any] = {}
    for node in list(constant):
        if node.op == "get_attr" or node.target in _CREATIONS:
            continue
        if storages(node) & returned:
            continue  # a result is the caller's, who may donate it: each call gets a new one
        if all(user in constant and user.target not in _CREATIONS for user in node.users):
            continue  # a later constant holds it
        name = f"folded_{node.name}"
        module.register_buffer(name, _evaluate(module, node, values), persistent=False)
        with graph.inserting_before(node):
            new = graph.get_attr(name)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
    drop_dead(graph)


def _constants(graph: Graph) -> dict[Node, None]:
    # No collective: it would run while capturing, on whatever ranks are capturing.
    found: dict[Node, None] = {node: None for node in graph.nodes if node.op == "get_attr"}
    for node in ops(graph):
        if not is_op(node) or not is_pure(node) or communicates(node):
            continue
        if _is_small(node) and all(s in found for s in node.all_input_nodes):
            found[node] = None
    return found


def _is_small(node: Node) -> bool:
    val = value(node)
    return val is not None and val.numel() * val.element_size() <= _LIMIT_BYTES


def _evaluate(module: GraphModule, node: Node, values: dict[Node, Any]) -> Tensor:
    for needed in _inputs_first(node, values):
        if needed.op == "get_attr":
            values[needed] = getattr(module, needed.target)
        else:
            args, kwargs = map_arg((needed.args, needed.kwargs), values.__getitem__)
            values[needed] = needed.target(*args, **kwargs)
    return values[node]


def _inputs_first(node: Node, values: dict[Node, Any]) -> list[Node]:
    ordered: dict[Node, None] = {}

    def visit(current: Node) -> None:
        if current in values or current in ordered:
            return
        for source in current.all_input_nodes:
            visit(source)
        ordered[current] = None

    visit(node)
    return list(ordered)
