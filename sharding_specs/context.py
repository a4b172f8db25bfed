"""Context parallelism as data: how the sequence lies over cp, how attention runs there, and why so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
from attrs import field, frozen

from sharding_specs.mesh import MeshSpec, divisors
from sharding_specs.param import Param
from sharding_specs.partition import entry_axes
from sharding_specs.problem import Problem, did_you_mean
from sharding_specs.rules import Rules

AXIS = "cp"
"""The mesh axis over which attention is context parallel."""

METHODS = ("auto", "ring", "all_gather", "ulysses")
LAYOUTS = ("auto", "contiguous", "balanced")

Run = tuple[int, int]
"""``(start, length)`` of consecutive places of a sequence."""


def _one_of(legal: tuple[str, ...]) -> Any:
    def check(_: Any, attribute: attrs.Attribute, value: Any) -> None:
        if value not in legal:
            hint = did_you_mean(str(value), legal)
            raise ValueError(f"{attribute.name}={value!r} of ContextParallel; {hint} legal: {', '.join(legal)}")

    return check


@frozen
class ContextParallel:
    """How a sequence that is split over the axis cp is laid out and attended to.

    ``compile_specs`` is given what is wanted, with "auto" for what it is to choose; a plan has what was chosen.

    Attributes:
      method: "ring": keys and values go round the ranks, block by block (Liu et al., 2023,
        https://arxiv.org/abs/2310.01889). "all_gather": every rank gathers all keys and values (Grattafiori et al.,
        2024, https://arxiv.org/abs/2407.21783, section 3.3.2). "ulysses": the split moves from the sequence to the
        heads and back (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509).
      layout: "contiguous": rank r has the r-th part. "balanced": the sequence is cut into 2 x cp chunks, of which rank
        r has chunks r and 2 x cp - 1 - r, so that causal attention is the same work on every rank.
      reason: why, in a sentence.
    """

    method: str = field(default="auto", validator=_one_of(METHODS))
    layout: str = field(default="contiguous", validator=_one_of(LAYOUTS))
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.method}, {self.layout}" + (f": {self.reason}" if self.reason else "")


def splits_sequence(rules: Rules, mesh: MeshSpec) -> bool:
    """Whether these rules split the sequence over more than one rank of cp."""
    return AXIS in mesh and mesh[AXIS] > 1 and AXIS in entry_axes(rules.spec(("batch", "seq"), mesh)[1])


def runs(rank: int, cp: int, seq_len: int, layout: str) -> tuple[Run, ...]:
    """The places in the row of what a rank of cp holds, in the order in which it holds them.

    Raises:
      ValueError: the sequence does not divide: see :func:`divisor`.
    """
    need = divisor(cp, layout)
    if seq_len % need:
        raise ValueError(indivisible(seq_len, cp, layout))
    size = seq_len // need
    if layout == "contiguous" or cp == 1:
        return ((rank * size, size),)
    return ((rank * size, size), ((2 * cp - 1 - rank) * size, size))


def all_runs(cp: int, seq_len: int, layout: str) -> tuple[Run, ...]:
    """The places in the row of the whole sequence in the order of the layout: rank after rank."""
    return tuple(run for rank in range(cp) for run in runs(rank, cp, seq_len, layout))


def divisor(cp: int, layout: str) -> int:
    """What the length of a sequence must be a multiple of."""
    return 2 * cp if layout == "balanced" and cp > 1 else cp


def indivisible(seq_len: int, cp: int, layout: str) -> str:
    """What to say of a length that :func:`divisor` does not divide."""
    need = divisor(cp, layout)
    below = seq_len // need * need
    legal = ", ".join(str(n) for n in (below, below + need) if n)
    chunks = f"{'2 chunks' if need > cp else 'one chunk'} on each rank of cp={cp}"
    return f"seq={seq_len} is not divisible by {need} ({chunks}, layout {layout}); legal seq: {legal}, …"


def resolve(
    wanted: ContextParallel,
    leaves: Iterable[tuple[str, Any]],
    rules: Rules,
    mesh: MeshSpec,
    seq_len: int | None = None,
    causal: bool = True,
) -> tuple[ContextParallel | None, list[Problem]]:
    """What is chosen for "auto", with the reason, and what is wrong with what was asked for.

    Args:
      leaves: the parameters; their dims named "heads" and "kv_heads" say which methods are possible.
      mesh: every size known.
      seq_len: the length of sequences; None where it is not known: then no layout that needs more than cp is chosen.
      causal: whether attention is causal, which is what the balanced layout is for.

    Returns:
      None where the sequence is not split over cp.
    """
    if not splits_sequence(rules, mesh):
        return None, []
    leaves = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Param)]
    heads, cp = _heads(leaves, rules, mesh), mesh[AXIS]
    problems = []
    if wanted.method == "ulysses" and (refusal := _no_ulysses(heads, cp)):
        legal = _ulysses_sizes(heads)
        problems.append(Problem("context/method", refusal, AXIS, legal, "or use ring, which splits no heads"))
    if wanted.layout == "balanced" and (stored := _stored_over_cp(leaves, rules, mesh)):
        message = f"{stored} is stored over cp, and the balanced layout takes every dim over cp for the sequence"
        problems.append(Problem("context/layout", message, hint="change that rule, or use the contiguous layout"))
    if "auto" not in (wanted.method, wanted.layout):
        return (wanted if wanted.reason else attrs.evolve(wanted, reason="as asked")), problems
    method, why = (wanted.method, "as asked") if wanted.method != "auto" else _method(heads, cp)
    layout, why_layout = wanted.layout, "layout as asked"
    if layout == "auto":
        layout, why_layout = _layout(method, cp, seq_len, causal, _stored_over_cp(leaves, rules, mesh))
    return ContextParallel(method, layout, f"{why}; {why_layout}"), problems


def _heads(leaves: list[tuple[str, Param]], rules: Rules, mesh: MeshSpec) -> dict[str, set[int]]:
    """The numbers of heads that a rank of tp has, by name, as far as the parameters tell."""
    found: dict[str, set[int]] = {"heads": set(), "kv_heads": set()}
    for _, param in leaves:
        for name, size in zip(param.names, param.shape):
            if name in found:
                shards = mesh.shards(rules.compute_spec((name,), mesh)[0]) if name in rules else 1
                found[name].add(max(size // shards, 1))
    return found


def _no_ulysses(heads: dict[str, set[int]], cp: int) -> str:
    """Why the heads cannot be split over cp; empty where they can."""
    bad = [f"{count} {name}" for name, counts in heads.items() for count in sorted(counts) if count % cp]
    return f"ulysses splits heads over cp={cp}, which does not divide {' and '.join(bad)} (of each rank of tp)" \
        if bad else ""  # fmt: skip


def _ulysses_sizes(heads: dict[str, set[int]]) -> tuple[int, ...]:
    return divisors(math.gcd(*(count for counts in heads.values() for count in counts)))


def _method(heads: dict[str, set[int]], cp: int) -> tuple[str, str]:
    """The method that sends least: per token and channel, ring (cp - 1) x 2 kv heads, ulysses (cp - 1) / cp x all."""
    if not heads["heads"] or not heads["kv_heads"]:
        return "ring", "ring, since no parameter tells the numbers of heads and kv_heads, which ulysses splits"
    if refusal := _no_ulysses(heads, cp):
        return "ring", f"ring, since {refusal}"
    queries, keys = max(heads["heads"]), max(heads["kv_heads"])
    of_ring, of_ulysses = (cp - 1) * 2 * keys, (cp - 1) * (2 * queries + 2 * keys) / cp
    figures = f"{of_ring} heads a token against {of_ulysses:g}"
    if of_ulysses < of_ring:
        return "ulysses", f"ulysses, since ring would send more ({figures})"
    return "ring", f"ring, which sends no more than ulysses ({figures}), and while it computes"


def _layout(method: str, cp: int, seq_len: int | None, causal: bool, stored: str) -> tuple[str, str]:
    if method == "ulysses":
        return "contiguous", "contiguous, since with ulysses every rank attends to whole sequences"
    if not causal:
        return "contiguous", "contiguous, since attention that is not causal is equal work anyway"
    if stored:
        return "contiguous", f"contiguous, since {stored} is stored over cp"
    if seq_len is None or seq_len % (2 * cp):
        known = "the length is not known" if seq_len is None else f"{seq_len} is not divisible by {2 * cp}"
        return "contiguous", f"contiguous, since {known}"
    return "balanced", "balanced, so that causal attention is the same work on every rank"


def _stored_over_cp(leaves: list[tuple[str, Param]], rules: Rules, mesh: MeshSpec) -> str:
    """The path of a parameter that is split over cp; empty where there is none."""
    for path, param in leaves:
        if all(name is None or name in rules or rules.replicates_parameters for name in param.names):
            if AXIS in rules.spec(param.names, mesh).axes:
                return path
    return ""
