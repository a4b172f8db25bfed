"""Small questions that every pass asks of a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functitan._torch import OpOverload, storage_id

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""Gives what it waits for itself, although it is not declared as a view of it."""


def is_op(node: Node) -> bool:
    return isinstance(node.target, OpOverload)


def is_call(node: Node) -> bool:
    """True for a call of something that is no operator: the stages of a pipeline."""
    return node.op == "call_function" and not is_op(node) and node.target is not operator.getitem


def is_pure(node: Node) -> bool:
    """True if the node can be dropped, merged or moved: it neither writes nor draws at random."""
    if node.target is operator.getitem:
        return True
    return is_op(node) and not node.target._schema.is_mutable and not draws(node.target, node.args, node.kwargs)


def draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if the operator reads torch's global generator. Attention does so only where its dropout is on."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return (args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)) != 0
    return True


def value(node: Node) -> Tensor | None:
    """The fake tensor of a node, or None if it yields several (or none)."""
    val = node.meta.get("val")
    return val if isinstance(val, Tensor) else None


def storages(node: Node) -> set[Hashable]:
    """The buffers a node's results live in; a view has those of its base.

    Asked of the base itself: once duplicates are merged, a view's own fake tensor may belong to the base that is gone.
    """
    base, parts = node, []
    while is_view(base) or base.target is WAIT or (base.target is operator.getitem and is_view(base.args[0])):
        base = base.args[0]
    if base.target is operator.getitem:
        base, parts = base.args[0], [base.args[1]]
    if base.op == "get_attr":
        return {base.target}  # tracing gives each use of a constant another fake tensor
    vals = base.meta.get("val")
    vals = vals if isinstance(vals, (list, tuple)) else (vals,)
    vals = [vals[part] for part in parts] or vals
    return {storage_id(x) for x in vals if isinstance(x, Tensor)}


def is_view(node: Node) -> bool:
    """True if the result of an operator shares its input's memory."""
    if not is_op(node) or node.target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def outputs(graph: Graph) -> list[Node | object]:
    return list(graph.output_node().args[0])


def ops(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


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
    anchor = next(iter(graph.nodes))
    for node in ordered:
        if node is not anchor:
            anchor.append(node)
            anchor = node


def drop_dead(graph: Graph) -> None:
    """Erases what nobody reads. Collectives and waits as well, which torch would keep: all ranks drop the same."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and (node.op == "get_attr" or is_pure(node)):
            graph.erase_node(node)


def call(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new node at the graph's insertion point, with the fake tensor that passes read."""
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda source: source.meta["val"])
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def dense(graph: Graph, x: Node) -> Node:
    """``x``, or a copy of it where its elements do not lie in the order of its dims."""
    if value(x).is_contiguous():
        return x
    return call(graph, torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)
