"""What each rank of a pipeline does in which order, as data: no tensor, no process group, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

COMPUTES = ("F", "B", "I", "W")
"""Forward; whole backward; its two halves: gradient of the stage's input, gradients of the stage's parameters."""

SENDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Activations to the next stage and from the one before, gradients to the stage before and from the next."""

UNIT_TIMES: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Durations where nothing is known: two products backward for one forward."""

Result = tuple[str, int, int]
"""What an action gives: ("x", stage, microbatch) is the stage's output, ("dx", …) the gradient of its input."""


@frozen(order=True)
class Action:
    """One thing that a rank does for one microbatch of one stage; ``str(action)`` is torch's: ``2F0``, ``1SEND_B3``.

    Attributes:
      kind: of COMPUTES or SENDS.
      stage: whose action it is: RECV_F of stage 2 receives what stage 1 sends as SEND_F.
      microbatch: which.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def gives(self) -> Result | None:
        """What a compute action makes for other actions; None for W, whose gradients no other action reads."""
        kind = {"F": "x", "B": "dx", "I": "dx"}.get(self.kind)
        return kind and (kind, self.stage, self.microbatch)

    def needs(self, stages: int) -> tuple[Result, ...]:
        """What a compute action reads of other actions, with so many stages in all."""
        stage, microbatch = self.stage, self.microbatch
        if self.kind == "F":
            return (("x", stage - 1, microbatch),) if stage else ()
        if self.kind == "W":
            return (("dx", stage, microbatch),)
        own: Result = ("x", stage, microbatch)
        return (own,) if stage == stages - 1 else (own, ("dx", stage + 1, microbatch))


Order = tuple[tuple[Action | None, ...], ...]
"""The compute actions of each rank; None is a slot in which torch, or a file, leaves the rank idle."""


@frozen
class Timed:
    """An action and when it runs."""

    rank: int
    action: Action
    start: float
    end: float


@frozen
class Schedule:
    """The order in which the ranks of a pipeline run its stages; made by ``functitan.compiler.pipeline.schedules``.

    Attributes:
      name: of the schedule, or the path of its file.
      ranks: the size of the mesh axis ``pp``.
      stages: how many; every rank has equally many.
      microbatches: how many parts a batch is taken in.
      order: of each rank.
      stage_ranks: the rank of each stage: in a loop (0 1 0 1), or there and back (0 1 1 0) for the V-shaped ones.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    order: Order
    stage_ranks: tuple[int, ...]

    @property
    def stages_per_rank(self) -> int:
        return self.stages // self.ranks

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is run in its two halves, I and W."""
        return any(action.kind == "I" for row in self.order for action in row if action is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in ascending order. Raises ValueError where there is no such rank."""
        self._check_rank(rank)
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def apart(self, stage: int) -> bool:
        """Whether its rank ever does something else between the forward and the backward pass of a microbatch."""
        row = [action for action in self.order[self.stage_ranks[stage]] if action is not None]
        pairs = itertools.pairwise(row)
        at_once = sum(a.kind == "F" and b.kind in ("B", "I") and a.stage == b.stage == stage and
                      a.microbatch == b.microbatch for a, b in pairs)  # fmt: skip
        return at_once < self.microbatches

    def run(self, duration: Callable[[Action], float], send: float = 0.0) -> tuple[Timed, ...]:
        """When every action runs, if each starts as soon as its rank is free and what it reads has arrived.

        Args:
          duration: of a compute action, in any unit.
          send: how long a result is under way from one rank to another, in the same unit; a rank computes meanwhile.

        Returns:
          In order of start, and at one time in order of ranks.

        Raises:
          ValueError: ranks wait for each other for ever, which :func:`schedule_of` lets no schedule do.
        """
        timed, stuck = simulate(self.order, self.stages, self.stage_ranks, duration, send)
        if stuck:
            raise ValueError(f"the schedule {self.name} cannot go on: {stuck[0][1]} never gets what it needs")
        return timed

    def with_sends(self) -> tuple[tuple[Action, ...], ...]:
        """Each rank's actions, with a SEND and a RECV for each result that another rank reads.

        All ranks' lists are taken from one sequence in which a SEND and its RECV stand side by side, at the time when
        the result is there (at UNIT_TIMES). So two ranks agree on the order of what passes between them, and nothing
        waits for ever, whether or not a SEND waits for its RECV. A SEND follows what made the result; a RECV says when
        to post the receive, to be waited for before the action that reads it. Stages of one rank send nothing to each
        other.
        """
        events: list[tuple[float, int, int, Action, Action | None]] = []
        for one in self.run(lambda action: UNIT_TIMES[action.kind]):
            events.append((one.start, 1, one.rank, one.action, None))
            if pair := self.sends(one.action):
                events.append((one.end, 0, one.rank, *pair))
        lists: list[list[Action]] = [[] for _ in range(self.ranks)]
        for _, _, rank, action, received in sorted(events, key=lambda event: event[:3]):
            lists[rank].append(action)
            if received is not None:
                lists[self.stage_ranks[received.stage]].append(received)
        return tuple(map(tuple, lists))

    def sends(self, action: Action) -> tuple[Action, Action] | None:
        """The SEND and the RECV of a compute action's result, or None where no other rank reads it."""
        given = action.gives()
        if given is None:
            return None
        to = action.stage + (1 if given[0] == "x" else -1)
        if not 0 <= to < self.stages or self.stage_ranks[to] == self.stage_ranks[action.stage]:
            return None
        way = "F" if given[0] == "x" else "B"
        return (Action(f"SEND_{way}", action.stage, action.microbatch), Action(f"RECV_{way}", to, action.microbatch))

    def in_flight(self, rank: int) -> int:
        """The most forwards of a rank whose backward (of split ones the W) is still to come: what it keeps at once.

        Counted in microbatches of one stage. Raises ValueError where there is no such rank.
        """
        self._check_rank(rank)
        held = most = 0
        for action in self.order[rank]:
            if action is not None:
                held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                most = max(most, held)
        return most

    def to_csv(self) -> str:
        """One line a rank, one cell an action, empty cells where it is idle: as torch reads and writes schedules."""
        return "".join(",".join("" if a is None else str(a) for a in row) + "\n" for row in self.order)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"the schedule {self.name} has no rank {rank}; legal: 0 to {self.ranks - 1}")


