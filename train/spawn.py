"""Starting the ranks of a run on this machine, and staying with them to their end.

torch's elastic launcher (what torchrun is made of) starts and watches them; here is what it leaves open: the exit
status, one line in place of its own traceback, and that no rank outlives the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from train.config_text import ConfigError


def run_ranks(command: Sequence[str], nproc: int, stop_timeout_s: int) -> int:
    """Runs ``python COMMAND`` on ``nproc`` ranks of this machine until all have ended, and returns the exit status.

    That is 0, or the status of the rank that failed first. SIGTERM and SIGINT are passed on to the ranks, which save
    and stop; the status is then 128 + the signal's number. Whatever happens, no rank is left when this returns.

    Args:
        command: what follows the interpreter: ``[*this_program(), "train", "debug"]``.
        nproc: how many ranks.
        stop_timeout_s: seconds that the ranks have to save, after a signal, before they are killed.

    Raises:
        ConfigError: there are fewer GPUs than ranks on a machine that has some.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < nproc:
        raise ConfigError([f"--nproc: is {nproc}, but this machine has {gpus} GPUs; give 1 to {gpus}"])
    # Both are read from the environment by what comes after: the ranks, and the launcher.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(_cores() // nproc, 1)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(stop_timeout_s))
    # The launcher's own lines say in several screens what a rank or _told() says in one line.
    log = logging.getLogger("torch.distributed.elastic")
    log.propagate = False
    log.addHandler(logging.NullHandler())
    before = set(psutil.Process().children())
    with tempfile.TemporaryDirectory(prefix="functitan-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a port that is free
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _told(error.failures)
        except SignalException as error:
            return 128 + error.sigval
        finally:
            # The launcher ends them, but for one that it was itself interrupted in.
            for child in set(psutil.Process().children()) - before:
                child.kill()
                child.wait()
    return 0


def this_program() -> list[str]:
    """What makes the interpreter run this functitan's command line, whatever the working folder has for a train.py."""
    root = str(Path(__file__).parents[1])
    # Only where it is not installed: a folder of packages must not come before the standard library.
    code = (
        f"import sys; root = {root!r}; root in sys.path or sys.path.insert(0, root); "
        "from train.cli import main; sys.exit(main())"
    )
    return ["-P", "-c", code]


def _told(failures: dict[int, ProcessFailure]) -> int:
    """The exit status of failed ranks; says what a rank cannot say itself: that it was killed."""
    # What comes later is a consequence, or the launcher's own doing. Times are in whole seconds.
    begin = min(failure.timestamp for failure in failures.values())
    first = {rank: failure for rank, failure in failures.items() if failure.timestamp <= begin + 1}
    killed = [rank for rank, failure in first.items() if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM]
    if not killed:
        # A rank that ends by itself has said why, and those that end because of it have taken over its status.
        own = [failure.exitcode for failure in failures.values() if failure.exitcode > 0]
        if own:
            return own[0]
    rank = min(killed or first)
    number = -first[rank].exitcode
    hint = "; the system does that when memory is short" if number == signal.SIGKILL else ""
    print(f"functitan: error: rank {rank} was killed by {signal.Signals(number).name}{hint}", file=sys.stderr)
    return 128 + number


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
