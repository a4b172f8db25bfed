"""Runs the actions of a schedule on what this process has compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from functitan.compiler.pipeline.transport import Box, Local, Messages, box_of, receipts
from functitan.microbatches import rows_by_part

if TYPE_CHECKING:
    import torch.distributed as dist

    from functitan.compiler.pipeline.program import Compiled, StageProgram
    from functitan.compiler.pipeline.schedules import Action, Schedule
    from functitan.compiler.pipeline.stage import Boundary, Leaf
    from functitan.compiler.pipeline.stages import Pipeline


@frozen(eq=False)
class Place:
    """Which ranks of the axis pp this process stands for, and where each of its stages' layers are in its stacks.

    Attributes:
        ranks: one, or all of them.
        group: of the ranks of pp; None where this process is all of them.
        pipeline: of the plan.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    pipeline: Pipeline

    @staticmethod
    def alone(pipeline: Pipeline) -> Place:
        return Place(tuple(range(max(pipeline.stage_ranks) + 1)), None, pipeline)

    @staticmethod
    def on(mesh: Any, pipeline: Pipeline) -> Place:
        return Place((mesh.get_local_rank("pp"),), mesh.get_group("pp"), pipeline)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(s for s, rank in enumerate(self.pipeline.stage_ranks) if rank in self.ranks)

    def rows(self, stage: int) -> tuple[int, int]:
        """The layers of a stage in the stacks of this process: all layers in order, or a rank's, stage by stage."""
        if self.group is None:
            return self.pipeline.layers[stage]
        before = sum(stop - start for start, stop in (self.pipeline.layers[s] for s in self.stages if s < stage))
        start, stop = self.pipeline.layers[stage]
        return before, before + stop - start


@frozen(eq=False)
class Inputs:
    """Which of the tensors that a :class:`PipelineCall` is given are what.

    Attributes:
        params, part, key: numbers of the leaves that are tensors.
        stacked: those parameters that are stacked over layers.
    """

    params: tuple[int, ...]
    part: tuple[int, ...]
    key: tuple[int, ...]
    stacked: frozenset[int]


@frozen(eq=False, repr=False)
class PipelineCall:
    """A pipeline's step as a function of tensors: parameters, batch and keys of this process -> sums and gradients.

    Attributes:
        programs: the compiled stages of this process.
        edge: what stages hand on.
        schedule: the order of actions.
        place: of this process.
        parts: of the batch; as many microbatches as the schedule has go through at a time.
        inputs: what it is given.
        variables: numbers of the parameters' leaves whose gradients it gives, if any.
        results: tensors without values, of the shapes and dtypes of what it gives.
    """

    programs: Mapping[int, StageProgram]
    edge: Boundary
    schedule: Schedule
    place: Place
    parts: int
    inputs: Inputs
    variables: tuple[int, ...]
    results: tuple[Tensor, ...]

    __name__ = "pipeline"

    def __repr__(self) -> str:
        return f"pipeline({self.schedule.name}, stages {', '.join(map(str, self.place.stages))})"

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        lists = self.actions()
        if self.place.group is None:
            transport = Local()
        else:
            transport = Messages(self.place.group, receipts(lists, self.schedule.stage_ranks))
        run = _Run(self, tensors, transport, lists)
        for first in range(0, self.parts, self.schedule.microbatches):
            run.round(first)
        transport.finish()
        return run.results()

    def actions(self) -> list[list[Action]]:
        """What every rank of pp does in turn, with sends; without gradients the forward half."""
        return [
            [a for a in actions if self.variables or a.kind in ("F", "SEND_F", "RECV_F")]
            for actions in self.schedule.with_sends()
        ]


