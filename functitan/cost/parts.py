"""What the memory of a step is for: the part of each buffer, and the phase of each operator, read off the data flow."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from torch.fx import Graph, Node

from functitan._torch import OpOverload
from functitan.compiler.collectives import is_backward, is_collective, is_wait
from functitan.compiler.graphs import is_view, ops, placeholders
from functitan.cost.collectives import tensors_of
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

    What carries the mark is backward. What goes into none of it, and comes from it, or straight from parameters and
    optimizer state, is update: the sum over microbatches, norm, optimizer. The rest is forward.
    """
    nodes, marked = _marked(graph)
    if not marked:
        return dict.fromkeys(nodes)
    update = _downstream(graph, marked | _stateful(graph), _reaching(graph.nodes, marked))
    return {node: "backward" if node in marked else "update" if node in update else "forward" for node in nodes}


def parts_of(graph: Graph) -> dict[Node, str]:
    """The part (see ``PARTS``) of a buffer that each node makes, if it makes one.

    The update is what nothing of forward and backward follows from: behind the marked backward pass, or, in a graph
    without marks, behind all products and embeddings. Where its operators first join a value with parameters or
    optimizer state, that value is a gradient, and so is what it was made of by elementwise operators, moves and
    communication, back to the product or sum that made it.
    """
    inputs = {node: part_of_input(node.meta.get("path")) for node in placeholders(graph)}
    nodes, marked = _marked(graph)
    anchors = marked or {node for node in nodes if _is_heavy(node)}
    update = _downstream(graph, _stateful(graph), _reaching(graph.nodes, anchors))
    gradients = _made_of([source for node in update for source in node.all_input_nodes], update)
    weights = _from_alone({node for node, part in inputs.items() if part == "parameters"}, nodes, update)

    def part(node: Node) -> str:
        if node in gradients:
            return "gradients"
        if node in update:
            return "optimizer"
        return "gathered" if node in weights else "activations"

    found = {node: part(node) for node in nodes}
    return found | inputs | _constants(graph)


def parts_of_stage(
    graph: Graph, inputs: Mapping[Node, str], gradients: Iterable[Node]
) -> dict[Node, str]:
    """As :func:`parts_of`, of a part of a pipeline's stage, which has no update.

    Args:
        inputs: the parts of the placeholders.
        gradients: the outputs that are gradients of parameters.
    """
    nodes = list(ops(graph))
    found = _made_of(gradients, set())
    weights = _from_alone({node for node, part in inputs.items() if part in ("parameters", "gathered")}, nodes, set())

    def part(node: Node) -> str:
        return "gradients" if node in found else "gathered" if node in weights else "activations"

    return {node: part(node) for node in nodes} | dict(inputs) | _constants(graph)


def _marked(graph: Graph) -> tuple[list[Node], set[Node]]:
    """The operators, and those of them that capture has marked as backward, or that run a pipeline's backward."""
    nodes = list(ops(graph))
    return nodes, {node for node in nodes if is_backward(node) or getattr(node.target, "variables", ())}


def _constants(graph: Graph) -> dict[Node, str]:
    return {node: "other" for node in graph.nodes if node.op == "get_attr"}


def _stateful(graph: Graph) -> set[Node]:
    """The arguments that are parameters or optimizer state."""
    return {n for n in placeholders(graph) if part_of_input(n.meta.get("path")) in ("parameters", "optimizer")}


def _downstream(graph: Graph, starts: set[Node], barred: set[Node]) -> set[Node]:
    """The operators that read one of ``starts``, or one another, and are none of ``barred``."""
    found: set[Node] = set()
    for node in ops(graph):
        if node not in barred and any(source in found or source in starts for source in node.all_input_nodes):
            found.add(node)
    return found


def _made_of(roots: Iterable[Node], update: set[Node]) -> set[Node]:
    """``roots``, less scalars and operators of the update, and what was turned into them element by element."""
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


def _reaching(nodes: Iterable[Node], ends: set[Node]) -> set[Node]:
    """``ends``, and all that they are made of."""
    found = set(ends)
    for node in reversed(list(nodes)):
        if node in found:
            found.update(node.all_input_nodes)
    return found
