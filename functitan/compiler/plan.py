"""compile_specs: from declared parameters, rules and a mesh to a Plan: pure data that every later stage reads."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from attrs import frozen

from functitan import tree
from sharding_specs import DTYPE_BYTES, MeshSpec, P, Param, Rules, SpecError, check_leaves
from sharding_specs.problem import did_you_mean


@frozen
class Plan:
    """The layout of every parameter over a mesh; made by :func:`compile_specs`. ``print(plan)`` is a table.

    A parameter's path is that of :mod:`functitan.tree`: ``layers/wq``. Two plans are equal where all their data is.

    Attributes:
      params: the tree of Param, as declared.
      rules: logical name -> mesh axes, for activations as well: ``plan.rules.spec(names, plan.mesh)``.
      mesh: the mesh, every size known.
      specs: the layout of each parameter by path, with one entry a dim, in the order of the tree's leaves.
    """

    params: Any
    rules: Rules
    mesh: MeshSpec
    specs: dict[str, P]

    def spec(self, path: str) -> P:
        """The layout of the parameter at a path. Raises ValueError where there is none."""
        return self.specs[self._known(path)]

    def param(self, path: str) -> Param:
        """The declaration of the parameter at a path. Raises ValueError where there is none."""
        return dict(tree.leaves_with_path(self.params))[self._known(path)]

    def shard_shape(self, path: str) -> tuple[int, ...]:
        """The largest shape that a rank holds of a parameter: of layers stacked over pp, that of the first stage."""
        return self._shard_shape(self.param(path), self.spec(path))

    def shard_bytes(self, path: str) -> int:
        """The bytes of :meth:`shard_shape`."""
        return self._shard_bytes(self.param(path), self.spec(path))

    @property
    def param_count(self) -> int:
        """The number of elements of all parameters, each counted whole and once."""
        return sum(param.size for param in tree.leaves(self.params))

    @property
    def param_bytes(self) -> int:
        """The bytes of all parameters, each counted whole and once."""
        return sum(param.bytes for param in tree.leaves(self.params))

    @property
    def bytes_per_rank(self) -> int:
        """The bytes of all parameters on the rank that holds most.

        With pp an upper bound: parameters outside the stacked layers are counted as if every stage held them.
        """
        return sum(self._shard_bytes(param, self.specs[path]) for path, param in tree.leaves_with_path(self.params))

    def _known(self, path: str) -> str:
        if path not in self.specs:
            hint = did_you_mean(path, self.specs) or f"the paths are {', '.join(self.specs) or '(none)'}"
            raise ValueError(f"the plan has no parameter at {path!r}; {hint}")
        return path

    def _shard_shape(self, param: Param, spec: P) -> tuple[int, ...]:
        return tuple(-(-size // self.mesh.shards(entry)) for size, entry in zip(param.shape, spec, strict=True))

    def _shard_bytes(self, param: Param, spec: P) -> int:
        return math.prod(self._shard_shape(param, spec)) * DTYPE_BYTES[param.dtype]

    def __str__(self) -> str:
        rows = [("path", "shape", "dtype", "names", "layout", "bytes per rank")]
        for path, param in tree.leaves_with_path(self.params):
            names = ", ".join(name or "-" for name in param.names)
            size = _readable(self._shard_bytes(param, self.specs[path]))
            rows.append((path, str(param.shape), param.dtype, names, str(self.specs[path]), size))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(texts, widths)), size.rjust(widths[-1])])
            for *texts, size in rows
        ]
        total = (
            f"{self.param_count:,} parameters, {_readable(self.param_bytes)}; "
            f"{_readable(self.bytes_per_rank)} per rank of {self.mesh}"
        )
        return "\n".join([*lines, total])


def compile_specs(
    params: Any,
    rules: Rules = Rules(),  # noqa: B008 (immutable)
    mesh: MeshSpec = MeshSpec(),  # noqa: B008 (immutable)
    *,
    activations: Collection[str] = (),
) -> Plan:
    """Checks a tree of Param against rules and a mesh, and gives every parameter its layout.

    Args:
      params: a tree of Param, of any node that :mod:`functitan.tree` knows.
      rules: logical name -> mesh axes. The default replicates every parameter.
      mesh: every size known (see ``MeshSpec.resolve``). The default is one device.
      activations: logical names that only activations have, beyond "batch" and "seq".

    Raises:
      SpecError: the layout cannot work. A ValueError that lists every problem, one a line, with the legal values.
    """
    leaves = tree.leaves_with_path(params)
    problems = check_leaves(leaves, rules, mesh, activations=activations)
    if problems:
        raise SpecError(problems)
    return Plan(params, rules, mesh, {path: rules.spec(param.names, mesh) for path, param in leaves})


def _readable(count: int) -> str:
    """Bytes with three digits or so and a binary unit: ``29.9 GiB``."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 5)
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"
