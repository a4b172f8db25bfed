"""Memory of a captured step, by walking through its graph: which buffers are alive while each operator runs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping

import attrs
from attrs import frozen
from torch import Tensor
from torch.fx import Graph, Node

from functitan._torch import OpOverload, storage_id
from functitan.compiler.collectives import is_collective, is_wait
from functitan.compiler.graphs import outputs, placeholders
from functitan.cost.collectives import kind_of
from functitan.cost.parts import PARTS, parts_of

_SEND_A_COPY = ("all_reduce", "broadcast")
"""Kinds that work in place on their result, a copy of what they are given."""

Live = tuple[int, ...]
"""Bytes by part, in the order of ``PARTS``."""


@frozen
class Memory:
    """The moment of a step at which its tensors take most.

    Attributes:
        peak: bytes of all tensors that are alive then; what an allocator rounds up and kernels use inside is not in it.
        parts: the same by part; see :data:`functitan.cost.PARTS`.
        at: the operator that runs then, or "the start".
        phase: of that operator.
        arguments: bytes of the step's arguments, which are there before it starts.
        part_peaks: the most that each part takes at any moment of the step, each at its own; so they do not add up to
            ``peak``. At a peak in the forward pass there are no gradients yet, and here they are.
    """

    peak: int
    parts: dict[str, int]
    at: str
    phase: str | None
    arguments: int
    part_peaks: dict[str, int]


@frozen
class _Buffer:
    """A piece of memory; equal only to itself."""

    key: Hashable
    part: str
    size: int


@frozen
class Result:
    """One output of a graph: which piece of memory it lives in, and what that is for.

    Attributes:
        buffer: equal for outputs that share one.
        part: of it.
        size: its bytes; 0 of memory that is counted elsewhere.
    """

    buffer: Hashable
    part: str
    size: int


def timeline(graph: Graph, donated: Collection[int] = ()) -> tuple[Live, list[Live]]:
    """Bytes alive at the start, and while each operator runs: its operands and results, and what is used later.

    As the emitted program does it: a value is dropped after its last use, views and ``out=`` results keep the buffer
    they stand in, an argument that is not donated stays. What a collective reads stays until its result was waited for.

    Args:
        graph: of a captured function, with fake tensors; see ``Captured.graph``.
        donated: numbers of the inputs that are dropped after their last use.

    Raises:
        ValueError: a node has no fake tensor to tell its size.
    """
    start, lives, _ = walk(graph, parts_of(graph), donated)
    return start, lives


def walk(
    graph: Graph, part_of: Mapping[Node, str], donated: Collection[int], *, lent: bool = False
) -> tuple[Live, list[Live], list[Result | None]]:
    """As :func:`timeline`, and the memory of each output; None where one is no tensor.

    Args:
        part_of: the part of what each node makes.
        lent: what is not donated, constants as well, belongs to somebody else, who counts it: here it is nothing.
    """
    steps = _Walk(part_of)
    last_use = _last_uses(graph)
    # What somebody else holds goes first: an input that shares its memory is nothing here either.
    inputs = sorted(enumerate(placeholders(graph)), key=lambda pair: pair[0] in donated)
    for i, node in inputs:
        steps.take(node, nothing=lent and i not in donated)
        if i not in donated:
            steps.hold(steps.where[node][0])
    for node in graph.nodes:
        if node.op == "get_attr":  # a constant of the graph, which is always there
            steps.take(node, nothing=lent)
            steps.hold(steps.where[node][0])
    start = steps.live()
    for node in placeholders(graph):
        if node not in last_use:
            steps.drop(node)
    ending: dict[Node, list[Node]] = {}
    for node, last in last_use.items():
        ending.setdefault(last, []).append(node)
    lives = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        steps.run(node)
        lives.append(steps.live())
        for dead in ending.get(node, ()):
            steps.drop(dead)
        for sent in steps.sent.pop(node, ()):
            steps.release(sent)
    buffers = [steps.where[node][0] if isinstance(node, Node) else None for node in outputs(graph)]
    return start, lives, [buffer and Result(buffer, buffer.part, buffer.size) for buffer in buffers]


class _Walk:
    """The state of the walk: where each node's results live, and how many hold each buffer."""

    def __init__(self, part_of: Mapping[Node, str]) -> None:
        self.part_of = part_of
        self.inputs: dict[int, _Buffer] = {}
        self.where: dict[Node, list[_Buffer]] = {}
        self.holders: dict[_Buffer, int] = {}
        self.bytes = dict.fromkeys(PARTS, 0)
        self.sent: dict[Node, list[_Buffer]] = {}
        """What is let go behind a node, which waits for the collective that reads it."""

    def live(self) -> Live:
        return tuple(self.bytes.values())

    def take(self, node: Node, nothing: bool) -> None:
        """Makes the buffer of an input or a constant, or finds that of another one which shares its memory."""
        (buffer,) = self._buffers(node)
        if nothing:
            buffer = attrs.evolve(buffer, size=0)
        if node.op == "placeholder" and isinstance(node.meta["val"], Tensor):
            buffer = self.inputs.setdefault(storage_id(node.meta["val"]), buffer)
        self.where[node] = [buffer]
        self.hold(buffer)

    def run(self, node: Node) -> None:
        self.make(node)
        last_wait = _last_wait(node) if is_collective(node) and kind_of(node) not in _SEND_A_COPY else None
        if last_wait is not None:
            read = {buffer for source in node.all_input_nodes for buffer in self.where[source]}
            for buffer in read:
                self.hold(buffer)
            self.sent.setdefault(last_wait, []).extend(read)

    def make(self, node: Node) -> None:
        """Finds or makes the buffers of a node's results, and holds them in its name."""
        self.where[node] = buffers = self._buffers(node)
        for buffer in set(buffers):
            self.hold(buffer)

    def drop(self, node: Node) -> None:
        for buffer in set(self.where[node]):
            self.release(buffer)

    def hold(self, buffer: _Buffer) -> None:
        if buffer not in self.holders:
            self.holders[buffer] = 0
            self.bytes[buffer.part] += buffer.size
        self.holders[buffer] += 1

    def release(self, buffer: _Buffer) -> None:
        self.holders[buffer] -= 1
        if not self.holders[buffer]:
            del self.holders[buffer]
            self.bytes[buffer.part] -= buffer.size

    def _buffers(self, node: Node) -> list[_Buffer]:
        """One for each result, in order; results may share one."""
        if node.target is operator.getitem:
            source, index = node.args
            return [self.where[source][index]]
        if node.op == "get_attr":
            constant = getattr(node.graph.owning_module, node.target)
            size = _storage_bytes(constant) if isinstance(constant, Tensor) else 0
            return [_Buffer(node.target, self.part_of[node], size)]
        if "val" not in node.meta:
            raise ValueError(f"{node.name} has no fake tensor (node.meta['val']): its size is not known")
        results = _listed(node)
        given = [buffer for source in _written_or_viewed(node) for buffer in self.where[source]]
        if given:
            # Written into as many as there are results, or all of them views of one buffer.
            return given if len(given) == len(results) else given[:1] * len(results)
        known = {
            storage_id(x): buffer
            for source in node.all_input_nodes
            for x, buffer in zip(_listed(source), self.where[source])
            if isinstance(x, Tensor)
        }
        return [self._fresh(node, place, x, known) for place, x in enumerate(results)]

    def _fresh(self, node: Node, place: int, x: object, known: dict[int, _Buffer]) -> _Buffer:
        if not isinstance(x, Tensor):
            return _Buffer((node, place), self.part_of[node], 0)  # a result that was not asked for
        # Some operators give a view that their schema does not own up to (_unsafe_view): the fake tensors do.
        fresh = _Buffer((node, place), self.part_of[node], _storage_bytes(x))
        return known.setdefault(storage_id(x), fresh)


