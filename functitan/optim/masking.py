"""Transformations for some of the leaves: ``masked`` and ``partition``, and the masks of weight decay."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from functitan import tree
from functitan.optim.base import GradientTransformation

MaskOrFn = Any | Callable[[Any], Any]
"""A tree of bools with the structure of the parameters or a prefix of it (so a bool is one), or a function of the
parameters that returns one."""


class MaskedNode(NamedTuple):
    """Stands where a leaf was masked out. A node without leaves, so that ``tree.map`` passes over it."""


class MaskedState(NamedTuple):
    inner_state: Any


class PartitionState(NamedTuple):
    inner_states: dict[str, Any]


def masked(inner: GradientTransformation, mask: MaskOrFn) -> GradientTransformation:
    """``inner`` on the leaves whose mask is True; the other updates pass through unchanged.

    Args:
        inner: sees trees in which the other leaves are :class:`MaskedNode`.
        mask: a tree of bools or a function of the parameters; in ``update`` the function is given the updates where
            no parameters are passed, so it should read shapes only.

    Raises:
        ValueError: the mask's structure is no prefix of the tree's.
        TypeError: a leaf of the mask is no bool.
    """

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(_keep(_resolve(mask, params), params)))

    def update(updates: Any, state: MaskedState, params: Any = None) -> tuple[Any, MaskedState]:
        bools = _resolve(mask, updates if params is None else params)
        kept_params = None if params is None else _keep(bools, params)
        new, inner_state = inner.update(_keep(bools, updates), state.inner_state, kept_params)
        return tree.map(lambda m, n, old: n if m else old, bools, new, updates), MaskedState(inner_state)

    return GradientTransformation(init, update)


def partition(
    transforms: Mapping[str, GradientTransformation], labels: Any | Callable[[Any], Any]
) -> GradientTransformation:
    """A transformation for each group of leaves, as ``optax.partition``.

    Args:
        transforms: label to transformation.
        labels: a tree of labels with the structure of the parameters or a prefix of it, or a function of the
            parameters that returns one.

    Raises:
        ValueError: a label that ``transforms`` lacks, with its path; or labels that do not fit the tree.
    """

    def resolved_labels(params: Any) -> Any:
        found = labels(params) if callable(labels) else labels
        for path, label in tree.leaves_with_path(found):
            if label not in transforms:
                raise ValueError(
                    f"partition: label {label!r} at {path or 'the root'} has no transformation; "
                    f"legal: {', '.join(map(repr, transforms))}"
                )
        return found

    def group(label: str) -> GradientTransformation:
        return masked(transforms[label], lambda params: tree.map(lambda x: x == label, resolved_labels(params)))

    groups = {label: group(label) for label in transforms}

    def init(params: Any) -> PartitionState:
        return PartitionState({label: transform.init(params) for label, transform in groups.items()})

    def update(updates: Any, state: PartitionState, params: Any = None) -> tuple[Any, PartitionState]:
        new_states = {}
        # Groups are disjoint, so applying one after the other lets each see its own gradients.
        for label, transform in groups.items():
            updates, new_states[label] = transform.update(updates, state.inner_states[label], params)
        return updates, PartitionState(new_states)

    return GradientTransformation(init, update)


_NOT_DECAYED = re.compile(r"(norm|bias|scale|gamma|beta)$|^ln(_|\d|$)", re.IGNORECASE)


def default_decay_mask(params: Any) -> Any:
    """The mask of weight decay where none is given: neither norms nor biases.

    Decayed are leaves with 2 dims or more, but none below a name that ends in norm, bias, scale, gamma or beta or that
    is an ``ln``: where layers are stacked a norm has 2 dims as well. A model that declares its parameters says it
    without guessing: :func:`decay_mask`.
    """

    def decays(path: str, p: Tensor) -> bool:
        return p.ndim >= 2 and not any(_NOT_DECAYED.search(name) for name in path.split("/"))

    return tree.map_with_path(decays, params)


def decay_mask(specs: Any) -> Any:
    """The mask of weight decay that the parameters themselves declare.

    ``adamw(lr, mask=decay_mask(declare(cfg)))`` decays every parameter whose :attr:`sharding_specs.Param.decays` is
    True: by default those with 2 dims or more beside "layers", so neither norms nor biases, also where stacked.

    Args:
        specs: a tree of ``sharding_specs.Param``.

    Raises:
        TypeError: a leaf does not say whether it decays; the message has the path.
    """

    def decays(path: str, spec: Any) -> bool:
        if not hasattr(spec, "decays"):
            raise TypeError(
                f"decay_mask: {path or 'the tree'} is {type(spec).__name__}, not a Param; "
                "pass the tree that the model declares, not its tensors"
            )
        return spec.decays

    return tree.map_with_path(decays, specs)


def _resolve(mask: MaskOrFn, params: Any) -> Any:
    bools = mask(params) if callable(mask) else mask
    for path, value in tree.leaves_with_path(bools):
        if not isinstance(value, bool):
            raise TypeError(
                f"masked: the mask at {path or 'the root'} is {type(value).__name__} {value!r}; "
                "its leaves are True or False"
            )
    return bools


def _keep(bools: Any, params: Any) -> Any:
    try:
        return tree.map(lambda m, p: p if m else MaskedNode(), bools, params)
    except ValueError as error:
        raise ValueError(
            f"masked: the mask is neither of the structure of the parameters nor a prefix of it: {error}"
        ) from error
