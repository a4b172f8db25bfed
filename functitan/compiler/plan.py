"""compile_specs: from declared parameters, rules and a mesh to a Plan: pure data that every later stage reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from functitan import tree
from functitan.precision import Precision
from sharding_specs import (
    DTYPE_BYTES,
    BatchSpec,
    ContextParallel,
    MeshSpec,
    P,
    Param,
    Rules,
    SpecError,
    check_leaves,
    region,
)
from sharding_specs.context import resolve as resolve_context
from sharding_specs.partition import entry_axes
from sharding_specs.problem import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from functitan.compiler.pipeline.stages import Pipeline

DEFAULT_SCHEDULE = "1F1B"
"""Of a plan with stages that is given no pipeline."""


@frozen
class Plan:
    """The layout of every parameter over a mesh; made by :func:`compile_specs`. ``print(plan)`` is a table.

    A parameter's path is that of :mod:`functitan.tree`: ``layers/wq``. Two plans are equal where all their data is.

    Attributes:
      params: the tree of Param, as declared.
      rules: logical name -> mesh axes, for activations as well: ``plan.rules.spec(names, plan.mesh)``.
      mesh: the mesh, every size known.
      specs: the layout of each parameter by path, with one entry a dim, in the order of the tree's leaves.
      precision: of it, the dtype in which gradients are added up over the ranks; the model is given the rest.
      context: how attention over a sequence that is split over cp runs, and how the sequence is laid out; None where
        none is split.
      pipeline: the stages over pp and the schedule in which they run; None where there is one stage.
    """

    params: Any
    rules: Rules
    mesh: MeshSpec
    specs: dict[str, P]
    precision: Precision = Precision()
    context: ContextParallel | None = None
    pipeline: Pipeline | None = None

    def spec(self, path: str) -> P:
        """The layout of the parameter at a path. Raises ValueError where there is none."""
        return self.specs[self._known(path)]

    def param(self, path: str) -> Param:
        """The declaration of the parameter at a path. Raises ValueError where there is none."""
        return dict(tree.leaves_with_path(self.params))[self._known(path)]

    def compute_spec(self, path: str) -> P:
        """The layout that the parameter at a path has where it is used: without :meth:`storage_axes`.

        As ``plan.rules.compute_spec`` of its names. Raises ValueError where there is none.
        """
        return self.rules.compute_spec(self.param(path).names, self.mesh)

    def storage_axes(self, path: str) -> tuple[str, ...]:
        """The axes of more than one rank over which the parameter at a path is gathered at use, in the mesh's order.

        Raises ValueError where there is none.
        """
        return self._storage_axes(self.param(path), self.spec(path))

    @property
    def batch_spec(self) -> P:
        """The layout of a batch's arrays [batch, seq]: that of the rows of the logits, which labels must match."""
        return self.rules.batch_spec(self.mesh)

    def placements(self, path: str) -> tuple[Placement, ...]:
        """The DTensor placements of the parameter at a path: see :func:`placements`.

        Layers over pp are ``Shard(0)`` there, although stages may differ in size, and a rank's layers may come from
        several places of the stack: see :meth:`regions`. Raises ValueError where there is none.
        """
        return placements(self.spec(path), self.mesh)

    def regions(self, path: str, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The slices that a rank holds of the parameter at a path, each ``(start, size)`` for every dim.

        It is one, but for layers over pp: there it is one for each of the rank's stages, in their order. As DTensor
        splits, uneven dims included: see :func:`sharding_specs.region`. Raises ValueError where there is no such path
        or rank.
        """
        spec, shape = self.spec(path), self.param(path).shape
        staged = [dim for dim, entry in enumerate(spec) if "pp" in entry_axes(entry)]
        if not staged or self.pipeline is None:
            return (region(shape, spec, self.mesh, rank),)
        (dim,) = staged
        rest = region(shape, P(*(None if d == dim else entry for d, entry in enumerate(spec))), self.mesh, rank)
        pp_rank = self.mesh.coordinate(rank)["pp"]
        spans = [self.pipeline.layers[stage] for stage in self.pipeline.stages_of(pp_rank)]
        return tuple((*rest[:dim], (start, stop - start), *rest[dim + 1 :]) for start, stop in spans)

    def region(self, path: str, rank: int) -> tuple[tuple[int, int], ...]:
        """The only one of :meth:`regions`.

        Raises ValueError where there is no such path or rank, or the rank has several stages.
        """
        found = self.regions(path, rank)
        if len(found) > 1:
            raise ValueError(f"{path}: rank {rank} has the layers of {len(found)} stages; use plan.regions")
        return found[0]

    def local_shape(self, path: str, rank: int) -> tuple[int, ...]:
        """The shape of what this rank holds, where :meth:`shard_shape` is the most that one holds."""
        found = self.regions(path, rank)
        sizes = [size for _, size in found[0]]
        if len(found) > 1:
            sizes[0] = sum(one[0][1] for one in found)
        return tuple(sizes)

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

    def to_json(self) -> str:
        """The plan as JSON text, one parameter a line; ``Plan.from_json`` reads it: see functitan.compiler.plan_json.

        Raises:
          ValueError: a tree node or an initialiser is code and no data; the message has its path.
        """
        from functitan.compiler import plan_json  # which imports this module

        return plan_json.to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of a text that :meth:`to_json` made. Never runs code from it.

        Raises:
          ValueError: the text is malformed, of another version, or a plan that cannot work.
        """
        from functitan.compiler import plan_json

        return plan_json.from_json(text)

    def batch_rows(self, rank: int, batch_size: int) -> tuple[int, int]:
        """``(start, count)`` of the rows of a batch that a rank reads; ranks that share them get the same.

        Raises:
          ValueError: the batch does not divide over the ranks that split it, or there is no such rank.
        """
        split = self.batch_spec[0]
        if batch_size < 1 or batch_size % self.mesh.shards(split):
            raise ValueError(
                f"a batch of {batch_size} does not divide over {self.mesh.describe(split) or 'one device'}; "
                f"legal: multiples of {self.mesh.shards(split)}"
            )
        ((start, count),) = region((batch_size,), P(split), self.mesh, rank)
        return start, count

    def _known(self, path: str) -> str:
        if path not in self.specs:
            hint = did_you_mean(path, self.specs) or f"the paths are {', '.join(self.specs) or '(none)'}"
            raise ValueError(f"the plan has no parameter at {path!r}; {hint}")
        return path

    def _storage_axes(self, param: Param, spec: P) -> tuple[str, ...]:
        gathered = set(spec.axes).difference(self.rules.compute_spec(param.names, self.mesh).axes)
        return tuple(axis for axis, size in self.mesh.items() if axis in gathered and size > 1)

    def _shard_shape(self, param: Param, spec: P) -> tuple[int, ...]:
        most = [-(-size // self.mesh.shards(entry)) for size, entry in zip(param.shape, spec, strict=True)]
        if self.pipeline is not None and "pp" in spec.axes:
            most[0] = max(len(self.pipeline.layers_of(rank)) for rank in range(self.mesh["pp"]))
        return tuple(most)

    def _shard_bytes(self, param: Param, spec: P) -> int:
        return math.prod(self._shard_shape(param, spec)) * DTYPE_BYTES[param.dtype]

    def __str__(self) -> str:
        rows = [("path", "shape", "dtype", "names", "layout", "gathered", "bytes per rank")]
        for path, param in tree.leaves_with_path(self.params):
            names = ", ".join(name or "-" for name in param.names)
            spec = self.specs[path]
            gathered = ", ".join(self._storage_axes(param, spec)) or "-"
            size = readable_bytes(self._shard_bytes(param, spec))
            rows.append((path, str(param.shape), param.dtype, names, str(spec), gathered, size))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(texts, widths)), size.rjust(widths[-1])])
            for *texts, size in rows
        ]
        total = (
            f"{self.param_count:,} parameters, {readable_bytes(self.param_bytes)}; "
            f"{readable_bytes(self.bytes_per_rank)} per rank of {self.mesh}"
        )
        context = [] if self.context is None else [f"context parallel over cp={self.mesh['cp']}: {self.context}"]
        pipeline = [] if self.pipeline is None else [str(self.pipeline)]
        return "\n".join([*lines, total, *context, *pipeline])


