"""The order of a pipeline's actions by name, from torch.distributed.pipelining, or from a file.

The one file that knows the private parts of torch's schedules. GPipe, Huang et al., https://arxiv.org/abs/1811.06965;
1F1B and Interleaved1F1B, Narayanan et al., https://arxiv.org/abs/2104.04473; InterleavedZeroBubble (their ZB1P) and
ZBVZeroBubble, Qi et al., https://arxiv.org/abs/2401.10241 and https://arxiv.org/abs/2405.15362; DualPipeV after
DeepSeek-V3, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attrs import frozen

from functitan.compiler.pipeline.actions import COMPUTES, Action, Order, Schedule, schedule_of
from sharding_specs.problem import did_you_mean

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "fewest_microbatches",
    "is_file",
    "legal_microbatches",
    "make_schedule",
    "stages_per_rank_of",
]


@frozen
class _Rule:
    """Which numbers of stages and microbatches a schedule takes."""

    stages_per_rank: tuple[int, ...] | None
    """The legal ones; None is any."""
    default_stages: int
    takes: Callable[[int, int], bool]
    """``(microbatches, ranks)``: whether it works."""
    needs: str
    """The same in words."""


def _in_rounds(microbatches: int, ranks: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


_ROUNDS = "that max(1, microbatches // ranks) divides"
_RULES = {
    "GPipe": _Rule((1,), 1, lambda m, p: m >= 1, "of at least 1"),
    "1F1B": _Rule((1,), 1, lambda m, p: m >= p, "of at least one a rank"),
    "Interleaved1F1B": _Rule(None, 2, _in_rounds, _ROUNDS),
    "InterleavedZeroBubble": _Rule(None, 2, _in_rounds, _ROUNDS),
    "ZBVZeroBubble": _Rule((2,), 2, lambda m, p: m >= 1, "of at least 1"),
    "DualPipeV": _Rule((2,), 2, lambda m, p: m >= 2 * p, "of at least two a rank"),
}

SCHEDULES = tuple(_RULES)
"""Names of schedules. The path of a .csv file is a schedule as well."""


def is_file(name: str) -> bool:
    """Whether a schedule is named by a file with its actions."""
    return name.lower().endswith(".csv")


def make_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The order in which ``ranks`` ranks run the stages of a pipeline for each of the microbatches.

    Args:
      name: of SCHEDULES, or the path of a .csv file: one line a rank, one cell an action (``0F0``, ``1B2``, ``1I2``,
        ``1W2``: stage, kind, microbatch; ``(0F1;3B0)OVERLAP_F_B`` is both in turn), an empty cell where it is idle.
      ranks: the size of the mesh axis ``pp``.
      microbatches: parts of a batch.
      stages_per_rank: None is what the schedule wants, see :func:`stages_per_rank_of`.

    Raises:
      ValueError: there is no such schedule or file, a number cannot work with it, or the file is malformed; with the
        legal values.
    """
    if ranks < 1:
        raise ValueError(f"a pipeline over {ranks} ranks; legal: 1 and more")
    if is_file(name):
        return _matching(_from_file(name), ranks, microbatches, stages_per_rank)
    stages_per_rank = _check_stages(name, stages_per_rank)
    if not (microbatches >= 1 and _RULES[name].takes(microbatches, ranks)):
        raise ValueError(
            f"{name} over {ranks} ranks needs a number of microbatches {_RULES[name].needs}, not {microbatches}; "
            f"nearest legal: {', '.join(map(str, _nearest(name, ranks, microbatches)))}"
        )
    return _named(name, ranks, microbatches, stages_per_rank)


def legal_microbatches(name: str, ranks: int, stages_per_rank: int | None, upto: int) -> tuple[int, ...]:
    """Every number of microbatches, up to ``upto``, that a schedule takes; of a file its own.

    Raises:
      ValueError: as :func:`make_schedule`, but for the number of microbatches.
    """
    if is_file(name):
        count = _matching(_from_file(name), ranks, None, stages_per_rank).microbatches
        return (count,) if count <= upto else ()
    _check_stages(name, stages_per_rank)
    return tuple(m for m in range(1, upto + 1) if _RULES[name].takes(m, ranks))


def fewest_microbatches(name: str, ranks: int, stages_per_rank: int | None) -> int:
    """The fewest microbatches that a schedule takes and that are two a rank or more; of a file its own number.

    Raises:
      ValueError: as :func:`legal_microbatches`.
    """
    if is_file(name):
        return _matching(_from_file(name), ranks, None, stages_per_rank).microbatches
    return next(m for m in legal_microbatches(name, ranks, stages_per_rank, 2 * ranks) if m >= 2 * ranks)


def stages_per_rank_of(name: str, asked: int | None = None) -> int:
    """The number of stages that a rank has; without ``asked`` 1, or 2 for interleaved and V-shaped schedules.

    Raises:
      ValueError: there is no such schedule or file, the file is malformed, or ``asked`` cannot work with it.
    """
    if is_file(name):
        return _matching(_from_file(name), None, None, asked).stages_per_rank
    return _check_stages(name, asked)


