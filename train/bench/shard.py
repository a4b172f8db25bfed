"""``functitan bench shard``: a training step on several ranks, functitan against FSDP2, in one run."""

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

from functitan.compiler.passes import DEFAULT
from train.bench.report import cpu_name, json_problems, make_console, mib, option_problems, spread, write_json
from train.bench.rounds import FIRST_STEPS, Figures, Work, measure
from train.bench.sharded import Precision, Rank, make_fsdp2, make_functional
from train.bench.variants import Setting, model_config
from train.config_text import ConfigError, near

NOTES = """Of each round: the median over its steps, of the slowest rank; then medians of the rounds. Ratios are taken
within a round. peak: on the rank that needs most, the state and what a step adds (on a CPU in resident memory, on a GPU
in allocated memory). start: capture and compilation, to the end of the first step. All ranks of a variant run at once,
the variants in turn; the others' freed memory is given back meanwhile. All compute the same step of a global batch:
causal attention without document masks, clipping, AdamW. fsdp2: the module under fully_shard as in torchtitan, its
AdamW and clipping over all parameters at once; +keep: what is gathered for forward is kept for backward
(reshard_after_forward=False), as by jit-regather, jit without that pass. +compile: each layer and the loss compiled;
+compile-whole: the model and the loss in one; the optimizer and clipping are not compiled there (AdamW is the fused
one), while jit and jit+inductor have them in the step's one graph."""
BASE, KEEP, NO_REGATHER, ONE_RANK = "fsdp2", "fsdp2+keep", "jit-regather", "jit@1"
COMPILED = ("fsdp2+compile", "fsdp2+compile-whole")
"""Of these the faster one is what the others are compared with."""
AGREE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far the losses of the first steps may be from fsdp2's (relative; below 1, in nats): sums have another order."""

Make = Callable[[Setting, Precision, Rank], Work]


@attrs.frozen
class ShardBench:
    """What to measure, and on how many ranks."""

    nproc: int = 2
    """Ranks, of this machine: one a GPU, or, where it has none, processes that share its cores. The mesh is fsdp."""
    model: str = "debug"
    """Size of the model: debug has 2 million parameters, 160M is the smallest after it."""
    batch_size: int = 8
    """Sequences of a rank in a step."""
    seq_len: int = 256
    """Tokens in a sequence."""
    precision: Precision = "float32"
    """What the model computes in; parameters, optimizer and the sums of gradients are float32."""
    rounds: int = 7
    """In each round every variant runs in turn."""
    steps: int = 5
    """Steps of a variant in a round."""
    ablate: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PASS...")] = ()
    """Passes to measure the captured step without, one by one; "all" for every pass. Without regather always."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = ()
    """Some of the variants; all by default, and those of --ablate."""
    threads: int | None = None
    """Threads of a rank, in every variant. None: as many as torch takes for one process, over nproc."""
    timeout: float = 600.0
    """Seconds for a variant to prepare, or to run its steps of a round; one that takes longer has failed."""
    json: Path | None = None
    """File to write the figures to."""


def variants(nproc: int, ablate: Sequence[str] = ()) -> dict[str, Make]:
    """How to make each variant on a rank, by its name."""
    # Without regather always: it is what fsdp2+keep does.
    without = {
        f"jit-{name}": functools.partial(make_functional, passes=tuple(p for p in DEFAULT if p != name))
        for name in dict.fromkeys(["regather", *ablate])
    }
    makers: dict[str, Make] = {
        "jit": make_functional,
        **without,
        "plain": functools.partial(make_functional, captured=False),
        "jit+inductor": functools.partial(make_functional, inductor=True),
        BASE: make_fsdp2,
        KEEP: functools.partial(make_fsdp2, reshard=False),
        COMPILED[0]: functools.partial(make_fsdp2, compiled="blocks"),
        COMPILED[1]: functools.partial(make_fsdp2, compiled="whole"),
    }
    if nproc > 1:
        makers[ONE_RANK] = make_functional
    return makers


def main(args: Sequence[str]) -> int:
    options = tyro.cli(ShardBench, prog="functitan bench shard", description=__doc__, args=list(args))
    ablate = ablated(options.ablate)
    _check(options, ablate)
    makers = variants(options.nproc, ablate)
    makers = {name: make for name, make in makers.items() if not options.only or name in options.only}
    setting = Setting(model_config(options.model), options.batch_size, options.seq_len)
    threads = options.threads or max(torch.get_num_threads() // options.nproc, 1)
    console = make_console()
    with console.status("starting") as status, tempfile.TemporaryDirectory(prefix="functitan-bench-") as folder:

        def ranks(name: str) -> list[Callable[[], Work]]:
            size = 1 if name == ONE_RANK else options.nproc
            places = [Rank(i, size, threads, str(Path(folder, name)), options.timeout) for i in range(size)]
            return [functools.partial(makers[name], setting, options.precision, place) for place in places]

        figures, failed = measure(
            {name: ranks(name) for name in makers},
            options.rounds,
            options.steps,
            progress=status.update,
            timeout=options.timeout,
        )
    _print(console, options, threads, figures, failed)
    if options.json is not None:
        write_json(options.json, _as_data(options, threads, figures, failed))
    return 0 if figures else 1


def _check(options: ShardBench, ablate: Sequence[str]) -> None:
    lowest = {"nproc": 1, "batch_size": 1, "seq_len": 1, "rounds": 1, "steps": 1, "timeout": 1}
    problems = option_problems(options, lowest if options.threads is None else {**lowest, "threads": 1})
    gpus = torch.cuda.device_count()
    if 0 < gpus < options.nproc:
        problems.append(f"--nproc: is {options.nproc}, but this machine has {gpus} GPUs; give 1 to {gpus}")
    unknown = [name for name in ablate if name not in DEFAULT]
    problems += [f"--ablate: unknown pass {name!r}{near(name, ('all', *DEFAULT))}" for name in unknown]
    known = variants(options.nproc, ablate)
    problems += [f"--only: unknown variant {name!r}{near(name, known)}" for name in options.only if name not in known]
    problems += json_problems(options.json)
    if problems:
        raise ConfigError(problems)


def ablated(names: Sequence[str]) -> tuple[str, ...]:
    """The passes that ``--ablate`` names, each once, "all" standing for every pass."""
    return tuple(dict.fromkeys(name for given in names for name in (DEFAULT if given == "all" else (given,))))


def faster(figures: dict[str, Figures]) -> str | None:
    """The name of FSDP2's faster way to compile, of those that were measured."""
    measured = [name for name in COMPILED if name in figures]
    return min(measured, key=lambda name: figures[name].median, default=None)