def compile_specs(
    params: Any,
    rules: Rules = Rules(),  # noqa: B008 (immutable)
    mesh: MeshSpec = MeshSpec(),  # noqa: B008 (immutable)
    *,
    batch: BatchSpec | None = None,
    devices: int | None = None,
    activations: Collection[str] = (),
    precision: Precision = Precision(),  # noqa: B008 (immutable)
    context: ContextParallel = ContextParallel(),  # noqa: B008 (immutable)
    pipeline: Pipeline | None = None,
) -> Plan:
    """Checks a tree of Param against rules and a mesh, and gives every parameter its layout.

    Args:
      params: a tree of Param, of any node that :mod:`functitan.tree` knows.
      rules: logical name -> mesh axes. The default replicates every parameter.
      mesh: the default is one device. Every size is known, unless ``devices`` is given.
      batch: the sizes of a step, if they are to be checked as well.
      devices: how many there are; the product of the mesh must be that, and one size may be -1: what is left of them.
      activations: logical names that only activations have, beyond "batch" and "seq".
      precision: see :class:`functitan.precision.Precision`.
      context: the method of attention over cp, and the layout of the sequence, either of them "auto". The default
        leaves the tokens in their order: with the layout "balanced" or "auto" a model has to ask ``nn.positions`` for
        the places of its tokens, and to say with :func:`functitan.nn.visibility` who sees whom.
      pipeline: the stages over pp and their schedule, as :func:`functitan.make_pipeline` makes them. None is that
        function's default where the rules put layers over pp. Ignored where there is one stage.

    Raises:
      SpecError: the layout cannot work. A ValueError that lists every problem, one a line, with the legal values.
    """
    leaves = tree.leaves_with_path(params)
    problems = check_leaves(leaves, rules, mesh, None, devices, activations=activations)
    chosen = None
    if not problems:
        sizes = mesh if devices is None else mesh.resolve(devices)
        chosen, problems = resolve_context(context, leaves, rules, sizes, None if batch is None else batch.seq_len)
    if batch is not None:
        balanced = chosen is None or chosen.layout == "balanced"
        batch = attrs.evolve(batch, causal_balanced=balanced and batch.causal_balanced)
        problems += [p for p in check_leaves(leaves, rules, mesh, batch, devices, activations=activations)
                     if p not in problems]  # fmt: skip
    if problems:
        raise SpecError(problems)
    if devices is not None:
        mesh = mesh.resolve(devices)
    specs = {path: rules.spec(param.names, mesh) for path, param in leaves}
    stages = _pipeline(params, rules, mesh, specs, pipeline)
    return Plan(params, rules, mesh, specs, precision, context=chosen, pipeline=stages)