def _listed(node: Node) -> list[object]:
    val = node.meta.get("val")
    return list(val) if isinstance(val, (list, tuple)) else [val]


def _written_or_viewed(node: Node) -> list[Node]:
    """The operands in whose memory a node's results live, by its schema; none where it makes memory of its own."""
    if is_wait(node):
        return [node.args[0]]
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    aliased = [result.alias_info for result in schema.returns if result.alias_info is not None]
    if not aliased:
        return []
    # A list of views is written Tensor(a -> *)[]: its results name no operand, and the operand says "*".
    marks = {"*", *(mark for info in aliased for mark in info.before_set)}
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and marks & (info.before_set | info.after_set):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            return [x for x in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(x, Node)]
    return []


def _last_uses(graph: Graph) -> dict[Node, Node]:
    """The node behind which each is dropped: its last reader, or itself. What is returned, and an argument that nobody
    reads, has none."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
        if node.op == "call_function":
            last[node] = node
    for result in outputs(graph):
        if isinstance(result, Node):
            last[result] = graph.output_node()
    return last


def _last_wait(node: Node) -> Node | None:
    """The last wait for a result of a collective."""
    waits = []
    reading = list(node.users)
    while reading:
        user = reading.pop()
        if is_wait(user):
            waits.append(user)
        elif user.target is operator.getitem:
            reading += user.users
    return max(waits, default=None)


def _storage_bytes(x: Tensor) -> int:
    return x.untyped_storage().nbytes()
