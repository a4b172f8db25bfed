"""Cuts the graph of a stage's forward and backward pass into the parts that a schedule runs one by one.

The forward part ends with the stage's result and with what the backward part reads of it. The backward part can be cut
once more, into what the stage before waits for (the gradient of the input) and the rest (the gradients of parameters):
Zero Bubble Pipeline Parallelism, Qi et al., https://arxiv.org/abs/2401.10241. What is only a view is made anew in each
part, so that nothing is handed on twice.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from attrs import frozen
from torch.fx import Graph, GraphModule, Node

from functitan.compiler.collectives import is_backward
from functitan.compiler.graphs import is_view, ops, outputs, placeholders, storages


@frozen(eq=False)
class Part:
    """A graph, and by name what it reads and what it gives.

    Attributes:
        module: one placeholder for each name in ``reads``, one output for each in ``gives``.
        reads: names of the stage's inputs, and of values that earlier parts have given.
        gives: names of results.
        owned: numbers of the inputs that no one else holds: their memory may be overwritten, once they are read for
            the last time.
    """

    module: GraphModule
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    owned: tuple[int, ...]


@frozen(eq=False)
class Cut:
    """The names of a joint graph's inputs and outputs, and which outputs the parts end with.

    Attributes:
        inputs: of each placeholder.
        forward: name -> output of the joint graph, for the results of the forward part.
        input_grads: of the gradients of the stage's input.
        param_grads: of the gradients of parameters.
    """

    inputs: tuple[str, ...]
    forward: Mapping[str, Node]
    input_grads: Mapping[str, Node]
    param_grads: Mapping[str, Node]


def cut_of(joint: GraphModule, inputs: Sequence[str], gives: Sequence[Mapping[str, int]]) -> Cut:
    """A Cut from the numbers of the joint graph's outputs: of the forward part, input and parameter gradients."""
    results = outputs(joint.graph)
    return Cut(tuple(inputs), *({name: results[i] for name, i in part.items()} for part in gives))


def forward_backward(joint: GraphModule, cut: Cut) -> tuple[Part, Part]:
    """The graph in two parts: forward, and the whole backward pass."""
    backward = _backward(joint.graph)
    forward = [node for node in ops(joint.graph) if node not in backward]
    return _parts(joint, cut, [(forward, cut.forward), (list(backward), {**cut.input_grads, **cut.param_grads})])


def forward_input_weight(joint: GraphModule, cut: Cut) -> tuple[Part, Part, Part]:
    """The graph in three parts: forward, gradients of the input, gradients of the parameters."""
    backward = _backward(joint.graph)
    forward = [node for node in ops(joint.graph) if node not in backward]
    first = _ancestors(cut.input_grads.values(), backward)
    of_input = [node for node in backward if node in first]
    of_params = [node for node in backward if node not in first]
    return _parts(joint, cut, [(forward, cut.forward), (of_input, cut.input_grads), (of_params, cut.param_grads)])


def _backward(graph: Graph) -> dict[Node, None]:
    """The operators of the backward pass, in order: what is marked, and what follows from it."""
    found: dict[Node, None] = {}
    for node in ops(graph):
        picks = node.target is operator.getitem  # goes with what it picks from, whoever asked for it
        if (is_backward(node) and not picks) or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return found


def _ancestors(roots: Iterable[Node], among: Collection[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = [node for node in roots if node in among]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [source for source in node.all_input_nodes if source in among]
    return found


def _parts(joint: GraphModule, cut: Cut, phases: Sequence[tuple[list[Node], Mapping[str, Node]]]) -> tuple[Part, ...]:
    names = dict(zip(placeholders(joint.graph), cut.inputs))
    made_in = {node: i for i, (nodes, _) in enumerate(phases) for node in nodes}
    drafts = [_Draft(joint, names, nodes, results, made_in, i) for i, (nodes, results) in enumerate(phases)]
    # From the last part to the first: what a part reads of earlier ones, these have to give.
    wanted: dict[Node, None] = {}
    parts = []
    for i, draft in reversed(list(enumerate(drafts))):
        part = draft.finish([node for node in wanted if made_in[node] == i])
        wanted |= dict.fromkeys(draft.saved)
        parts.append(part)
    return tuple(reversed(parts))


def saved_name(node: Node) -> str:
    return f"saved:{node.name}"


class _Draft:
    """One part while it is built."""

    def __init__(
        self,
        joint: GraphModule,
        names: Mapping[Node, str],
        nodes: list[Node],
        results: Mapping[str, Node],
        made_in: Mapping[Node, int],
        number: int,
    ) -> None:
        self.joint, self.names, self.results, self.made_in, self.number = joint, names, results, made_in, number
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.reads: dict[Node, Node] = {}
        """What is read: nodes of the joint graph (placeholders, or made in an earlier part) -> placeholders here."""
        self.needed = _ancestors(results.values(), set(nodes))

    @property
    def saved(self) -> list[Node]:
        return [node for node in self.reads if node.op == "call_function"]

    def finish(self, saved: Sequence[Node]) -> Part:
        """The part, which gives ``saved`` beside its results."""
        here = {node for node, part in self.made_in.items() if part == self.number}
        chosen = self.needed | _ancestors(saved, here)
        for node in [node for node in self.made_in if node in chosen]:
            self._copy(node)
        for node in self.results.values():
            self._get(node)
        gives = {**self.results, **{saved_name(node): node for node in saved}}
        self.graph.output([self._get(node) for node in gives.values()])
        order = list(self.reads)
        for node in reversed(order):
            next(iter(self.graph.nodes)).prepend(self.reads[node])
        module = GraphModule(self.joint, self.graph)
        names = tuple(self.names.get(node) or saved_name(node) for node in order)
        return Part(module, names, tuple(gives), self._owned(order))

    def _copy(self, node: Node) -> Node:
        if node not in self.copies:
            for source in node.all_input_nodes:
                self._get(source)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        return self.copies[node]

    def _get(self, node: Node) -> Node:
        """The node here: copied, made anew where it is a view, or read."""
        if node in self.copies:
            return self.copies[node]
        if node.op == "get_attr" or self.made_in.get(node) == self.number or _is_only_a_view(node):
            return self._copy(node)
        read = self.graph.placeholder(node.name)
        read.meta = dict(node.meta)
        self.copies[node] = self.reads[node] = read
        return read

    def _owned(self, order: Sequence[Node]) -> tuple[int, ...]:
        """Saved values whose buffer is no result's, and neither a constant's nor the stage's input's."""
        shared: set[Hashable] = set()
        for node in (*placeholders(self.joint.graph), *(n for n in self.joint.graph.nodes if n.op == "get_attr")):
            shared |= storages(node)
        for result in outputs(self.joint.graph):
            if isinstance(result, Node):
                shared |= storages(result)
        counts: dict[Hashable, int] = {}
        for node in order:
            for buffer in storages(node):
                counts[buffer] = counts.get(buffer, 0) + 1
        return tuple(
            i for i, node in enumerate(order)
            if node.op == "call_function" and all(b not in shared and counts[b] == 1 for b in storages(node))
        )  # fmt: skip


def _is_only_a_view(node: Node) -> bool:
    """Whether a value is another one's memory, seen in another way: to be made anew instead of handed on."""
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return is_view(node)


__all__ = ["Cut", "Part", "cut_of", "forward_backward", "forward_input_weight", "saved_name"]
