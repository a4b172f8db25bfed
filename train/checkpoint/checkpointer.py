"""The checkpoints of one run: writing them in turn, keeping the last few, finding and loading one."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp

from functitan import tree
from train.checkpoint import storage
from train.checkpoint.storage import Damaged, causes, os_error_text
from train.errors import UserError

_log = logging.getLogger("train.checkpoint")
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
    killed one. Raises :class:`UserError` at once if the folder cannot be written to.
    """

    def __init__(self, folder: str | Path, keep: int = 3, asynchronous: bool = True) -> None:
        if keep < 1:
            raise UserError(f"cannot keep the last {keep} checkpoints: keep must be 1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Hours of training should not end at the first save: whether files can be made is known only by trying.
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {self.folder}: {os_error_text(error)}") from error

    def save(self, step: int, state: Any) -> None:
        """Saves ``state``, a tree of tensors, as the checkpoint of ``step``, replacing one of the same step.

        Asynchronous: returns when the state is copied, so that a step may then overwrite its tensors; first waits
        for the save before, and raises that one's error. A tensor that two paths share is written
        for each, and comes back as two equal ones.

        Raises :class:`UserError` if the disk is full, the folder gone, and the like; what was complete stays so.
        TypeError for a leaf that is no tensor, ValueError for two leaves of one path.
        """
        self.wait()
        tensors = storage.named_tensors(state)
        if not self.asynchronous:
            self._write(step, tensors)
            return
        snapshot = {path: tensor.detach().to("cpu", copy=True) for path, tensor in tensors.items()}
        # Not dcp.async_save: it is marked experimental, and its future is done before the checksums and the rename,
        # whose errors would be lost in a callback. The thread is no daemon, so that the process waits for it at exit.
        self._thread = threading.Thread(target=self._write_in_background, args=(step, snapshot), name="checkpoint")
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
        """Raises the error of an asynchronous save that has failed meanwhile; does not wait for one under way."""
        if self._error is not None:
            self.wait()

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

    def _write(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        final = path_of(self.folder, step)
        temporary = _renamed(final, "tmp")
        try:
            self._clear_leftovers()
            storage.write(temporary, step, tensors)
            _publish(temporary, final)
        except (Exception, dcp.CheckpointException) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            cause, os_error = causes(error)
            if os_error is None:
                raise cause from error
            kept = next((f"; step {found.step} is still whole" for found in _whole(self.folder)), "")
            size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
            raise UserError(
                f"the checkpoint of step {step} ({size:.3g} GB) could not be saved to {self.folder}: "
                f"{os_error_text(os_error)}{kept}"
            ) from cause
        self._prune(step)

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
            found.path.rename(doomed)  # a kill in the middle of the removal leaves nothing that looks complete
            _remove(doomed)


def latest(folder: str | Path, notice: Callable[[str], None] = _log.warning) -> Checkpoint | None:
    """The complete checkpoint of the highest step in ``folder``; None if there is none yet.

    Partial and damaged ones are passed over, each with one line to ``notice``. Sizes are checked here, checksums by
    :func:`load`. Raises :class:`UserError` if all that once were complete are damaged, or if one that would be taken
    is of another format: starting again from nothing must then be the user's decision.
    """
    damaged = []
    for step, kind, path in _scan(Path(folder)):
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
        return Checkpoint(step, path)
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

    Raises :class:`UserError` for a missing, partial or damaged checkpoint (sizes and checksums are verified), for
    another format, and for other paths, shapes or dtypes than those of ``like``. Runs no code from the files.
    """
    path = Path(path)
    wanted = storage.named_leaves(like)
    try:
        metadata = storage.inspect(path)
        index = storage.read_index(path, metadata)
        storage.check_fit(path, metadata, wanted, subset)
        storage.verify(path, metadata)
        loaded = storage.read(path, index, wanted, device)
    except Damaged as problem:
        others = [found.path.name for found in _whole(path.parent) if found.path != path]
        advice = f"move it away to use {others[0]}" if others else f"no other in {path.parent} is whole"
        raise UserError(f"the checkpoint {path} cannot be used: {problem}; {advice}") from problem
    except OSError as error:
        raise UserError(f"the checkpoint {path} cannot be read: {os_error_text(error)}") from error
    return tree.unflatten(tree.structure(like), loaded.values())


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
