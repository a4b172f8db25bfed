"""From a configuration to the parts of a run: the model as a function, the optimizer, the schedule, the plan."""

from __future__ import annotations

import functools
from typing import Any

import attrs

import functitan as ft
from functitan import optim
from functitan.precision import Precision
from models import llama
from sharding_specs import SpecError
from train.config import OptimConfig, RunConfig, TrainConfig
from train.config_text import ConfigError
from train.layout import plan_of
from train.step import Model


@attrs.frozen(eq=False)
class Parts:
    """What a run is made of; every part is a pure function or plain data."""

    model: Model
    plan: ft.Plan
    optimizer: optim.GradientTransformation
    schedule: optim.Schedule
    train_parts: int
    """How many parts a step takes its batch in: accumulation x the microbatches of the pipeline, if there is one."""
    eval_parts: int
    """How many an evaluation does: the microbatches of the pipeline."""


def build(config: RunConfig, devices: int = 1) -> Parts:
    """The parts that ``config`` describes, its mesh filled up to ``devices``. Allocates nothing.

    Raises:
        ConfigError: the mesh does not fit the devices, or the parameters, the batch or the stages do not fit it.
    """
    try:
        plan = plan_of(config, devices, build_precision(config.train))
    except SpecError as error:
        raise ConfigError([str(problem) for problem in error.problems]) from error
    schedule = build_schedule(config.optim, config.train.steps)
    microbatches = 1 if plan.pipeline is None else plan.pipeline.microbatches
    return Parts(
        model=build_model(config),
        plan=plan,
        optimizer=build_optimizer(config.optim, schedule, plan.params),
        schedule=schedule,
        train_parts=config.train.accumulation * microbatches,
        eval_parts=microbatches,
    )


def build_model(config: RunConfig) -> Model:
    """``model(params, batch, key=None) -> logits``, computing in the configured precision."""
    return functools.partial(
        llama.apply, cfg=config.model, remat=config.train.remat, precision=build_precision(config.train)
    )


def build_precision(config: TrainConfig) -> Precision:
    """The dtypes of a step; the logits stay in what they are computed in, since the loss is float32 by itself."""
    return Precision(compute=config.precision, reduce=config.reduce)


def build_schedule(config: OptimConfig, steps: int) -> optim.Schedule:
    """The learning rate: a line from 0 to the peak over the warm-up, then as ``config.schedule`` says."""
    peak, warmup = config.learning_rate, config.warmup_steps
    end = peak * config.min_ratio
    left = max(steps - warmup, 0)  # a run may end within its warm-up
    if config.schedule == "wsd":
        decay = steps // 10 if config.decay_steps is None else config.decay_steps
        return optim.wsd_schedule(peak, max(steps, warmup), warmup, min(decay, left), end_value=end)
    if config.schedule == "constant":
        return optim.warmup_constant_schedule(0.0, peak, warmup)
    decay = left if config.decay_steps is None else config.decay_steps
    if config.schedule == "cosine":
        after = optim.cosine_decay_schedule(peak, decay, config.min_ratio)
    else:
        after = optim.linear_schedule(peak, end, decay)
    return optim.join_schedules([optim.linear_schedule(0.0, peak, warmup), after], [warmup])


def build_optimizer(config: OptimConfig, schedule: optim.Schedule, params: Any) -> optim.GradientTransformation:
    """Clipping, the update rule, and weight decay on what ``params`` (a tree of Param) says decays."""
    mask = optim.decay_mask(params)
    if config.name == "adamw":
        rule = optim.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask)
    elif config.name == "lion":
        rule = optim.lion(schedule, config.b1, config.b2, weight_decay=config.weight_decay, mask=mask)
    elif config.name == "sgd":
        rule = optim.chain(
            optim.trace(config.b1),
            optim.add_decayed_weights(config.weight_decay, mask),
            optim.scale_by_learning_rate(schedule),
        )
    else:
        rule = optim.muon(
            schedule,
            beta=config.b1,
            adam_b1=config.b1,
            adam_b2=config.b2,
            weight_decay=config.weight_decay,
            adam_weight_decay=config.weight_decay,
            weight_decay_mask=mask,
            dimension_numbers=optim.muon_dimension_numbers(params),
        )
    return rule if config.clip_norm is None else optim.chain(optim.clip_by_global_norm(config.clip_norm), rule)
