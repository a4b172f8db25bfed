"""What a captured step costs a rank: its layout, collectives, operations and memory, as data and as a report."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

from functitan import tree
from functitan.compiler.jit import Captured
from functitan.compiler.plan import Plan, readable_bytes
from functitan.cost.collectives import CollectiveCount
from functitan.cost.facts import Facts, graph_facts
from functitan.cost.groups import axes_of, group_ranks
from functitan.cost.memory import Memory
from functitan.cost.parts import PARTS
from functitan.cost.pipeline import pipeline_facts, pipeline_of
from sharding_specs import DTYPE_BYTES, MeshSpec
from sharding_specs.partition import entry_axes


@frozen
class ParamRow:
    """The layout of one parameter.

    Attributes:
        path: in the tree of parameters: ``layers/wq``.
        shape: of the whole.
        dtype: its name.
        layout: the mesh axes of each dim, outermost first; axes of size 1 left out.
        gathered: the axes over which it is gathered at use.
        local_shape: what the rank holds.
        bytes: of that.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: tuple[tuple[str, ...], ...]
    gathered: tuple[str, ...]
    local_shape: tuple[int, ...]
    bytes: int


@frozen
class Explanation:
    """What one step costs one rank. ``str()`` is the report, :meth:`to_json` the same as data.

    Attributes:
        mesh: the mesh that it was captured for.
        rank: which rank the layout is of; collectives, operations and memory are those of the rank that captured it.
        params: the layout of every parameter.
        collectives: what is sent, each kind of call and its count, in the order of the first.
        flops: floating-point operations by kind: see :mod:`functitan.cost.flops`.
        uncounted: operators that may do products and have no formula, and how often each occurs.
        memory: the peak, and what it is made of; and the most that each part takes at any moment.
        captured_layers: the numbers of layers of the graphs that the figures were extrapolated from; empty where they
            were read off the whole graph.
    """

    mesh: MeshSpec
    rank: int
    params: tuple[ParamRow, ...]
    collectives: tuple[CollectiveCount, ...]
    flops: dict[str, int]
    uncounted: dict[str, int]
    memory: Memory
    captured_layers: tuple[int, ...] = ()

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def wire_bytes(self) -> int:
        """What the rank sends in a step, by the usual ring algorithms."""
        return sum(row.total_bytes for row in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON's types. The keys are stable; later versions may add some.

        ``mesh`` {axis: size}; ``rank``; ``params`` [{path, shape, dtype, layout, gathered, local_shape, bytes}];
        ``collectives`` [{kind, axes, ranks, dtype, bytes_in, bytes_out, phase, wire_bytes, count, total_bytes}];
        ``wire_bytes``; ``flops`` {kind: number}; ``total_flops``; ``uncounted`` {operator: count};
        ``memory`` {peak, parts {part: bytes}, at, phase, arguments, part_peaks {part: bytes}}; ``captured_layers``
        [number]. Sizes are bytes, of one rank and one step.
        """
        return {
            "mesh": dict(self.mesh),
            "rank": self.rank,
            "params": [json.loads(json.dumps(attrs.asdict(row))) for row in self.params],
            "collectives": [
                {
                    **attrs.asdict(row.call),
                    "axes": list(row.call.axes),
                    "wire_bytes": row.call.wire_bytes,
                    "count": row.count,
                    "total_bytes": row.total_bytes,
                }
                for row in self.collectives
            ],
            "wire_bytes": self.wire_bytes,
            "flops": dict(self.flops),
            "total_flops": self.total_flops,
            "uncounted": dict(self.uncounted),
            "memory": attrs.asdict(self.memory),
            "captured_layers": list(self.captured_layers),
        }

    def __str__(self) -> str:
        blocks = [self._params(), self._collectives(), self._flops(), self._memory()]
        if self.captured_layers:
            blocks.append(f"Extrapolated from captures of {', '.join(map(str, self.captured_layers))} layers.")
        return "\n\n".join(blocks)

    def _params(self) -> str:
        rows = [("path", "shape", "dtype", "layout", "gathered over", "on the rank", "bytes")]
        for row in self.params:
            layout = ", ".join(" x ".join(axes) or "-" for axes in row.layout)
            local = str(list(row.local_shape))
            gathered = " x ".join(row.gathered) or "-"
            rows.append((row.path, str(list(row.shape)), row.dtype, layout, gathered, local, readable_bytes(row.bytes)))
        total = readable_bytes(sum(row.bytes for row in self.params))
        where = f"rank {self.rank} of {self.mesh.size} ({self.mesh.describe(self.mesh.axes) or 'one device'})"
        return "\n".join([f"Parameters on {where}: {total}", *_table(rows)])

    def _collectives(self) -> str:
        if not self.collectives:
            return "Collectives in a step: none"
        rows = [("kind", "axes", "ranks", "phase", "dtype", "in", "out", "count", "sent")]
        for row in self.collectives:
            call = row.call
            rows.append(
                (
                    call.kind,
                    " x ".join(call.axes) or "?",
                    str(call.ranks),
                    call.phase or "-",
                    call.dtype,
                    readable_bytes(call.bytes_in),
                    readable_bytes(call.bytes_out),
                    str(row.count),
                    readable_bytes(row.total_bytes),
                )
            )
        calls, sent = sum(row.count for row in self.collectives), readable_bytes(self.wire_bytes)
        head = f"Collectives in a step: {calls} calls, {sent} sent by this rank (ring algorithms)"
        return "\n".join([head, *_table(rows)])

    def _flops(self) -> str:
        rows = [(kind, f"{number:.4g}") for kind, number in self.flops.items()]
        lines = [f"Operations in a step on this rank: {self.total_flops:.4g} FLOPs", *_table(rows)]
        if self.uncounted:
            names = ", ".join(f"{name} (x{n})" for name, n in self.uncounted.items())
            lines.append(f"  not counted, since there is no formula for it: {names}")
        return "\n".join(lines)

    def _memory(self) -> str:
        memory = self.memory
        where = f"at {memory.at}" + (f" ({memory.phase})" if memory.phase else "")
        rows = [("part", "at the peak", "at its own peak")]
        rows += [(part, readable_bytes(memory.parts[part]), readable_bytes(memory.part_peaks[part])) for part in PARTS]
        head = f"Peak memory of tensors on this rank: {readable_bytes(memory.peak)}, {where}"
        return "\n".join([head, *_table(rows), f"  arguments before the step: {readable_bytes(memory.arguments)}"])


def explain(captured: Captured, plan: Plan, *, rank: int = 0) -> Explanation:
    """What a step costs that ``jit(...).lower(...)`` or a call has captured.

    Args:
        captured: the graph of one rank; with Inductor, as it is before Inductor fuses it.
        plan: the one that it was captured for.
        rank: whose part of the parameters to list: the one that captured it.

    Raises:
        ValueError: the mesh has no such rank.
        RuntimeError: the process group of the capture is gone.
    """
    return summarize(facts_of(captured, plan), plan, rank=rank)


def facts_of(captured: Captured, plan: Plan) -> Facts:
    """The facts of a captured graph, operator by operator, the groups of its collectives named by the plan's axes."""

    @functools.cache
    def group_axes(name: str) -> tuple[tuple[str, ...], int]:
        ranks = group_ranks(name)
        return axes_of(ranks, plan.mesh), len(ranks)

    graph = captured.graph.graph
    pipeline = pipeline_of(graph)
    if pipeline is None:
        return graph_facts(graph, captured.donated, group_axes)
    return pipeline_facts(graph, pipeline, captured.donated, group_axes)


def summarize(found: Facts, plan: Plan, *, rank: int = 0, captured_layers: Sequence[int] = ()) -> Explanation:
    """The explanation of facts, read off a graph or extrapolated. As :func:`explain`."""
    return Explanation(
        mesh=plan.mesh,
        rank=rank,
        params=params_of(plan, rank),
        collectives=found.collectives,
        flops=found.flops,
        uncounted=found.uncounted,
        memory=found.memory,
        captured_layers=tuple(captured_layers),
    )


def params_of(plan: Plan, rank: int = 0) -> tuple[ParamRow, ...]:
    """The layout of every parameter, and what a rank holds of it."""
    rows = []
    for path, param in tree.leaves_with_path(plan.params):
        local = plan.local_shape(path, rank)
        size = math.prod(local) * DTYPE_BYTES[param.dtype]
        layout = tuple(
            tuple(axis for axis in entry_axes(entry) if plan.mesh.get(axis, 1) > 1) for entry in plan.spec(path)
        )
        rows.append(ParamRow(path, param.shape, param.dtype, layout, plan.storage_axes(path), local, size))
    return tuple(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines; what begins with a digit stands to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
