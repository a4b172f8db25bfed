"""``functitan explain``: what a run costs each rank, on a laptop: layout, collectives, operations and peak memory.

The train step is captured for one rank of a fake process group, which has the size of the mesh and no other member.
A deep model is not captured whole: models of a few layers are, and the figures are extrapolated from them. Of a
pipeline the rank's stages are captured, every layer of them, and their parts put together in the order of the schedule.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import tyro
from attrs import frozen

from train import options
from train.config import RunConfig, unsupported, validate
from train.config_text import ConfigError
from train.errors import UserError
from train.explain_report import report, run_facts
from train.options import RunOptions
from train.timeline_plot import FORMATS, plot_timeline

if TYPE_CHECKING:
    from functitan.compiler.jit import Captured
    from functitan.compiler.plan import Plan
    from functitan.cost import Explanation, Facts

SHALLOW = 4
"""Layers of the first capture of three, each one layer deeper: fewer have no two layers alike once passes have moved
what communicates from one layer to the next."""
SMALL_NUMEL = 1024
"""Tensors up to this size join nothing in the pass that orders the update (``passes.order``), so what is stacked over
layers must be larger in the shallow models too if it is in the deep one."""
TIMELINES = (*FORMATS, ".txt", ".json")
"""What a file of ``--timeline`` may end in."""
BATCH_ARRAYS = ("tokens", "labels", "positions", "documents")


@frozen
class ExplainOptions:
    """A run, and how to show what it costs."""

    job: Annotated[RunOptions, tyro.conf.arg(name="")]
    devices: int | None = None
    """How many devices will run it: gives a mesh axis of -1 its size. None: the product of the mesh."""
    rank: int = 0
    """The rank to explain. All do the same where dims divide evenly, a sequence over cp is balanced, and there is no
    pipeline."""
    json: bool = False
    """Print the figures as JSON."""
    graph: Path | None = None
    """Write the code that the rank runs to this file, and of a pipeline that of its stages. Captures every layer: a
    deep model takes minutes."""
    timeline: Path | None = None
    """Draw who does what when in the pipeline: a picture (.png, .svg, .pdf), text (.txt) or data (.json), if all stages
    took the same, a backward pass twice its forward pass, and sends no time."""


def main(args: Sequence[str]) -> int:
    """Runs ``functitan explain`` and returns its exit status.

    Raises:
        ConfigError: a mistake in the options or the configuration; nothing has been captured yet.
        UserError: the file of ``--graph`` or ``--timeline`` cannot be written.
        SystemExit: from tyro.
    """
    text = "Print what a run costs each rank: layout, collectives, operations, memory. Needs no GPU and runs nothing."
    parsed = options.parse(ExplainOptions, args, "functitan explain", text)
    config = _checked(parsed)
    plan = _plan(config)
    if parsed.timeline is not None:
        _draw(plan, parsed.timeline)
    explanation, captured = explain(config, parsed.rank, whole=parsed.graph is not None)
    if parsed.graph is not None:
        _write(parsed.graph, _sources(captured), "--graph")
    if parsed.json:
        print(json.dumps({**run_facts(config, plan), **explanation.to_json()}, indent=1))
    else:
        print(report(config, plan, explanation))
    return 0


def explain(config: RunConfig, rank: int = 0, whole: bool = False) -> tuple[Explanation, Captured]:
    """What the train step of a run costs a rank.

    Args:
        config: valid, every size of its mesh known.
        rank: one of the mesh.
        whole: capture every layer, and do not extrapolate.

    Returns:
        The explanation, and the last capture that it is read from: the whole step's, unless it is extrapolated.

    Raises:
        RuntimeError: this process is in a process group already.
    """
    from functitan import cost

    reason = "as asked"
    with cost.fake_group(config.mesh.spec().size, rank):
        if config.mesh.pp > 1:
            _note("capturing the stages of the rank, every layer of them")
            captured, plan = capture(config)
            return cost.explain(captured, plan, rank=rank), captured
        if not whole:
            try:
                return _extrapolated(config, rank)
            except cost.NotRegularError as error:
                reason = f"since shallow models say too little: {error}"
        _note(f"capturing all layers ({config.model.n_layers}), {reason}")
        captured, plan = capture(config)
        return cost.explain(captured, plan, rank=rank), captured


def capture(config: RunConfig, layers: int | None = None) -> tuple[Captured, Plan]:
    """The captured train step of a run, with another number of layers where one is given.

    Raises:
        RuntimeError: there is no process group of the size of the mesh (see ``functitan.cost.fake_group``).
    """
    import functitan as ft
    from train.build import build
    from train.step import make_train_step

    if layers is not None:
        config = attrs.evolve(config, model=attrs.evolve(config.model, n_layers=layers))
    parts = build(config, config.mesh.spec().size)
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, parts.train_parts)
    step = ft.jit(step, parts.plan, donate=("state",), passes=config.jit.passes)
    state = ft.abstract_state(parts.plan, parts.optimizer)
    batch = ft.abstract_batch(parts.plan, BATCH_ARRAYS, config.train.batch_size, config.train.seq_len)
    return step.lower(state, batch), parts.plan


def _checked(parsed: ExplainOptions) -> RunConfig:
    """The configuration with every size of its mesh known; all that can be refused is refused here."""
    config, devices = parsed.job.run, parsed.devices
    if devices is not None and devices < 1:
        raise ConfigError([f"--devices: is {devices}; give 1 or more"])
    options.raise_problems(validate(config, devices))
    if not config.jit.enabled:
        raise ConfigError(
            ["jit.enabled: is false, but what is explained is the captured step, which is another than the one that "
             "runs then: give --jit.enabled"]
        )  # fmt: skip
    mesh = config.mesh.spec()
    free = [axis for axis, size in mesh.items() if size == -1]
    if free and devices is None:
        raise ConfigError(
            [f"mesh.{free[0]}: is -1, what the devices leave: give their number with --devices, or --mesh.{free[0]}"]
        )
    mesh = mesh.resolve(devices if free else mesh.size)
    if not 0 <= parsed.rank < mesh.size:
        raise ConfigError([f"--rank: is {parsed.rank}; give 0 to {mesh.size - 1}, a rank of the mesh"])
    config = attrs.evolve(config, mesh=attrs.evolve(config.mesh, **dict(mesh)))
    options.raise_problems(unsupported(config, mesh.size))
    files = [("--graph", parsed.graph), ("--timeline", parsed.timeline)]
    problems = [
        f"{name}: {path} is no file in an existing folder"
        for name, path in files if path is not None and (path.is_dir() or not path.parent.is_dir())
    ]  # fmt: skip
    if parsed.timeline is not None:
        if parsed.timeline.suffix.lower() not in TIMELINES:
            problems.append(f"--timeline: {parsed.timeline} ends in none of {', '.join(TIMELINES)}")
        if config.mesh.pp == 1:
            problems.append("--timeline: the run has no pipeline, since mesh.pp is 1: give --mesh.pp 2 or more")
    if problems:
        raise ConfigError(problems)
    return config


def _shallow(config: RunConfig, rank: int) -> int:
    """The layers of the shallowest of three captures.

    Raises:
        NotRegularError: capturing the model whole is as quick, or layers are split over ranks, by a rule or for Muon's
            work, so that what a rank does is not linear in their number.
    """
    from functitan import cost

    plan, depth = _plan(config), config.model.n_layers
    if plan.mesh.shards(plan.rules["layers"]) > 1:
        raise cost.NotRegularError("rules.layers splits them over ranks")
    if config.optim.name == "muon" and plan.mesh.size > 1:
        raise cost.NotRegularError("ranks share out Muon's work by layers")
    stacked = [plan.local_shape(path, rank) for path in plan.specs if path.startswith("layers/")]
    smallest = min(math.prod(shape[1:]) for shape in stacked)
    larger = SMALL_NUMEL // smallest + 1 if smallest * depth > SMALL_NUMEL else 1
    layers = max(SHALLOW, larger)
    if 3 * layers + 3 >= depth:
        raise cost.NotRegularError(f"models of {layers}, {layers + 1} and {layers + 2}, the least, are no less work")
    return layers


def _plan(config: RunConfig) -> Plan:
    from train.build import build

    return build(config, config.mesh.spec().size).plan


def _extrapolated(config: RunConfig, rank: int) -> tuple[Explanation, Captured]:
    """From captures of three depths, each one layer deeper: the third must be what the first two predict.

    Where it is not, deeper ones follow, as long as all of them together are less work than the model. A model in
    bfloat16 needs it whose layers cast what the next one gathers: at ``SHALLOW`` layers too few of them are alike to
    tell the last one's cast, of the unembedding, from growth (see :mod:`functitan.cost.depth`).

    Raises:
        NotRegularError: no three depths do.
    """
    from functitan import cost

    depth, shallow = config.model.n_layers, _shallow(config, rank)
    _note(f"capturing {shallow}, {shallow + 1} and {shallow + 2} of {depth} layers")
    found: list[Facts] = []
    layers = shallow - 1
    while True:
        layers += 1
        captured, plan = capture(config, layers)
        found.append(cost.facts_of(captured, plan))
        if len(found) < 3:
            continue
        try:
            facts = _predicted(found[-3:], layers, depth)
        except cost.NotRegularError as error:
            if sum(range(shallow, layers + 2)) >= depth:
                raise
            _note(f"capturing {layers + 1} layers too, since the shallower graphs say too little: {error}")
        else:
            depths = (layers - 2, layers - 1, layers)
            return cost.summarize(facts, _plan(config), rank=rank, captured_layers=depths), captured


def _predicted(found: Sequence[Facts], deepest: int, depth: int) -> Facts:
    """The facts of a model of ``depth`` layers from those of three, the last of ``deepest`` layers."""
    from functitan import cost

    predicted = cost.extrapolate(found[0], found[1], deepest - 2, 2)
    if predicted.totals != found[2].totals:
        raise cost.NotRegularError(f"{deepest} layers cost other than {deepest - 2} and {deepest - 1} predict")
    return cost.extrapolate(found[1], found[2], deepest - 1, depth - deepest + 1)


def _sources(captured: Captured) -> str:
    """The code of the step, and behind it that of the stages of its pipeline."""
    from functitan import cost

    pipeline = cost.pipeline_of(captured.graph.graph)
    stages = {} if pipeline is None else pipeline.target.programs
    return "\n\n".join([
        captured.source,
        *(f"# {kind} of stage {number}\n{compiled.source}"
          for number, program in stages.items() for kind, compiled in program.parts.items()),
    ])  # fmt: skip


def _draw(plan: Plan, path: Path) -> None:
    timeline = plan.pipeline.timeline()
    if path.suffix.lower() in (".txt", ".json"):
        _write(path, timeline.to_json() if path.suffix.lower() == ".json" else f"{timeline}\n", "--timeline")
    else:
        plot_timeline(timeline, path)


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}: give another file with {option}") from error


def _note(text: str) -> None:
    print(f"functitan: note: {text}", file=sys.stderr, flush=True)
