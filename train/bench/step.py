"""``functitan bench step``: time and memory of a training step, functitan against PyTorch and JAX, in one run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import torch
import tyro
from rich.console import Console
from rich.table import Table

from train.bench.report import cpu_name, json_problems, make_console, mib, option_problems, spread, write_json
from train.bench.rounds import Figures, measure
from train.bench.variants import VARIANTS, Setting, model_config
from train.config_text import ConfigError, near

NOTES = """Of each round: the median over its steps; then medians of the rounds. Ratios are taken within a round. peak:
the state, and the resident memory that a step adds. grown: the process's resident memory after all steps, above that
before the variant was made. start: capture and compilation, to the end of the first step. All compute the same step
(loss: after all of them): causal attention without document masks, clipping, AdamW. module+compile compiles forward and
backward; its AdamW is the fused one. The C library keeps freed memory (train/allocator.py) during a turn in all."""
BASE = "module"
"""What the others are compared with."""


@attrs.frozen
class StepBench:
    """What to measure."""

    model: str = "debug"
    """Size of the model; see functitan train --help for the recipes' own."""
    batch_size: int = 16
    """Sequences in a step."""
    seq_len: int = 256
    """Tokens in a sequence."""
    rounds: int = 7
    """In each round every variant runs in turn; at least 5."""
    steps: int = 5
    """Steps of a variant in a round."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = ()
    """Some of the variants; all by default."""
    json: Path | None = None
    """File to write the figures to."""


def main(args: Sequence[str]) -> int:
    options = tyro.cli(StepBench, prog="functitan bench step", description=__doc__, args=list(args))
    _check(options)
    names = [name for name in VARIANTS if not options.only or name in options.only]
    setting = Setting(model_config(options.model), options.batch_size, options.seq_len)
    console = make_console()
    with console.status("starting") as status:
        figures, failed = measure(
            {name: [functools.partial(VARIANTS[name], setting)] for name in names},
            options.rounds, options.steps, progress=status.update,
        )  # fmt: skip
    _print(console, options, figures, failed)
    if options.json is not None:
        write_json(options.json, _as_data(options, figures, failed))
    return 0 if figures else 1


def _check(options: StepBench) -> None:
    problems = option_problems(options, {"batch_size": 1, "seq_len": 1, "rounds": 5, "steps": 1})
    unknown = [name for name in options.only if name not in VARIANTS]
    problems += [f"--only: unknown variant {name!r}{near(name, VARIANTS)}" for name in unknown]
    problems += json_problems(options.json)
    if problems:
        raise ConfigError(problems)


def _print(console: Console, options: StepBench, figures: dict[str, Figures], failed: dict[str, str]) -> None:
    console.print(
        f"{options.model}, {options.batch_size} x {options.seq_len} tokens a step, {options.rounds} rounds of "
        f"{options.steps} steps in turn\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {cpu_name()}",
        highlight=False,
    )
    base = figures.get(BASE)
    table = Table(padding=(0, 0))
    table.add_column("variant", no_wrap=True)
    span, over = "(min, max)", f"over {BASE}"
    for title in ("ms/step", span, over, span, "peak MiB", over, "grown MiB", "start s", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, f in figures.items():
        ratios = f.ratios(base) if base else None
        table.add_row(
            name,
            *spread([1e3 * s for s in f.seconds], ".1f"),
            *(spread(ratios, ".2f") if ratios else ("n/a", "")),
            mib(f.peak_bytes),
            f"{f.peak_bytes / base.peak_bytes:.2f}" if base and base.peak_bytes and f.peak_bytes else "n/a",
            mib(f.resident_bytes),
            f"{f.start_seconds:.1f}",
            f"{f.loss:.4f}",
        )
    console.print(table)
    if {"jit+inductor", "module+compile"} <= figures.keys():
        ratios = figures["jit+inductor"].ratios(figures["module+compile"])
        console.print("jit+inductor over module+compile: {} {}".format(*spread(ratios, ".2f")))
    console.print(NOTES)
    for name, reason in failed.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def _as_data(options: StepBench, figures: dict[str, Figures], failed: dict[str, str]) -> dict:
    return {
        "options": {k: v for k, v in attrs.asdict(options).items() if k != "json"},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "figures": {name: attrs.asdict(f) for name, f in figures.items()},
        "ratios_over_module": {name: f.ratios(figures[BASE]) for name, f in figures.items()} if BASE in figures else {},
        "failed": failed,
    }
