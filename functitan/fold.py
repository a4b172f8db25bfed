"""``fold``: the loop over a model's layers, and the one place where a pipeline cuts a model into stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functitan import tree

Layer = Callable[[Any, Any, int], Any]
"""``layer(params, x, index) -> x``, with the parameters of one layer and its number in the whole model."""
OnFold = Callable[[Layer, Any, Any], Any]

_state = threading.local()


def fold(layer: Layer, x: Any, layers: Any) -> Any:
    """``x`` through a stack of layers: ``for i, p in enumerate(layers): x = layer(p, x, i)``.

    Where a plan has the layers over the mesh axis ``pp``, a stage of the pipeline runs its layers of the loop alone:
    what a model computes before it belongs to the first stage, and what it computes from the result to the last.
    A model has one such loop.

    Args:
        layer: keeps the structure, the shapes and the dtypes of ``x``; what else it reads it closes over (masks,
            angles, keys), and every stage computes that for itself.
        x: a tree of tensors, such as activations [batch, seq, embed].
        layers: a tree of parameters, every leaf stacked over the layers along its first dim.

    Returns:
        What the last layer gives.

    Raises:
        ValueError: the stacks differ in their number of layers, or there are none.
        TypeError: ``layer`` changes the structure, a shape or a dtype of ``x``.
    """
    hook: OnFold | None = getattr(_state, "hook", None)
    return run_layers(layer, x, layers, 0) if hook is None else hook(layer, x, layers)


def run_layers(layer: Layer, x: Any, layers: Any, first: int) -> Any:
    """The loop itself, over stacks that begin with layer number ``first``."""
    counts = {path or "layers": leaf.shape[0] if leaf.ndim else None for path, leaf in tree.leaves_with_path(layers)}
    if len(set(counts.values())) != 1 or None in counts.values():
        raise ValueError(f"fold: every leaf needs the same number of layers, its first dim; they have {counts}")
    leaves, treedef = tree.flatten(layers)
    # unbind, not stack[i]: the backward pass of n selects makes n tensors of the size of the whole stack.
    for i, params in enumerate(zip(*(leaf.unbind(0) for leaf in leaves))):
        after = layer(tree.unflatten(treedef, params), x, first + i)
        check_carry(x, after)
        x = after
    return x


def check_carry(before: Any, after: Any) -> None:
    """Raises TypeError where ``after`` has another structure than ``before``, or a leaf another shape or dtype."""
    if tree.structure(before) != tree.structure(after):
        raise TypeError(
            f"fold: a layer changed the structure of x from {tree.structure(before)} to {tree.structure(after)}"
        )
    for (path, a), b in zip(tree.leaves_with_path(before), tree.leaves(after)):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype):
            raise TypeError(
                f"fold: a layer changed x{' at ' + path if path else ''} from {tuple(a.shape)} {a.dtype} to "
                f"{tuple(b.shape)} {b.dtype}; every layer has to keep its shape and dtype"
            )


@contextmanager
def folding(hook: OnFold | None) -> Iterator[None]:
    """Within it, on this thread, ``fold`` is ``hook``; None is the plain loop."""
    before = getattr(_state, "hook", None)
    _state.hook = hook
    try:
        yield
    finally:
        _state.hook = before
