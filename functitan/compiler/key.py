"""What a captured graph depends on, and what has changed where another one is needed."""

from __future__ import annotations

import numbers
from typing import Any

import attrs
import torch
from torch import Tensor

from functitan import tree
from functitan.compiler import boundary
from functitan.sharding.layout import Layout, pipelined

_DECIDING = ("rules", "mesh", "precision", "context", "pipeline")
"""What of a plan decides which operators a function runs."""


@attrs.frozen
class Key:
    """All that a captured graph depends on."""

    treedef: tree.TreeDef
    leaves: tuple[Any, ...]
    settings: tuple[Any, ...]

    def lines(self, paths: list[str]) -> list[str]:
        """A line for each leaf, the same on every rank of a mesh."""
        return [f"{path}: {_describe_whole(leaf)}" for path, leaf in zip(paths, self.leaves)]

    def difference(self, old: Key, paths: list[str]) -> str:
        if self.treedef != old.treedef:
            return _structure_change(old, self, paths)
        changes = [
            f"{path}: {_describe(before)} -> {_describe(after)}"
            for path, before, after in zip(paths, old.leaves, self.leaves)
            if before != after
        ]
        if not changes:
            return f"torch's settings changed from {dict(old.settings)} to {dict(self.settings)}"
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        return "; ".join(changes[:3]) + more


def _structure_change(old: Key, new: Key, paths: list[str]) -> str:
    before = {path for path, _ in tree.leaves_with_path(tree.unflatten(old.treedef, old.leaves), _is_leaf_key)}
    gone, come = sorted(before - set(paths)), sorted(set(paths) - before)
    parts = [f"{verb} {', '.join(names[:3])}" for verb, names in (("lost", gone), ("now have", come)) if names]
    if parts:
        return f"the arguments {' and '.join(parts)}"
    return f"the structure of the arguments changed from {old.treedef} to {new.treedef}"


def _is_leaf_key(x: Any) -> bool:
    return isinstance(x, tuple) and bool(x) and isinstance(x[0], (torch.dtype, type))


def settings(layout: Layout | None) -> tuple[Any, ...]:
    """What else decides which operators a function runs."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = [(f"autocast {kind}", torch.get_autocast_dtype(kind)) for kind in kinds]
    plan = None
    if layout is not None:
        # With the name of a process group, which no later one has: the graph has the names of its groups in it.
        plan = *(getattr(layout.plan, name) for name in _DECIDING), layout.mesh.get_group(0).group_name
    return (
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("layout", plan),
        ("pipeline", None if pipelined() is None else pipelined().pipeline),
        *autocast,
    )


def leaf_key(x: Any) -> Any:
    if isinstance(x, Tensor):
        part = boundary.local(x)
        # Of a DTensor the local tensor's as well: what the whole looks like does not say how a part lies in memory.
        return x.dtype, x.shape, part.stride(), part.device, type(x), boundary.spec_of(x), part.shape
    if isinstance(x, numbers.Number) and not isinstance(x, int):
        return type(x), repr(x)  # tells 0.0 from -0.0, and a NaN equals itself
    try:
        hash(x)
    except TypeError as error:
        raise TypeError(
            f"jit: a leaf of type {type(x).__name__} is neither a tensor nor hashable, so no graph can be kept for it; "
            "pass a tensor, a number, a string or a frozen value"
        ) from error
    return type(x), x


def _describe_whole(key: tuple) -> str:
    if not isinstance(key[0], torch.dtype):
        return _describe(key)
    dtype, shape, _, _, _, spec, _ = key
    layout = "" if spec is None else f" {spec.placements}"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{layout}"


def _describe(leaf_key: tuple) -> str:
    if isinstance(leaf_key[0], torch.dtype):
        dtype, shape, stride, device, _, spec, _ = leaf_key
        layout = "" if spec is None else f" {spec.placements}"
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} stride {list(stride)} {device}{layout}"
    kind, value = leaf_key
    return value if issubclass(kind, numbers.Number) and isinstance(value, str) else repr(value)
