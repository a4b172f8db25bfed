"""The ranks of a run: how they meet, agree, fail together and part. What they compute together is elsewhere.

torchrun (or ``functitan train --nproc``) tells each rank who it is through its environment. All agreement is over a
Gloo group of its own: it costs a GPU nothing, and no collective of the model or of a checkpoint can get between.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from train.checkpoint.ranks import Unreachable
from train.config_text import ConfigError
from train.errors import UserError
from train.hardware import default_device
from train.options import world_size

T = TypeVar("T")

_ASK = timedelta(seconds=10)
"""For an answer of the store."""
_PATIENCE_S = 5
"""Seconds that a rank which lost the others waits for word of why; its launcher may end it sooner."""
_NCCL_GRACE = timedelta(seconds=60)
"""NCCL's watchdog aborts the process: the Gloo group, which raises an error that can be told, is to be first."""


class FailedElsewhere(Exception):
    """This rank cannot go on because another has failed, which has said why. ``status`` is that one's exit status."""

    def __init__(self, rank: int, status: int):
        super().__init__(f"rank {rank} has failed")
        self.rank, self.status = rank, status


@frozen(eq=False)
class Ranks:
    """This rank and how it agrees with the others. ``Ranks()`` is a process alone, with which all agreement is trivial.

    Every method is collective but for the properties and ``tell``: all ranks call it, in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        local_size: how many there are on this machine.
        device: that this rank computes on.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: torch.device = field(factory=default_device)
    _group: Any = None
    _failures: _Failures | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0

    def maxima(self, *values: float) -> list[float]:
        """Of each value the largest on any rank. Values are float64, and so exact for integers below 2**53."""
        if self.size == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. They travel pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: T) -> T:
        """The first rank's value, which travels pickled."""
        if self.size == 1:
            return value
        values = [value if self.is_first else None]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def on_first(self, function: Callable[[], T]) -> T | None:
        """What ``function()`` returns on the first rank, where alone it is called; None on the others.

        Raises:
            UserError, OSError: on every rank, where the first one's call raises it.
        """
        value = error = None
        if self.is_first:
            try:
                value = function()
            except (UserError, OSError) as caught:
                error = caught
        self.raise_any(error)
        return value

    def raise_any(self, error: UserError | OSError | None) -> None:
        """Raises on every rank the error of the first rank that has one, if any has."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        # Not the exceptions themselves: what else they hold may not travel.
        found = next((told for told in self.gather(_as_told(error)) if told is not None), None)
        if found is not None:
            kind, *arguments = found
            raise kind(*arguments) from error

    def tell(self, error: BaseException) -> None:
        """Lets the other ranks know that this one fails of ``error``, before what it may still do at its end.

        Not collective. :func:`start` does it for what leaves its context.
        """
        if self._failures is not None:
            self._failures.tell(error)

    def agree(self, facts: Mapping[str, Any], what: str) -> None:
        """Makes sure that all ranks hold the same facts, by their text.

        Args:
            facts: name -> value.
            what: the facts are of: "configuration".

        Raises:
            ConfigError: on every rank, naming each fact that differs, its values, and which ranks have which.
        """
        found = disagreements(self.gather({name: str(value) for name, value in facts.items()}))
        if found:
            raise ConfigError([f"the ranks differ in their {what}: {line}" for line in found])

    def wait(self) -> None:
        """Returns when all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self._group)


