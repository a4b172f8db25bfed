"""A run from its configuration to its last checkpoint. Run the same configuration again and it goes on."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import torch
from rich.console import Console
from torch import Tensor

import functitan as ft
from functitan import random, tree
from functitan.compiler.boundary import local
from functitan.state import TrainState
from models.llama import flops_per_token
from train import checkpoint
from train import config as configs
from train.allocator import keep_freed_memory
from train.build import Parts, build
from train.checkpoint import Checkpointer
from train.config import RunConfig
from train.data import Data, Loader, build_data, eval_batches, train_batches
from train.distributed import Ranks, start, versions
from train.errors import UserError
from train.finish import finish, free_memory
from train.folder import CHECKPOINTS, compare_config, run_folder, write_config
from train.hardware import device_peak_flops, mfu
from train.metrics import HELD_OUT_LOSS, LOSS, MetricsWriter, Progress, memory
from train.step import make_eval_step, make_train_step

MAX_SKIPPED_IN_A_ROW = 50
"""After so many steps with non-finite gradients, one after the other, a run has diverged and stops."""

LAST_SAVE_S = 30
"""Seconds that a checkpoint which is being written when a run fails still has to be completed."""

# A failed save is raised, and told once by whoever called run(); the checkpointer's own log would tell it again.
logging.getLogger("train.checkpoint").addHandler(logging.NullHandler())


@attrs.define(eq=False)
class _Run:
    """What the loop needs at hand; ``state`` alone changes."""

    config: RunConfig
    ranks: Ranks
    parts: Parts
    data: Data
    state: TrainState
    progress: Progress
    writer: MetricsWriter | None
    """None on all ranks but the first."""
    checkpoints: Checkpointer


def run(config: RunConfig) -> int:
    """Trains as ``config`` says, from the newest checkpoint in its folder if there is one.

    On the ranks that torchrun has started, where it has: every rank calls this; the first one prints and writes.

    Returns:
        The exit status: 0 when all steps are done, 128 + n when signal n (SIGTERM, SIGINT) stopped the run after a
        checkpoint.

    Raises:
        UserError: the run cannot start or go on; one line says why. What was saved stays whole.
        FailedElsewhere: another rank has failed, and raises the reason.
    """
    with start(config.train.timeout_s) as ranks:
        return _run(config, ranks)


def _run(config: RunConfig, ranks: Ranks) -> int:
    ranks.agree(versions(), "versions")
    ranks.agree(configs.flat(config), "configuration")
    if ranks.device.type == "cpu":
        keep_freed_memory()
    parts = build(config, ranks.size)
    _check_memory(parts, config, ranks)
    data = build_data(config.data, config.train.seq_len, config.model.vocab_size)
    ranks.agree({"tokens": data.fingerprint()}, "data (--data.path)")
    with contextlib.ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(run_folder(config.out)))
        steps, folder = config.train.steps, config.out / CHECKPOINTS
        notices: list[str] = [data.summary(), _model_summary(parts, ranks)]
        found = checkpoint.latest(folder, notices.append)
        if found is not None:
            notices += ranks.on_first(lambda: compare_config(config)) or []
        timeout = timedelta(seconds=config.train.timeout_s)
        checkpoints = Checkpointer(folder, config.checkpoint.keep, config.checkpoint.asynchronous, timeout)
        stack.push(lambda kind, error, trace: _part(ranks, checkpoints, error))
        state = _initial_state(parts, config, ranks) if found is None else _load(parts, found, ranks)
        begin = int(state.step)
        writer = ranks.on_first(
            lambda: stack.enter_context(MetricsWriter(config.out, resume_step=begin if found else None))
        )
        if begin < steps:
            # Only now: a run that is refused, or has nothing to do, changes nothing.
            ranks.on_first(lambda: write_config(config))
        progress = stack.enter_context(Progress(steps, None if ranks.is_first else Console(quiet=True)))
        for notice in notices:
            progress.note(notice)
        if found is not None:
            progress.note(f"going on from step {begin} ({found.path})")
        this = _Run(config, ranks, parts, data, state, progress, writer, checkpoints)
        del state
        stop = stack.enter_context(_stop_signals())
        stopped_by = 0
        if begin < steps:
            stopped_by = _train(this, begin, stop)
            checkpoints.wait()
        else:
            progress.note(f"all {steps} steps are done already: raise --train.steps to go on, or give another --out")
        if stopped_by:
            name = signal.Signals(stopped_by).name
            progress.note(f"stopped by {name} at step {int(this.state.step)}; the same command goes on")
            ranks.wait()  # torchrun ends the other ranks when one has ended
            return 128 + stopped_by
        finish(config, ranks, parts, data, this.state, progress.note)
    return 0


def _part(ranks: Ranks, checkpoints: Checkpointer, error: BaseException | None) -> None:
    """Leaves the checkpoints; after an error not before the other ranks know, and within :data:`LAST_SAVE_S`."""
    if error is None:
        checkpoints.close()
    else:
        ranks.tell(error)
        checkpoints.abandon(LAST_SAVE_S)


def _model_summary(parts: Parts, ranks: Ranks) -> str:
    mesh = parts.plan.mesh
    where = str(ranks.device) if ranks.size == 1 else f"{ranks.size} x {ranks.device.type}: {mesh.describe(mesh.axes)}"
    return f"model: {parts.plan.param_count:,} parameters on {where}"


def _check_memory(parts: Parts, config: RunConfig, ranks: Ranks) -> None:
    """Refuses a model whose state and gradients alone are larger than the free memory, before anything is allocated."""
    state = ft.abstract_state(parts.plan, parts.optimizer)
    needed = sum(local(x).nbytes for x in tree.leaves(state)) + parts.plan.bytes_per_rank
    needed += 4 * 8 * len(_batch_rows(parts, config, ranks)) * config.train.seq_len  # a batch's four int64 arrays
    if ranks.device.type == "cpu":
        needed *= ranks.local_size  # a machine's ranks share its memory
    error, free = None, free_memory(ranks.device)
    if needed > free:
        error = UserError(
            f"parameters, gradients, optimizer state and one batch take {needed / 1e9:.1f} GB, and {ranks.device} has "
            f"{free / 1e9:.1f} GB free, activations aside: take a smaller model (see functitan train --help) or batch, "
            "or more ranks (--mesh.fsdp)"
        )
    ranks.raise_any(error)


def _batch_rows(parts: Parts, config: RunConfig, ranks: Ranks) -> range:
    """The rows of every global batch that this rank reads; ranks that only split them further read the same ones."""
    first, count = parts.plan.batch_rows(ranks.rank, config.train.batch_size)
    return range(first, first + count)


def _initial_state(parts: Parts, config: RunConfig, ranks: Ranks) -> TrainState:
    return ft.init_state(parts.plan, random.key(config.seed).to(ranks.device), parts.optimizer)


def _load(parts: Parts, found: checkpoint.Checkpoint, ranks: Ranks) -> TrainState:
    like = ft.abstract_state(parts.plan, parts.optimizer)
    return checkpoint.load(found.path, like, plan=parts.plan, device=ranks.device)


def _train(this: _Run, begin: int, stop: list[int]) -> int:
    """Runs the steps from ``begin`` on, until a rank's ``stop`` has a signal; returns that, or 0 at the end."""
    config, every, parts = this.config, this.config.train, this.parts
    options = {"passes": config.jit.passes, "inductor": config.jit.inductor}
    train_step = make_train_step(parts.model, parts.optimizer, parts.schedule, parts.train_parts)
    train_step = ft.jit(train_step, parts.plan, donate=("state",), **options)
    eval_step = ft.jit(make_eval_step(parts.model, parts.eval_parts), parts.plan, **options)
    meter = _Meter(this, begin)
    rows = _batch_rows(parts, config, this.ranks)
    batches = train_batches(this.data.train, every.batch_size, int(this.state.data["position"]), rows=rows)
    with contextlib.closing(batches) as loader, contextlib.nullcontext() if config.jit.enabled else ft.disable_jit():
        for step in range(begin + 1, every.steps + 1):
            this.state, metrics = train_step(this.state, _placed(this, next(loader)))
            # A signal that comes from here on is for the next step. A few bytes between the hosts: GPUs do not wait.
            stopping = int(*this.ranks.maxima(stop[0] if stop else 0))
            last = step == every.steps or bool(stopping)
            held_out = None
            if every.eval_every and not stopping and (step % every.eval_every == 0 or last):
                with meter.paused():
                    held_out = _evaluate(this, eval_step)
            meter.add(step, metrics, held_out, loader, show=last or step == begin + 1 or step % every.log_every == 0)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                with meter.paused():
                    _save(this, step, meter.streak())
            this.checkpoints.check()
            if stopping:
                return stopping
    return 0


