"""The complete description of a run, as data. Every field's docstring is the command line's help text.

A configuration is never changed after it is parsed; ``attrs.evolve`` makes another. :func:`validate` says everything
that is wrong with one, :func:`dump` writes it as YAML and ``parse(dump(config)) == config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import tyro
from attrs import frozen

from functitan.compiler import passes
from models.llama import LlamaConfig
from sharding_specs import STANDARD_NAMES
from train.checkpoint import CheckpointConfig
from train.config_text import ConfigError, from_yaml, load_yaml, near, to_yaml
from train.data.config import DataConfig, config_problems
from train.layout import layout_problems
from train.layout_config import RUNNABLE_AXES, UNEVEN_NAMES, ContextConfig, MeshConfig, PipelineConfig, RulesConfig

VERSION = 1
"""Of the fields below: raised whenever a field changes its name or meaning."""

@frozen
class TrainConfig:
    """How long and on how much at once."""

    steps: int = 1000
    """Optimizer steps of the whole run. A finished run with more steps goes on where it stopped."""
    batch_size: int = 16
    """Sequences in one step, over all devices and micro-steps."""
    seq_len: int = 256
    """Tokens in a sequence."""
    accumulation: int = 1
    """Micro-steps in one step: the batch is taken in so many parts, one by one. Saves memory, and changes no number but
    what dropout draws."""
    eval_every: int = 100
    """Steps between two evaluations on held-out data; 0: never."""
    eval_batches: int = 8
    """Batches in one evaluation."""
    log_every: int = 10
    """Steps between two printed lines and two lines of metrics.jsonl."""
    remat: Literal["none", "selective", "full"] = "none"
    """What backward computes anew instead of keeping: nothing, in each layer what is cheap to compute, or each layer
    (a third more time, least memory)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. Parameters, optimizer state and sums are float32 either way."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """In what the parameters' gradients are added up over the devices; bfloat16 sends half and rounds every sum."""
    timeout_s: int = 600
    """Seconds that a rank waits for the others before the run ends as failed, and that ranks have to save after a
    signal. More where one machine reads text or writes checkpoints much slower than another."""


@frozen
class OptimConfig:
    """The optimizer and its learning rate over time."""

    name: Literal["adamw", "lion", "sgd", "muon"] = "adamw"
    """The update rule."""
    learning_rate: float = 3e-4
    """The peak, reached at the end of the warm-up."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """The learning rate after the warm-up: falls as a cosine or a line, falls at the end only (wsd), or stays."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises in a line from 0 to its peak; a shorter run ends before the peak."""
    decay_steps: int | None = None
    """Steps in which it falls; wsd: the last of the run. None: all after the warm-up, or for wsd a tenth of the run."""
    min_ratio: float = 0.1
    """The last learning rate, as a fraction of the peak."""
    b1: float = 0.9
    """Decay of the average of gradients; the momentum of sgd and muon."""
    b2: float = 0.95
    """Decay of the average of squared gradients (adamw), or of the momentum (lion)."""
    eps: float = 1e-8
    """Added to the root of the averaged squared gradient (adamw)."""
    weight_decay: float = 0.1
    """Fraction of a parameter taken off in each step, times the learning rate. Norms and biases have none."""
    clip_norm: float | None = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it. None: no limit."""


@frozen
class JitConfig:
    """How the step is compiled."""

    enabled: bool = True
    """Capture the whole step as one graph; off, it runs as it is written."""
    inductor: bool = False
    """Compile the captured graph with Inductor: slower to start, faster to run."""
    passes: tuple[str, ...] = passes.DEFAULT
    """Optimisations of the captured graph, by name; all of them by default."""


@frozen
class RunConfig:
    """A run: everything that decides its numbers, and the folder that it writes to."""

    model: LlamaConfig
    """The transformer."""
    data: DataConfig = attrs.field(factory=DataConfig)
    """What it is trained on."""
    train: TrainConfig = attrs.field(factory=TrainConfig)
    """How long and on how much at once."""
    optim: OptimConfig = attrs.field(factory=OptimConfig)
    """The optimizer and its learning rate over time."""
    mesh: MeshConfig = attrs.field(factory=MeshConfig)
    """Devices along each axis of the mesh."""
    rules: RulesConfig = attrs.field(factory=RulesConfig)
    """Which mesh axes split which dims."""
    pipeline: PipelineConfig = attrs.field(factory=PipelineConfig)
    """How a step goes through the stages of a pipeline."""
    context: ContextConfig = attrs.field(factory=ContextConfig)
    """How attention runs over a sequence that is split."""
    jit: JitConfig = attrs.field(factory=JitConfig)
    """How the step is compiled."""
    checkpoint: CheckpointConfig = attrs.field(factory=CheckpointConfig)
    """When and how the state is saved."""
    out: Path = Path("runs/run")
    """Folder of the run: its configuration, metrics, plot and checkpoints. A run that is there already goes on."""
    seed: int = 0
    """Of the initial parameters and of dropout; the order of the data has its own (data.seed)."""
    version: Annotated[int, tyro.conf.Suppress] = VERSION
    """Of the fields, in a file: see VERSION. No option."""


def dump(config: RunConfig) -> str:
    """The YAML text of a configuration, complete, the version of its fields first."""
    first, rest = f"version: {config.version}\n", to_yaml(config).removesuffix(f"version: {config.version}\n")
    return "# A functitan run. Run it again: functitan train --config THIS_FILE\n" + first + rest


def parse(text: str, source: str = "configuration") -> RunConfig:
    """The inverse of :func:`dump`. Fields that are left out keep their defaults.

    Args:
        source: what errors call the text: the path of the file.

    Raises:
        ConfigError: every unknown field, missing field and wrong type at once, or another version of the fields.
    """
    version = load_yaml(text, source).get("version", VERSION)
    if version != VERSION:
        raise ConfigError(
            [
                f"{source}: version: is {version!r}, but this functitan reads version {VERSION}: run it with the "
                "functitan that wrote it, or start from `functitan train RECIPE` and carry the values over"
            ]
        )
    return from_yaml(text, RunConfig, source)


def validate(config: RunConfig, devices: int | None = None) -> list[str]:
    """Everything that is wrong with a configuration, each problem one line: where, the sizes, what is legal.

    Args:
        devices: ranks that will run it (WORLD_SIZE); None leaves the product of the mesh unchecked.

    Returns:
        The problems; empty where there are none. Needs no device, no process group and no data.
    """
    return [
        *_counts(config),
        *_optim(config.optim, config.train.steps),
        *_jit(config.jit),
        *_rules(config.rules),
        *config_problems(config.data),
        *layout_problems(config, devices),
    ]


def unsupported(config: RunConfig, devices: int) -> list[str]:
    """What is right in a configuration that :func:`validate` finds no fault with, and cannot be trained yet."""
    return [
        f"mesh.{axis}: is {size}, but this version runs {', '.join(RUNNABLE_AXES[:-1])} and {RUNNABLE_AXES[-1]}; "
        "the others come later: give 1"
        for axis, size in config.mesh.spec().resolve(devices).items()
        if size > 1 and axis not in RUNNABLE_AXES
    ]


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every field of a configuration by its whole name: ``{"model.dim": 128, …, "seed": 0}``."""
    if not attrs.has(type(config)):
        return {prefix: config}
    found = {}
    for part in attrs.fields(type(config)):
        found |= flat(getattr(config, part.name), f"{prefix}.{part.name}" if prefix else part.name)
    return found


