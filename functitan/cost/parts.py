"""What the memory of a step is for: the part of each buffer, and the phase of each operator, read off the data flow."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch.fx import Graph, Node

from functitan._torch import OpOverload, mark_of
from functitan.compiler.graphs import is_view, placeholders
from functitan.cost.collectives import is_collective, is_wait, tensors_of
from functitan.cost.flops import flops_of, is_elementwise, is_uncounted

PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "other")
"""Of the memory of a step:

parameters
    what the step is given as parameters, and writes over with the new ones where it may;
gathered
    parameters as they are used: gathered over a storage axis, cast to the compute dtype, packed for sending;
gradients
    what the optimizer takes from the backward pass, from the product that makes it on: before and after it is summed
    over ranks and microbatches, divided and clipped;
optimizer
    its state, and what the update computes;
activations
    everything else that is computed;
other
    the batch, counters, the key, constants.
"""

_MOVES = ("cat", "stack", "clone", "_to_copy", "copy", "slice_scatter", "select_scatter", "constant_pad_nd",
          "_unsafe_view")  # fmt: skip


def part_of_input(path: str | None) -> str:
    """The part of an argument by its path: ``state/params/…``, ``params/…``, ``state/opt_state/…``, the rest."""
    names = (path or "").split("/")[:2]
    if "params" in names:
        return "parameters"
    return "optimizer" if "opt_state" in names else "other"


def phases_of(graph: Graph) -> dict[Node, str | None]:
    """"forward", "backward" or "update" for each operator; None for all where capture has marked no backward pass.

    What carries the mark is backward. What comes from it unmarked, and never goes back into it, is update: the sum
    over microbatches, norm, optimizer. The rest is forward.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    marked = {node for node in nodes if mark_of(node, "phase") == "backward"}
    if not marked:
        return dict.fromkeys(nodes)
    later, before = _reached(graph.nodes, marked), _reaching(graph.nodes, marked)
    return {
        node: "backward" if node in marked else "update" if node in later and node not in before else "forward"
        for node in nodes
    }


def parts_of(graph: Graph) -> dict[Node, str]:
    """The part (see ``PARTS``) of a buffer that each node makes, if it makes one.

    The update is what nothing of forward and backward follows from: behind the marked backward pass, or, in a graph
    without marks, behind all products and embeddings. Where its operators first join a value with parameters or
    optimizer state, that value is a gradient, and so is what it was made of by elementwise operators, moves and
    communication, back to the product or sum that made it.
    """
    inputs = {node: part_of_input(node.meta.get("path")) for node in placeholders(graph)}
    stateful = {node for node, part in inputs.items() if part in ("parameters", "optimizer")}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    marked = {node for node in nodes if mark_of(node, "phase") == "backward"}
    anchors = marked or {node for node in nodes if _is_heavy(node)}
    work = _reaching(graph.nodes, anchors)
    update: set[Node] = set()
    roots: list[Node] = []
    for node in nodes:
        sources = node.all_input_nodes
        if node not in work and any(source in update or source in stateful for source in sources):
            update.add(node)
            roots += [s for s in sources if s.op == "call_function" and s not in update and not _is_scalar(s)]
    # The state may meet a gradient before another value does that was made of it alone: not a gradient either way.
    gradients = _made_of(roots, update)
    weights = _from_alone({node for node, part in inputs.items() if part == "parameters"}, nodes, update)

    def part(node: Node) -> str:
        if node in gradients:
            return "gradients"
        if node in update:
            return "optimizer"
        return "gathered" if node in weights else "activations"

    found = {node: part(node) for node in nodes}
    return found | inputs | {node: "other" for node in graph.nodes if node.op == "get_attr"}


def _made_of(roots: Iterable[Node], update: set[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in found or node in update or node.op != "call_function" or _is_scalar(node):
            continue
        found.add(node)
        if _keeps_elements(node):
            waiting += node.all_input_nodes
    return found


def _from_alone(sources: set[Node], nodes: Iterable[Node], update: set[Node]) -> set[Node]:
    """The nodes of which every operand comes from ``sources``, directly or through such nodes."""
    known = set(sources)
    for node in nodes:
        operands = node.all_input_nodes
        if operands and node not in update and all(operand in known for operand in operands):
            known.add(node)
    return known - sources


def _keeps_elements(node: Node) -> bool:
    """Whether what a node yields is its operands' elements, moved, summed over ranks or changed one by one."""
    if node.target is operator.getitem or is_view(node) or is_collective(node) or is_wait(node):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return is_elementwise(node.target) or node.target.overloadpacket.__name__ in _MOVES


def _is_heavy(node: Node) -> bool:
    if flops_of(node) is not None or is_uncounted(node):
        return True
    return isinstance(node.target, OpOverload) and "embedding" in node.target.overloadpacket.__name__


def _is_scalar(node: Node) -> bool:
    return all(x.numel() <= 1 for x in tensors_of(node))


def _reached(nodes: Iterable[Node], starts: set[Node]) -> set[Node]:
    found = set(starts)
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _reaching(nodes: Iterable[Node], ends: set[Node]) -> set[Node]:
    found = set(ends)
    for node in reversed(list(nodes)):
        if node in found:
            found.update(node.all_input_nodes)
    return found
