"""A picture of a pipeline's timeline: one row a rank, one box an action."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import UserError

if TYPE_CHECKING:
    from functitan.compiler.pipeline.timeline import Timeline

COLOURS = {"F": "#4477aa", "B": "#228833", "I": "#66ccee", "W": "#ccbb44"}
"""Of each kind of action: of Paul Tol's bright scheme, which colour-blind people can tell apart."""

MEANINGS = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
FORMATS = (".png", ".svg", ".pdf")
_LEAST_TEXT = 6.0
"""Points of a letter; in boxes that hold less there is no number."""


def plot_timeline(timeline: Timeline, path: Path | str) -> Path:
    """Draws who does what when, the microbatches' numbers in the boxes, and returns the path.

    Of several stages on a rank, later ones are paler. The title has the bubble's share of the time.

    Raises:
        UserError: the path does not end in .png, .svg or .pdf, or cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: a timeline is drawn as {', '.join(FORMATS)}: end the name with one of these")
    # Here, since it takes a second. The object interface needs no display and no global backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = timeline.schedule.ranks
    longest = max(len(timeline.of_rank(rank)) for rank in range(ranks))
    figure = Figure(figsize=(min(24.0, 5 + 0.22 * longest), 1.6 + 0.42 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_boxes(timeline, axes, inches=figure.get_figwidth() - 1)
    _label(timeline, axes)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"the timeline cannot be written to {path}: {error.strerror or error}") from None
    return path


def _draw_boxes(timeline: Timeline, axes: Any, inches: float) -> None:
    from matplotlib.patches import Rectangle

    makespan, schedule = timeline.makespan, timeline.schedule
    for row in timeline.rows:
        action = row.action
        later = schedule.stages_of(row.rank).index(action.stage) / schedule.stages_per_rank
        length = row.end - row.start
        axes.add_patch(Rectangle((row.start, row.rank - 0.45), length, 0.9, facecolor=COLOURS[action.kind],
                                 alpha=1 - 0.6 * later, edgecolor="white", linewidth=0.8))  # fmt: skip
        text = str(action.microbatch)
        size = min(9.0, 72 * inches * length / makespan / (0.75 * len(text)))
        if size >= _LEAST_TEXT:
            axes.text(row.start + length / 2, row.rank, text, ha="center", va="center", fontsize=size)


def _label(timeline: Timeline, axes: Any) -> None:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    used = {row.action.kind for row in timeline.rows}
    title = f"{Path(schedule.name).name}, {schedule.microbatches} microbatches: bubble {timeline.bubble:.1%}"
    axes.set(xlim=(0, timeline.makespan), ylim=(schedule.ranks - 0.5, -0.5), title=title)
    axes.set_xlabel(f"time ({timeline.unit})" if timeline.unit else "time")
    axes.set_yticks(range(schedule.ranks), [_row_name(timeline, rank) for rank in range(schedule.ranks)])
    axes.set_facecolor("#eeeeee")
    handles = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in COLOURS if kind in used]
    handles.append(Patch(facecolor="#eeeeee", edgecolor="#bbbbbb", label="idle"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _row_name(timeline: Timeline, rank: int) -> str:
    stages = timeline.schedule.stages_of(rank)
    return f"rank {rank}\nstage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
