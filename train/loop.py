"""A run from its configuration to its last checkpoint. Run the same configuration again and it goes on."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil
import torch
from torch import Tensor

import functitan as ft
from functitan import random, tree
from functitan.state import TrainState
from models.llama import flops_per_token
from train import checkpoint
from train.allocator import keep_freed_memory
from train.build import Parts, build
from train.checkpoint import Checkpointer
from train.config import RunConfig
from train.config_text import ConfigError
from train.data import Data, Loader, build_data, eval_batches, train_batches
from train.errors import UserError
from train.folder import CHECKPOINTS, compare_config, run_folder, write_config
from train.hardware import default_device, device_peak_flops, mfu
from train.metrics import HELD_OUT_LOSS, LOSS, MetricsWriter, Progress, memory, plot_loss, read_metrics
from train.options import world_size
from train.sample import continuation
from train.step import make_eval_step, make_train_step

MAX_SKIPPED_IN_A_ROW = 50
"""After so many steps with non-finite gradients, one after the other, a run has diverged and stops."""


# A failed save is raised, and told once by whoever called run(); the checkpointer's own log would tell it again.
logging.getLogger("train.checkpoint").addHandler(logging.NullHandler())


@attrs.define(eq=False)
class _Run:
    """What the loop needs at hand; ``state`` alone changes."""

    config: RunConfig
    parts: Parts
    data: Data
    device: torch.device
    state: TrainState
    progress: Progress
    writer: MetricsWriter
    checkpoints: Checkpointer


def run(config: RunConfig) -> int:
    """Trains as ``config`` says, from the newest checkpoint in its folder if there is one.

    Returns:
        The exit status: 0 when all steps are done, 128 + n when signal n (SIGTERM, SIGINT) stopped the run after a
        checkpoint.

    Raises:
        UserError: the run cannot start or go on; one line says why. What was saved stays whole.
    """
    device = default_device()
    if device.type == "cpu":
        keep_freed_memory()
    parts = build(config, world_size(os.environ) or 1)
    _check_one_device(parts)
    _check_memory(parts, config, device)
    data = build_data(config.data, config.train.seq_len, config.model.vocab_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_folder(config.out))
        steps, folder = config.train.steps, config.out / CHECKPOINTS
        notices: list[str] = [data.summary(), f"model: {parts.plan.param_count:,} parameters on {device}"]
        found = checkpoint.latest(folder, notices.append)
        if found is not None:
            notices += compare_config(config)
        checkpoints = Checkpointer(folder, config.checkpoint.keep, config.checkpoint.asynchronous)
        stack.callback(checkpoints.close)
        state = _initial_state(parts, config, device) if found is None else _load(parts, found, device)
        start = int(state.step)
        writer = stack.enter_context(MetricsWriter(config.out, resume_step=start if found else None))
        if start < steps:
            write_config(config)  # only now: a run that is refused, or has nothing to do, changes nothing
        progress = stack.enter_context(Progress(steps))
        for notice in notices:
            progress.note(notice)
        if found is not None:
            progress.note(f"going on from step {start} ({found.path})")
        this = _Run(config, parts, data, device, state, progress, writer, checkpoints)
        del state
        stop = stack.enter_context(_stop_signals())
        stopped_by = None
        if start < steps:
            stopped_by = _train(this, start, stop)
            checkpoints.wait()
        else:
            progress.note(f"all {steps} steps are done already: raise --train.steps to go on, or give another --out")
        if stopped_by is not None:
            name = signal.Signals(stopped_by).name
            progress.note(f"stopped by {name} at step {int(this.state.step)}; the same command goes on")
            return 128 + stopped_by
        _finish(this)
    return 0


def _check_one_device(parts: Parts) -> None:
    mesh = parts.plan.mesh
    if mesh.size != 1:
        raise ConfigError([f"{mesh} needs {mesh.size} devices, and this version trains on one: leave --mesh.* at 1"])


def _check_memory(parts: Parts, config: RunConfig, device: torch.device) -> None:
    """Refuses a model whose state and gradients alone are larger than the free memory, before anything is allocated."""
    state = ft.abstract_state(parts.plan, parts.optimizer)
    needed = sum(x.numel() * x.element_size() for x in tree.leaves(state)) + parts.plan.param_bytes
    needed += 4 * 8 * config.train.batch_size * config.train.seq_len  # the four int64 arrays of one batch
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"parameters, gradients, optimizer state and one batch take {needed / 1e9:.1f} GB, and {device} has "
            f"{free / 1e9:.1f} GB free, activations aside: take a smaller model (see functitan train --help) or batch"
        )


def _initial_state(parts: Parts, config: RunConfig, device: torch.device) -> TrainState:
    return ft.init_state(parts.plan, random.key(config.seed).to(device), parts.optimizer)


def _load(parts: Parts, found: checkpoint.Checkpoint, device: torch.device) -> TrainState:
    return checkpoint.load(found.path, ft.abstract_state(parts.plan, parts.optimizer), device=device)


def _train(this: _Run, start: int, stop: list[int]) -> int | None:
    """Runs the steps from ``start`` on, until the list ``stop`` has a signal; returns that, or None at the end."""
    config, every = this.config, this.config.train
    train_step = make_train_step(this.parts.model, this.parts.optimizer, this.parts.schedule, every.accumulation)
    eval_step = make_eval_step(this.parts.model)
    if config.jit.enabled:
        options = {"passes": config.jit.passes, "inductor": config.jit.inductor}
        train_step = ft.jit(train_step, this.parts.plan, donate=("state",), **options)
        eval_step = ft.jit(eval_step, **options)
    meter = _Meter(this, start)
    batches = train_batches(this.data.train, every.batch_size, int(this.state.data["position"]))
    with contextlib.closing(batches) as loader:
        for step in range(start + 1, every.steps + 1):
            batch = _to(next(loader), this.device)
            this.state, metrics = train_step(this.state, batch)
            stopping = list(stop)  # a signal that comes from here on is for the next step
            last = step == every.steps or bool(stopping)
            held_out = None
            if every.eval_every and not stopping and (step % every.eval_every == 0 or last):
                with meter.paused():
                    held_out = _evaluate(this, eval_step)
            meter.add(step, metrics, held_out, loader, show=last or step == start + 1 or step % every.log_every == 0)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                with meter.paused():
                    _save(this, step, meter.streak())
            this.checkpoints.check()
            if stopping:
                return stopping[0]
    return None


def _save(this: _Run, step: int, skipped_in_a_row: int) -> None:
    """Saves the state, unless it has diverged: what nobody can go on from must not push out a good checkpoint."""
    if skipped_in_a_row > 1:
        this.progress.note(f"step {step}: not saved, since the last {skipped_in_a_row} steps changed nothing")
        return
    if not all(bool(torch.isfinite(p).all()) for p in tree.leaves(this.state.params)):
        raise UserError(
            f"the parameters are not finite after step {step}: the run has diverged. {_advice(this)}"
        )
    this.checkpoints.save(step, this.state)


def _advice(this: _Run) -> str:
    this.checkpoints.wait()
    kept = checkpoint.latest(this.checkpoints.folder, notice=lambda text: None)
    where = f"goes on from step {kept.step}, the last checkpoint" if kept else "starts from the beginning"
    return f"The same command with a lower --optim.learning-rate {where}"


def _evaluate(this: _Run, eval_step: Any) -> float | None:
    """Mean loss over the held-out samples, in nats a token; None if there are none."""
    config = this.config.train
    with contextlib.closing(eval_batches(this.data.held_out, config.batch_size, config.eval_batches)) as batches:
        sums = [eval_step(this.state.params, _to(batch, this.device)) for batch in batches]
    tokens = sum(int(s["tokens"]) for s in sums)
    return sum(float(s["loss_sum"]) for s in sums) / tokens if tokens else None


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return tree.map(lambda x: x.to(device, non_blocking=True), batch)


class _Meter:
    """Turns the metrics of steps into lines: reads them only where a line is due, so that a GPU is not waited for."""

    def __init__(self, this: _Run, start: int) -> None:
        self.this = this
        self.pending: list[tuple[int, dict[str, Tensor]]] = []
        self.skipped_in_a_row = 0
        self.peak = device_peak_flops(this.device, this.config.train.precision)
        self.flops = flops_per_token(this.config.model, this.config.train.seq_len)
        self.start = start
        self.since, self.since_step, self.waited = time.perf_counter(), start, 0.0

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
        rates = self._rates(step, loader) if step > self.start + 1 else self._first(loader)
        for at, values in self.pending:
            row = {name: value.item() for name, value in values.items()}
            self._count_skipped(at, row)
            if at == step:
                row |= rates | memory(self.this.device)
                if held_out is not None:
                    row[HELD_OUT_LOSS] = held_out
                self.this.progress.update(step, row)
            if at == step or row["skipped"]:
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
        self.since, self.since_step, self.waited = time.perf_counter(), self.start + 1, loader.wait_s
        return dict.fromkeys(("tokens_per_s", "step_s", "data_wait_s", "mfu"))

    def _rates(self, step: int, loader: Loader) -> dict[str, float | None]:
        config = self.this.config.train
        self.this.state.step.item()  # the steps are done now, not only queued
        now = time.perf_counter()
        seconds, steps = now - self.since, step - self.since_step
        wait, self.waited = loader.wait_s - self.waited, loader.wait_s
        self.since, self.since_step = now, step
        tokens_per_s = steps * config.batch_size * config.seq_len / seconds
        return {
            "tokens_per_s": tokens_per_s,
            "step_s": seconds / steps,
            "data_wait_s": wait / steps,
            "mfu": mfu(tokens_per_s, self.flops, self.peak),
        }

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
    """A list that SIGTERM and the first SIGINT put their number into; a second SIGINT interrupts at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(this: _Run) -> None:
    """The plot, a sample, and where everything is."""
    out, step = this.config.out, int(this.state.step)
    note = this.progress.note
    try:
        plot_loss(out)
    except OSError as error:  # the run itself is done and saved
        note(f"no plot: {error.filename or out}: {error.strerror}")
    evaluated = [(row["step"], row[HELD_OUT_LOSS]) for row in read_metrics(out) if HELD_OUT_LOSS in row]
    if evaluated:
        at, loss = evaluated[-1]
        uniform = math.log(this.config.model.vocab_size)
        note(f"held-out loss after {at} steps: {loss:.3f} nats a token (a uniform guess: {uniform:.3f})")
    if skipped := int(this.state.skipped):
        note(f"{skipped} of {step} steps were skipped: their gradients were not finite")
    prompt = _prompt(this)
    text = prompt + continuation(
        this.parts.model, this.state.params, this.data.tokenizer, prompt, this.config.train.seq_len, tokens=300
    )
    # A young model writes any byte: none of them is to reach the terminal as a command.
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    note("\n".join(["", f"a sample after {step} steps:", "", *(f"    {line}" for line in text.split("\n")), ""]))
    note(f"files of this run in {_shown(out)}: config.yaml, metrics.jsonl, loss.png, checkpoints/, tensorboard/")
    note(f"more text: functitan sample {_shown(out)} --prompt 'class '")


def _prompt(this: _Run) -> str:
    """The beginning of a text such as the model was trained on."""
    if not this.config.data.path:
        return "import sys\n\ndef "
    sample = (this.data.held_out if len(this.data.held_out) else this.data.train)[0]
    return this.data.tokenizer.decode(sample["tokens"][:16].tolist())


def _shown(path: Path) -> str:
    """The path as short as it can be given from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
