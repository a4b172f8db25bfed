"""Pytrees that behave as in JAX: ``None`` is no leaf, dict order does not matter, static fields survive.

torch's own pytree differs in the first two, so the work is done by optree, which agrees with JAX. A class
joins the trees with :func:`node`; its leaves then have readable paths (``params/layers/wq``), which are what
errors, checkpoints and initial values are keyed by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs
import optree

NAMESPACE = "functitan"
T = TypeVar("T")
TreeDef = optree.PyTreeSpec


def node(cls: type[T]) -> type[T]:
    """Registers an attrs class as a tree node (a class decorator, above ``@attrs.frozen``).

    Every field is a child, in the order of declaration, except those declared with :func:`static`, which are
    part of the structure: two trees with different static fields have different structures.
    """
    fields = attrs.fields(cls)
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(obj: T):
        return (
            tuple(getattr(obj, name) for name in children),
            tuple(getattr(obj, name) for name in statics),
            children,
        )

    def unflatten(static_values: tuple, child_values: Iterable) -> T:
        # Trees are rebuilt with leaves of any kind (shapes, placements, None), so validators do not run here.
        obj = object.__new__(cls)
        for name, value in (*zip(children, child_values), *zip(statics, static_values)):
            object.__setattr__(obj, name, value)
        return obj

    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE
    )
    return cls


def static(**kwargs: Any) -> Any:
    """An attrs field that belongs to the structure of the tree and not to its leaves."""
    return attrs.field(metadata={"static": True}, **kwargs)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Any:
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> TreeDef:
    return optree.tree_structure(tree, is_leaf, namespace=NAMESPACE)


def map(fun: Callable, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:  # noqa: A001
    """``fun`` over the leaves of ``tree`` and the matching subtrees of ``rest``; a mismatch is a ValueError."""
    return optree.tree_map(fun, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def leaves_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """``(path, leaf)`` pairs in the order of :func:`leaves`; a path is joined by slashes: ``layers/wq``."""
    accessors, values, _ = optree.tree_flatten_with_accessor(tree, is_leaf, namespace=NAMESPACE)
    return [("/".join(_entry_name(entry) for entry in accessor), value) for accessor, value in zip(accessors, values)]


def _entry_name(entry: optree.PyTreeEntry) -> str:
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def map_with_path(fun: Callable, tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """As :func:`map`, with ``fun(path, leaf, *rest_leaves)``; the path is a string as in :func:`leaves_with_path`."""
    pairs = leaves_with_path(tree, is_leaf)
    treedef = structure(tree, is_leaf)
    others = [treedef.flatten_up_to(other) for other in rest]
    return unflatten(treedef, [fun(path, leaf, *more) for (path, leaf), *more in zip(pairs, *others)])
