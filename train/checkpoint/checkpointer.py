"""Writing the checkpoints of one run in turn, in the background or not, and keeping the last few."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch.distributed.checkpoint as dcp

from functitan import Plan
from train.checkpoint import pieces, storage
from train.checkpoint.finding import path_of, scan, whole
from train.checkpoint.pieces import Piece
from train.checkpoint.ranks import RankFailed, Ranks, Unreachable
from train.checkpoint.storage import causes, os_error_text
from train.errors import UserError

_log = logging.getLogger("train.checkpoint")
_DONE, _RUNNING, _FAILED = range(3)


@attrs.frozen
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 500
    """Steps from one checkpoint to the next. One more is written at the end of the run; 0 writes only that one."""

    keep: int = 3
    """How many checkpoints to keep. Older ones are removed once a newer one is complete."""

    asynchronous: bool = True
    """Write in the background while training goes on. Until it is written, a rank holds its part of the state twice."""


class Checkpointer:
    """Writes the checkpoints of one run into ``folder`` (made if need be) and keeps the last ``keep`` of them.

    One run at a time: what another process is just writing into the same folder is taken for the leftover of a
    killed one.

    Where torch.distributed has more than one rank, every rank makes one, and calls its methods in the same order, in
    the same steps of training. The folder must be on a file system that all of them share. Saving never touches the
    process groups that training uses. Call :meth:`close` before the process group is destroyed.

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

    def save(self, step: int, state: Any, plan: Plan | None = None) -> None:
        """Saves ``state``, a tree of tensors, as the checkpoint of ``step``, replacing one of the same step.

        Each rank writes its own shards of DTensors, and a share of what others have too. A plain tensor is taken to
        be the same on every rank. ``plan`` is what the state is laid out by; it is needed where layers are split over
        pp, as only the plan knows which ones a rank has.

        Asynchronous: returns when the state is copied, so that a step may then overwrite its tensors; first waits
        for the save before, and raises that one's error. A tensor that two paths share is written
        for each, and comes back as two equal ones.

        Raises :class:`UserError` if the disk is full, the folder gone, and the like; what was complete stays so. If
        that happens on one rank, all raise the same error, which names the rank.
        TypeError for a leaf that is no tensor, ValueError for two leaves of one path, for a Partial DTensor,
        and for layers over pp without their plan.
        """
        self.wait()
        try:
            tensors = storage.named_tensors(state)
            size = sum(tensor.nbytes for tensor in tensors.values())
            own = pieces.own_pieces(tensors, self._writers, plan)
            if self.asynchronous:
                own = [piece.copied() for piece in own]
        except Exception as error:
            self._begin(step, error)  # the other ranks must not wait for this one
            raise
        if not self.asynchronous:
            self._write(step, own, size)
            return
        # Not dcp.async_save: it is marked experimental, and its future is done before the checksums and the rename,
        # whose errors would be lost in a callback. The thread is a daemon, so that abandon() can leave it behind;
        # the process waits for it at its exit otherwise.
        self._thread = threading.Thread(
            target=self._write_in_background, args=(step, own, size), name="checkpoint", daemon=True
        )
        atexit.register(self._thread.join)
        self._thread.start()

    def wait(self) -> None:
        """Returns when no save is under way; raises the error of the last asynchronous one, once."""
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
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

    def abandon(self, seconds: float) -> None:
        """The end of the checkpointer's use in a run that has failed, in place of :meth:`close`.

        Waits at most so long for a save under way, which is lost if it takes longer, and raises nothing: what the run
        failed of is to be told, and the save may have failed of the same. No collective.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            atexit.unregister(self._thread.join)
            self._thread = None
        self._error = None

    def _write_in_background(self, step: int, own: list[Piece], size: int) -> None:
        try:
            self._write(step, own, size)
        except BaseException as error:
            # Raised again by wait(); logged too, because a process that ends without calling it must not be silent.
            if self._writers.rank == 0:
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

    def _write(self, step: int, own: list[Piece], size: int) -> None:
        ranks, final = self._writers, path_of(self.folder, step)
        temporary = None
        try:
            self._begin(step)
            ranks.first(self._clear_leftovers)
            # The name has a random part, so that one rank must give it to all.
            temporary = self.folder / ranks.first(lambda: _renamed(final, "tmp").name)
            storage.write(temporary, step, own, ranks)
            ranks.first(lambda: _publish(temporary, final))
        except (Exception, dcp.CheckpointException) as error:
            if temporary is not None and ranks.rank == 0:  # a rank that still writes there will find it gone, and fail
                shutil.rmtree(temporary, ignore_errors=True)
            self._explain(error, step, size)
        ranks.first(lambda: self._prune(step))

    def _explain(self, error: BaseException, step: int, size: int) -> NoReturn:
        """Raises UserError where the operating system or another rank is at fault, else what has gone wrong."""
        cause, os_error = causes(error)
        if isinstance(error, Unreachable):
            reason = str(error)
        elif os_error is not None:
            reason = os_error_text(os_error)
        else:
            raise cause
        where = error.where if isinstance(error, RankFailed) else ""
        kept = next((f"; step {found.step} is still whole" for found in whole(self.folder)), "")
        raise UserError(
            f"the checkpoint of step {step} ({size / 1e9:.3g} GB) could not be saved to {self.folder}{where}: "
            f"{reason}{kept}"
        ) from error

    def _clear_leftovers(self) -> None:
        for step, kind, path in scan(self.folder):
            final = path_of(self.folder, step)
            if kind == "old" and not final.exists():
                path.rename(final)
            elif kind:
                _remove(path)

    def _prune(self, step: int) -> None:
        # Only whole ones count towards `keep`, so that a damaged one never displaces one that can be loaded; and
        # only older ones are removed, so that a run that was taken back to an earlier step does not remove its own.
        older = [found for found in whole(self.folder) if found.step < step]
        for found in older[self.keep - 1 :]:
            doomed = _renamed(found.path, "tmp")
            try:
                found.path.rename(doomed)  # a kill in the middle of the removal leaves nothing that looks complete
            except OSError as error:
                _log.warning("could not remove %s: %s", found.path, os_error_text(error))
            else:
                _remove(doomed)


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


def _renamed(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{uuid.uuid4().hex[:12]}")


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        # It only takes up space: no reason to end the run.
        _log.warning("could not remove %s: %s", path, os_error_text(error))
