"""Who does what when in a pipeline: a schedule simulated with durations, and the share of time that ranks wait."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from functitan.compiler.pipeline.actions import UNIT_TIMES, Schedule, Timed

Durations = Mapping[str, float | Sequence[float]]
"""Kind of action ("F", "B", "I", "W") -> duration, or one duration a stage, all in one unit."""

WIDTHS = (100, 240)
"""Of a picture in text, where none is asked for: at least and at most so many characters."""


@frozen
class Timeline:
    """When each action of a schedule runs; made by :func:`simulate`. ``print(timeline)`` is a picture in text.

    Attributes:
      schedule: whose actions.
      rows: by start.
      unit: of the times, such as "s"; "" where they are relative.
    """

    schedule: Schedule
    rows: tuple[Timed, ...]
    unit: str = ""

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(row.end for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from 0 to the makespan, in which they compute nothing: at least 0, below 1."""
        busy = math.fsum(row.end - row.start for row in self.rows)
        return max(0.0, 1.0 - busy / (self.schedule.ranks * self.makespan))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Of each rank, the most microbatches (each of one stage) whose activations it keeps at once."""
        return tuple(map(self.schedule.in_flight, range(self.schedule.ranks)))

    def of_rank(self, rank: int) -> tuple[Timed, ...]:
        """The actions of one rank, by start."""
        return tuple(row for row in self.rows if row.rank == rank)

    def title(self) -> str:
        """One line: the schedule, its sizes, the makespan, the bubble's share and what is in flight."""
        made = self.schedule
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches; "
            f"{self.makespan:.6g}{unit}, bubble {self.bubble:.1%}, in flight {' '.join(map(str, self.in_flight))}"
        )

    def to_json(self) -> str:
        """JSON text with one action a line; times in ``unit``."""
        made = self.schedule
        head = {
            "schedule": made.name,
            "ranks": made.ranks,
            "stages": made.stages,
            "microbatches": made.microbatches,
            "stage_ranks": list(made.stage_ranks),
            "unit": self.unit,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "in_flight": list(self.in_flight),
        }
        actions = ",\n".join(
            "    " + json.dumps({"rank": row.rank, "action": str(row.action), "start": row.start, "end": row.end})
            for row in self.rows
        )
        fields = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
        return f'{{\n{fields}  "actions": [\n{actions}\n  ]\n}}\n'

    def picture(self, width: int | None = None) -> str:
        """One line a rank, so many characters wide: ``F0-F1-......B0----``, where dots are idle.

        None is what kind and microbatch have room in, within WIDTHS.

        A box is named by stage, kind and microbatch where ranks have several stages and every box has room for that,
        else by kind and microbatch, and where some box has no room for these by its kind.

        Raises:
          ValueError: the width leaves no room for the boxes.
        """
        margin = len(f"rank {self.schedule.ranks - 1} ")
        if width is None:
            shortest = min(row.end - row.start for row in self.rows)
            letters = 1 + len(str(self.schedule.microbatches - 1))
            width = min(max(margin + math.ceil(letters * self.makespan / shortest), WIDTHS[0]), WIDTHS[1])
        room = width - margin
        if room < 1:
            raise ValueError(f"a picture {width} characters wide; legal: {margin + 1} and more")
        spans = {row: [round(time / self.makespan * room) for time in (row.start, row.end)] for row in self.rows}
        names = self._names({row: stop - start for row, (start, stop) in spans.items()})
        lines = [["."] * room for _ in range(self.schedule.ranks)]
        for row, (start, stop) in spans.items():
            lines[row.rank][start:stop] = names[row][: stop - start].ljust(stop - start, "-")
        return "\n".join(f"rank {rank}".ljust(margin) + "".join(line) for rank, line in enumerate(lines))

    def _names(self, rooms: Mapping[Timed, int]) -> dict[Timed, str]:
        """The names of all boxes, by the fullest way in which each has room."""
        names = {row: row.action.kind for row in rooms}
        longer = [{row: f"{row.action.kind}{row.action.microbatch}" for row in rooms}]
        if self.schedule.stages_per_rank > 1:
            longer.append({row: str(row.action) for row in rooms})
        for candidate in longer:
            if all(len(name) <= rooms[row] for row, name in candidate.items()):
                names = candidate
        return names

    def __str__(self) -> str:
        return f"{self.title()}\n{self.picture()}"


def simulate(schedule: Schedule, durations: Durations = UNIT_TIMES, send: float = 0.0, unit: str = "") -> Timeline:
    """When each action runs, if each starts as soon as its rank is free and what it reads has arrived.

    Args:
      schedule: of functitan.compiler.pipeline.schedules.
      durations: of each kind that the schedule has. The default is that of equal stages: 1 for F, I and W, 2 for B.
      send: how long activations or gradients are under way from one rank to another; ranks compute meanwhile.
      unit: of all of these, for the texts.

    Raises:
      ValueError: a duration is missing, not above 0 or not finite, or there is not one for each stage.
    """
    used = [kind for kind in UNIT_TIMES if any(a is not None and a.kind == kind for row in schedule.order for a in row)]
    missing = [kind for kind in used if kind not in durations]
    if missing:
        raise ValueError(f"{schedule.name} needs durations of {', '.join(used)}; {', '.join(missing)} missing")
    table = {kind: _of_stages(kind, durations[kind], schedule.stages) for kind in used}
    if not 0 <= send < math.inf:
        raise ValueError(f"a send of {send}; legal: a finite time of at least 0")
    return Timeline(schedule, schedule.run(lambda action: table[action.kind][action.stage], send), unit)


def _of_stages(kind: str, duration: float | Sequence[float], stages: int) -> tuple[float, ...]:
    each = (duration,) * stages if isinstance(duration, (int, float)) else tuple(duration)
    if len(each) != stages or not all(0 < one < math.inf for one in each):
        raise ValueError(f"durations of {kind}: {duration}; legal: a finite time above 0, or {stages}, one a stage")
    return each