class _Run:
    """One step."""

    def __init__(
        self, call: PipelineCall, tensors: Sequence[Tensor], transport: Local | Messages, lists: list[list[Action]]
    ) -> None:
        self.call, self.transport, self.lists = call, transport, lists
        groups = (call.inputs.params, call.inputs.part, call.inputs.key)
        rest = iter(tensors)
        params, part, key = ({i: next(rest) for i in group} for group in groups)
        self.params = params
        self.part = {i: rows_by_part(x, call.parts) for i, x in part.items()}
        self.key = key
        self.values: dict[tuple[int, int], dict[str, Tensor]] = {}
        """Of each stage and microbatch what is handed from one of its parts to the next."""
        self.outbox: dict[Box, list[Tensor]] = {}
        self.sums: list[Tensor] | None = None
        self.grads: dict[tuple[int, int], Tensor] = {}
        """By stage and number of the parameter."""
        self.first = 0
        self.gradients = bool(call.variables)

    def round(self, first: int) -> None:
        """The schedule once, on as many parts of the batch from number ``first`` on."""
        self.first = first
        waiting = {rank: list(self.lists[rank]) for rank in self.call.place.ranks}
        while any(waiting.values()):
            moved = False
            for actions in waiting.values():
                while actions and self._can(actions[0]):
                    self._do(actions.pop(0))
                    moved = True
            if not moved:
                stuck = ", ".join(str(actions[0]) for actions in waiting.values() if actions)
                raise RuntimeError(f"the schedule {self.call.schedule.name} goes no further: {stuck} wait for others")

    def results(self) -> list[Tensor]:
        """The sums, zeros where this process has not the last stage, and the gradients of what it holds."""
        call = self.call
        count = sum(leaf.local is not None for leaf in call.edge.sums)
        sums = self.sums or [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in call.results[:count]]
        return [*sums, *(self._grad(i, like) for i, like in zip(call.variables, call.results[count:]))]

    def _can(self, action: Action) -> bool:
        stages = len(self.call.schedule.stage_ranks)
        if action.kind == "F" and action.stage > 0:
            return self.transport.can_take(("F", action.stage, action.microbatch))
        if action.kind in ("B", "I") and action.stage < stages - 1:
            return self.transport.can_take(("B", action.stage, action.microbatch))
        return True

    def _do(self, action: Action) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        ranks = self.call.schedule.stage_ranks
        if kind.startswith("SEND"):
            box = box_of(action)
            self.transport.send(box, self.outbox.pop(box), ranks[box[1]])
        elif kind.startswith("RECV"):
            source = stage - 1 if kind == "RECV_F" else stage + 1
            self.transport.expect(box_of(action), self._like(kind), ranks[source])
        elif kind == "F":
            self._forward(stage, microbatch)
        else:
            self._backward(kind, stage, microbatch)

    def _like(self, kind: str) -> list[Tensor]:
        """What a message looks like."""
        tensors = [leaf.local for leaf in self.call.edge.x if leaf.local is not None]
        return tensors if kind == "RECV_F" else [x for x in tensors if x.is_floating_point()]

    def _forward(self, stage: int, microbatch: int) -> None:
        values = self.values[stage, microbatch] = {}
        if stage > 0:
            numbers = [i for i, leaf in enumerate(self.call.edge.x) if leaf.local is not None]
            # In no variable of its own, which would keep it while the part runs.
            values.update(_named("x", numbers, self.transport.take(("F", stage, microbatch))))
        given = self._run("F", stage, microbatch)
        if stage == len(self.call.schedule.stage_ranks) - 1:
            sums = [given.pop(name) for name in list(given) if name.startswith("sum:")]
            self.sums = sums if self.sums is None else [a + b for a, b in zip(self.sums, sums, strict=True)]
        else:
            out = [given.pop(name) for name in list(given) if name.startswith("out:")]
            self._hand_on(("F", stage + 1, microbatch), out, stage)
        if self.gradients:
            values.update(given)
        else:
            del self.values[stage, microbatch]

    def _backward(self, kind: str, stage: int, microbatch: int) -> None:
        if kind not in self.call.programs[stage].parts:  # a stage whose backward is split elsewhere in the schedule
            self._backward("I", stage, microbatch)
            self._backward("W", stage, microbatch)
            return
        values = self.values[stage, microbatch]
        if kind != "W" and stage < len(self.call.schedule.stage_ranks) - 1:
            numbers = [i for i, leaf in enumerate(self.call.edge.x) if _is_variable(leaf)]
            values.update(_named("grad", numbers, self.transport.take(("B", stage, microbatch))))
        given = self._run(kind, stage, microbatch)
        for name in [name for name in given if name.startswith("dparam:")]:
            self._add(stage, int(name.partition(":")[2]), given.pop(name))
        dx = [given.pop(name) for name in list(given) if name.startswith("dx:")]
        if kind != "W" and stage > 0:
            self._hand_on(("B", stage - 1, microbatch), dx, stage)
        values.update(given)
        if kind != "I":
            del self.values[stage, microbatch]

    def _hand_on(self, box: Box, tensors: list[Tensor], stage: int) -> None:
        """To the next stage on this rank at once, to one on another when the schedule says so."""
        tensors = [x.contiguous() for x in tensors]
        ranks = self.call.schedule.stage_ranks
        if ranks[box[1]] == ranks[stage]:
            self.transport.send(box, tensors, ranks[stage])
        else:
            self.outbox[box] = tensors

    def _run(self, kind: str, stage: int, microbatch: int) -> dict[str, Tensor]:
        compiled: Compiled = self.call.programs[stage].parts[kind]
        values = self.values[stage, microbatch]
        read = [self._value(name, stage, microbatch) for name in compiled.part.reads]
        for name in compiled.last:  # so that the graph holds the only reference, and frees it at its last use
            values.pop(name, None)
        return dict(zip(compiled.part.gives, compiled.run(read), strict=True))

    def _value(self, name: str, stage: int, microbatch: int) -> Tensor:
        what, _, number = name.partition(":")
        if what == "param":
            i = int(number)
            start, stop = self.call.programs[stage].rows
            return self.params[i][start:stop] if i in self.call.inputs.stacked else self.params[i]
        if what == "part":
            return self.part[int(number)][self.first + microbatch].contiguous()
        if what == "key":
            return self.key[int(number)][self.first + microbatch]
        return self.values[stage, microbatch][name]

    def _add(self, stage: int, i: int, grad: Tensor) -> None:
        known = self.grads.get((stage, i))
        if known is None:
            self.grads[stage, i] = grad
        else:
            known.add_(grad)

    def _grad(self, i: int, like: Tensor) -> Tensor:
        stages = self.call.place.stages
        if i not in self.call.inputs.stacked:
            own = [self.grads[s, i] for s in stages if (s, i) in self.grads]
            zeros = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            return sum(own[1:], start=own[0]) if own else zeros
        parts = []
        for s in stages:
            start, stop = self.call.programs[s].rows
            zeros = torch.zeros((stop - start, *like.shape[1:]), dtype=like.dtype, device=like.device)
            parts.append(self.grads.get((s, i), zeros))
        if self.call.place.group is None or len(parts) > 1:
            return torch.cat(parts)
        return parts[0]


def _named(kind: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{kind}:{i}": x for i, x in zip(numbers, tensors, strict=True)}


def _is_variable(leaf: Leaf) -> bool:
    return leaf.local is not None and leaf.local.is_floating_point()