_INT32 = 2**31 - 1  # the optimizer's count, and sizes that a tensor can have
_LARGE = 1e30  # far above any sensible rate, and far enough below the largest float32


def _counts(config: RunConfig) -> list[str]:
    # batch_size, seq_len and accumulation are checked together with the mesh.
    train = config.train
    lowest = {"steps": 1, "eval_every": 0, "eval_batches": 1, "log_every": 1, "timeout_s": 1}
    problems = [
        f"train.{name}: is {getattr(train, name)}; give {low} to {_INT32}"
        for name, low in lowest.items()
        if not low <= getattr(train, name) <= _INT32
    ]
    large = {
        "train.batch_size": config.train.batch_size, "train.seq_len": config.train.seq_len,
        "train.accumulation": config.train.accumulation, "optim.warmup_steps": config.optim.warmup_steps,
    }  # fmt: skip
    problems += [f"{name}: is {n}; give at most {_INT32}" for name, n in large.items() if n > _INT32]
    problems += [
        f"checkpoint.{name}: is {getattr(config.checkpoint, name)}; give {low} or more"
        for name, low in {"every": 0, "keep": 1}.items()
        if getattr(config.checkpoint, name) < low
    ]
    if not 0 <= config.seed < 2**32:
        problems.append(f"seed: is {config.seed}; give 0 to 2**32 - 1")
    if str(config.out) in ("", "."):
        problems.append("out: is empty; give a folder of its own, such as runs/first")
    return problems


def _optim(optim: OptimConfig, steps: int) -> list[str]:
    problems = []
    positive = ("learning_rate", "eps") if optim.clip_norm is None else ("learning_rate", "eps", "clip_norm")
    for name in positive:
        value = getattr(optim, name)
        if not 0 < value <= _LARGE:
            problems.append(f"optim.{name}: is {value}; give a number above 0, to {_LARGE:g}")
    for name in ("b1", "b2"):
        value = getattr(optim, name)
        if not 0 <= value < 1:
            problems.append(f"optim.{name}: is {value}; give 0 or more and less than 1")
    if not 0 <= optim.min_ratio <= 1:
        problems.append(f"optim.min_ratio: is {optim.min_ratio}; give 0 to 1")
    if not 0 <= optim.weight_decay <= _LARGE:
        problems.append(f"optim.weight_decay: is {optim.weight_decay}; give 0 to {_LARGE:g}")
    left = max(steps - optim.warmup_steps, 0)
    if optim.warmup_steps < 0:
        problems.append(f"optim.warmup_steps: is {optim.warmup_steps}; give 0 or more")
    elif optim.decay_steps is not None and not 0 <= optim.decay_steps <= left:
        problems.append(
            f"optim.decay_steps: is {optim.decay_steps}, but {left} of {steps} steps are left after the warm-up "
            f"(optim.warmup_steps); give 0 to {left}, or None"
        )
    return problems


def _jit(jit: JitConfig) -> list[str]:
    problems = []
    if jit.inductor and not jit.enabled:
        problems.append(
            "jit.inductor: is on, but jit.enabled is off, which leaves it no graph to compile; change one of them"
        )
    return problems + [
        f"jit.passes: unknown pass {name!r}{near(name, passes.PASSES)}"
        for name in jit.passes
        if name not in passes.PASSES
    ]


def _rules(rules: RulesConfig) -> list[str]:
    # What the axes are is checked together with the mesh.
    problems = [
        f"rules.{name}: is {getattr(rules, name)!r}; give axes such as fsdp or fsdp,tp, or none"
        for name in STANDARD_NAMES
        if getattr(rules, name) is not None and not all(axis.strip() for axis in getattr(rules, name).split(","))
    ]
    return problems + [
        f"rules.uneven: unknown name {name!r}{near(name, UNEVEN_NAMES)}"
        for name in rules.uneven
        if name not in UNEVEN_NAMES
    ]
