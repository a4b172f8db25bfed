"""What attention over cp sends and holds, read off the graphs of ranks that are not there."""

import pytest
import torch
from context_cases import SEQ, Case, attend, inputs, plan_of

import functitan as ft
from functitan import cost, nn
from functitan.compiler.collectives import is_wait, signature
from functitan.cost.flops import flops_of
from sharding_specs import ContextParallel, MeshSpec, Param, Rules

CP = 4
KV = 2 * 2 * (SEQ // CP) * 4 * 8 * 4  # bytes of a rank's keys and values: batch 2, 4 heads of 8, float32


def captured(case: Case, rank: int) -> tuple[list[str], cost.Facts]:
    """The collectives of a rank, as all ranks have to agree on them, and the facts of its graph."""
    with cost.fake_group(case.cp, rank):
        plan = plan_of(case)
        graph = ft.jit(lambda x: attend(x, case), plan).lower(ft.shard_batch(plan, inputs(case)))
        return signature(graph.graph.graph), cost.facts_of(graph, plan)


def sent(facts: cost.Facts, phase: str) -> int:
    """Bytes of attention's own that a rank sends: the sum of the loss and the documents' numbers are none of it."""
    return sum(
        count.call.wire_bytes * count.count for count in facts.collectives
        if count.call.phase == phase and count.call.kind != "all_reduce" and count.call.dtype == "float32"
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_all_ranks_have_the_same_collectives(method, layout):
    """A rank that sees nothing of the others' keys, such as the first one under a causal mask, passes them on too."""
    for mask, remat in (("causal", "none"), ("documents", "selective"), ("causal", "full")):
        case = Case(CP, method, layout, mask, captured=True, remat=remat)
        first, last = (captured(case, rank)[0] for rank in (0, CP - 1))
        assert len(first) > 1 and first == last, str(case)


@pytest.mark.parametrize(
    "method, remat, forward, backward",
    [
        # (cp - 1) times the rank's keys and values; backward the same again, and their gradients.
        ("ring", "none", (CP - 1) * KV, 2 * (CP - 1) * KV),
        ("ring", "selective", (CP - 1) * KV, 2 * (CP - 1) * KV),
        ("ring", "full", (CP - 1) * KV, 3 * (CP - 1) * KV),
        # One gather of all keys and values, one reduce-scatter of their gradients.
        ("all_gather", "none", (CP - 1) * KV, (CP - 1) * KV),
        ("all_gather", "full", (CP - 1) * KV, 2 * (CP - 1) * KV),
        # q, k, v and the output change places, and so do their gradients; what stays with the rank is not sent.
        ("ulysses", "none", 2 * KV * (CP - 1) // CP, 2 * KV * (CP - 1) // CP),
        ("ulysses", "full", 2 * KV * (CP - 1) // CP, (2 + 1.5) * KV * (CP - 1) // CP),
    ],
)
def test_what_is_sent_is_what_theory_says(method, remat, forward, backward):
    for layout, rank in (("contiguous", 0), ("balanced", CP - 1)):
        facts = captured(Case(CP, method, layout, "causal", captured=True, remat=remat), rank)[1]
        assert (sent(facts, "forward"), sent(facts, "backward")) == (forward, backward)


def test_a_window_ends_the_ring_sooner():
    """Three places of a window reach one rank back, not three."""
    facts = captured(Case(CP, "ring", "contiguous", "short", captured=True), CP - 1)[1]
    assert (sent(facts, "forward"), sent(facts, "backward")) == (KV, 2 * KV)


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_a_block_is_computed_while_the_next_ones_keys_travel(layout):
    """Of all that goes round only the gradients of the last block have nothing left to travel behind."""
    case = Case(CP, "ring", layout, "causal", captured=True)
    with cost.fake_group(CP, CP - 1):
        plan = plan_of(case)
        step = ft.jit(lambda x: attend(x, case), plan).lower(ft.shard_batch(plan, inputs(case)))
    nodes = [node for node in step.graph.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    travelling = [node for node in nodes if "all_to_all" in str(node.target)]
    hidden = []
    for node in travelling:
        (arrived,) = [user for user in node.users if is_wait(user)]
        hidden.append(any(flops_of(between) for between in nodes[place[node] : place[arrived]]))
    assert len(hidden) == 3 * (CP - 1) and hidden == [True] * (len(hidden) - 1) + [False]


def peak(cp: int, method: str, local: int = 256) -> int:
    """Peak bytes of activations of the last rank, which sees most: forward and backward over ``cp * local`` tokens."""
    params = {name: Param((4,), (name,), ft.init.zeros()) for name in ("heads", "kv_heads")}
    with cost.fake_group(cp, cp - 1):
        plan = ft.compile_specs(params, Rules(), MeshSpec(cp=cp), context=ContextParallel(method, "contiguous"))
        x = ft.shard_batch(plan, {name: torch.zeros(1, cp * local, 4, 64) for name in "qkv"})

        def run(x):
            return ft.grad(lambda qkv: nn.attention(*qkv, causal=True).sum())((x["q"], x["k"], x["v"]))

        graph = ft.jit(run, plan).lower(x)
        return cost.explain(graph, plan, rank=cp - 1).memory.peak


def test_the_memory_of_a_ring_does_not_grow_with_its_ranks():
    """Over two ranks it is less: there nothing travels while the last block is computed, as that one is the second."""
    at_2, at_4, at_8 = (peak(cp, "ring") for cp in (2, 4, 8))
    assert at_2 < at_4 == at_8
    gathered_4, gathered_8 = (peak(cp, "all_gather") for cp in (4, 8))
    assert gathered_8 > 1.3 * gathered_4, (gathered_4, gathered_8)
