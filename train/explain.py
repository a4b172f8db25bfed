"""``functitan explain``: what a run costs each rank, on a laptop: layout, collectives, operations and peak memory.

The train step is captured for one rank of a fake process group, which has the size of the mesh and no other member.
A deep model is not captured whole: models of a few layers are, and the figures are extrapolated from them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import tyro
from attrs import frozen

from models import llama
from train import options
from train.config import RunConfig, validate
from train.config_text import ConfigError
from train.errors import UserError
from train.options import RunOptions

if TYPE_CHECKING:
    from functitan.compiler.jit import Captured
    from functitan.compiler.plan import Plan
    from functitan.cost import Explanation, Facts
    from functitan.sharding.context.calls import Work

SHALLOW = 4
"""Layers of the first capture of three, each one layer deeper: fewer have no two layers alike once passes have moved
what communicates from one layer to the next."""
SMALL_NUMEL = 1024
"""Tensors up to this size join nothing in the pass that orders the update (``passes.order``), so what is stacked over
layers must be larger in the shallow models too if it is in the deep one."""
EXPLAINED_AXES = ("dp", "fsdp", "cp", "tp")
"""Runs go over pp too; what that costs is not told yet."""
BATCH_ARRAYS = ("tokens", "labels", "positions", "documents")


@frozen
class ExplainOptions:
    """A run, and how to show what it costs."""

    job: Annotated[RunOptions, tyro.conf.arg(name="")]
    devices: int | None = None
    """How many devices will run it: gives a mesh axis of -1 its size. None: the product of the mesh."""
    rank: int = 0
    """The rank to explain. All do the same where dims divide evenly and a sequence over cp is balanced."""
    json: bool = False
    """Print the figures as JSON."""
    graph: Path | None = None
    """Write the code that the rank runs to this file. Captures every layer: a deep model takes minutes."""


def main(args: Sequence[str]) -> int:
    """Runs ``functitan explain`` and returns its exit status.

    Raises:
        ConfigError: a mistake in the options or the configuration; nothing has been captured yet.
        UserError: the file of ``--graph`` cannot be written.
        SystemExit: from tyro.
    """
    text = "Print what a run costs each rank: layout, collectives, operations, memory. Needs no GPU and runs nothing."
    parsed = options.parse(ExplainOptions, args, "functitan explain", text)
    config = _checked(parsed)
    explanation, captured = explain(config, parsed.rank, whole=parsed.graph is not None)
    if parsed.graph is not None:
        _write(parsed.graph, captured.source)
    if parsed.json:
        print(json.dumps({**run_facts(config), **explanation.to_json()}, indent=1))
    else:
        print(report(config, explanation))
    return 0


def explain(config: RunConfig, rank: int = 0, whole: bool = False) -> tuple[Explanation, Captured]:
    """What the train step of a run costs a rank.

    Args:
        config: valid, every size of its mesh known, of EXPLAINED_AXES alone.
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


def run_facts(config: RunConfig) -> dict[str, Any]:
    """Of the run as a whole, for JSON.

    ``batch_size``, ``seq_len``, ``accumulation``, ``layers``, ``precision``, ``remat``; ``model_flops`` of all ranks in
    a step, recomputation not counted; ``model_flops_per_rank``, which model flops utilisation divides by the seconds
    of a step and the peak of a device. ``context`` {method, layout, reason, scores [number], shares [number],
    imbalance}, by rank of cp, the scores of one row and one head, if its documents hid nothing; null without cp.
    """
    train = config.train
    model_flops = llama.flops_per_token(config.model, train.seq_len) * train.batch_size * train.seq_len
    return {
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
        "accumulation": train.accumulation,
        "layers": config.model.n_layers,
        "precision": train.precision,
        "remat": train.remat,
        "model_flops": model_flops,
        "model_flops_per_rank": model_flops / config.mesh.spec().size,
        "context": _context_facts(config),
    }


def _context_work(config: RunConfig) -> Work | None:
    """What each rank of cp computes of the attention; None where the sequence is not split."""
    from functitan.sharding.context.calls import Pattern, work

    context = _plan(config).context
    if context is None:
        return None
    return work(context, config.mesh.cp, config.train.seq_len, Pattern(causal=True, documents=True))


def _context_facts(config: RunConfig) -> dict[str, Any] | None:
    found = _context_work(config)
    if found is None:
        return None
    return {
        **attrs.asdict(found.context),
        "scores": list(found.scores),
        "shares": list(found.shares),
        "imbalance": found.imbalance,
    }


def report(config: RunConfig, explanation: Explanation) -> str:
    """The explanation as text, with the basis of model flops utilisation (PaLM, Chowdhery et al., 2022, appendix B)."""
    facts = run_facts(config)
    needed, done = facts["model_flops_per_rank"], explanation.total_flops
    lines = [
        f"A step: {facts['batch_size']} sequences of {facts['seq_len']} tokens in {facts['accumulation']} parts, "
        f"{facts['layers']} layers, {facts['precision']}, remat {facts['remat']}; kernels as on a CPU",
        "",
        str(explanation),
        "",
        *_context_lines(config),
        f"Model FLOPs: {facts['model_flops']:.4g} in a step, {needed:.4g} on each rank; the graph does "
        f"{done / needed:.3f} times that",
        f"  model flops utilisation = {needed:.4g} / (seconds of a step x peak FLOP/s of a device)",
    ]
    if config.jit.inductor:
        lines.append("Inductor (jit.inductor) fuses operators beyond this: its peak memory differs.")
    return "\n".join(lines)


def _context_lines(config: RunConfig) -> list[str]:
    found = _context_work(config)
    if found is None:
        return []
    each = [f"{share:.1%}" for share in found.shares]
    shares = ", ".join(each if len(each) <= 8 else [*each[:4], "…", *each[-3:]])
    return [
        f"Context: attention over cp={len(each)} by {found.context}",
        f"  work of the ranks, if documents hid nothing: {shares}; the busiest has {found.imbalance:.2f} x the mean",
        "",
    ]


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
    others = [f"{axis}={size}" for axis, size in mesh.items() if size > 1 and axis not in EXPLAINED_AXES]
    if others:
        raise ConfigError(
            [f"mesh: has {', '.join(others)}, but this version explains {', '.join(EXPLAINED_AXES[:-1])} "
             f"and {EXPLAINED_AXES[-1]}: give the others 1"]
        )
    if not 0 <= parsed.rank < mesh.size:
        raise ConfigError([f"--rank: is {parsed.rank}; give 0 to {mesh.size - 1}, a rank of the mesh"])
    if parsed.graph is not None and (parsed.graph.is_dir() or not parsed.graph.parent.is_dir()):
        raise ConfigError([f"--graph: {parsed.graph} is no file in an existing folder"])
    return attrs.evolve(config, mesh=attrs.evolve(config.mesh, **dict(mesh)))


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


def _write(path: Path, source: str) -> None:
    try:
        path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}: give another file with --graph") from error


def _note(text: str) -> None:
    print(f"functitan: note: {text}", file=sys.stderr, flush=True)
