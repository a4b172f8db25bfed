"""The folder of a run: its configuration, and whether what is there already belongs to the same run."""

from __future__ import annotations

from typing import Any

import attrs

from train import config as configs
from train.config import RunConfig
from train.errors import UserError

CONFIG = "config.yaml"


def prepare_folder(config: RunConfig, *, resumes: bool) -> list[str]:
    """Makes the folder and writes config.yaml into it.

    Args:
        resumes: the folder has a checkpoint that the run goes on from. Its configuration must then be of the same
            model.

    Returns:
        Notices: what differs from the configuration that was there before.

    Raises:
        UserError: the folder cannot be written to, or the checkpoints there are of another model.
    """
    path = config.out / CONFIG
    notices = []
    try:
        if resumes and path.exists():
            before = configs.parse(path.read_text(encoding="utf-8"), str(path))
            notices = _compare(before, config)
        config.out.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".yaml.tmp")
        temporary.write_text(configs.dump(config), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}: give a writable folder with --out") from error
    return notices


def _compare(before: RunConfig, now: RunConfig) -> list[str]:
    changes = differences(before, now)
    model = [change for change in changes if change.startswith("model.")]
    if model:
        raise UserError(
            f"{now.out} holds a run of another model ({'; '.join(model)}): give another --out, or the same model"
        )
    return [f"changed since the last run: {change}" for change in changes if not change.startswith("out")]


def differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    """``name: old -> new`` of every field of two configurations in which they differ."""
    if attrs.has(type(a)) and type(a) is type(b):
        found = []
        for field in attrs.fields(type(a)):
            name = f"{prefix}.{field.name}" if prefix else field.name
            found += differences(getattr(a, field.name), getattr(b, field.name), name)
        return found
    return [] if a == b else [f"{prefix}: {a} -> {b}"]
