"""The facts of a deep model from those of two shallow ones, whose graphs differ by one layer.

A graph of identical layers is a fixed beginning and end with blocks between that repeat, one a layer, in the forward
pass and again in the backward pass. The graph of one layer more has one more repetition of each; finding these tells
what a layer costs. All of it is linear in the number of layers: how often an operator occurs, the size of what is
stacked over layers, and the bytes alive at an operator, in the depth of the model and in the number of its layer. So
the table of the deep graph is written out without making that graph, and its peak is a maximum over all its rows.

A pass that decides by a size breaks the line where the size crosses its threshold: the order of the update, and with it
the bytes alive there, changes where what is stacked over layers grows beyond ``passes.order``'s 1,024 elements.

Two repetitions of a block are too few to tell the last one's peculiarities from growth. Where layers cast what the next
one gathers (bfloat16 on a mesh with fsdp), the last one casts the unembedding, which is larger: between it and the
first the memory seems to grow unevenly. With three repetitions the first and the last are taken as they are. The
outermost layers are none (what they send has no neighbour on one side), so three take a graph of five layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs import frozen

from functitan.cost.collectives import line
from functitan.cost.facts import Fact, Facts
from functitan.cost.memory import Live

_WINDOW = 64
"""Operators that must agree behind a repetition for it to be taken for one."""


class NotRegularError(ValueError):
    """The two graphs do not differ by one repetition of blocks, or not in sizes alone."""


@frozen
class _Block:
    """A block of ``length`` operators, repeated ``count`` times in the shallow graph and once more in the deeper one,
    from the same place in both of them (``start``, ``start_deeper``)."""

    start: int
    start_deeper: int
    length: int
    count: int


def extrapolate(shallow: Facts, deeper: Facts, depth: int, more: int) -> Facts:
    """The facts of the same model with ``more`` layers beyond the ``depth`` of ``shallow``.

    Args:
        shallow: of a model of ``depth`` layers, two at least.
        deeper: of the same with one layer more.
        more: layers to add to ``shallow``, 1 or more; with 1 it is ``deeper`` again.

    Raises:
        NotRegularError: the graphs do not have the form that the module's text says; capture the deep model whole.
    """
    near, far = shallow.ops, deeper.ops
    rows: list[Fact] = []
    i = j = 0
    for block in _blocks(near, far, depth):
        rows += _lines(near[i : block.start], far[j : block.start_deeper], more)
        rows += _repeated(near, far, block, more)
        i = block.start + block.count * block.length
        j = block.start_deeper + (block.count + 1) * block.length
    rows += _lines(near[i:], far[j:], more)
    return Facts(_live_line(shallow.start, deeper.start, more), tuple(rows))


def _blocks(near: Sequence[Fact], far: Sequence[Fact], depth: int) -> list[_Block]:
    a, b = [_kind(fact) for fact in near], [_kind(fact) for fact in far]
    found: list[_Block] = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        # The shallow graph goes on with what follows the layers; the deeper one has another layer first.
        length = _period(a, b, i, j)
        begin = found[-1].start_deeper + (found[-1].count + 1) * found[-1].length if found else 0
        count = 0
        while count < depth and j - (count + 1) * length >= begin:
            if b[j - (count + 1) * length : j - count * length] != b[j : j + length]:
                break
            count += 1
        if count < 2:
            raise NotRegularError(f"operator {j} ({far[j].op if j < len(b) else 'the end'}): a block repeats once only")
        found.append(_Block(i - count * length, j - count * length, length, count))
        j += length
    return found


def _period(a: list[object], b: list[object], i: int, j: int) -> int:
    window = min(_WINDOW, len(a) - i)
    for length in range(1, len(b) - j - window + 1):
        if length > j:
            break
        if b[j + length : j + length + window] != a[i : i + window]:
            continue
        if window < _WINDOW and len(b) - j - length != window:
            continue
        if b[j - length : j] == b[j : j + length]:
            return length
    raise NotRegularError(f"operator {i} of the shallow graph: the deeper one has another there, and no repeated block")


def _kind(fact: Fact) -> object:
    """What is the same for the same operator at every depth: all but sizes."""
    call = fact.collective
    sent = None if call is None else (call.kind, call.axes, call.ranks, call.dtype)
    return fact.op, fact.phase, fact.uncounted, sent, fact.flops and fact.flops[0]


def _repeated(near: Sequence[Fact], far: Sequence[Fact], block: _Block, more: int) -> list[Fact]:
    """The rows of a block that is repeated ``count + more`` times.

    The first and the last two repetitions are found in both graphs, counted from the front and from the back; what
    differs in the first or last layer is right there. Those between lie on the line through the inner ones.
    """
    count, length = block.count, block.length
    edge = 2 if count >= 3 else 1
    total = count + more

    def repetition(index: int, from_end: bool) -> list[Fact]:
        a = block.start + (count - 1 - index if from_end else index) * length
        b = block.start_deeper + (count - index if from_end else index) * length
        return _lines(near[a : a + length], far[b : b + length], more)

    first = [repetition(i, from_end=False) for i in range(edge)]
    last = [repetition(i, from_end=True) for i in reversed(range(edge))]
    inner = total - 2 * edge
    middle = [
        [_between(x, y, step, inner + 1) for x, y in zip(first[-1], last[0])] for step in range(1, inner + 1)
    ]
    return [fact for rows in (*first, *middle, *last) for fact in rows]


def _lines(near: Sequence[Fact], far: Sequence[Fact], steps: int) -> list[Fact]:
    return [_line(a, b, steps) for a, b in zip(near, far, strict=True)]


def _line(near: Fact, far: Fact, steps: int) -> Fact:
    flops, call = near.flops, near.collective
    return attrs.evolve(
        near,
        flops=flops and (flops[0], flops[1] + steps * (far.flops[1] - flops[1])),
        collective=call and line(call, far.collective, steps),
        live=_live_line(near.live, far.live, steps),
    )


def _live_line(near: Live, far: Live, steps: int) -> Live:
    return tuple(a + steps * (b - a) for a, b in zip(near, far))


def _between(first: Fact, last: Fact, step: int, steps: int) -> Fact:
    """The row ``step`` of ``steps`` on the way between two repetitions of one operator."""
    if (first.flops, first.collective) != (last.flops, last.collective):
        raise NotRegularError(f"{first.op}: the sizes differ from layer to layer")
    live = []
    for a, b in zip(first.live, last.live):
        if (b - a) % steps:
            raise NotRegularError(f"{first.op}: the memory does not grow evenly from layer to layer")
        live.append(a + (b - a) // steps * step)
    return attrs.evolve(first, live=tuple(live))
