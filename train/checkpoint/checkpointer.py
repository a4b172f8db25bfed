"""The checkpoints of one run: writing them in turn, keeping the last few, finding and loading one."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import torch
import torch.distributed.checkpoint as dcp

from functitan import tree
from train.checkpoint import storage
from train.checkpoint.ranks import RankFailed, Ranks, Unreachable, os_error_of
from train.checkpoint.storage import Damaged, os_error_text
from train.errors import UserError

T = TypeVar("T")
_log = logging.getLogger("train.checkpoint")
_DONE, _RUNNING, _FAILED = range(3)
_NAME = re.compile(r"step-(?P<step>\d+)(?:\.(?P<kind>tmp|old)-[0-9a-f]+)?")


@attrs.frozen
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 500
    """Steps from one checkpoint to the next. One more is written at the end of the run; 0 writes only that one."""

    keep: int = 3
    """How many checkpoints to keep. Older ones are removed once a newer one is complete."""

    asynchronous: bool = True
    """Write in the background while training goes on. Takes as much host memory as the state while it writes."""


@attrs.frozen
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path


class Checkpointer:
    """Writes the checkpoints of one run into ``folder`` (made if need be) and keeps the last ``keep`` of them.

    One run at a time: what another process is just writing into the same folder is taken for the leftover of a
    killed one.

    Where torch.distributed has more than one rank, every rank makes one, and calls its methods in the same order, in
    the same steps of training. The folder must be on a file system that all of them share. Saving never
    touches the process groups that training uses.

    Args:
        folder: such as OUT/checkpoints.
        keep: how many.
        asynchronous: see :class:`CheckpointConfig`.
        timeout: how long a rank waits for the slowest one to write its part.

    Raises:
        UserError: at once, on every rank, if the folder cannot be written to by all ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        asynchronous: bool = True,
        timeout: timedelta = timedelta(minutes=30),  # noqa: B008 (immutable)
    ) -> None:
        if keep < 1:
            raise UserError(f"cannot keep the last {keep} checkpoints: keep must be 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Two groups, because the collectives of one must come in the same order on every rank, and what the
        # background thread and check() do has no order.
        self._writers = Ranks.of_new_group(timeout)
        self._watchers = Ranks.of_new_group(timeout)
        probe = self._writers.first(self._make_probe)
        try:
            self._writers.each(lambda: self._try_folder(probe))
        finally:
            if self._writers.rank == 0:
                (self.folder / probe).unlink(missing_ok=True)

    def _make_probe(self) -> str:
        """Hours of training should not end at the first save: whether files can be made is known only by trying."""
        probe = f".probe-{uuid.uuid4().hex[:12]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / probe).touch()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {self.folder}: {os_error_text(error)}") from error
        return probe

    def _try_folder(self, probe: str) -> None:
        if not (self.folder / probe).exists():
            raise UserError(
                f"cannot write checkpoints to {self.folder}: what rank 0 writes there is not seen here; use a folder "
                "on a file system that all machines share (--out), under the same name on all"
            )
        try:
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {self.folder}: {os_error_text(error)}") from error

    def save(self, step: int, state: Any) -> None:
        """Saves ``state``, a tree of tensors, as the checkpoint of ``step``, replacing one of the same step.

        Each rank writes its own shards of DTensors. A plain tensor is taken to be the same on every rank.

        Asynchronous: returns when the state is copied, so that a step may then overwrite its tensors; first waits
        for the save before, and raises that one's error. A tensor that two paths share is written
        for each, and comes back as two equal ones.

        Raises :class:`UserError` if the disk is full, the folder gone, and the like; what was complete stays so. If
        that happens on one rank, all raise the same error, which names the rank.
        TypeError for a leaf that is no tensor, ValueError for two leaves of one path and for a Partial DTensor.
        """
        self.wait()
        try:
            tensors = storage.named_tensors(state)
            if self.asynchronous:
                tensors = {path: tensor.detach().to("cpu", copy=True) for path, tensor in tensors.items()}
        except Exception as error:
            self._begin(step, error)  # the other ranks must not wait for this one
            raise
        if not self.asynchronous:
            self._write(step, tensors)
            return
        # Not dcp.async_save: it is marked experimental, and its future is done before the checksums and the rename,
        # whose errors would be lost in a callback. The thread is no daemon, so that the process waits for it at exit.
        self._thread = threading.Thread(target=self._write_in_background, args=(step, tensors), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when no save is under way; raises the error of the last asynchronous one, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raises the error of an asynchronous save that has failed meanwhile; does not wait for one under way.

        With several ranks it is raised by all of them in the same call. For that they exchange one number, in those
        calls only that come while a save is under way.
        """
        if self._thread is None:
            return
        state = _FAILED if self._error is not None else _RUNNING if self._thread.is_alive() else _DONE
        state = self._watchers.highest(state)
        if state != _RUNNING:
            self.wait()
        if state == _FAILED:
            raise Unreachable("the last checkpoint could not be saved by another rank; see what it printed")

    def close(self) -> None:
        """As :meth:`wait`; the end of the checkpointer's use."""
        self.wait()

    def _write_in_background(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        try:
            self._write(step, tensors)
        except BaseException as error:
            # Raised again by wait(); logged too, because a process that ends without calling it must not be silent.
            _log.error("%s", error)
            self._error = error

    def _begin(self, step: int, error: Exception | None = None) -> None:
        """Every rank has its tensors, for the same step; or the failures of those that have not."""

        def report() -> int:
            if error is not None:
                raise error
            return step

        steps = self._writers.each(report)
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks are about to save different steps: {steps}")

    def _write(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        ranks, final = self._writers, path_of(self.folder, step)
        temporary = None
        try:
            self._begin(step)
            ranks.first(self._clear_leftovers)
            # The name has a random part, so that one rank must give it to all.
            temporary = self.folder / ranks.first(lambda: _renamed(final, "tmp").name)
            storage.write(temporary, step, tensors, ranks)
            ranks.first(lambda: _publish(temporary, final))
        except (Exception, dcp.CheckpointException) as error:
            if temporary is not None and ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self._explain(error, step, sum(tensor.nbytes for tensor in tensors.values()) / 1e9)
        ranks.first(lambda: self._prune(step))

    def _explain(self, error: BaseException, step: int, size: float) -> NoReturn:
        """Raises UserError where the operating system or another rank is at fault, else what has gone wrong."""
        where = error.where if isinstance(error, RankFailed) else ""
        if isinstance(error, RankFailed):
            cause: BaseException = error.error
        elif isinstance(error, dcp.CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        else:
            cause = error
        os_error = os_error_of(cause)
        if isinstance(error, Unreachable):
            reason = str(error)
        elif os_error is not None:
            reason = os_error_text(os_error)
        else:
            raise error if isinstance(error, RankFailed) else cause
        kept = next((f"; step {found.step} is still whole" for found in _whole(self.folder)), "")
        raise UserError(
            f"the checkpoint of step {step} ({size:.3g} GB) could not be saved to {self.folder}{where}: {reason}{kept}"
        ) from error

    def _clear_leftovers(self) -> None:
        for step, kind, path in _scan(self.folder):
            final = path_of(self.folder, step)
            if kind == "old" and not final.exists():
                path.rename(final)
            elif kind:
                _remove(path)

    def _prune(self, step: int) -> None:
        # Only whole ones count towards `keep`, so that a damaged one never displaces one that can be loaded; and
        # only older ones are removed, so that a run that was taken back to an earlier step does not remove its own.
        older = [found for found in _whole(self.folder) if found.step < step]
        for found in older[self.keep - 1 :]:
            doomed = _renamed(found.path, "tmp")
            try:
                found.path.rename(doomed)  # a kill in the middle of the removal leaves nothing that looks complete
            except OSError as error:
                _log.warning("could not remove %s: %s", found.path, os_error_text(error))
            else:
                _remove(doomed)


def latest(folder: str | Path, notice: Callable[[str], None] = _log.warning) -> Checkpoint | None:
    """The complete checkpoint of the highest step in ``folder``; None if there is none yet.

    Partial and damaged ones are passed over, each with one line to ``notice``. Sizes are checked here, checksums by
    :func:`load`. Raises :class:`UserError` if all that once were complete are damaged, or if one that would be taken
    is of another format: starting again from nothing must then be the user's decision.

    With several ranks a collective: rank 0 looks and gives the notices, and every rank returns or raises the same.
    """
    name = Ranks.of_default_group().first(lambda: _newest(Path(folder), notice))
    return None if name is None else Checkpoint(int(_NAME.fullmatch(name)["step"]), Path(folder) / name)


def _newest(folder: Path, notice: Callable[[str], None]) -> str | None:
    damaged = []
    for _, kind, path in _scan(folder):
        if kind == "tmp":
            notice(f"skipped the partial checkpoint {path}: its save was cut off; the next save removes it")
            continue
        try:
            storage.inspect(path)
        except Damaged as problem:
            notice(f"skipped the damaged checkpoint {path}: {problem}")
            damaged.append(path.name)
            continue
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {os_error_text(error)}") from error
        return path.name
    if damaged:
        raise UserError(
            f"no checkpoint in {folder} is whole ({', '.join(damaged)}); restore one from a copy, or move the folder "
            "away to start from the beginning"
        )
    return None


def path_of(folder: str | Path, step: int) -> Path:
    """Where the complete checkpoint of ``step`` lies, if there is one."""
    return Path(folder) / f"step-{step:08d}"


def load(path: str | Path, like: Any, *, device: torch.device | str | None = None, subset: bool = False) -> Any:
    """The tree in the checkpoint folder ``path``, in the structure of ``like``.

    Args:
        path: a checkpoint's own folder, as in :attr:`Checkpoint.path`.
        like: a tree whose leaves have ``shape`` and ``dtype``: tensors, meta or fake tensors, or any such objects. It
            is neither written to nor kept, so that with abstract leaves the state is in memory once. A DTensor gives
            its mesh and placements, whatever those were at saving.
        device: where to put the tensors, other than DTensors, which belong to a mesh. By default a leaf's own device;
            the CPU where it has none, or meta.
        subset: whether ``like`` may leave out paths, such as everything but ``{"params": …}``.

    With several ranks a collective, and each rank reads what it needs of every file: a DTensor of ``like`` gets this
    rank's shard, a plain tensor is read whole. All return or all raise. Verifying is divided among them.

    Raises :class:`UserError` for a missing, partial or damaged checkpoint (sizes and checksums are verified), for
    another format, and for other paths, shapes or dtypes than those of ``like``. Runs no code from the files.
    """
    path, ranks = Path(path), Ranks.of_default_group()
    wanted = storage.named_leaves(like)

    def check() -> tuple[storage.Metadata, dcp.Metadata]:
        metadata = storage.inspect(path)
        index = storage.read_index(path, metadata)
        storage.check_fit(path, metadata, wanted, subset)
        return metadata, index

    metadata, index = _in_step(path, ranks, check)
    _in_step(path, ranks, lambda: storage.verify(path, metadata, ranks))
    loaded = _in_step(path, ranks, lambda: storage.read(path, index, wanted, device))
    return tree.unflatten(tree.structure(like), loaded.values())


def _in_step(path: Path, ranks: Ranks, act: Callable[[], T]) -> T:
    """This rank's ``act()``, once every rank has done its own; what is wrong with a file as a UserError."""
    result = []

    def attempt() -> None:
        try:
            result.append(act())
        except Damaged as problem:
            others = [found.path.name for found in _whole(path.parent) if found.path != path]
            advice = f"move it away to use {others[0]}" if others else f"no other in {path.parent} is whole"
            raise UserError(f"the checkpoint {path} cannot be used: {problem}; {advice}") from problem
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {os_error_text(error)}") from error

    ranks.each(attempt)
    return result[0]


def _publish(temporary: Path, final: Path) -> None:
    """Gives the written folder its final name. At every moment the old or the new one can be found by latest()."""
    displaced = None
    if final.exists():
        displaced = _renamed(final, "old")
        final.rename(displaced)
    temporary.rename(final)
    storage.sync_folder(final.parent)
    if displaced is not None:
        _remove(displaced)


def _scan(folder: Path) -> list[tuple[int, str, Path]]:
    """``(step, kind, path)`` of all folders, the highest step first; kind is "" (once complete), "old" or "tmp"."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append((int(match["step"]), match["kind"] or "", path))
    return sorted(found, key=lambda entry: (-entry[0], ("", "old", "tmp").index(entry[1]), entry[2].name))


def _whole(folder: Path) -> list[Checkpoint]:
    """The checkpoints that latest() would take, the highest step first."""
    found = []
    for step, kind, path in _scan(folder):
        if not kind:
            try:
                storage.inspect(path)
            except (Damaged, UserError, OSError):
                continue
            found.append(Checkpoint(step, path))
    return found


def _renamed(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{uuid.uuid4().hex[:12]}")


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        # It only takes up space: no reason to end the run.
        _log.warning("could not remove %s: %s", path, os_error_text(error))