def _check_stages(name: str, asked: int | None) -> int:
    if name not in _RULES:
        near = {known.lower(): known for known in SCHEDULES}.get(name.lower())
        hint = f"did you mean {near!r}?" if near else did_you_mean(name, SCHEDULES)
        raise ValueError(
            f"there is no schedule {name!r}; {hint + ' ' if hint else ''}legal: {', '.join(SCHEDULES)}, or the "
            "path of a .csv file"
        )
    rule = _RULES[name]
    if asked is None:
        return rule.default_stages
    if asked < 1 or (rule.stages_per_rank and asked not in rule.stages_per_rank):
        legal = ", ".join(map(str, rule.stages_per_rank)) if rule.stages_per_rank else "1 and more"
        raise ValueError(f"{name} with {asked} stages a rank; legal: {legal}")
    return asked


def _nearest(name: str, ranks: int, microbatches: int) -> list[int]:
    """The nearest legal counts below and above; every schedule takes any multiple of twice the ranks."""
    upto = max(microbatches, 0) + 2 * ranks
    legal = legal_microbatches(name, ranks, None, upto)
    below = [m for m in legal if m < microbatches]
    above = [m for m in legal if m > microbatches]
    return below[-1:] + above[:2]


@lru_cache(maxsize=64)
def _named(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    if name == "1F1B":
        order = tuple(_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks))
    else:
        order = _torch_order(name, ranks, microbatches, stages_per_rank)
    return schedule_of(name, order)


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """What torch's Schedule1F1B runs. The order that it says it runs begins the last stage with microbatch 1."""
    warmup = min(microbatches, stages - stage)
    forwards = [Action("F", stage, m) for m in range(microbatches)]
    actions = forwards[:warmup]
    for m in range(microbatches):
        actions.append(Action("B", stage, m))
        actions += forwards[warmup + m : warmup + m + 1]
    return tuple(actions)


def _torch_order(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    """The order of torch's class of this name, which needs stages: it is given what it asks of them, and no more."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    stages = [
        SimpleNamespace(stage_index=i * ranks, num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0,
                        is_first=i == 0, is_last=False, submod=None)
        for i in range(stages_per_rank)
    ]  # fmt: skip
    kind = get_schedule_class(name)
    made = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches)
    return tuple(tuple(_flattened(made.pipeline_order[rank])) for rank in range(ranks))


def _flattened(actions: Iterable[Any]) -> Iterator[Action | None]:
    """Our actions of torch's: overlapping ones in turn, and none of those for sharded parameters."""
    for action in actions:
        if action is None:
            yield None
            continue
        for part in action.sub_actions or (action,):
            if part.computation_type.value in COMPUTES:
                yield Action(part.computation_type.value, part.stage_index, part.microbatch_index)


_CELL = re.compile(rf"(\d{{1,6}})({'|'.join(COMPUTES)})(\d{{1,6}})", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def _from_file(name: str) -> Schedule:
    try:
        with Path(name).open(newline="", encoding="utf-8") as file:
            lines = [(i, row) for i, row in enumerate(csv.reader(file, strict=True), 1) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"the schedule {name!r} cannot be read: {reason}; give a .csv file, one line a rank") from None
    order: list[tuple[Action | None, ...]] = []
    places: list[list[str]] = []
    for i, row in lines:
        cells = [(f"line {i}, cell {j}", part) for j, cell in enumerate(row, 1) for part in _parts(cell)]
        order.append(tuple(_parse(name, place, part) for place, part in cells))
        places.append([place for place, _ in cells])
    return schedule_of(name, tuple(order), places)


def _parts(cell: str) -> list[str]:
    overlap = _OVERLAP.fullmatch(cell.strip())
    return [part.strip() for part in overlap[1].split(";")] if overlap else [cell.strip()]


def _parse(name: str, place: str, cell: str) -> Action | None:
    if not cell:
        return None
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(
            f"{name}: {place}: {cell!r} is no action; legal: a stage, one of {', '.join(COMPUTES)} and a microbatch, "
            "such as 0F0, or nothing"
        )
    return Action(match[2], int(match[1]), int(match[3]))


def _matching(schedule: Schedule, ranks: int | None, microbatches: int | None, stages_per_rank: int | None) -> Schedule:
    """A file's schedule, where it has the numbers that are asked for (None: any)."""
    for asked, has, what in [
        (ranks, schedule.ranks, "ranks (lines)"),
        (microbatches, schedule.microbatches, "microbatches"),
        (stages_per_rank, schedule.stages_per_rank, "stages a rank"),
    ]:
        if asked is not None and asked != has:
            raise ValueError(f"the schedule {schedule.name} has {has} {what}, not {asked}; legal: {has}")
    return schedule
