"""Which parts of the square of scores have to be computed, known before any of them is: pure arithmetic of places."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from sharding_specs.context import ContextParallel, Run, runs


@frozen
class Pattern:
    """Who sees whom, without the documents' numbers.

    Attributes:
        causal: no token sees a later one.
        window: a token sees keys less than this far away; None: any.
        documents: whether tokens of different documents are hidden from each other.
    """

    causal: bool
    window: int | None = None
    documents: bool = False


@frozen
class Call:
    """One call of a kernel: runs ``q[0]:q[1]`` of the queries against runs ``k[0]:k[1]`` of the keys.

    Attributes:
        kind: "full": every query sees every key; "causal": the two are the same places, in order; "masked": a mask says
            who sees whom.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    kind: str


def calls_of(queries: Sequence[Run], keys: Sequence[Run], pattern: Pattern) -> tuple[Call, ...]:
    """The calls that together compute all scores that anybody sees, and as few others as whole runs allow.

    Args:
        queries: where the queries stand, run by run.
        keys: where the keys stand.
    """
    rows = [[_kind(q, k, pattern) for k in keys] for q in queries]
    if len(queries) > 1 and tuple(queries) == tuple(keys) and _is_triangle(rows):
        return (Call((0, len(queries)), (0, len(keys)), "causal"),)
    calls: list[Call] = []
    for i, row in enumerate(rows):
        for first, last, kind in _merged(row):
            before = calls[-1] if calls else None
            if before and kind == before.kind != "causal" and before.q[1] == i and before.k == (first, last) \
                    and _merged(rows[i - 1]) == _merged(row):  # fmt: skip
                calls[-1] = Call((before.q[0], i + 1), before.k, kind)
            else:
                calls.append(Call((i, i + 1), (first, last), kind))
    return tuple(calls)


def _kind(query: Run, key: Run, pattern: Pattern) -> str:
    """Of one run of queries against one of keys: "empty", "full", "causal" or "masked"."""
    nearest = max(query[0] - (key[0] + key[1] - 1), key[0] - (query[0] + query[1] - 1), 0)
    farthest = max(query[0] + query[1] - 1 - key[0], key[0] + key[1] - 1 - query[0])
    if pattern.causal and key[0] > query[0] + query[1] - 1:
        return "empty"
    if pattern.window is not None and nearest >= pattern.window:
        return "empty"
    near = pattern.window is None or farthest < pattern.window
    if pattern.documents or not near:
        return "masked"
    if not pattern.causal or key[0] + key[1] - 1 <= query[0]:
        return "full"
    return "causal" if query == key else "masked"


def _is_triangle(rows: list[list[str]]) -> bool:
    return all(
        kind == ("full" if j < i else "causal" if j == i else "empty")
        for i, row in enumerate(rows)
        for j, kind in enumerate(row)
    )


def _merged(row: list[str]) -> list[tuple[int, int, str]]:
    """``(first, last, kind)`` of neighbours of one kind, without the empty ones."""
    found: list[tuple[int, int, str]] = []
    for j, kind in enumerate(row):
        if found and found[-1][1] == j and found[-1][2] == kind != "causal":
            found[-1] = (found[-1][0], j + 1, kind)
        elif kind != "empty":
            found.append((j, j + 1, kind))
    return found


def ring_calls(rank: int, cp: int, seq_len: int, layout: str, pattern: Pattern) -> list[tuple[Call, ...]]:
    """Of every step of a ring, what a rank computes: at step ``s`` it has the keys of rank ``rank - s``.

    Steps at which no rank has anything to compute are left out, on all ranks alike: they are the last ones.
    """
    def at(r: int, step: int) -> tuple[Call, ...]:
        places = runs(r, cp, seq_len, layout)
        return calls_of(places, runs((r - step) % cp, cp, seq_len, layout), pattern)

    # Keys have to pass through a rank that does not need them on the way to one that does.
    needed = max((step for step in range(cp) if any(at(r, step) for r in range(cp))), default=0)
    return [at(rank, step) for step in range(needed + 1)]


def scores(calls: Sequence[Call], queries: Sequence[Run], keys: Sequence[Run]) -> int:
    """How many scores the calls compute; the kernels leave out the upper triangle of a causal one."""
    total = 0
    for call in calls:
        rows = sum(length for _, length in queries[slice(*call.q)])
        columns = sum(length for _, length in keys[slice(*call.k)])
        total += rows * (rows + 1) // 2 if call.kind == "causal" else rows * columns
    return total


@frozen
class Work:
    """What each rank of cp computes of the square of scores: ``print(work)`` is a line.

    Attributes:
        context: method and layout.
        scores: of each rank, for one row and one head.
        seq_len: of the row.
    """

    context: ContextParallel
    scores: tuple[int, ...]
    seq_len: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each rank, the part of all that the ranks compute together."""
        total = sum(self.scores)
        return tuple(count / total for count in self.scores)

    @property
    def imbalance(self) -> float:
        """The most that a rank computes by the mean: 1 where all do the same."""
        return max(self.scores) * len(self.scores) / sum(self.scores)

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.shares)
        return (
            f"attention of {self.seq_len} tokens over cp={len(self.scores)}, {self.context.method}, "
            f"{self.context.layout}: shares of the ranks {shares}; the busiest has {self.imbalance:.2f} x the mean"
        )


def work(context: ContextParallel, cp: int, seq_len: int, pattern: Pattern) -> Work:
    """The scores that each rank of cp computes.

    With documents their places are not known, and every pair that causality and window allow counts.

    Raises:
        ValueError: the sequence does not divide.
    """
    counts = []
    for rank in range(cp):
        if context.method == "ulysses":  # all scores of a part of the heads
            whole = ((0, seq_len),)
            counts.append(scores(calls_of(whole, whole, pattern), whole, whole) // cp)
            continue
        mine = runs(rank, cp, seq_len, context.layout)
        total = 0
        for other in range(cp):
            theirs = runs(other, cp, seq_len, context.layout)
            total += scores(calls_of(mine, theirs, pattern), mine, theirs)
        counts.append(total)
    return Work(context, tuple(counts), seq_len)
