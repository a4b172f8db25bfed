"""The shape of an optimizer, as in optax: ``GradientTransformation(init, update)``, composed with :func:`chain`.

Everything is a pure function of trees of tensors: nothing is changed in place, no state hides in an object, and
nothing reads a value back to Python, so a step that contains an optimizer can be captured as one graph.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functitan import tree

Schedule = Callable[[Any], Any]
"""``schedule(count) -> value``: a Python number gives a float, a 0-dim tensor gives a 0-dim tensor."""
ScalarOrSchedule = float | Tensor | Schedule

_INT32_MAX = 2**31 - 1


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    Attributes:
        init: ``init(params) -> state``, a tree of tensors.
        update: ``update(updates, state, params=None) -> (updates, state)``. The updates have the structure and
            shapes of the parameters: gradients go in, what is to be added to the parameters comes out of the last
            transformation. ``params`` is needed by those that read it, such as weight decay.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


def init_empty_state(params: Any) -> EmptyState:
    """The ``init`` of a transformation without state."""
    del params
    return EmptyState()


def identity() -> GradientTransformation:
    """Leaves the updates as they are."""
    return GradientTransformation(init_empty_state, lambda updates, state, params=None: (updates, state))


def chain(*transforms: GradientTransformation) -> GradientTransformation:
    """One transformation after the other; the state is the tuple of their states.

    Raises:
        ValueError: (from ``update``) the state is not one of this chain.
    """

    def init(params: Any) -> tuple:
        return tuple(transform.init(params) for transform in transforms)

    def update(updates: Any, state: tuple, params: Any = None) -> tuple[Any, tuple]:
        if len(state) != len(transforms):
            raise ValueError(
                f"chain: a state of {len(state)} parts for {len(transforms)} transformations; "
                "pass the state that this optimizer's init or update returned"
            )
        new_state = []
        for transform, part in zip(transforms, state):
            updates, part = transform.update(updates, part, params)
            new_state.append(part)
        return updates, tuple(new_state)

    return GradientTransformation(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates``, each leaf in the dtype of the parameter.

    The sum is taken in the wider dtype of the two: a float32 update reaches a bfloat16 parameter with one rounding.

    Raises:
        ValueError: the trees, or the shapes of a leaf, differ.
    """
    return map_matching("apply_updates", lambda p, u: (p + u).to(p.dtype), params, updates=updates)


def map_matching(where: str, fun: Callable, first: Any, *, outputs: int = 1, **rest: Any) -> Any:
    """``fun(leaf, *leaves of rest)`` over trees of one structure and equal shapes.

    Broadcasting a wrong gradient against a parameter would succeed silently, so shapes must be equal.

    Args:
        where: who asks, for the error.
        outputs: how many values ``fun`` returns; the result is as many trees.
        **rest: more trees; the keyword names them in the error.

    Raises:
        ValueError: a structure or a shape differs; the message has the path.
    """
    leaves, treedef = tree.flatten(first)
    columns = [leaves]
    for name, other in rest.items():
        if tree.structure(other) != treedef:
            raise ValueError(f"{where}: {_structure_difference(first, name, other)}")
        columns.append(tree.leaves(other))
        for i, (x, y) in enumerate(zip(leaves, columns[-1])):
            if x.shape != y.shape:
                path = tree.leaves_with_path(first)[i][0] or "the leaf"
                raise ValueError(f"{where}: {path} has shape {tuple(x.shape)}, in {name} {tuple(y.shape)}")
    results = [fun(*row) for row in zip(*columns)]
    if outputs == 1:
        return tree.unflatten(treedef, results)
    return tuple(tree.unflatten(treedef, [result[k] for result in results]) for k in range(outputs))


def _structure_difference(first: Any, name: str, other: Any) -> str:
    mine, theirs = (dict(tree.leaves_with_path(t)) for t in (first, other))
    missing, extra = mine.keys() - theirs.keys(), theirs.keys() - mine.keys()
    parts = [
        f"{label} {', '.join(sorted(paths)[:3])}{', …' if len(paths) > 3 else ''}"
        for label, paths in (("missing there:", missing), ("only there:", extra))
        if paths
    ]
    detail = "; ".join(parts) or f"{tree.structure(first)} against {tree.structure(other)}"
    return f"{name} has another structure than the tree given ({detail}); both must come from the same parameters"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to accumulate values of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def zeros_like(params: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros in the shapes of ``params``: in ``dtype``, or float32 where the parameter has a lower precision."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=dtype or at_least_float32(p.dtype)), params)


def zero_count(params: Any) -> Tensor:
    """An int32 0-dim zero where the parameters are."""
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def increment(count: Tensor) -> Tensor:
    """``count + 1``, which stays at the largest int32 instead of wrapping round."""
    return count.clamp(max=_INT32_MAX - 1) + 1


def bias_correction(decay: float, count: Tensor) -> Tensor:
    """``1 - decay**count`` as a float32 0-dim tensor.

    By expm1: the plain expression loses four digits in float32 where decay is 0.999 and count 1.
    """
    log_decay = math.log(decay) if decay > 0 else -math.inf
    return -torch.expm1(count.to(torch.float32) * log_decay)


def check_number(where: str, name: str, value: Any, legal: str, is_legal: Callable[[float], bool]) -> None:
    """Raises TypeError where ``value`` is no Python number, ValueError where it is not a legal one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} must be a number ({legal}), not {type(value).__name__} {value!r}")
    if not is_legal(value):
        raise ValueError(f"{where}: {name}={value!r}; legal: {legal}")


def check_decay_rate(where: str, name: str, value: Any) -> None:
    check_number(where, name, value, "0 <= value < 1", lambda x: 0 <= x < 1)


def check_not_negative(where: str, name: str, value: Any) -> None:
    check_number(where, name, value, "finite, >= 0", lambda x: 0 <= x < math.inf)


def check_scalar_or_schedule(where: str, name: str, value: Any) -> None:
    """As :func:`check_not_negative`, where a 0-dim tensor or a schedule will do too."""
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(f"{where}: {name} must be a 0-dim tensor; it has shape {tuple(value.shape)}")
    elif not callable(value):
        check_not_negative(where, name, value)
