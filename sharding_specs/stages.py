"""Which layers belong to which pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Cost = int | float | Sequence[int | float]
"""One number, or several of which the first counts most: such as operations, then bytes."""


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """The layers of each stage: consecutive, every layer once, no stage empty, sizes at most one apart.

    The larger stages come first, since the last one also holds the output head: 5 layers over 4 stages are
    ``[0, 1], [2], [3], [4]``.

    Raises:
      ValueError: a number is below 1, or there are fewer layers than stages.
    """
    if n_stages < 1 or n_layers < n_stages:
        raise ValueError(
            f"{n_layers} layers cannot fill {n_stages} pipeline stages: each stage needs a layer; "
            f"legal numbers of stages: {f'1 to {n_layers}' if n_layers > 1 else '1, with at least one layer'}"
        )
    size, larger = divmod(n_layers, n_stages)
    return _ranges([size + (stage < larger) for stage in range(n_stages)])


def listed_stages(counts: str | Sequence[int], n_layers: int, n_stages: int) -> list[range]:
    """The layers of each stage by a list of their numbers, such as ``"2,1,1,1"`` or ``(2, 1, 1, 1)``.

    Raises:
      ValueError: it is no list of numbers, not one for each stage, a stage is empty, or they do not add up to the
        layers; with a list that works.
    """
    even = stage_layers(n_layers, n_stages)
    shown = counts if isinstance(counts, str) else ",".join(map(str, counts))
    legal = (
        f"legal: {n_stages} number{'s' if n_stages > 1 else ''} of at least 1 that add up to {n_layers}, such as "
        f"{','.join(str(len(layers)) for layers in even)}"
    )
    texts = [text.strip() for text in shown.split(",")]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise ValueError(f"layers of the stages {shown!r}: not a list of numbers; {legal}")
    sizes = [int(text) for text in texts]
    if len(sizes) != n_stages:
        raise ValueError(f"layers of the stages {shown}: {len(sizes)} numbers for {n_stages} stages; {legal}")
    if 0 in sizes:
        raise ValueError(f"layers of the stages {shown}: stage {sizes.index(0)} is empty; {legal}")
    if sum(sizes) != n_layers:
        raise ValueError(f"layers of the stages {shown}: {sum(sizes)} in all, but there are {n_layers}; {legal}")
    return _ranges(sizes)


def balanced_stages(costs: Sequence[Cost], n_stages: int, *, first: Cost = 0, last: Cost = 0) -> list[range]:
    """The layers of each stage, consecutive and none empty, so that the dearest stage is as cheap as it can be.

    Exact, by dynamic programming. Of the divisions with the least maximum those are taken whose further costs, if
    there are any, have the least maximum in turn; of these the one with the least sum of squares of the first cost,
    and of equals the one whose earlier stages have more layers. So equal layers with no extra cost are divided as by
    :func:`stage_layers`.

    Args:
      costs: of each layer.
      n_stages: how many stages.
      first: what the first stage has beside its layers (the embedding); 0 is nothing of any cost.
      last: the same of the last stage (the head).

    Raises:
      ValueError: there are fewer layers than stages, or a cost is negative, not finite, or of another length.
    """
    n_layers = len(costs)
    stage_layers(n_layers, n_stages)
    kinds = len(_several(costs[0]))
    layers = [_checked(cost, kinds, f"layer {i}") for i, cost in enumerate(costs)]
    extra_first, extra_last = (
        (0,) * kinds if cost == 0 else _checked(cost, kinds, name) for cost, name in ((first, "first"), (last, "last"))
    )
    sums = [(0, *accumulate(layer[kind] for layer in layers)) for kind in range(kinds)]

    def cost_of(kind: int, start: int, stop: int) -> int | float:
        extra = (extra_first[kind] if start == 0 else 0) + (extra_last[kind] if stop == n_layers else 0)
        return sums[kind][stop] - sums[kind][start] + extra

    bounds: list[int | float] = []

    def allowed(start: int, stop: int) -> bool:
        return all(cost_of(kind, start, stop) <= bound for kind, bound in enumerate(bounds))

    for kind in range(kinds):
        divided = _divide(n_layers, n_stages, allowed, lambda start, stop, kind=kind: cost_of(kind, start, stop), max)
        bounds.append(max(cost_of(kind, layers.start, layers.stop) for layers in divided))
    return _divide(n_layers, n_stages, allowed, lambda start, stop: cost_of(0, start, stop) ** 2, lambda a, b: a + b)


def _divide(
    n_layers: int,
    n_stages: int,
    allowed: Callable[[int, int], bool],
    cost: Callable[[int, int], int | float],
    join: Callable[[int | float, int | float], int | float],
) -> list[range]:
    """The division into allowed stages of which the joined costs are least; of equals, earlier stages are larger."""
    # Of the layers from each start on, in the stages still to come: the joined costs, and where the first one stops.
    best: dict[int, tuple[int | float | None, int]] = {n_layers: (None, n_layers)}
    choices = []
    for stage in reversed(range(n_stages)):
        now: dict[int, tuple[int | float, int]] = {}
        for start in range(stage, stage + n_layers - n_stages + 1) if stage else (0,):
            for stop, (rest, _) in best.items():
                if stop <= start or not allowed(start, stop):
                    continue
                total = cost(start, stop) if rest is None else join(cost(start, stop), rest)
                if start not in now or (total, -stop) < (now[start][0], -now[start][1]):
                    now[start] = (total, stop)
        choices.append(now)
        best = now
    sizes, start = [], 0
    for chosen in reversed(choices):
        stop = chosen[start][1]
        sizes.append(stop - start)
        start = stop
    return _ranges(sizes)


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise((0, *accumulate(sizes)))]


def _several(cost: Cost) -> tuple[int | float, ...]:
    return (cost,) if isinstance(cost, (int, float)) else tuple(cost)


def _checked(cost: Cost, kinds: int, what: str) -> tuple[int | float, ...]:
    several = _several(cost)
    if len(several) != kinds or not all(0 <= number < math.inf for number in several):
        raise ValueError(
            f"the cost of {what} is {cost}; legal: {kinds} finite number{'s' if kinds > 1 else ''} of at least 0"
        )
    return several
