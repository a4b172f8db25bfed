"""Finding the checkpoints in a run's folder, and loading one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed.checkpoint as dcp

from functitan import Plan, tree
from train.checkpoint import storage
from train.checkpoint.ranks import Ranks
from train.checkpoint.storage import Damaged, os_error_text
from train.errors import UserError

T = TypeVar("T")
_log = logging.getLogger("train.checkpoint")
_NAME = re.compile(r"step-(?P<step>\d+)(?:\.(?P<kind>tmp|old)-[0-9a-f]+)?")


@attrs.frozen
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path


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
    for _, kind, path in scan(folder):
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


def load(
    path: str | Path,
    like: Any,
    *,
    plan: Plan | None = None,
    device: torch.device | str | None = None,
    subset: bool = False,
) -> Any:
    """The tree in the checkpoint folder ``path``, in the structure of ``like``.

    Args:
        path: a checkpoint's own folder, as in :attr:`Checkpoint.path`.
        like: a tree whose leaves have ``shape`` and ``dtype``: tensors, meta or fake tensors, or any such objects. It
            is neither written to nor kept, so that with abstract leaves the state is in memory once. A DTensor gives
            its mesh and placements, whatever those were at saving.
        plan: what ``like`` is laid out by. Needed where layers are split over pp: which ones a rank has, only the plan
            knows.
        device: where to put the tensors, other than DTensors, which belong to a mesh. By default a leaf's own device;
            the CPU where it has none, or meta.
        subset: whether ``like`` may leave out paths, such as everything but ``{"params": …}``.

    With several ranks a collective, and each rank reads what it needs of every file: a DTensor of ``like`` gets this
    rank's shard, a plain tensor is read whole. All return or all raise. Verifying is divided among them.

    Raises :class:`UserError` for a missing, partial or damaged checkpoint (sizes and checksums are verified), for
    another format, and for other paths, shapes or dtypes than those of ``like``; ValueError for layers over pp without
    their plan. Runs no code from the files.
    """
    path, ranks = Path(path), Ranks.of_default_group()

    def check() -> tuple[dict[str, Any], storage.Metadata, dcp.Metadata]:
        wanted = storage.named_leaves(like)
        metadata = storage.inspect(path)
        index = storage.read_index(path, metadata)
        storage.check_fit(path, metadata, wanted, subset)
        return wanted, metadata, index

    wanted, metadata, index = _in_step(path, ranks, check)
    _in_step(path, ranks, lambda: storage.verify(path, metadata, ranks))
    loaded = _in_step(path, ranks, lambda: storage.read(path, index, wanted, device, plan))
    return tree.unflatten(tree.structure(like), loaded.values())


def _in_step(path: Path, ranks: Ranks, act: Callable[[], T]) -> T:
    """This rank's ``act()``, once every rank has done its own; what is wrong with a file as a UserError."""
    result = []

    def attempt() -> None:
        try:
            result.append(act())
        except Damaged as problem:
            others = [found.path.name for found in whole(path.parent) if found.path != path]
            advice = f"move it away to use {others[0]}" if others else f"no other in {path.parent} is whole"
            raise UserError(f"the checkpoint {path} cannot be used: {problem}; {advice}") from problem
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {os_error_text(error)}") from error

    ranks.each(attempt)
    return result[0]


def scan(folder: Path) -> list[tuple[int, str, Path]]:
    """``(step, kind, path)`` of all folders, the highest step first; kind is "" (once complete), "old" or "tmp"."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append((int(match["step"]), match["kind"] or "", path))
    return sorted(found, key=lambda entry: (-entry[0], ("", "old", "tmp").index(entry[1]), entry[2].name))


def whole(folder: Path) -> list[Checkpoint]:
    """The checkpoints that latest() would take, the highest step first."""
    found = []
    for step, kind, path in scan(folder):
        if not kind:
            try:
                storage.inspect(path)
            except (Damaged, UserError, OSError):
                continue
            found.append(Checkpoint(step, path))
    return found