def disagreements(figures: dict[str, Figures], precision: Precision) -> dict[str, list[float]]:
    """The losses of the first steps of those whose work is not fsdp2's."""
    base = figures.get(BASE)
    if base is None:
        return {}
    return {
        name: f.first_losses
        for name, f in figures.items()
        if name != ONE_RANK  # it has another batch
        # Written so that a NaN disagrees.
        and not all(
            abs(x - y) <= AGREE[precision] * max(abs(y), 1.0)
            for x, y in zip(f.first_losses, base.first_losses, strict=True)
        )
    }


def _print(
    console: Console, options: ShardBench, threads: int, figures: dict[str, Figures], failed: dict[str, str]
) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    console.print(
        f"{options.model}, {options.nproc} ranks (fsdp={options.nproc}), {options.batch_size} x {options.seq_len} "
        f"tokens a step and rank, {options.precision}, {options.rounds} rounds of {options.steps} steps in turn\n"
        f"torch {torch.__version__}, {threads} threads a rank, {device}",
        highlight=False,
    )
    compiled = faster(figures)
    console.print(_table(figures, compiled))
    if compiled is not None:
        console.print(f"compiled: {compiled}, the fastest of {', '.join(c for c in COMPILED if c in figures)}")
    for mine, other in (("jit", BASE), (NO_REGATHER, KEEP), ("jit+inductor", compiled)):
        if mine in figures and other in figures:
            time = " ".join(spread(figures[mine].ratios(figures[other]), ".2f"))
            memory = _ratio(figures[mine].peak_bytes, figures[other].peak_bytes)
            console.print(f"{mine} over {other}: time {time}, peak {memory}", highlight=False)
    if {"jit", ONE_RANK} <= figures.keys():
        efficiency = " ".join(spread(figures[ONE_RANK].ratios(figures["jit"]), ".2f"))
        console.print(
            f"weak scaling, 1 -> {options.nproc} ranks (time of {ONE_RANK} over jit's): {efficiency}", highlight=False
        )
    for name, losses in disagreements(figures, options.precision).items():
        theirs = ", ".join(f"{x:.6g}" for x in figures[BASE].first_losses)
        mine = ", ".join(f"{x:.6g}" for x in losses)
        console.print(
            f"{name} DOES NOT COMPUTE THE SAME as {BASE}: losses of the first {FIRST_STEPS} steps {mine}; {theirs}",
            markup=False, highlight=False,
        )  # fmt: skip
    console.print(NOTES)
    for name, reason in failed.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def _table(figures: dict[str, Figures], compiled: str | None) -> Table:
    bases = {BASE: figures.get(BASE), "compiled": figures.get(compiled) if compiled else None}
    table = Table(padding=(0, 0))
    table.add_column("variant", no_wrap=True)
    over = [f"over\n{name}" for name in bases]
    for title in ("ms/step", "(min, max)", *over, "peak\nMiB", *over, "start\ns", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, f in figures.items():
        ratios = [spread(f.ratios(base), ".2f")[0] if base else "n/a" for base in bases.values()]
        table.add_row(
            name,
            *spread([1e3 * s for s in f.seconds], ".1f"),
            *ratios,
            mib(f.peak_bytes),
            *(_ratio(f.peak_bytes, base.peak_bytes if base else None) for base in bases.values()),
            f"{f.start_seconds:.1f}",
            f"{f.loss:.4f}",
        )
    return table


def _ratio(mine: int | None, theirs: int | None) -> str:
    return f"{mine / theirs:.2f}" if mine and theirs else "n/a"


def _as_data(options: ShardBench, threads: int, figures: dict[str, Figures], failed: dict[str, str]) -> dict:
    compiled = faster(figures)
    return {
        "options": {k: v for k, v in attrs.asdict(options).items() if k != "json"},
        "torch": torch.__version__,
        "threads_per_rank": threads,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "figures": {name: attrs.asdict(f) for name, f in figures.items()},
        "compiled_base": compiled,
        "ratios": {
            base: {name: f.ratios(figures[base]) for name, f in figures.items()}
            for base in (BASE, KEEP, compiled)
            if base in figures
        },
        "weak_scaling": (figures[ONE_RANK].ratios(figures["jit"]) if {"jit", ONE_RANK} <= figures.keys() else None),
        "disagree": disagreements(figures, options.precision),
        "failed": failed,
    }
