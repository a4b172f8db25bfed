"""Learning rates as functions of the count, with optax's names and values.

A schedule takes a Python number and gives a float, or takes a 0-dim tensor and gives a 0-dim tensor without reading
it back, so the same one serves a captured step (``adamw(schedule)``) and the log (``schedule(step)``).

Every value lies between the smallest and the largest of the values a schedule is made of, at any count: before 0 it
is that of count 0, after the last step it stays. A transition over 0 steps is none: the value stays where it was.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from functitan.optim.base import Schedule, check_not_negative, check_number


def constant_schedule(value: float) -> Schedule:
    """``value`` at every count."""
    check_not_negative("constant_schedule", "value", value)
    return lambda count: value


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """``(init_value - end_value)·(1 - t)^power + end_value``, t from 0 to 1 over the transition.

    Args:
        init_value: the value up to count ``transition_begin``.
        end_value: the value from count ``transition_begin + transition_steps`` on.
        power: > 0; 1 is linear.
        transition_steps: >= 0; with 0 the value stays at ``init_value``.
        transition_begin: >= 0.

    Raises:
        ValueError: an argument is not as above.
    """
    where = "polynomial_schedule"
    check_not_negative(where, "init_value", init_value)
    check_not_negative(where, "end_value", end_value)
    _check_positive(where, "power", power)
    _check_steps(where, transition_steps=transition_steps, transition_begin=transition_begin)
    shape = lambda t: (1 - t) if power == 1 else (1 - t) ** power  # noqa: E731
    return _transition(init_value, end_value, transition_steps, shape, transition_begin)


def linear_schedule(
    init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """A straight line from ``init_value`` to ``end_value``; see :func:`polynomial_schedule`."""
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(
    init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0
) -> Schedule:
    """Half a cosine from ``init_value`` to ``alpha·init_value`` (https://arxiv.org/abs/1608.03983, without restarts).

    Args:
        init_value: the value at count 0, >= 0.
        decay_steps: >= 0; with 0 the value stays at ``init_value`` (optax refuses 0).
        alpha: the last value as a fraction of the first, >= 0.
        exponent: of the cosine, > 0.

    Raises:
        ValueError: an argument is not as above.
    """
    where = "cosine_decay_schedule"
    check_not_negative(where, "init_value", init_value)
    check_not_negative(where, "alpha", alpha)
    _check_positive(where, "exponent", exponent)
    _check_steps(where, decay_steps=decay_steps)
    return _transition(init_value, alpha * init_value, decay_steps, _half_cosine(exponent))


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each counts from its own boundary.

    Args:
        schedules: at least one.
        boundaries: the count at which each but the first begins, not descending.

    Raises:
        ValueError: the lengths do not fit, or the boundaries descend or are negative.
    """
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules and {len(boundaries)} boundaries; "
            "give one boundary less than schedules"
        )
    _check_steps("join_schedules", **{f"boundaries[{i}]": b for i, b in enumerate(boundaries)})
    if any(a > b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"join_schedules: boundaries {boundaries} must not descend")

    def schedule(count: Any) -> Any:
        value = schedules[0](count)
        for boundary, following in zip(boundaries, schedules[1:]):
            if isinstance(count, Tensor):
                value = torch.where(count < boundary, value, following(count - boundary))
            elif count >= boundary:
                value = following(count - boundary)
        return value

    return schedule


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """A straight line from ``init_value`` to ``peak_value``, which then stays.

    With 0 warm-up steps the value is ``peak_value`` (optax stays at ``init_value``).
    """
    _check_steps("warmup_constant_schedule", warmup_steps=warmup_steps)
    return join_schedules(
        [linear_schedule(init_value, peak_value, warmup_steps), constant_schedule(peak_value)], [warmup_steps]
    )


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A straight line up to ``peak_value``, then a half cosine down to ``end_value``.

    Args:
        init_value: the value at count 0.
        peak_value: the value at count ``warmup_steps``.
        warmup_steps: >= 0.
        decay_steps: the length of the whole schedule, **warm-up included** (as in optax), >= ``warmup_steps``;
            where equal, there is no decay.
        end_value: the value from count ``decay_steps`` on.
        exponent: of the cosine, > 0.

    Raises:
        ValueError: an argument is not as above.
    """
    where = "warmup_cosine_decay_schedule"
    check_not_negative(where, "peak_value", peak_value)
    check_not_negative(where, "end_value", end_value)
    _check_positive(where, "exponent", exponent)
    _check_steps(where, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if warmup_steps > decay_steps:
        raise ValueError(
            f"{where}: warmup_steps={warmup_steps} is more than decay_steps={decay_steps}, which is the length of the "
            f"whole schedule, warm-up included; legal warmup_steps: 0 to {decay_steps}"
        )
    return join_schedules(
        [
            linear_schedule(init_value, peak_value, warmup_steps),
            _transition(peak_value, end_value, decay_steps - warmup_steps, _half_cosine(exponent)),
        ],
        [warmup_steps],
    )


def wsd_schedule(
    peak_value: float,
    total_steps: int,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    *,
    init_value: float = 0.0,
    end_value: float = 0.0,
    decay: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Warm-up, stable, decay (Hu et al., https://arxiv.org/abs/2404.06395): up in a line, flat, down at the end.

    Args:
        peak_value: the value between warm-up and decay.
        total_steps: the length of the whole schedule.
        warmup_steps: >= 0; from ``init_value`` at count 0 to the peak.
        decay_steps: >= 0, the last of the steps; 0 is no decay.
        init_value: the value at count 0 where there is a warm-up.
        end_value: the value from count ``total_steps`` on where there is a decay.
        decay: the shape of the decay; "sqrt" is ``1 - sqrt(t)`` (Hägele et al., https://arxiv.org/abs/2405.18392).

    Raises:
        ValueError: an argument is not as above; warm-up and decay together are longer than the whole.
    """
    where = "wsd_schedule"
    shapes = {"linear": lambda t: 1 - t, "cosine": _half_cosine(), "sqrt": lambda t: 1 - t**0.5}
    if decay not in shapes:
        raise ValueError(f"{where}: decay={decay!r}; legal: {', '.join(map(repr, shapes))}")
    check_not_negative(where, "peak_value", peak_value)
    check_not_negative(where, "end_value", end_value)
    _check_steps(where, total_steps=total_steps, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"{where}: warmup_steps={warmup_steps} and decay_steps={decay_steps} together are more than "
            f"total_steps={total_steps}; legal warmup_steps: 0 to {total_steps}, "
            f"with this one legal decay_steps: 0 to {max(0, total_steps - warmup_steps)}"
        )
    return join_schedules(
        [
            linear_schedule(init_value, peak_value, warmup_steps),
            constant_schedule(peak_value),
            _transition(peak_value, end_value, decay_steps, shapes[decay]),
        ],
        [warmup_steps, total_steps - decay_steps],
    )