def _save(this: _Run, step: int, skipped_in_a_row: int) -> None:
    """Saves the state, unless it has diverged: what nobody can go on from must not push out a good checkpoint."""
    if skipped_in_a_row > 1:
        this.progress.note(f"step {step}: not saved, since the last {skipped_in_a_row} steps changed nothing")
        return
    broken = not all(bool(torch.isfinite(local(p)).all()) for p in tree.leaves(this.state.params))
    if any(this.ranks.maxima(broken)):
        raise UserError(
            f"the parameters are not finite after step {step}: the run has diverged. {_advice(this)}"
        )
    this.checkpoints.save(step, this.state, this.parts.plan)


def _advice(this: _Run) -> str:
    this.checkpoints.wait()
    kept = checkpoint.latest(this.checkpoints.folder, notice=lambda text: None)
    where = f"goes on from step {kept.step}, the last checkpoint" if kept else "starts from the beginning"
    return f"The same command with a lower --optim.learning-rate {where}"


def _evaluate(this: _Run, eval_step: Any) -> float | None:
    """Mean loss over the held-out samples, in nats a token; None if there are none."""
    config, rows = this.config.train, _batch_rows(this.parts, this.config, this.ranks)
    batches = eval_batches(this.data.held_out, config.batch_size, config.eval_batches, rows=rows)
    with contextlib.closing(batches):
        sums = [eval_step(this.state.params, _placed(this, batch)) for batch in batches]
    tokens = sum(int(s["tokens"]) for s in sums)
    return sum(float(s["loss_sum"]) for s in sums) / tokens if tokens else None


