"""``functitan bench pipeline``: a training step through stages, functitan against torch.distributed.pipelining."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import attrs
import torch
import tyro
from rich.console import Console
from rich.table import Table

from functitan.compiler.pipeline.schedules import SCHEDULES, is_file, make_schedule
from functitan.compiler.pipeline.stages import Pipeline, check_rows, make_pipeline
from models import llama
from sharding_specs import PRESETS, MeshSpec, SpecError
from train.bench import shard
from train.bench.piped import make_functional, make_torch
from train.bench.report import cpu_name, json_problems, make_console, mib, option_problems, spread, write_json
from train.bench.rounds import FIRST_STEPS, Figures, Work, measure
from train.bench.sharded import Precision, Rank
from train.bench.variants import Setting, model_config
from train.config_text import ConfigError, near
from train.layout_config import PipelineConfig

NOTES = """Of each round: the median over its steps, of the slowest rank; then medians of the rounds. over: torch's
for the same (jit over torch, jit+inductor over torch+compile), ratios taken within a round. peak: on the rank that
needs most, the state and what a step adds (on a CPU in resident memory, on a GPU in allocated memory). start:
capture and compilation, to the end of the first step. All ranks of a variant run at once, the variants in turn. All
have the same layers in each stage, the same schedule and microbatches, and compute the same step: causal attention
without document masks, the mean over all tokens, clipping by the norm over all stages, AdamW. torch: the module cut
as in torchtitan, each stage a PipelineStage, its AdamW the fused one; +compile: each layer and the loss compiled."""
PAIRS = {"jit": "torch", "jit+inductor": "torch+compile"}
"""What each of functitan's variants is compared with."""

Make = Callable[[Setting, Precision, Rank, PipelineConfig], Work]

VARIANTS: dict[str, Make] = {
    "jit": make_functional,
    "jit+inductor": functools.partial(make_functional, inductor=True),
    "torch": make_torch,
    "torch+compile": functools.partial(make_torch, compiled=True),
}


@attrs.frozen
class PipelineBench:
    """What to measure, and on how many ranks."""

    nproc: int = 2
    """Ranks, of this machine: one a GPU, or, where it has none, processes that share its cores. The mesh is pp."""
    model: str = "debug"
    """Size of the model: debug has 2 million parameters, 160M is the smallest after it."""
    schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    microbatches: int = 8
    """Parts that the batch is taken in."""
    stages_per_rank: int | None = None
    """Stages of one rank. None: what the schedule wants: 1, or 2 for the interleaved and the V-shaped ones."""
    batch_size: int = 16
    """Sequences in a step, of all microbatches."""
    seq_len: int = 256
    """Tokens in a sequence."""
    precision: Precision = "float32"
    """What the model computes in; parameters, optimizer and the sums of gradients are float32."""
    rounds: int = 7
    """In each round every variant runs in turn."""
    steps: int = 5
    """Steps of a variant in a round."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = ()
    """Some of the variants; all by default."""
    threads: int | None = None
    """Threads of a rank, in every variant. None: as many as torch takes for one process, over nproc."""
    timeout: float = 600.0
    """Seconds for a variant to prepare, or to run its steps of a round; one that takes longer has failed."""
    json: Path | None = None
    """File to write the figures to."""

    @property
    def pipeline(self) -> PipelineConfig:
        return PipelineConfig(self.schedule, self.microbatches, self.stages_per_rank)


def main(args: Sequence[str]) -> int:
    options = tyro.cli(PipelineBench, prog="functitan bench pipeline", description=__doc__, args=list(args))
    _check(options)
    setting = Setting(model_config(options.model), options.batch_size, options.seq_len)
    threads = options.threads or max(torch.get_num_threads() // options.nproc, 1)
    console = make_console()
    with console.status("starting") as status, tempfile.TemporaryDirectory(prefix="functitan-bench-") as folder:

        def ranks(name: str) -> list[Callable[[], Work]]:
            size, store = options.nproc, str(Path(folder, name))
            places = [Rank(i, size, threads, store, options.timeout) for i in range(size)]
            make = VARIANTS[name]
            return [functools.partial(make, setting, options.precision, place, options.pipeline) for place in places]

        figures, failed = measure(
            {name: ranks(name) for name in VARIANTS if not options.only or name in options.only},
            options.rounds,
            options.steps,
            progress=status.update,
            timeout=options.timeout,
        )
    _print(console, options, threads, figures, failed)
    if options.json is not None:
        write_json(options.json, _as_data(options, threads, figures, failed))
    return 0 if figures else 1


def _check(options: PipelineBench) -> None:
    """Raises ConfigError with everything that is wrong."""
    lowest = {"nproc": 2, "microbatches": 1, "batch_size": 1, "seq_len": 1, "rounds": 1, "steps": 1, "timeout": 1}
    problems = option_problems(options, lowest if options.threads is None else {**lowest, "threads": 1})
    gpus = torch.cuda.device_count()
    if 0 < gpus < options.nproc:
        problems.append(f"--nproc: is {options.nproc}, but this machine has {gpus} GPUs; give 2 to {gpus}")
    problems += _stage_problems(options)
    problems += [f"--only: unknown variant {n!r}{near(n, VARIANTS)}" for n in options.only if n not in VARIANTS]
    problems += json_problems(options.json)
    if problems:
        raise ConfigError(problems)


def _stage_problems(options: PipelineBench) -> list[str]:
    """What is wrong with the schedule, and with the stages and microbatches for this model and batch."""
    known = options.model in llama.SIZES
    problems = []
    if known and model_config(options.model).tied_embeddings:
        legal = ", ".join(name for name, config in llama.SIZES.items() if not config.tied_embeddings)
        problems.append(
            f"--model: {options.model} has tied embeddings, which torch's stages cannot share; legal: {legal}"
        )
    if is_file(options.schedule):
        legal = ", ".join(SCHEDULES)
        return [*problems, f"--schedule: {options.schedule!r} is a file, and torch's are taken by name; legal: {legal}"]
    if min(options.nproc, options.microbatches, options.batch_size) < 1:
        return problems  # which is said already, and nothing can be told of the rest
    try:
        make_schedule(options.schedule, options.nproc, options.microbatches, options.stages_per_rank)
        if known:
            check_rows(_stages(options), options.batch_size)
    except SpecError as error:
        return [*problems, *(str(attrs.evolve(p, path=_OPTIONS.get(p.path, p.path))) for p in error.problems)]
    except ValueError as error:
        return [*problems, f"--schedule: {error}"]
    return problems


_OPTIONS = {"mesh/pp": "--nproc", "pipeline/microbatches": "--microbatches"}
"""Where the library sees a problem, and the option that it is about."""


def _stages(options: PipelineBench) -> Pipeline:
    """The stages as functitan divides the layers, on both sides. Raises SpecError where they cannot be made."""
    params, mesh = llama.declare(model_config(options.model)), MeshSpec(pp=options.nproc)
    return make_pipeline(params, PRESETS["all"], mesh, options.schedule, options.microbatches, options.stages_per_rank)


def disagreements(figures: dict[str, Figures], precision: Precision) -> dict[str, list[float]]:
    """The losses of the first steps of those whose work is not torch's."""
    base = _base(figures)
    return shard.disagreements({shard.BASE if name == base else name: f for name, f in figures.items()}, precision)