def _transition(init: float, end: float, steps: int, shape: Callable[[Any], Any], begin: int = 0) -> Schedule:
    """``(init - end)·shape(t) + end``, where t goes from 0 to 1 over ``steps`` from count ``begin`` on."""
    low, high = min(init, end), max(init, end)

    def schedule(count: Any) -> Any:
        if steps == 0:
            return init
        t = _clip((count - begin) / steps, 0.0, 1.0)
        # The sum may round past its bounds.
        return _clip((init - end) * shape(t) + end, low, high)

    return schedule


def _half_cosine(exponent: float = 1.0) -> Callable[[Any], Any]:
    def shape(t: Any) -> Any:
        height = 0.5 * (1 + (torch.cos(t * math.pi) if isinstance(t, Tensor) else math.cos(t * math.pi)))
        return height if exponent == 1 else height**exponent

    return shape


def _clip(x: Any, low: float, high: float) -> Any:
    return x.clamp(low, high) if isinstance(x, Tensor) else min(max(x, low), high)


def _check_positive(where: str, name: str, value: Any) -> None:
    check_number(where, name, value, "finite, > 0", lambda x: 0 < x < math.inf)


def _check_steps(where: str, **steps: Any) -> None:
    for name, value in steps.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{where}: {name} must be an int >= 0, not {type(value).__name__} {value!r}")
        if value < 0:
            raise ValueError(f"{where}: {name}={value}; legal: an int >= 0")