def _placed(this: _Run, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's rows of a batch as the batch, on the mesh and the device."""
    return ft.shard_batch(this.parts.plan, tree.map(lambda x: x.to(this.ranks.device, non_blocking=True), rows))


class _Meter:
    """Turns the metrics of steps into lines: reads them only where a line is due, so that a GPU is not waited for."""

    def __init__(self, this: _Run, begin: int) -> None:
        self.this = this
        self.pending: list[tuple[int, dict[str, Tensor]]] = []
        self.skipped_in_a_row = 0
        self.peak = device_peak_flops(this.ranks.device, this.config.train.precision)
        self.flops = flops_per_token(this.config.model, this.config.train.seq_len)
        self.begin = begin
        self.since, self.since_step, self.waited = time.perf_counter(), begin, 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as time of a step."""
        self.this.state.step.item()  # a GPU may still be busy with steps, whose time this is not
        before = time.perf_counter()
        yield
        self.since += time.perf_counter() - before

    def add(self, step: int, metrics: dict[str, Tensor], held_out: float | None, loader: Loader, *, show: bool) -> None:
        self.pending.append((step, metrics))
        if not show and held_out is None:
            return
        rates = self._rates(step, loader) if step > self.begin + 1 else self._first(loader)
        for at, values in self.pending:
            row = {name: value.item() for name, value in values.items()}
            self._count_skipped(at, row)
            if at == step:
                row |= rates | self._memory()
                if held_out is not None:
                    row[HELD_OUT_LOSS] = held_out
                self.this.progress.update(step, row)
            if self.this.writer is not None and (at == step or row["skipped"]):
                self.this.writer.write(at, row)
        self.pending.clear()

    def streak(self) -> int:
        """How many steps, up to the last one, were skipped in a row."""
        count = 0
        for _, values in reversed(self.pending):
            if not int(values["skipped"]):
                return count
            count += 1
        return count + self.skipped_in_a_row

    def _first(self, loader: Loader) -> dict[str, None]:
        """The first step waits for the data and for the capture, so that its time says nothing."""
        self.since, self.since_step, self.waited = time.perf_counter(), self.begin + 1, loader.wait_s
        return dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "step_s", "data_wait_s", "mfu"))

    def _rates(self, step: int, loader: Loader) -> dict[str, float | None]:
        config, ranks = self.this.config.train, self.this.ranks
        self.this.state.step.item()  # the steps are done now, not only queued
        now = time.perf_counter()
        steps = step - self.since_step
        # A step takes as long as it takes the slowest rank, and so does a wait for data.
        seconds, wait = ranks.maxima(now - self.since, loader.wait_s - self.waited)
        self.since, self.since_step, self.waited = now, step, loader.wait_s
        tokens_per_s = steps * config.batch_size * config.seq_len / seconds
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / ranks.size,
            "step_s": seconds / steps,
            "data_wait_s": wait / steps,
            "mfu": mfu(tokens_per_s / ranks.size, self.flops, self.peak),
        }

    def _memory(self) -> dict[str, int]:
        """That of the rank that has most."""
        own = memory(self.this.ranks.device)
        return dict(zip(own, map(int, self.this.ranks.maxima(*own.values()))))

    def _count_skipped(self, step: int, row: dict[str, Any]) -> None:
        if not row["skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.this.progress.note(
            f"step {step}: the gradient was not finite (norm {row['grad_norm']}, loss {row[LOSS]}); "
            "parameters and optimizer state stay as they were"
        )
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"the gradients of the last {MAX_SKIPPED_IN_A_ROW} steps, up to step {step}, were not finite: the run "
                f"has diverged. {_advice(self.this)}"
            )


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and the first SIGINT put their number into; any signal beside a SIGINT interrupts at once.

    A second Ctrl-C reaches a rank as a SIGTERM after the SIGINT: the launcher passes on the first one only as it is.
    """
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received and signal.SIGINT in (number, received[0]):
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
