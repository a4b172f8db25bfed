"""The folder of a run: its configuration, and whether what is there already belongs to the same run."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train import config as configs
from train.config import RunConfig
from train.errors import UserError

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"


@contextmanager
def run_folder(out: Path) -> Iterator[Path]:
    """Makes the folder of a run and keeps other runs out of it while this one lasts.

    Raises:
        UserError: it cannot be made or written to, or another process trains in it.
    """
    path = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}: give a writable folder with --out") from error
    with file:
        try:
            # Held by the open file: it ends with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is training in {out}: wait for it, or give another --out") from error
        yield out


def compare_config(config: RunConfig) -> list[str]:
    """Notices of what differs from the configuration that the folder's checkpoints were made with.

    Raises:
        UserError: those are of another model.
    """
    path = config.out / CONFIG
    if not path.exists():
        return []
    before = configs.parse(read_config(path), str(path))
    return _compare(before, config)


def read_config(path: Path) -> str:
    """The text of a config.yaml. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: give the folder of a run") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: restore it, or give another --out for a new run") from error


def write_config(config: RunConfig) -> None:
    """Writes config.yaml whole or not at all. Raises UserError if it cannot be written."""
    path = config.out / CONFIG
    temporary = path.with_suffix(".yaml.tmp")
    try:
        temporary.write_text(configs.dump(config), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}: give a writable folder with --out") from error


def _compare(before: RunConfig, now: RunConfig) -> list[str]:
    changes = differences(before, now)
    model = [change for change in changes if change.startswith("model.")]
    if model:
        raise UserError(
            f"{now.out} holds a run of another model ({'; '.join(model)}): give another --out, or the same model"
        )
    return [f"changed since the last run: {change}" for change in changes if not change.startswith("out")]


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """``name: old -> new`` of every field of two configurations in which they differ."""
    old, new = configs.flat(a), configs.flat(b)
    # A part that one of them leaves out (None) has no fields there.
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]
