"""What the pipeline of a captured step costs a rank: its stages' operators, in the order of the schedule.

In the graph of a step the pipeline is one node. Here it becomes the operators of the parts that the rank runs, action
by action, with what is kept from one to the next, what is under way between ranks, and the sums of gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
from attrs import field, frozen
from torch import Tensor
from torch.fx import Graph, Node

from functitan._torch import storage_id
from functitan.compiler.graphs import ops, outputs, placeholders
from functitan.compiler.pipeline.actions import Action
from functitan.compiler.pipeline.executor import PipelineCall
from functitan.compiler.pipeline.program import StageProgram
from functitan.compiler.pipeline.transport import Box, box_of, receipts
from functitan.cost.collectives import Collective, GroupAxes
from functitan.cost.facts import Fact, Facts, facts_of_nodes
from functitan.cost.memory import Live, Result, timeline, walk
from functitan.cost.parts import PARTS, parts_of, parts_of_stage, phases_of

PP = "pp"
_NOTHING: Live = (0,) * len(PARTS)
_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


def pipeline_of(graph: Graph) -> Node | None:
    """The node that is a pipeline; None where a step has none.

    Raises:
        ValueError: it has two.
    """
    found = [node for node in ops(graph) if isinstance(node.target, PipelineCall)]
    if len(found) > 1:
        raise ValueError(f"the step goes through {len(found)} pipelines; what is explained has one")
    return found[0] if found else None


def pipeline_facts(graph: Graph, node: Node, donated: Collection[int], group_axes: GroupAxes) -> Facts:
    """As :func:`functitan.cost.graph_facts`, of a step with a pipeline.

    Args:
        node: the pipeline, see :func:`pipeline_of`.

    Raises:
        ValueError: the graph is of one process that runs all stages, and not of a rank.
    """
    start, lives = timeline(graph, donated)
    constants = _constants(node.target)
    start, lives = _plus(start, constants), [_plus(live, constants) for live in lives]
    rows = facts_of_nodes(graph, lives, phases_of(graph), group_axes)
    at = [x for x in ops(graph) if x.target is not operator.getitem].index(node)
    results = sum(x.untyped_storage().nbytes() for x in node.meta["val"])
    around = _minus(rows[at].live, _only(parts_of(graph)[node], results))
    run = _Run(node.target, around, group_axes)
    return Facts(start, (*rows[:at], *run.rows(results), *rows[at + 1 :]))


def _constants(call: PipelineCall) -> Live:
    """Of the graphs of all stages, which are there from before the step; the parts of a stage share theirs."""
    sizes = {}
    for program in call.programs.values():
        for compiled in program.parts.values():
            module = compiled.part.module
            for node in module.graph.nodes:
                constant = getattr(module, node.target) if node.op == "get_attr" else None
                if isinstance(constant, Tensor):
                    sizes[storage_id(constant)] = constant.untyped_storage().nbytes()
    return _only("other", sum(sizes.values()))


@frozen
class _Part:
    """What one part of a stage costs for one microbatch.

    Attributes:
        facts: of its operators; the bytes alive are those that it makes or takes over, and not what it borrows.
        rows: of the batch, which it is given a copy of (where the microbatch has one row, this is more than is there).
        kept: the memory of what later parts of the stage read.
        handed_on: of what goes to another stage, and is not kept.
        gradients: of the stage's parameters.
    """

    facts: Facts
    rows: Live
    kept: Live
    handed_on: Live
    gradients: Live


def _parts(program: StageProgram, group_axes: GroupAxes) -> dict[str, _Part]:
    """The parts of a stage by kind of action."""
    known: dict[str, Result] = {}
    """What earlier parts have given, by name; of size 0 what lives in memory that is not the stage's."""
    found = {}
    for kind, compiled in program.parts.items():
        part, graph = compiled.part, compiled.part.module.graph
        inputs = dict(zip(placeholders(graph), part.reads, strict=True))
        rows = [node for node, name in inputs.items() if name.startswith("part:")]
        arrived = {name for name in part.reads if name.startswith(("x:", "grad:"))}
        own = arrived | {name for name, result in known.items() if result.size}
        free = [
            i for i, (node, name) in enumerate(inputs.items())
            if node in rows or (name in own and name in compiled.last)
        ]  # fmt: skip
        named = dict(zip(part.gives, outputs(graph), strict=True))
        parts = parts_of_stage(
            graph, {node: _part_of_input(name, known) for node, name in inputs.items()},
            [node for name, node in named.items() if name.startswith("dparam:")],
        )  # fmt: skip
        start, lives, results = walk(graph, parts, free, lent=True)
        given = {name: result for name, result in zip(named, results) if result is not None}
        saved = {name: result for name, result in given.items() if name.startswith("saved:")}
        sent = {result for name, result in given.items() if name.startswith(("out:", "dx:"))}
        grads = {result for name, result in given.items() if name.startswith("dparam:")}
        found[kind] = _Part(
            Facts(start, facts_of_nodes(graph, lives, dict.fromkeys(ops(graph), _PHASES[kind]), group_axes)),
            rows=_only("other", sum(node.meta["val"].nbytes for node in rows)),
            kept=_total(saved.values()),
            handed_on=_total(sent - set(saved.values())),
            gradients=_total(grads),
        )
        known |= saved
    return found


