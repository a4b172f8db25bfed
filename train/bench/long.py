"""``functitan bench long``: attention over long sequences on several ranks, against one rank and PyTorch's own."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import tyro
from rich.console import Console
from rich.table import Table

from sharding_specs.context import indivisible
from train.bench.long_work import GRADIENTS, METHODS, TORCH, Make, Setting, variants
from train.bench.report import cpu_name, json_problems, make_console, mib, spread, write_json
from train.bench.rounds import Figures, Work, measure
from train.bench.shard import ONE_RANK
from train.bench.sharded import Rank
from train.config_text import ConfigError, near

NOTES = """Of each round: the median over its steps, of the slowest rank; then medians of the rounds. Ratios are taken
within a round. peak: on the rank that needs most, its part of q, k, v and the cotangent and what a step adds, its part
of the gradients included: on a CPU in resident memory, with the holes that the allocator leaves, on a GPU in allocated
memory. start: capture, to the end of the first step. All ranks of a variant run at once, the variants in turn. All
compute the same: the sum of the output times the cotangent, and the gradients of q, k and v; what a variant gives for
the whole sequence is checked. jit@1: functitan on one rank, with the threads of one of several; ring, all_gather,
ulysses: functitan over cp, captured, in the layout that the plan chooses. torch: the fastest of PyTorch's, which are
eager. torch-allgather, torch-alltoall: torch.distributed.tensor.experimental.context_parallel with set_rotate_method,
heads of keys and values repeated beforehand; +cpu: the ring behind it with the kernel of a CPU put in, which takes
grouped heads."""
AGREE = 1e-4
"""How far the loss and the gradients' checksums may be apart (relative; of a loss below 1, absolute): float32, and sums
have another order."""


@attrs.frozen
class LongBench:
    """What to measure, and on how many ranks."""

    nproc: int = 2
    """Ranks, of this machine: one a GPU, or, where it has none, processes that share its cores. The mesh is cp."""
    seq_lens: Annotated[tuple[int, ...], tyro.conf.arg(metavar="TOKENS...")] = (2048, 4096, 8192, 16384, 32768)
    """Lengths of the whole sequence, measured one after the other."""
    batch_size: int = 1
    """Sequences in a step."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Heads of keys and values."""
    head_dim: int = 64
    """Width of a head."""
    rounds: int = 3
    """In each round every variant runs in turn."""
    steps: int = 5
    """Steps of a variant in a round at the shortest length. The work grows with the square of the length and the steps
    get fewer by that, to one."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = ()
    """Some of the variants; all by default."""
    threads: int | None = None
    """Threads of a rank, in every variant: one rank has no more of them than one of several. None: as many as torch
    takes for one process, over nproc."""
    timeout: float = 600.0
    """Seconds for a variant to prepare, or to run its steps of a round; one that takes longer has failed."""
    json: Path | None = None
    """File to write the figures to."""


@attrs.frozen
class Length:
    """What was measured at one length.

    Attributes:
        steps: of a variant in a round.
        figures: of the variants that compute the same; ``first_losses`` are the checksums of ``GRADIENTS``.
        failed: why the others have no figures.
        wrong: which of those computed something else.
    """

    steps: int
    figures: dict[str, Figures]
    failed: dict[str, str]
    wrong: tuple[str, ...] = ()

    @property
    def torch(self) -> str | None:
        """The name of PyTorch's fastest, of those that were measured."""
        measured = [name for name in TORCH if name in self.figures]
        return min(measured, key=lambda name: self.figures[name].median, default=None)

    @property
    def bases(self) -> dict[str, str]:
        """What the others are compared with: the column's title, and the variant."""
        found = {ONE_RANK: ONE_RANK, "torch": self.torch}
        return {title: name for title, name in found.items() if name in self.figures}