def _pipeline(
    params: Any, rules: Rules, mesh: MeshSpec, specs: dict[str, P], given: Pipeline | None
) -> Pipeline | None:
    if mesh.get("pp", 1) == 1 or not any("pp" in spec.axes for spec in specs.values()):
        return None
    from functitan.compiler.pipeline.stages import check_pipeline, make_pipeline

    if given is None:
        return make_pipeline(params, rules, mesh, DEFAULT_SCHEDULE)
    check_pipeline(given, params, rules, mesh)
    return given


def placements(spec: P, mesh: MeshSpec) -> tuple[Placement, ...]:
    """A layout as DTensor says it: one placement for every mesh axis of more than one rank, in the mesh's order.

    Raises:
      ValueError: the layout names an axis that the mesh lacks, or splits a dim over axes that are not in the mesh's
        order: DTensor splits by the outer axis first.
    """
    from torch.distributed.tensor import Replicate, Shard

    unknown = [axis for axis in spec.axes if axis not in mesh]
    if unknown:
        raise ValueError(f"{spec} names {', '.join(unknown)}, which {mesh} lacks")
    dims = {axis: dim for dim, entry in enumerate(spec) for axis in entry_axes(entry)}
    split = [axis for axis, size in mesh.items() if size > 1]
    for entry in spec:
        axes = [axis for axis in entry_axes(entry) if axis in split]
        ordered = [axis for axis in split if axis in axes]
        if axes != ordered:
            raise ValueError(
                f"{spec} splits a dim over {', '.join(axes)}, which is not the order of {mesh}; "
                f"the order that works: {', '.join(ordered)}"
            )
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in split)


def partition(placements: Sequence[Placement], mesh: MeshSpec, ndim: int) -> P:
    """The inverse of :func:`placements`, for an array of ``ndim`` dims: its layout, with one entry a dim.

    Raises:
      ValueError: the number of placements is not that of the mesh's axes of more than one rank, a dim is not there, or
        a placement is neither Shard nor Replicate.
    """
    from torch.distributed.tensor import Replicate, Shard

    split = [axis for axis, size in mesh.items() if size > 1]
    if len(placements) != len(split):
        raise ValueError(f"{len(placements)} placements for the {len(split)} axes of more than one rank of {mesh}")
    entries: list[list[str]] = [[] for _ in range(ndim)]
    for axis, placement in zip(split, placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise ValueError(f"axis {axis} has placement {placement}, which no P describes; legal: Shard, Replicate")
        if not -ndim <= placement.dim < ndim:
            raise ValueError(f"axis {axis} has placement {placement}, but the array has {ndim} dims")
        entries[placement.dim].append(axis)
    return P(*entries)


def readable_bytes(count: int) -> str:
    """Bytes with three digits or so and a binary unit: ``29.9 GiB``."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 5)
    return f"{count / 1024**power:.1f} {'KMGTP'[power - 1]}iB"
