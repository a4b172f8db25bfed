"""Alternating measurement: every variant lives in a process of its own, and they take turns, round after round.

A shared machine drifts by more than what is to be measured, so figures are only compared within a round. A process
for each keeps one variant's compiler, caches and memory out of another's figures.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import psutil

from train.allocator import keep_freed_memory
from train.errors import UserError

MIB = 2**20


@attrs.frozen
class Work:
    """What a variant runs.

    Attributes:
        step: one step, done when it returns; gives the loss.
        state_bytes: memory of what lives from step to step.
    """

    step: Callable[[], float]
    state_bytes: int


@attrs.frozen
class Figures:
    """What was measured of one variant.

    Attributes:
        seconds: of a step, one figure a round.
        peak_bytes: the state, and what a step adds to the process's resident memory at its peak; None where the system
            does not tell.
        resident_bytes: what the process has grown by since before the variant was made, after all steps: state,
            kept buffers, compiled code.
        start_seconds: from nothing to the end of the first step (capture, compilation).
        loss: after all steps; equal among variants that compute the same thing.
    """

    seconds: list[float]
    peak_bytes: int | None
    resident_bytes: int
    start_seconds: float
    loss: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, other: Figures) -> list[float]:
        """This variant's time over the other's, round by round."""
        return [mine / theirs for mine, theirs in zip(self.seconds, other.seconds)]


def measure(
    makers: Mapping[str, Callable[[], Work]],
    rounds: int,
    steps: int,
    progress: Callable[[str], None] = lambda text: None,
    timeout: float = 600.0,
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures of each variant, and for those that could not be run the reason.

    Args:
        makers: by name, a picklable function that prepares the variant in its own process.
        rounds: in each, every variant runs ``steps`` steps, in turn.
        steps: see ``rounds``; one figure is their mean.
        timeout: seconds for one answer of a process.
    """
    if rounds < 1 or steps < 1:
        raise UserError(f"{rounds} rounds of {steps} steps: give 1 or more of each")
    failed: dict[str, str] = {}
    with _workers(makers) as workers:
        ready: dict[str, float] = {}
        for name, connection in workers.items():
            progress(f"preparing {name}")
            connection.send(("start", None))
            kind, answer = _receive(name, connection, timeout)
            (ready if kind == "ok" else failed)[name] = answer
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        losses: dict[str, float] = {}
        names = list(ready)
        for i in range(rounds):
            # Each round starts with another variant, so that none always runs in the wake of the same one.
            for name in names[i % len(names) :] + names[: i % len(names)]:
                progress(f"round {i + 1} of {rounds}: {name}")
                taken, losses[name] = _ask(name, workers[name], ("run", steps), timeout)
                seconds[name].append(taken)
        # Last, because giving heap back to the system slows the steps that follow.
        memory = {name: _ask(name, workers[name], ("memory", None), timeout) for name in ready}
    return {name: Figures(seconds[name], *memory[name], ready[name], losses[name]) for name in ready}, failed


def _ask(name: str, connection: Connection, command: tuple[str, Any], timeout: float) -> Any:
    try:
        connection.send(command)
    except OSError as error:
        raise UserError(f"{name} ended while it was measured (out of memory?)") from error
    kind, answer = _receive(name, connection, timeout)
    if kind == "error":
        raise UserError(f"{name} failed while it was measured: {answer}")
    return answer


@contextmanager
def _workers(makers: Mapping[str, Callable[[], Work]]) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    processes, connections = [], {}
    try:
        for name, make in makers.items():
            connections[name], theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make), daemon=True, name=f"bench {name}")
            process.start()
            theirs.close()
            processes.append(process)
        yield connections
    finally:
        for connection in connections.values():
            with suppress(OSError):  # it may be gone already, which is what is asked for
                connection.send(("stop", None))
        for process in processes:
            process.join(10)
            process.kill()


def _receive(name: str, connection: Connection, timeout: float) -> tuple[str, Any]:
    if not connection.poll(timeout):
        raise UserError(f"{name} gave no answer for {timeout:.0f} s: try fewer --steps or a smaller model")
    try:
        return connection.recv()
    except EOFError:
        return "error", "its process ended (out of memory?)"


def _serve(connection: Connection, make: Callable[[], Work]) -> None:
    work: Work | None = None
    import torch  # noqa: F401 (so that it is not counted as memory of a variant)

    keep_freed_memory()  # as functitan train does; for every variant alike, or page faults are what is compared
    before = psutil.Process().memory_info().rss
    while True:
        command, argument = connection.recv()
        if command == "stop":
            return
        try:
            if command == "start":
                started = time.perf_counter()
                work = make()
                work.step()
                answer: Any = time.perf_counter() - started
                work.step()  # the second step may still set things up
            elif command == "memory":
                answer = _peak(work), psutil.Process().memory_info().rss - before
            else:
                work.step()  # not timed: caches and threads are another variant's until then
                started = time.perf_counter()
                for _ in range(argument):
                    loss = work.step()
                answer = ((time.perf_counter() - started) / argument, loss)
            connection.send(("ok", answer))
        except Exception as error:  # told to the parent, which decides; the whole story goes to stderr
            if not isinstance(error, UserError):
                traceback.print_exc()
            connection.send(("error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))


def _peak(work: Work) -> int | None:
    """Resident memory that a step needs at its peak, above what the process holds between steps, and the state's."""
    peaks = []
    for _ in range(3):
        _trim()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here (proc(5))
        except OSError:
            return None  # not Linux, or not allowed
        before = psutil.Process().memory_info().rss
        work.step()
        peaks.append(_high_water() - before)
    return work.state_bytes + sorted(peaks)[1]


def _trim() -> None:
    """Gives freed heap back to the system, so that only what a step allocates is counted."""
    import gc

    gc.collect()
    with suppress(OSError, AttributeError):  # another libc than glibc has no malloc_trim; its heap counts then
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
