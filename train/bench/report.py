"""What the benchmarks' commands share: their options' checks, and figures as text."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from models.llama import SIZES
from train.bench.rounds import MIB
from train.config_text import near
from train.errors import UserError

WIDTH = 120
"""Columns of a table that goes to a log or a file, so that it is not cut."""


def option_problems(options: Any, lowest: Mapping[str, int]) -> list[str]:
    """What is wrong with the model's name and with numbers below their lowest legal value."""
    problems = [
        f"--{name.replace('_', '-')}: is {getattr(options, name)}; give {low} or more"
        for name, low in lowest.items()
        if getattr(options, name) < low
    ]
    if options.model not in SIZES:
        problems.append(f"--model: unknown size {options.model!r}{near(options.model, SIZES)}")
    return problems


def json_problems(path: Path | None) -> list[str]:
    """Why the file of ``--json`` cannot be written, if it cannot: to be known before hours of measuring."""
    if path is None:
        return []
    if path.is_dir():
        return [f"--json: {path} is a folder; give a file"]
    if not path.parent.is_dir():
        return [f"--json: {path}: there is no folder {path.parent}; make it, or give another file"]
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return [f"--json: {path} may not be written; give another file"]
    return []


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Raises UserError where it cannot be written."""
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror}; the figures are in the table above") from error


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def spread(values: Sequence[float], spec: str) -> tuple[str, str]:
    """The median, and the range in brackets."""
    return format(statistics.median(values), spec), f"({min(values):{spec}}, {max(values):{spec}})"


def mib(count: int | None) -> str:
    return "n/a" if count is None else f"{count / MIB:,.0f}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} cores)"
    return platform.processor() or platform.machine()