def simulate(
    order: Order, stages: int, stage_ranks: Sequence[int], duration: Callable[[Action], float], send: float
) -> tuple[tuple[Timed, ...], tuple[tuple[int, Action, Result], ...]]:
    """As :meth:`Schedule.run`, also of an order that cannot go on: then ``(rank, action, what it lacks)`` of each rank.

    Each rank's order is fixed, so that the times follow from it: an action starts at the end of the one before on its
    rank, or when the last thing that it reads has arrived.
    """
    rows = [[action for action in row if action is not None] for row in order]
    made: dict[Result, tuple[float, int]] = {}
    timed: list[Timed] = []
    place, free = [0] * len(rows), [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row) and all(need in made for need in row[place[rank]].needs(stages)):
                action = row[place[rank]]
                arrivals = [end + send * (owner != rank) for end, owner in map(made.get, action.needs(stages))]
                start = max([free[rank], *arrivals])
                timed.append(Timed(rank, action, start, start + duration(action)))
                free[rank] = timed[-1].end
                if given := action.gives():
                    made[given] = (free[rank], rank)
                place[rank] += 1
                moved = True
    heads = [(rank, row[i]) for rank, (row, i) in enumerate(zip(rows, place)) if i < len(row)]
    stuck = tuple((rank, action, next(n for n in action.needs(stages) if n not in made)) for rank, action in heads)
    return tuple(sorted(timed, key=lambda one: (one.start, one.rank))), stuck


def schedule_of(name: str, order: Order, places: Sequence[Sequence[str]] | None = None) -> Schedule:
    """The Schedule of an order, checked: each stage's F, and its B or I and W, once a microbatch, after what they need.

    Args:
      name: see :class:`Schedule`.
      order: of each rank.
      places: in words, where each entry of the order stands, for the errors.

    Raises:
      ValueError: an action is missing or double, a stage is on two ranks, ranks have unequal numbers of stages, or an
        action comes before what it reads.
    """
    where: dict[Action, str] = {}
    owner: dict[int, int] = {}
    for rank, row in enumerate(order):
        for i, action in enumerate(row):
            if action is None:
                continue
            here = places[rank][i] if places else f"rank {rank}, action {i}"
            if action in where:
                raise ValueError(f"{name}: {here}: {action} is already at {where[action]}; each action comes once")
            if owner.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"{name}: {here}: {action} is on rank {rank}, but stage {action.stage} has actions on rank "
                    f"{owner[action.stage]}; a stage belongs to one rank"
                )
            where[action] = here
    stages, microbatches = _check_whole(name, where)
    stage_ranks = tuple(owner[stage] for stage in range(stages))
    counts = [stage_ranks.count(rank) for rank in range(len(order))]
    if len(set(counts)) != 1:
        raise ValueError(f"{name}: the ranks have {counts} stages; each rank needs equally many")
    _, stuck = simulate(order, stages, stage_ranks, lambda _: 1.0, 0.0)
    if stuck:
        raise ValueError(f"{name}: {_deadlock(stuck, where, stage_ranks)}")
    return Schedule(name, len(order), stages, microbatches, order, stage_ranks)


def _check_whole(name: str, where: Mapping[Action, str]) -> tuple[int, int]:
    """The numbers of stages and microbatches, each of which has its F and either B or both I and W."""
    if not where:
        raise ValueError(f"{name}: there are no actions; the least is one line such as 0F0,0B0")
    stages = 1 + max(action.stage for action in where)
    microbatches = 1 + max(action.microbatch for action in where)
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = "".join(kind for kind in COMPUTES if Action(kind, stage, microbatch) in where)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"{name}: stage {stage} has {' and '.join(kinds) or 'nothing'} for microbatch {microbatch} of "
                    f"{microbatches}; legal: F and B, or F, I and W"
                )
    return stages, microbatches


def _deadlock(
    stuck: Sequence[tuple[int, Action, Result]], where: Mapping[Action, str], stage_ranks: Sequence[int]
) -> str:
    """An action that cannot run and where the one stands that it needs: on its own rank, if any stuck rank has both."""
    makers = {given: action for action in where if (given := action.gives())}
    own = [one for one in stuck if stage_ranks[makers[one[2]].stage] == one[0]]
    _, action, missing = (own or stuck)[0]
    maker = makers[missing]
    waiting = ", ".join(f"{rank} at {head}" for rank, head, _ in stuck)
    return (
        f"{where[action]}: {action} needs {maker} ({where[maker]}) to come before it; "
        f"as it is, rank{'s wait' if len(stuck) > 1 else ' waits'} for ever: {waiting}"
    )