@contextlib.contextmanager
def start(timeout_s: int, env: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The ranks that torchrun's environment describes, as a process group while the context lasts.

    Without torchrun, or with one rank, nothing is started. The default group is NCCL for tensors on GPUs, of which
    each rank takes the one of its LOCAL_RANK, and Gloo for those on CPUs.

    An exception that leaves the context on several ranks comes out of the one that had it first; the others, which
    mostly just lost their connection to that one, get :class:`FailedElsewhere`. So what is printed is the cause, once.
    Where all that ranks have to tell is that they lost others, killed or hung, one of them gets a UserError with the
    ranks that were not heard of.

    Args:
        timeout_s: seconds that a rank waits for another, here and in every collective.

    Raises:
        ConfigError: torchrun's variables are incomplete.
        UserError: there is no GPU for this rank, or the others did not come.
    """
    if (world_size(env) or 1) == 1:
        yield Ranks()
        return
    rank, size, local_rank, local_size = (
        _number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    device = _device(local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        backend = "gloo" if device.type == "cpu" else "nccl"
        limit = timeout if backend == "gloo" else timeout + _NCCL_GRACE
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        group = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:  # of the store, the backends, and an address that is none
        where = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
        reason = _reason(error)
        raise UserError(f"rank {rank} of {size} could not meet the others at {where}: {reason}") from error
    # torchrun may start all anew with the same store: each attempt has its own first failure.
    failures = _Failures(_of_attempt(store, env), rank, size, timeout_s)
    try:
        yield Ranks(rank, size, local_size, device, group, failures)
    except BaseException as error:
        failures.settle(error)
    # Not after a failure: others may be gone, and to part from them could take until the timeout.
    dist.destroy_process_group()


@frozen(eq=False)
class _Failures:
    """What the ranks of a job tell each other about their failures, through the store that they met at."""

    store: dist.Store
    rank: int
    size: int
    timeout_s: int

    def tell(self, error: BaseException) -> tuple[int, int] | None:
        """The rank that was first to fail of its own, and its exit status; None if this one only lost the others."""
        status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ConfigError) else 1
        try:
            self.store.set_timeout(_ASK)
            if lost_others(error):
                self.store.set(f"lost/{self.rank}", "")
                return None
            return self._first(status)
        except dist.DistError:
            return self.rank, status  # nobody is left to ask: better said twice than not at all

    def settle(self, error: BaseException) -> NoReturn:
        """Raises ``error`` if this rank is the first to fail, else FailedElsewhere.

        The first one has told the store before its connections close, so that whoever fails of that comes after it.

        Raises:
            UserError: in place of an ``error`` that only says that others are gone, if none of them has said why.
        """
        first = self.tell(error)
        if first is None:
            error, first = self._explained(error)
        if first[0] != self.rank:
            raise FailedElsewhere(*first) from error
        if isinstance(error, Exception) and not isinstance(error, (UserError, OSError)):
            get_error_handler().record_exception(error)  # for torchrun, which shows the cause in its table
        raise error

    def _explained(self, error: BaseException) -> tuple[BaseException, tuple[int, int]]:
        """What to say for an error that only tells of a loss, and who is to say something."""
        silent: list[int] = []
        try:
            # Not store.wait(), which logs several lines when the time is over.
            end = time.monotonic() + _PATIENCE_S
            while time.monotonic() < end and not self.store.check(["failed"]):
                time.sleep(0.1)
            silent = [rank for rank in range(self.size) if not self.store.check([f"lost/{rank}"])]
            first = self._first(1)
        except dist.DistError:
            first = self.rank, 1  # as above
        what = f"{_named(silent)} ended or did not answer" if silent else "the ranks lost each other"
        explained = UserError(
            f"{what} within {self.timeout_s} s (--train.timeout-s), as rank {self.rank} found: look for what "
            f"was printed there last, and at the machine; raise the time if one was only slow ({_reason(error)})"
        )
        explained.__cause__ = error
        return explained, first

    def _first(self, status: int) -> tuple[int, int]:
        rank, status = map(int, self.store.compare_set("failed", "", f"{self.rank} {status}").split())
        return rank, status


def lost_others(error: BaseException) -> bool:
    """Whether an error says no more than that other ranks are gone or silent, and so has its cause elsewhere."""
    link: BaseException | None = error
    while link is not None:
        # Gloo's errors have no class of their own; they begin with the place in its source.
        if isinstance(link, (Unreachable, dist.DistBackendError, dist.DistNetworkError)):
            return True
        if isinstance(link, RuntimeError) and "/gloo/" in str(link):
            return True
        link = link.__cause__
    return False


def _reason(error: BaseException) -> str:
    """The first line of a backend's error, without the place in its source and its general advice."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+/gloo/\S+\] ", "", line).partition(". This is typically")[0]


def first_to_say(text: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank is the first of its job with ``text``, and so is the one to print it. Alone: True.

    For what ranks find before they meet, such as a mistake in the options: all of them mostly find the same, but one
    that finds something else, or is the only one to find anything, must not be silent. Several ranks say the same
    where they cannot know: torchrun's agent has no store, or it does not answer.
    """
    if env.get("WORLD_SIZE", "1") == "1" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        store = _of_attempt(dist.TCPStore(host, port, is_master=False, timeout=_ASK, wait_for_workers=False), env)
        key, own = hashlib.sha256(text.encode()).hexdigest(), env.get("RANK", "")  # a store's keys must be short
        return store.compare_set(f"said/{key}", "", own).decode() == own
    except (dist.DistError, KeyError, ValueError):
        return True


def _of_attempt(store: dist.Store, env: Mapping[str, str]) -> dist.Store:
    return dist.PrefixStore(f"functitan/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _as_told(error: UserError | OSError | None) -> tuple[Any, ...] | None:
    """A class and its arguments, which make the error anew in another process."""
    if error is None:
        return None
    if isinstance(error, ConfigError):
        return ConfigError, error.problems
    if isinstance(error, UserError):
        return UserError, str(error)
    if error.errno is None:
        return OSError, str(error)
    return OSError, error.errno, error.strerror, error.filename


def disagreements(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each fact that is not the same on all ranks: ``seed: 0 on ranks 0-2, 1 on rank 3``.

    Args:
        facts: of each rank, name -> value. A name that some do not have counts as a value of its own.
    """
    lines = []
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        holders: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            holders.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {_named(ranks)}" for value, ranks in holders.items()))
    return lines


def versions() -> dict[str, str]:
    """What must be the same on all ranks beside the configuration: the programs, and the kind of device."""
    return {"functitan": metadata.version("functitan"), "torch": torch.__version__, "device": default_device().type}


def _named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise ConfigError([f"{name}={text!r} is no number, beside WORLD_SIZE={env['WORLD_SIZE']}: torchrun sets both"])
    return int(text)


def _device(local_rank: int) -> torch.device:
    device = default_device()
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"rank {local_rank} of this machine has no GPU of its own: there are {count}; start {count} ranks a machine"
        )
    torch.cuda.set_device(local_rank)
    return torch.device(device.type, local_rank)
