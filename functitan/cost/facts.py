"""The facts of a captured graph, operator by operator: the table that every figure is a sum or a maximum of."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from attrs import frozen
from torch.fx import Graph, Node

from functitan.compiler.graphs import ops
from functitan.cost import collectives
from functitan.cost.collectives import Collective, CollectiveCount, GroupAxes, collective_of
from functitan.cost.flops import KINDS, flops_of, is_uncounted
from functitan.cost.memory import Live, Memory, timeline
from functitan.cost.parts import PARTS, phases_of


@frozen
class Fact:
    """What one operator of a graph costs.

    Attributes:
        op: its name, ``aten.mm.default``.
        phase: "forward", "backward" or "update"; None where the graph has no marks.
        flops: kind and number of its operations; None where it has no formula.
        uncounted: it has none, and may do products.
        collective: what it sends; None where it is no collective.
        live: bytes alive while it runs, by part.
    """

    op: str
    phase: str | None
    flops: tuple[str, int] | None
    uncounted: bool
    collective: Collective | None
    live: Live


@frozen
class Facts:
    """Of a whole graph: bytes alive at its start, by part, and its operators in order."""

    start: Live
    ops: tuple[Fact, ...]

    @property
    def collectives(self) -> tuple[CollectiveCount, ...]:
        """Each kind of call and how often it is made, in the order of the first."""
        return collectives.count(fact.collective for fact in self.ops if fact.collective is not None)

    @property
    def flops(self) -> dict[str, int]:
        """Operations by kind; kinds that do not occur are left out."""
        found: Counter[str] = Counter()
        for fact in self.ops:
            if fact.flops is not None:
                found[fact.flops[0]] += fact.flops[1]
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @property
    def uncounted(self) -> dict[str, int]:
        """How often each operator occurs that has no formula and may do products."""
        return dict(Counter(fact.op for fact in self.ops if fact.uncounted))

    @property
    def memory(self) -> Memory:
        """The first moment at which most bytes are alive, and the most of each part at any moment."""
        peak, at, phase = self.start, "the start", None
        for fact in self.ops:
            if sum(fact.live) > sum(peak):
                peak, at, phase = fact.live, fact.op, fact.phase
        most = map(max, zip(self.start, *(fact.live for fact in self.ops)))
        parts, part_peaks = dict(zip(PARTS, peak)), dict(zip(PARTS, most))
        return Memory(sum(peak), parts, at, phase, sum(self.start), part_peaks)

    @property
    def totals(self) -> tuple[tuple[CollectiveCount, ...], dict[str, int], dict[str, int], Memory]:
        """All that is reported: collectives, operations, uncounted operators and memory."""
        return self.collectives, self.flops, self.uncounted, self.memory


def graph_facts(graph: Graph, donated: Collection[int], group_axes: GroupAxes) -> Facts:
    """The facts of a captured graph.

    Args:
        graph: with a fake tensor for each node; see ``Captured.graph``.
        donated: numbers of the inputs whose memory may be overwritten.
        group_axes: the mesh axes and the number of ranks of a process group, by its name.

    Raises:
        ValueError: a node has no fake tensor.
    """
    start, lives = timeline(graph, donated)
    return Facts(start, facts_of_nodes(graph, lives, phases_of(graph), group_axes))


def facts_of_nodes(
    graph: Graph, lives: Sequence[Live], phase_of: Mapping[Node, str | None], group_axes: GroupAxes
) -> tuple[Fact, ...]:
    """What each operator costs. ``lives``: the bytes alive while it runs, operator by operator."""
    return tuple(
        Fact(
            op=str(node.target),
            phase=phase_of[node],
            flops=flops_of(node),
            uncounted=is_uncounted(node),
            collective=collective_of(node, group_axes, phase_of[node]),
            live=live,
        )
        for node, live in zip(ops(graph), lives, strict=True)
        if node.target is not operator.getitem  # picks one of several results, and costs nothing
    )
