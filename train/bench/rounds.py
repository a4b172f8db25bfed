"""Alternating measurement: every variant lives in processes of its own, and they take turns, round after round.

A shared machine drifts by more than what is to be measured, so figures are only compared within a round. Processes
for each keep one variant's compiler, caches and memory out of another's figures. A variant of several ranks is as many
processes, which do everything at the same time.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import psutil

from train.allocator import keep_freed_memory
from train.errors import UserError

MIB = 2**20
FIRST_STEPS = 3
"""Steps of a variant before it is measured: capture and compilation, and what the next ones may still set up."""


@attrs.frozen
class Work:
    """What a variant runs on a rank.

    Attributes:
        step: one step, done when it returns; gives the loss, of this rank's rows or of all.
        state_bytes: memory of what lives from step to step.
        device_type: "cpu" or "cuda": whose memory is measured.
    """

    step: Callable[[], float]
    state_bytes: int
    device_type: str = "cpu"


@attrs.frozen
class Figures:
    """What was measured of one variant; of several ranks, the slowest's and the largest's.

    Attributes:
        seconds: of a step, one figure a round.
        peak_bytes: the state, and what a step adds at its peak to the process's resident memory (on a GPU: to what is
            allocated); None where the system does not tell.
        resident_bytes: what the process has grown by since before the variant was made, after all steps: state,
            kept buffers, compiled code (on a GPU: what the allocator has reserved).
        start_seconds: from nothing to the end of the first step (capture, compilation).
        first_losses: of the first steps, the ranks' mean.
        loss: after all steps, the ranks' mean; equal among variants that compute the same thing.
    """

    seconds: list[float]
    peak_bytes: int | None
    resident_bytes: int
    start_seconds: float
    first_losses: list[float]
    loss: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratios(self, other: Figures) -> list[float]:
        """This variant's time over the other's, round by round."""
        return [mine / theirs for mine, theirs in zip(self.seconds, other.seconds)]


def measure(
    makers: Mapping[str, Sequence[Callable[[], Work]]],
    rounds: int,
    steps: int,
    progress: Callable[[str], None] = lambda text: None,
    timeout: float = 600.0,
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Figures of each variant, and for those that could not be run to the end the reason.

    Args:
        makers: by name, for every rank of the variant a picklable function that prepares it in a process of its own.
        rounds: in each, every variant runs ``steps`` steps, in turn.
        steps: see ``rounds``; one figure is their median.
        progress: is told what is being done.
        timeout: seconds for one answer of a variant; one that takes longer has failed.
    """
    if rounds < 1 or steps < 1:
        raise UserError(f"{rounds} rounds of {steps} steps: give 1 or more of each")
    groups: dict[str, _Group] = {}
    failed: dict[str, str] = {}

    def ask(name: str, command: str, argument: Any = None) -> list[Any] | None:
        """The ranks' answers; None if one of them fails, and then the variant is given up."""
        try:
            return groups[name].ask(command, argument, timeout)
        except _Failed as error:
            groups.pop(name).kill()
            failed[name] = error.reason
            if error.story:
                print(f"{name}: {error.story}", file=sys.stderr)
            return None

    starts: dict[str, list[tuple[float, list[float]]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    losses: dict[str, float] = {}
    resident: dict[str, int] = {}
    peaks: dict[str, int | None] = {}
    try:
        for name, ranks in makers.items():
            progress(f"preparing {name}")
            groups[name] = _Group(name, ranks)
            if (answers := ask(name, "start")) is not None:
                starts[name] = answers
        for i in range(rounds):
            # Each round starts with another variant, so that none always runs in the wake of the same one.
            names = list(groups)
            first = i % len(names) if names else 0
            for name in names[first:] + names[:first]:
                progress(f"round {i + 1} of {rounds}: {name}")
                if (answers := ask(name, "run", steps)) is not None:
                    times, values, grown = zip(*answers)
                    seconds[name].append(max(map(statistics.median, times)))
                    losses[name], resident[name] = statistics.fmean(values), max(grown)
        for name in list(groups):
            progress(f"memory of {name}")
            if (answers := ask(name, "peak")) is not None:
                peaks[name] = None if None in answers else max(answers)
        return {
            name: Figures(
                seconds[name],
                peaks[name],
                resident[name],
                max(taken for taken, _ in starts[name]),
                [statistics.fmean(values) for values in zip(*(first for _, first in starts[name]))],
                losses[name],
            )
            for name in groups
        }, failed
    finally:
        for group in groups.values():
            group.stop()


class _Failed(Exception):
    """A variant gave no answer: why, in a line, and the traceback unless it is a user's mistake or there is none."""

    def __init__(self, reason: str, story: str = "", ended: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.story, self.ended = reason, story, ended


class _Group:
    """The processes of one variant, one a rank."""

    def __init__(self, name: str, makers: Sequence[Callable[[], Work]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.connections = [], []
        for rank, make in enumerate(makers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make), daemon=True, name=f"bench {name} {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def ask(self, command: str, argument: Any, timeout: float) -> list[Any]:
        """What every rank answers to the command.

        Raises:
            _Failed: one of them fails, ends, or needs longer than ``timeout`` seconds.
        """
        for connection in self.connections:
            with suppress(OSError):  # of a process that has ended, which shows below
                connection.send((command, argument))
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        answers: dict[int, Any] = {}
        failures: list[_Failed] = []
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    kind, answer = connection.recv()
                except (EOFError, OSError):
                    failures.append(_Failed(f"{self._which(rank)}its process ended (out of memory?)", ended=True))
                    continue
                if kind == "ok":
                    answers[rank] = answer
                else:
                    failures.append(_Failed(self._which(rank) + answer[0], answer[1]))
            if failures:
                # The others wait for it in vain, or fail because of it: a moment to see whether one of them has ended.
                deadline = min(deadline, time.monotonic() + 1)
        if failures:
            raise next((failure for failure in failures if failure.ended), failures[0])
        if waiting:
            raise _Failed(f"{self._which(*waiting.values())}no answer for {timeout:g} s")
        return [answers[rank] for rank in range(len(self.connections))]

    def _which(self, *ranks: int) -> str:
        if len(self.connections) == 1:
            return ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "

    def stop(self) -> None:
        """Ends the processes, which are waiting for a command."""
        for connection in self.connections:
            with suppress(OSError):  # it may be gone already, which is what is asked for
                connection.send(("stop", None))
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        """Ends the processes, whatever they are at, and those that they have started (compilers)."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()


def _serve(connection: Connection, make: Callable[[], Work]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends these
    import torch  # noqa: F401 (so that it is not counted as memory of a variant)

    keep_freed_memory()  # as functitan train does; for every variant alike, or page faults are what is compared
    before = psutil.Process().memory_info().rss
    work: Work | None = None
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:  # the parent is gone
            return
        if command == "stop":
            return
        try:
            if command == "start":
                started = time.perf_counter()
                work = make()
                losses = [work.step()]
                taken = time.perf_counter() - started
                losses += [work.step() for _ in range(FIRST_STEPS - 1)]
                _trim(work)
                answer: Any = taken, losses
            elif command == "run":
                answer = (*_run(work, argument), _resident(work, before))
                _trim(work)
            else:
                answer = _peak(work)
            connection.send(("ok", answer))
        except Exception as error:  # told to the parent, which decides
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            connection.send(("error", (reason, "" if isinstance(error, UserError) else traceback.format_exc())))


def _run(work: Work, steps: int) -> tuple[list[float], float]:
    """Seconds of each of ``steps`` steps, and the last one's loss."""
    work.step()  # not timed: caches, threads and memory were another variant's until then
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        loss = work.step()
        times.append(time.perf_counter() - started)
    return times, loss


def _resident(work: Work, before: int) -> int:
    if work.device_type == "cuda":
        import torch

        return torch.cuda.memory_reserved()
    return psutil.Process().memory_info().rss - before


def _peak(work: Work) -> int | None:
    """Memory that a step needs at its peak above what is held between steps, and the state's."""
    peaks = []
    for _ in range(3):
        _trim(work)
        measured = _step_on_gpu(work) if work.device_type == "cuda" else _step_on_cpu(work)
        if measured is None:
            return None
        peaks.append(measured)
    return work.state_bytes + sorted(peaks)[1]


def _step_on_cpu(work: Work) -> int | None:
    """What a step adds to resident memory at its peak; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here (proc(5))
    except OSError:
        measured = None  # not Linux, or not allowed
    else:
        measured = psutil.Process().memory_info().rss
    work.step()  # in any case: other ranks may be able to tell, and wait for this one
    return None if measured is None else _high_water() - measured


def _step_on_gpu(work: Work) -> int:
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work.step()
    return torch.cuda.max_memory_allocated() - before


def _trim(work: Work) -> None:
    """Gives freed memory back to the system: the other variants have their turn, or only a step is to be counted."""
    gc.collect()
    if work.device_type == "cuda":
        import torch

        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # another libc than glibc has no malloc_trim; its heap counts then
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
