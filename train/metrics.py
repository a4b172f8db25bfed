"""What a run says of itself: metrics.jsonl, TensorBoard, the line on the terminal, and the plot of the loss.

metrics.jsonl is one JSON object a line, ``{"step": 10, "loss": 3.2, …}``, with rising steps: those that are logged,
evaluated or skipped. JSON has no NaN and no infinities; they are written as the strings "NaN", "Infinity" and
"-Infinity" (as in protobuf's JSON mapping), which tell a diverged loss from an overflowed one and which ``float()``
reads. :func:`read_metrics` gives floats back.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from train.errors import UserError
from train.hardware import format_mfu

FILE = "metrics.jsonl"
PLOT = "loss.png"
LOSS = "loss"
"""Key of the training loss of a step, nats a token."""
HELD_OUT_LOSS = "held_out_loss"
"""Key of the loss on held-out data, nats a token; only in the lines of steps that evaluate."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsWriter:
    """Appends to metrics.jsonl of a run's folder, and to TensorBoard where that is installed.

    Every line is in the file when :meth:`write` returns, so that a killed run has lost none. Use it as a context
    manager, or call :meth:`close`.

    Args:
        folder: of the run; it exists.
        resume_step: the step of the checkpoint that the run goes on from: later lines of the interrupted run are
            taken out, since those steps are done again, and so is a last line that was cut off in the middle.
            None starts an empty file.
        notices: where to say that TensorBoard is not installed; None for nowhere.
    """

    def __init__(self, folder: Path | str, resume_step: int | None = None, notices: IO[str] | None = sys.stderr):
        self.path = Path(folder) / FILE
        kept = [] if resume_step is None else [row for row in _rows(self.path) if row["step"] <= resume_step]
        self.last_step = kept[-1]["step"] if kept else None
        # A rename replaces the file whole, so that a kill here leaves either the old lines or the kept ones.
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(_line(row) for row in kept), encoding="utf-8")
            os.replace(temporary, self.path)
            # Unbuffered: a line is one write, and after a failed one nothing is left to fail again in close().
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}: give a writable folder with --out") from error
        self._said_no_mfu = False
        self._board = _tensorboard(Path(folder) / "tensorboard", self.last_step, notices)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the line of a step: numbers (0-dim tensors count as such), strings or None by name.

        Raises:
            ValueError: the step does not lie after the last one written; a step has one line.
            UserError: the disk is full or the folder gone.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path} already has step {self.last_step}; a line of step {step} cannot follow")
        row = {"step": step, **{name: _plain(value) for name, value in values.items()}}
        line = _line(row).encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}: free some space, then run again") from error
        if written != len(line):
            raise UserError(f"cannot write {self.path}: the disk is full: free some space, then run again")
        self.last_step = step
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, step)
                elif name == "mfu" and not self._said_no_mfu:
                    self._board.add_text(name, format_mfu(value), step)  # "n/a", which a curve cannot show
                    self._said_no_mfu = True

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, in order, NaN and infinities as floats.

    Raises:
        UserError: there is no such file, or a line other than the last, which may be cut off, is not valid.
    """
    path = Path(folder) / FILE
    if not path.exists():
        raise UserError(f"{path} does not exist: give the folder of a run")
    return _rows(path)


def plot_loss(folder: Path | str) -> Path:
    """Draws the training and the held-out loss over steps into loss.png, and returns its path.

    Raises:
        UserError: no line of the run has a loss.
    """
    rows = read_metrics(folder)
    curves = {
        label: [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
        for key, label in ((LOSS, "training"), (HELD_OUT_LOSS, "held out"))
    }
    if not any(curves.values()):
        raise UserError(f"{Path(folder) / FILE} has no losses to plot: let the run log a step first")
    # Here, since it takes a second. The object interface needs no display and no global backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            steps, losses = zip(*points)
            marker = "o" if label == "held out" or len(points) == 1 else None
            axes.plot(steps, losses, label=label, marker=marker, markersize=3.5, linewidth=1.3)
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=Path(folder).resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(folder) / PLOT
    figure.savefig(path, dpi=120)
    return path


def memory(device: Any = "cpu") -> dict[str, int]:
    """Memory in use and its peak, in bytes: ``{"memory_bytes": …, "memory_peak_bytes": …}``.

    A CPU's figures are the resident memory of this process and its peak since the start; a GPU's are what PyTorch
    has allocated for tensors, and the peak since ``torch.cuda.reset_peak_memory_stats``.
    """
    kind = str(device).split(":")[0]
    if kind == "cuda":
        import torch  # here, so that a plot or a command line's help does not load it

        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(device),
        }
    import resource

    import psutil

    # ru_maxrss is in KiB on Linux and in bytes on macOS (getrusage(2)).
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    used = psutil.Process().memory_info().rss
    return {"memory_bytes": used, "memory_peak_bytes": max(peak, used)}


class Progress:
    """The line of a run on the terminal: step, loss, learning rate, gradient norm, tokens a second, time left.

    On a terminal it is one line that changes in place; elsewhere (a file, a CI log) each update is a line of its own.

    Args:
        total: the last step of the run.
        console: where to; by default standard output.
    """

    def __init__(self, total: int, console: Console | None = None):
        self._total = total
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=8) if self._console.is_terminal else None
        self._first: tuple[int, float] | None = None

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows a step. Of ``values``, those that are there are shown: loss, held_out_loss, learning_rate, grad_norm,
        tokens_per_s, mfu (a fraction; None is left out)."""
        line = format_progress(step, self._total, values, self._seconds_left(step))
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        else:
            self._print(line)

    def note(self, text: str) -> None:
        """Prints a line that stays, above the changing one."""
        self._print(text)

    def _print(self, text: str) -> None:
        # Text and not markup: a path in brackets is not a style. soft_wrap: a log's lines are not cut at 80 columns.
        self._console.print(Text(text), soft_wrap=True)

    def _seconds_left(self, step: int, now: float | None = None) -> float | None:
        """By the mean time of the steps since the first update, which leaves out capture and compilation."""
        now = time.monotonic() if now is None else now
        if self._first is None:
            self._first = (step, now)
            return None
        first, then = self._first
        return (now - then) / (step - first) * (self._total - step) if step > first else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def format_progress(step: int, total: int, values: Mapping[str, Any], seconds_left: float | None) -> str:
    """``step 120/1000 · loss 2.413 · lr 3.0e-04 · grad norm 0.81 · 12.3k tokens/s · MFU n/a · 1:23 left``"""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    shown = (
        (LOSS, lambda v: f"loss {v:.3f}"),
        (HELD_OUT_LOSS, lambda v: f"held out {v:.3f}"),
        ("learning_rate", lambda v: f"lr {v:.1e}"),
        ("grad_norm", lambda v: f"grad norm {v:.2f}"),
        ("tokens_per_s", lambda v: f"{_short(v)} tokens/s"),
    )
    parts += [show(float(values[name])) for name, show in shown if values.get(name) is not None]
    if values.get("mfu") is not None:
        parts.append(f"MFU {format_mfu(values['mfu'])}")
    if seconds_left is not None:
        parts.append(f"{_clock(seconds_left)} left")
    return " · ".join(parts)


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _plain(value: Any) -> Any:
    """A value as JSON has it; a 0-dim tensor or array as its number."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a metric is a number, a string or None, not {type(value).__name__}")


def _line(row: Mapping[str, Any]) -> str:
    safe = {name: _as_text(value) if _is_non_finite(value) else value for name, value in row.items()}
    return json.dumps(safe, allow_nan=False) + "\n"


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _as_text(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    # Whole lines end with a newline, so the last part is empty, or a line that a kill cut off.
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: no line of metrics: mend it or move the file away") from error
        if not isinstance(step, int) or (rows and step <= rows[-1]["step"]):
            raise UserError(f"{path}:{number}: step {step!r} is not above the last: mend it or move the file away")
        rows.append({name: _NON_FINITE.get(v, v) if isinstance(v, str) else v for name, v in row.items()})
    return rows


def _tensorboard(folder: Path, last_step: int | None, notices: IO[str] | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if notices is not None:
            print(f"functitan: no TensorBoard: pip install 'functitan[tensorboard]'; {FILE} has it all", file=notices)
        return None
    # purge_step hides what an earlier run in this folder logged at later steps.
    return SummaryWriter(str(folder), purge_step=0 if last_step is None else last_step + 1)