def main(args: Sequence[str]) -> int:
    """Exit status 1 also where a variant computes something else than the others."""
    options = tyro.cli(LongBench, prog="functitan bench long", description=__doc__, args=list(args))
    _check(options)
    threads = options.threads or max(torch.get_num_threads() // options.nproc, 1)
    console = make_console()
    makers = _chosen(options)
    lengths: dict[int, Length] = {}
    with console.status("starting") as status:
        for seq_len in sorted(set(options.seq_lens)):
            progress = lambda text, seq_len=seq_len: status.update(f"{seq_len} tokens: {text}")
            lengths[seq_len] = _measure(options, seq_len, threads, makers, progress)
            # What cannot run at a length is not started again, for the same answer or a longer wait, at the next one.
            makers = {name: make for name, make in makers.items() if name not in lengths[seq_len].failed}
    _print(console, options, threads, lengths)
    if options.json is not None:
        write_json(options.json, _as_data(options, threads, lengths))
    good = any(length.figures for length in lengths.values()) and not any(length.wrong for length in lengths.values())
    return 0 if good else 1


def _measure(
    options: LongBench, seq_len: int, threads: int, makers: Mapping[str, Make], progress: Callable[[str], None]
) -> Length:
    setting = Setting(seq_len, options.batch_size, options.heads, options.kv_heads, options.head_dim)
    steps = steps_at(seq_len, options)
    with tempfile.TemporaryDirectory(prefix="functitan-bench-") as folder:

        def ranks(name: str) -> list[Callable[[], Work]]:
            size = 1 if name == ONE_RANK else options.nproc
            places = [Rank(i, size, threads, str(Path(folder, name)), options.timeout) for i in range(size)]
            return [functools.partial(makers[name], setting, place) for place in places]

        figures, failed = measure(
            {name: ranks(name) for name in makers}, options.rounds, steps, progress=progress, timeout=options.timeout
        )
    wrong = disagreements(figures)
    kept = {name: f for name, f in figures.items() if name not in wrong}
    return Length(steps, kept, {**failed, **wrong}, tuple(wrong))


def steps_at(seq_len: int, options: LongBench) -> int:
    """Steps of a variant in a round: the options' at the shortest length, and fewer as the work of one grows."""
    return max(round(options.steps * (min(options.seq_lens) / seq_len) ** 2), 1)


def disagreements(figures: Mapping[str, Figures]) -> dict[str, str]:
    """Of those who do not compute what one rank does (or the first one, where that was not measured), what differs."""
    base = ONE_RANK if ONE_RANK in figures else next(iter(figures), None)
    found = {}
    for name, f in figures.items():
        pairs = zip(("loss", *GRADIENTS), _computed(f), _computed(figures[base]))
        # Written so that a NaN disagrees.
        differ = [f"{what} {x:.7g}; {y:.7g}" for what, x, y in pairs if not abs(x - y) <= AGREE * max(abs(y), 1.0)]
        if differ:
            found[name] = f"DOES NOT COMPUTE THE SAME as {base}: {', '.join(differ)}"
    return found


def _computed(figures: Figures) -> list[float]:
    return [figures.loss, *figures.first_losses]


def _chosen(options: LongBench) -> dict[str, Make]:
    return {name: make for name, make in variants().items() if not options.only or name in options.only}


def _check(options: LongBench) -> None:
    counts = ("batch_size", "heads", "kv_heads", "head_dim", "rounds", "steps", "timeout")
    lowest = {"nproc": 2, **dict.fromkeys(counts, 1), **({} if options.threads is None else {"threads": 1})}
    problems = [
        f"--{name.replace('_', '-')}: is {getattr(options, name)}; give {low} or more"
        for name, low in lowest.items()
        if getattr(options, name) < low
    ]
    gpus = torch.cuda.device_count()
    if 0 < gpus < options.nproc:
        legal = f"give 2 to {gpus}" if gpus > 1 else "hide it (CUDA_VISIBLE_DEVICES=) to measure on CPUs"
        problems.append(f"--nproc: is {options.nproc}, but this machine has {gpus} GPUs; {legal}")
    if not options.seq_lens:
        problems.append("--seq-lens: give one length or more")
    problems += [f"--seq-lens: is {n}; give 1 or more" for n in options.seq_lens if n < 1]
    if not problems:
        # PyTorch's, and functitan's ring and all_gather, have the balanced layout.
        uneven = [n for n in options.seq_lens if n % (2 * options.nproc)]
        problems += [f"--seq-lens: {indivisible(n, options.nproc, 'balanced')}" for n in uneven]
        problems += _head_problems(options)
    known = variants()
    problems += [f"--only: unknown variant {name!r}{near(name, known)}" for name in options.only if name not in known]
    problems += json_problems(options.json)
    if problems:
        raise ConfigError(problems)


def _head_problems(options: LongBench) -> list[str]:
    heads, kv_heads, nproc = options.heads, options.kv_heads, options.nproc
    if heads % kv_heads:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return [f"--kv-heads: is {kv_heads}, which does not divide --heads {heads}; legal: {legal}"]
    if kv_heads % nproc and "ulysses" in _chosen(options):
        hint = "give a multiple of it, or leave out ulysses with --only, which splits heads over the ranks"
        return [f"--kv-heads: is {kv_heads}, which is not divisible by --nproc {nproc}; {hint}"]
    return []


def _print(console: Console, options: LongBench, threads: int, lengths: Mapping[int, Length]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    console.print(
        f"attention of {options.batch_size} sequences, {options.heads} query and {options.kv_heads} key/value heads of "
        f"{options.head_dim}, causal, float32, {options.nproc} ranks (cp={options.nproc}) and one\n"
        f"{options.rounds} rounds in turn, of "
        + ", ".join(f"{length.steps} steps at {seq_len}" for seq_len, length in lengths.items())
        + f"\ntorch {torch.__version__}, {threads} threads a rank, {device}",
        highlight=False,
    )
    console.print(_table(lengths))
    for seq_len, length in lengths.items():
        for mine in (name for name in METHODS if name in length.figures and length.bases):
            over = "; over ".join(_compared(length, mine, base) for base in length.bases.values())
            console.print(f"{seq_len} tokens, {mine} over {over}", highlight=False)
    console.print(NOTES)
    for seq_len, length in lengths.items():
        for name, reason in length.failed.items():
            what = f"{seq_len} tokens, {name}: not measured, nor at longer ones: {reason}"
            console.print(what, markup=False, highlight=False)


def _compared(length: Length, mine: str, base: str) -> str:
    time = " ".join(spread(length.figures[mine].ratios(length.figures[base]), ".2f"))
    return f"{base}: time {time}, peak {_peak_text(length, mine, base)}"


def _table(lengths: Mapping[int, Length]) -> Table:
    table = Table(padding=(0, 1))
    table.add_column("tokens", no_wrap=True, justify="right")
    table.add_column("variant", no_wrap=True)
    over = [f"over\n{title}" for title in (ONE_RANK, "torch")]
    for title in ("ms/step", "(min, max)", *over, "peak\nMiB", *over, "start\ns"):
        table.add_column(title, justify="right", no_wrap=True)
    for seq_len, length in lengths.items():
        for name, f in length.figures.items():
            bases = [length.bases.get(title) for title in (ONE_RANK, "torch")]
            table.add_row(
                str(seq_len),
                name,
                *spread([1e3 * s for s in f.seconds], ".1f"),
                *(spread(f.ratios(length.figures[base]), ".2f")[0] if base else "n/a" for base in bases),
                mib(f.peak_bytes),
                *(_peak_text(length, name, base) for base in bases),
                f"{f.start_seconds:.1f}",
            )
        for name in length.failed:
            table.add_row(str(seq_len), name, "wrong" if name in length.wrong else "failed", "see below")
        table.add_section()
    return table


def _peak_ratio(length: Length, mine: str, base: str) -> float | None:
    peak, other = length.figures[mine].peak_bytes, length.figures[base].peak_bytes
    return peak / other if peak and other else None


def _peak_text(length: Length, mine: str, base: str | None) -> str:
    ratio = None if base is None else _peak_ratio(length, mine, base)
    return "n/a" if ratio is None else f"{ratio:.2f}"


def _as_data(options: LongBench, threads: int, lengths: Mapping[int, Length]) -> dict[str, Any]:
    return {
        "options": {k: v for k, v in attrs.asdict(options).items() if k != "json"},
        "torch": torch.__version__,
        "threads_per_rank": threads,
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "lengths": {str(seq_len): _length_as_data(length) for seq_len, length in lengths.items()},
    }


def _length_as_data(length: Length) -> dict[str, Any]:
    bases, figures = length.bases, length.figures
    return {
        "steps": length.steps,
        "figures": {name: attrs.asdict(f) for name, f in figures.items()},
        "checksums": {name: dict(zip(GRADIENTS, f.first_losses)) for name, f in figures.items()},
        "torch_base": length.torch,
        "ratios": {t: {name: f.ratios(figures[base]) for name, f in figures.items()} for t, base in bases.items()},
        "peak_ratios": {t: {name: _peak_ratio(length, name, base) for name in figures} for t, base in bases.items()},
        "failed": length.failed,
        "disagree": list(length.wrong),
    }