def _base(figures: dict[str, Figures]) -> str | None:
    """Whose losses are taken to be right: torch's, of its variants the simplest that was measured."""
    return next((name for name in PAIRS.values() if name in figures), None)


def _print(
    console: Console, options: PipelineBench, threads: int, figures: dict[str, Figures], failed: dict[str, str]
) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    layers = ", ".join(str(stop - start) for start, stop in _stages(options).layers)
    console.print(
        f"{options.model}, {options.nproc} ranks (pp={options.nproc}), {options.schedule}, stages of {layers} layers, "
        f"{options.microbatches} microbatches\n"
        f"{options.batch_size} x {options.seq_len} tokens a step, {options.precision}, {options.rounds} rounds of "
        f"{options.steps} steps in turn\n"
        f"torch {torch.__version__}, {threads} threads a rank, {device}",
        highlight=False,
    )
    console.print(_table(figures))
    for name, losses in disagreements(figures, options.precision).items():
        base = _base(figures)
        theirs = ", ".join(f"{x:.6g}" for x in figures[base].first_losses)
        mine = ", ".join(f"{x:.6g}" for x in losses)
        console.print(
            f"{name} DOES NOT COMPUTE THE SAME as {base}: losses of the first {FIRST_STEPS} steps {mine}; {theirs}",
            markup=False, highlight=False,
        )  # fmt: skip
    console.print(NOTES)
    for name, reason in failed.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def _table(figures: dict[str, Figures]) -> Table:
    table = Table(padding=(0, 1))
    table.add_column("variant", no_wrap=True)
    for title in ("ms/step", "(min, max)", "over", "(min, max)", "peak MiB", "over", "start s", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, f in figures.items():
        base = figures.get(PAIRS.get(name, ""))
        peaks = f"{f.peak_bytes / base.peak_bytes:.2f}" if base and f.peak_bytes and base.peak_bytes else ""
        table.add_row(
            name,
            *spread([1e3 * s for s in f.seconds], ".1f"),
            *(spread(f.ratios(base), ".2f") if base else ("", "")),
            mib(f.peak_bytes),
            peaks,
            f"{f.start_seconds:.1f}",
            f"{f.loss:.4f}",
        )
    return table


def _as_data(options: PipelineBench, threads: int, figures: dict[str, Figures], failed: dict[str, str]) -> dict:
    return {
        "options": {k: v for k, v in attrs.asdict(options).items() if k != "json"},
        "layers": _stages(options).layers,
        "torch": torch.__version__,
        "threads_per_rank": threads,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "figures": {name: attrs.asdict(f) for name, f in figures.items()},
        "ratios": {
            base: {name: f.ratios(figures[base]) for name, f in figures.items()}
            for base in PAIRS.values()
            if base in figures
        },
        "disagree": disagreements(figures, options.precision),
        "failed": failed,
    }