def _part_of_input(name: str, known: Mapping[str, Result]) -> str:
    if name in known:
        return known[name].part
    return {"param": "parameters", "x": "activations", "grad": "activations"}.get(name.partition(":")[0], "other")


@attrs.define
class _Run:
    """A step of the rank, action by action: as the executor's, with sizes in the place of tensors."""

    call: PipelineCall
    around: Live
    group_axes: GroupAxes
    held: dict[tuple[int, int], Live] = field(factory=dict)
    """By stage and microbatch: what is kept of it."""
    under_way: dict[Box, Live] = field(factory=dict)
    """What other ranks send, from when its receive is posted; what this one hands on, until it is known to be taken."""
    sums: dict[int, Live] = field(factory=dict)
    """By stage: sums of gradients."""

    def rows(self, results: int) -> tuple[Fact, ...]:
        """The operators of all actions, and at last the pipeline itself, which gives so many bytes of gradients."""
        call = self.call
        if len(call.place.ranks) > 1:
            raise ValueError(
                "the step was captured by one process that runs all stages in turn: to tell what a rank costs, capture "
                "it in a process group of the size of the mesh, or within functitan.cost.fake_group"
            )
        parts = {number: _parts(program, self.group_axes) for number, program in call.programs.items()}
        lists, ranks = call.actions(), call.schedule.stage_ranks
        taken = receipts(lists, ranks)
        found: list[Fact] = []
        for _ in range(0, call.parts, call.schedule.microbatches):
            for action in lists[call.place.ranks[0]]:
                if action.kind.startswith("RECV"):
                    found.append(self._receive(action))
                elif action.kind.startswith("SEND"):
                    found.append(self._send(action))
                else:
                    found += self._compute(action, parts[action.stage], taken)
        found.append(self._end(results))
        return tuple(found)

    def _compute(self, action: Action, parts: Mapping[str, _Part], taken: Mapping[Box, Sequence[Box]]) -> list[Fact]:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind == "B" and kind not in parts:  # as the executor does it
            both = [Action(half, stage, microbatch) for half in "IW"]
            return [row for half in both for row in self._compute(half, parts, taken)]
        place, part = (stage, microbatch), parts[kind]
        source = stage - 1 if kind == "F" else stage + 1
        held = self.held.pop(place, _NOTHING)
        if kind != "W" and 0 <= source < len(self.call.schedule.stage_ranks):
            box = ("F" if kind == "F" else "B", stage, microbatch)
            self.under_way.pop(box)
            held = _plus(held, _only("activations", self._message(box[0])))
            for sent in taken.get(box, ()):
                self.under_way.pop(sent, None)
        held = _minus(_plus(held, part.rows), part.facts.start)
        outside = _plus(self._alive(), held)
        rows = [attrs.evolve(row, live=_plus(row.live, outside)) for row in part.facts.ops]
        if kind in ("B", "W"):
            self.sums[stage] = part.gradients
        if kind in ("F", "I") and self.call.variables:
            self.held[place] = _plus(held, part.kept)
        target = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= target < len(self.call.schedule.stage_ranks):
            self.under_way["F" if kind == "F" else "B", target, microbatch] = part.handed_on
        return rows

    def _alive(self) -> Live:
        return _plus(self.around, *self.held.values(), *self.under_way.values(), *self.sums.values())

    def _receive(self, action: Action) -> Fact:
        size = self._message(action.kind[-1])
        self.under_way[box_of(action)] = _only("activations", size)
        return self._moves("receive", action, 0, size)

    def _send(self, action: Action) -> Fact:
        return self._moves("send", action, self._message(action.kind[-1]), 0)

    def _message(self, direction: str) -> int:
        """Bytes of what stages hand on forward ("F"), and backward ("B"), where only what has gradients has any."""
        tensors: list[Tensor] = [leaf.local for leaf in self.call.edge.x if leaf.local is not None]
        return sum(x.nbytes for x in tensors if direction == "F" or x.is_floating_point())

    def _moves(self, kind: str, action: Action, bytes_in: int, bytes_out: int) -> Fact:
        dtypes = {str(leaf.local.dtype).removeprefix("torch.") for leaf in self.call.edge.x if leaf.local is not None}
        phase = "forward" if action.kind.endswith("F") else "backward"
        call = Collective(kind, (PP,), 2, ", ".join(sorted(dtypes)), bytes_in, bytes_out, phase)
        return Fact(f"pipeline.{kind}", phase, None, False, call, self._alive())

    def _end(self, results: int) -> Fact:
        """Gradients as the step goes on with them: where the rank has several stages, joined in new memory."""
        live = self._alive()
        if len(self.sums) > 1:
            live = _plus(live, _only("gradients", results))
        else:
            known = sum(next(iter(self.sums.values()), _NOTHING))
            live = _plus(live, _only("gradients", max(results - known, 0)))  # zeros of what this stage does not use
        return Fact("pipeline.results", "backward", None, False, None, live)


def _only(part: str, size: int) -> Live:
    return tuple(size if name == part else 0 for name in PARTS)


def _plus(*lives: Live) -> Live:
    return tuple(map(sum, zip(*lives)))


def _minus(a: Live, b: Live) -> Live:
    return tuple(x - y for x, y in zip(a, b))


def _total(results: Iterable[Result]) -> Live:
    sums = dict.fromkeys(PARTS, 0)
    for result in set(results):
        sums[result.part] += result.size
    return tuple(sums.values())
