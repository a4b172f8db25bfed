"""What a process runs of a pipeline: the compiled parts of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from functitan.compiler import passes
from functitan.compiler.execute import compile_graph
from functitan.compiler.passes import inductor as inductor_pass
from functitan.compiler.passes.own import own_outputs
from functitan.compiler.pipeline.options import Options
from functitan.compiler.pipeline.partition import Part, forward_backward, forward_input_weight
from functitan.compiler.pipeline.stage import Boundary, Call, Stage, forward_graph, joint_graph

_ORDER_OF_UPDATE = "order"
"""The pass that is for optimizers, of which a stage has none."""


@frozen(eq=False)
class Compiled:
    """A part of a stage, ready to run.

    Attributes:
        part: its graph, after all passes.
        run: takes the values of ``part.reads`` in a list, which it empties, and gives those of ``part.gives``.
        source: the text that runs.
        last: which of ``part.reads`` no later part of the stage reads.
    """

    part: Part
    run: Callable[[list[Tensor]], list[Any]]
    source: str
    last: tuple[str, ...]


@frozen(eq=False)
class StageProgram:
    """The parts of one stage by the kind of action that runs them ("F", "B", "I", "W"), captured once.

    Attributes:
        stage: which one.
        rows: where its layers are in what this process holds of the stacks: start and stop.
        parts: see above.
    """

    stage: Stage
    rows: tuple[int, int]
    parts: Mapping[str, Compiled]


def compile_stage(
    call: Call, stage: Stage, rows: tuple[int, int], edge: Boundary, kinds: Sequence[str], options: Options
) -> StageProgram:
    """Captures one stage.

    Args:
        call: the loss with the leaves of this stage's arguments.
        rows: see :class:`StageProgram`.
        kinds: of the actions that it is to run: F alone, or with B, with I and W, or with all of them; with I and W
            a B is both, one after the other.
    """
    if set(kinds) == {"F"}:
        module, cut = forward_graph(call, stage, edge, options.passes)
        made = {"F": forward_backward(module, cut)[0]}
    else:
        module, cut = joint_graph(call, stage, edge, options.passes)
        if "I" in kinds:
            made = dict(zip("FIW", forward_input_weight(module, cut), strict=True))
        else:
            made = dict(zip("FB", forward_backward(module, cut), strict=True))
    later: set[str] = set()
    compiled: dict[str, Compiled] = {}
    for kind, part in reversed(made.items()):
        compiled[kind] = _compiled(part, kind, tuple(name for name in part.reads if name not in later), options)
        later.update(part.reads)
    return StageProgram(stage, rows, {kind: compiled[kind] for kind in made})


def _compiled(part: Part, kind: str, last: tuple[str, ...], options: Options) -> Compiled:
    # What a later part reads again is not this one's to write over.
    owned = tuple(i for i in part.owned if part.reads[i] in last)
    if kind in ("B", "W"):
        own_outputs(part.module.graph, owned)  # gradients are added up in the memory of the first one
    if options.inductor:
        examples = [node.meta["val"] for node in part.module.graph.nodes if node.op == "placeholder"]
        run, source = inductor_pass.compile_graph(part.module, examples, ())
    else:
        names = [name for name in options.passes if name != _ORDER_OF_UPDATE]
        passes.run_others(part.module.graph, owned, names)
        run, source = compile_graph(part.module)
    return Compiled(part, run, source, last)

