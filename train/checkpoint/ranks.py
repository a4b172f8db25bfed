"""What several ranks do together about one checkpoint, such that they all succeed or all fail, with the same words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from train.errors import UserError

T = TypeVar("T")


class RankFailed(Exception):
    """What the ranks report of an attempt that failed on one of them or on several."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(failures)
        self.failures = failures
        self.rank, self.error = min(failures.items())

    def __str__(self) -> str:
        return f"failed{self.where}: {self.error}"

    @property
    def where(self) -> str:
        """Such as " on rank 3", or " on rank 0 and 7 others" where all of them met with some error."""
        more = len(self.failures) - 1
        return f" on rank {self.rank}" + (f" and {more} other{'s' if more > 1 else ''}" if more else "")


class Unreachable(UserError):
    """A rank has ended, or has not answered in time."""


@attrs.frozen
class Ranks:
    """The ranks that act together: all of the process group, or this process alone.

    Every method is a collective: each rank must call it, in the same order. Only small Python objects are exchanged.
    """

    group: dist.ProcessGroup | None = None
    """None: this process alone, in which case errors are raised as they are."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_default_group(cls) -> Ranks:
        """Over the default process group; alone where there is none, or of one rank. No communication."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.group.WORLD, dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_new_group(cls, timeout: timedelta) -> Ranks:
        """As :meth:`of_default_group`, over a new Gloo group of the same ranks, whose collectives never mix with
        those of other groups. A collective where there are several ranks."""
        world = cls.of_default_group()
        return world if world.alone else cls(dist.new_group(backend="gloo", timeout=timeout), world.rank, world.size)

    @property
    def alone(self) -> bool:
        return self.group is None

    def first(self, act: Callable[[], T]) -> T:
        """``act()`` on rank 0 only; every rank gets its result, or a failure."""
        if self.alone:
            return act()
        report, own = _attempt(act) if self.rank == 0 else (None, None)
        box = [report]
        with self.reaching():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return self._agreed({0: box[0]}, own)[0]

    def each(self, act: Callable[[], T]) -> list[T]:
        """``act()`` on every rank; every rank gets all results by rank, or the failures of those that failed."""
        if self.alone:
            return [act()]
        report, own = _attempt(act)
        reports: list[Any] = [None] * self.size
        with self.reaching():
            dist.all_gather_object(reports, report, group=self.group)
        return self._agreed(dict(enumerate(reports)), own)

    def highest(self, value: int) -> int:
        """The highest of the ranks' values."""
        if self.alone:
            return value
        box = torch.tensor(value)
        with self.reaching():
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self.group)
        return int(box)

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Around communication: :class:`Unreachable` in place of the backend's RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            if self.alone:
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise Unreachable(
                f"a rank has ended or has not answered rank {self.rank} in time; look for what the other ranks "
                f"printed ({reason})"
            ) from error

    def _agreed(self, reports: dict[int, _Done | Exception], own: BaseException | None) -> list[Any]:
        failures = {rank: report for rank, report in reports.items() if isinstance(report, Exception)}
        if not failures:
            return [report.value for report in reports.values()]
        if own is not None and not isinstance(own, (UserError, OSError)):
            raise own  # a bug: with its own traceback where it happened, and as RankFailed elsewhere
        failed = RankFailed(failures)
        if isinstance(failed.error, UserError):
            # What every rank says, or rank 0 for all, needs no rank named.
            common = len({str(failure) for failure in failures.values()}) == 1 and len(failures) == len(reports)
            raise UserError(f"{'' if common else f'{failed.where.strip()}: '}{failed.error}") from own
        raise failed from own


@attrs.frozen
class _Done:
    value: Any


def _attempt(act: Callable[[], Any]) -> tuple[_Done | Exception, BaseException | None]:
    """The report for the other ranks, and the error itself, if any, for this one."""
    try:
        return _Done(act()), None
    except (Exception, KeyboardInterrupt, SystemExit, dcp.CheckpointException) as error:
        return portable(error), error


def portable(error: BaseException) -> Exception:
    """``error`` as something that can be sent to another process, whatever the class and its arguments were."""
    if isinstance(error, UserError):
        return UserError(str(error))
    if (os_error := os_error_of(error)) is not None:
        if os_error.errno is None:
            return OSError(str(os_error))
        return OSError(os_error.errno, os_error.strerror or os.strerror(os_error.errno))
    return RuntimeError(f"{type(error).__name__}: {error}")


def os_error_of(error: BaseException) -> OSError | None:
    """The operating system's error that led to ``error``.

    torch.save covers the OSError of a failed write with a RuntimeError about file positions.
    """
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return link
