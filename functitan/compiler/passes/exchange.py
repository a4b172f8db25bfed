"""On Gloo, a reduce-scatter as an exchange and a sum of what arrives.

Gloo has none of its own: torch reduces everything on every rank and keeps a part, which sends twice as much. The ranks'
parts are added in the order of the ranks, so the sum is the same on every run. Other backends are left alone.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph

from functitan._torch import is_on_gloo
from functitan.compiler.collectives import REDUCE_SCATTER, WAIT, collectives, wait_of
from functitan.compiler.graphs import call, dense, value

_aten = torch.ops.aten
_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def exchange_and_add(graph: Graph, donated: Collection[int] = ()) -> None:
    for node in collectives(graph):
        if node.target is not REDUCE_SCATTER or node.args[1] != "sum" or wait_of(node) is None:
            continue
        x, _, ranks, group = node.args
        if not is_on_gloo(group, value(x).device):
            continue
        wait, part = wait_of(node), list(value(node).shape)
        sizes = [part[0]] * ranks
        with graph.inserting_before(node):
            sent = call(graph, _ALL_TO_ALL, dense(graph, x), sizes, sizes, group)
        with graph.inserting_before(wait):
            arrived = call(graph, WAIT, sent)
            total = call(graph, _aten.sum.dim_IntList, call(graph, _aten.view.default, arrived, [ranks, *part]), [0])
        for new, old in ((sent, node), (arrived, wait), (total, wait)):
            new.meta["custom"] = old.meta.get("custom")
        wait.replace_all_uses_with(total)
        graph.erase_node(wait)
        graph.erase_node(node)
