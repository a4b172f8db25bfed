"""Real ranks for tests: processes that are started once and run one function after another."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankPool:
    """``size`` processes in one Gloo group that run one function after another, each within a timeout.

    Args:
        collective_timeout: seconds that a rank waits for the others in one collective.
    """

    def __init__(self, size: int, folder: Path, collective_timeout: float = 40) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            args = (rank, size, str(folder / "store"), collective_timeout, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)

    def run(self, function: Callable, *args: Any, timeout: float = 60) -> list[Any]:
        """``function(rank, *args)`` on every rank; its results. The ranks' tracebacks as one AssertionError."""
        for connection in self.connections:
            connection.send((function, args))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(timeout):
                self.close()
                raise AssertionError(f"rank {rank} did not answer within {timeout} s in {function.__name__}")
            answers.append(connection.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(answers) if text is not None]
        assert not failed, "\n".join(failed)
        return [result for result, _ in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: str, collective_timeout: float, connection: Any) -> None:
    torch.set_num_threads(1)
    # A test that would hang fails in the ranks before the pool gives them up.
    timeout = timedelta(seconds=collective_timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(rank, *args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
