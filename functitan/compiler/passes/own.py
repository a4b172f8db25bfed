"""Gives every result a buffer of its own: what a caller is handed it may donate."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import torch
from torch.fx import Graph, Node

from functitan.compiler.graphs import call, outputs, placeholders, storages


def own_outputs(graph: Graph, donated: Collection[int]) -> None:
    """Copies a result that shares memory with a constant, an input that was not donated, or another result."""
    taken: set[Hashable] = {s for node in graph.nodes if node.op == "get_attr" for s in storages(node)}
    taken |= {s for i, node in enumerate(placeholders(graph)) if i not in donated for s in storages(node)}
    results = outputs(graph)
    with graph.inserting_before(graph.output_node()):
        for i, result in enumerate(results):
            if isinstance(result, Node):
                if storages(result) & taken:
                    results[i] = call(graph, torch.ops.aten.clone.default, result)
                taken |= storages(results[i])
    graph.output_node().args = (results,)
