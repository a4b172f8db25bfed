"""From a configuration to its layout: the mesh, the stages, attention over cp; and all that is wrong with them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import attrs

import functitan as ft
import sharding_specs
from functitan import tree
from functitan.compiler.pipeline.schedules import SCHEDULES
from functitan.compiler.pipeline.stages import Pipeline, check_rows, make_pipeline
from functitan.precision import Precision
from models import llama
from sharding_specs import STANDARD_NAMES, BatchSpec, MeshSpec, Problem, SpecError
from sharding_specs.context import resolve as resolve_context
from sharding_specs.problem import did_you_mean
from train.layout_config import AXES, RUNNABLE_AXES

if TYPE_CHECKING:
    from train.config import RunConfig


def plan_of(config: RunConfig, devices: int, precision: Precision) -> ft.Plan:
    """The plan of a run, its mesh filled up to ``devices``.

    Raises:
        SpecError: the layout cannot work: what :func:`layout_problems` says.
    """
    params, rules = llama.declare(config.model), config.rules.rules()
    mesh = config.mesh.spec().resolve(devices)
    pipeline = _pipeline(config, params, mesh)
    batch = _batch(config)
    if pipeline is not None:
        check_rows(pipeline, _rows_of_a_part(config, mesh))
        batch = attrs.evolve(batch, microbatches=pipeline.microbatches)
    return ft.compile_specs(
        params, rules, mesh, batch=batch, precision=precision, context=config.context.wanted(), pipeline=pipeline
    )


def layout_problems(config: RunConfig, devices: int | None) -> list[str]:
    """The model, batch and sequence by themselves and against the mesh, and the mesh against the devices."""
    mesh = config.mesh.spec()
    if devices is None:
        devices = math.prod(size for size in mesh.sizes if size >= 1)
    broken = config.model.validate()
    params = {} if broken else llama.declare(config.model)
    found = _problems(config, params, devices)
    # Against the devices without the axes that nothing can be trained over yet, lest they be offered as a way out.
    offered = MeshSpec(**{axis: size for axis, size in mesh.items() if axis in RUNNABLE_AXES or size != 1})
    found = [*offered.problems(devices), *(problem for problem in found if problem not in mesh.problems(devices))]
    layout = [str(attrs.evolve(problem, path=_OPTIONS.get(problem.path, problem.path))) for problem in found]
    return [f"model: {problem}" for problem in broken] + [_with_options(problem) for problem in layout]


_OPTIONS = {
    **{f"mesh/{axis}": f"mesh.{axis}" for axis in AXES},
    **{f"rules/{name}": f"rules.{name}" for name in STANDARD_NAMES},
    "batch/size": "train.batch_size",
    **{f"batch/{name}": f"train.{name}" for name in ("seq_len", "accumulation")},
    **{f"context/{name}": f"context.{name}" for name in ("method", "layout")},
    **{f"pipeline/{name}": f"pipeline.{name}" for name in ("schedule", "microbatches", "stages_per_rank", "layers")},
}


def _problems(config: RunConfig, params: Any, devices: int) -> list[Problem]:
    mesh, rules, batch = config.mesh.spec(), config.rules.rules(), _batch(config)
    sizes = mesh.resolve(devices) if not mesh.problems(devices) else None
    of_context: list[Problem] = []
    if sizes is not None:
        leaves = tree.leaves_with_path(params)
        context, of_context = resolve_context(config.context.wanted(), leaves, rules, sizes, batch.seq_len)
        # A length that fits no layout over cp is one for which the balanced one is wanted.
        fits = context is not None and batch.seq_len % sizes["cp"] == 0
        batch = attrs.evolve(batch, causal_balanced=context is not None and (context.layout == "balanced" or not fits))
    of_schedule = _schedule(config.pipeline.schedule)
    found = [*sharding_specs.check(params, rules, mesh, batch, devices), *of_context, *of_schedule]
    of_stages = any(problem.subject == "pp" or problem.path == "rules/layers" for problem in found)
    if sizes is None or of_schedule or of_stages:
        return found
    try:
        pipeline = _pipeline(config, params, sizes)
        if pipeline is not None and not any(problem.path in ("batch/size", "batch/accumulation") for problem in found):
            check_rows(pipeline, _rows_of_a_part(config, sizes))
    except SpecError as error:
        found += error.problems
    return found


def _schedule(name: str) -> list[Problem]:
    """What is wrong with the name of a schedule, whether there is a pipeline or not."""
    if name in SCHEDULES or name.endswith(".csv"):
        return []
    hint = did_you_mean(name, SCHEDULES) or "or the path of a .csv file"
    return [Problem("pipeline/schedule", f"there is no schedule {name!r}", "schedule", tuple(SCHEDULES), hint)]


def _batch(config: RunConfig) -> BatchSpec:
    return BatchSpec(config.train.batch_size, config.train.seq_len, accumulation=config.train.accumulation)


def _rows_of_a_part(config: RunConfig, mesh: MeshSpec) -> int:
    """The rows of a batch that one rank takes at a time, but for microbatches."""
    return config.train.batch_size // mesh.shards(config.rules.rules().batch_spec(mesh)[0]) // config.train.accumulation


def _pipeline(config: RunConfig, params: Any, mesh: MeshSpec) -> Pipeline | None:
    """The stages of a run; None where there is one. Raises SpecError."""
    if mesh["pp"] == 1 or not params:
        return None
    wanted = config.pipeline
    return make_pipeline(
        params, config.rules.rules(), mesh, wanted.schedule, wanted.microbatches, wanted.stages_per_rank, wanted.layers
    )


def _with_options(text: str) -> str:
    """A hint to change the rules in Python as the options that do it."""
    text = re.sub(r'rules\.allow_uneven\("(\w+)"\)', r"--rules.uneven \1", text)
    return re.sub(r'rules\.replace\((\w+)="(\w+)"\)', r"--rules.\1 \2", text)
