"""The passes over collectives, each with and without: what it changes in the graph, and that no bit changes."""

import functools

import attrs
import pytest
import torch
import torch.distributed as dist
from mesh_cases import Case, train
from rank_pool import RankPool

import functitan as ft
from functitan import cost, nn, optim
from functitan.compiler.capture import capture
from functitan.compiler.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    WAIT,
    collectives,
    is_backward,
    label,
    wait_of,
)
from functitan.compiler.execute import compile_graph
from functitan.compiler.graphs import ops, placeholders, value
from functitan.compiler.passes import PASSES, run_passes
from models import llama
from sharding_specs import PRESETS, MeshSpec, Param
from train.step import make_train_step

MODEL = llama.LlamaConfig(vocab_size=67, dim=32, n_heads=8, n_kv_heads=4, head_dim=4, hidden_dim=48)
MESH = MeshSpec(fsdp=4)
ALL = tuple(PASSES)
COMMUNICATION = ("cse", "regather", "bucket", "prefetch")
LAYER_PARAMS = 9
LAYER_BYTES = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32)


def without(*names):
    return tuple(name for name in ALL if name not in names)


@functools.cache
def step_graph(passes, layers=3):
    """The captured step of rank 0 on :data:`MESH`."""
    model = attrs.evolve(MODEL, n_layers=layers)
    params = llama.declare(model)
    with cost.fake_group(MESH.size):
        plan = ft.compile_specs(params, PRESETS["all"], MESH)
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
        step = make_train_step(functools.partial(llama.apply, cfg=model), optimizer, lambda step: 1e-3)
        batch = ft.abstract_batch(plan, ["tokens", "labels"], 8, 16)
        jitted = ft.jit(step, plan, donate=("state",), passes=passes)
        return jitted.lower(ft.abstract_state(plan, optimizer), batch)


def of_kind(captured, kind, backward):
    """The collectives for parameters' sake of one kind and phase."""
    found = [node for node in collectives(captured.graph.graph) if node.target is kind and label(node) is not None]
    return [node for node in found if is_backward(node) == backward]


def sent_bytes(nodes):
    return sum(value(node.args[0]).nbytes for node in nodes)


def products_under_way(captured, nodes):
    """For each collective, how many matrix products run between its start and the wait for it."""
    order = {node: i for i, node in enumerate(captured.graph.graph.nodes)}
    products = [i for node, i in order.items() if "aten.mm." in str(node.target)]
    return [sum(order[node] < i < order[wait_of(node)] for i in products) for node in nodes]


def most_gathered(captured):
    """The most bytes of whole parameters that are alive at one moment."""
    _, lives = cost.timeline(captured.graph.graph, captured.donated)
    place = cost.PARTS.index("gathered")
    return max(live[place] for live in lives)


class TestCse:
    @pytest.mark.parametrize(("passes", "count"), [((), 2), (("cse",), 1)])
    def test_gathers_once_what_is_used_twice(self, passes, count):
        params = {"w": Param((8, 8), ("embed", None), ft.init.ones())}
        with cost.fake_group(MESH.size):
            plan = ft.compile_specs(params, PRESETS["all"], MESH)
            w = ft.init_params(plan, ft.random.key(0))["w"]
            x = ft.shard_batch(plan, {"x": torch.ones(2, 8)})["x"]
            captured = ft.jit(lambda x, w: nn.linear(nn.linear(x, w), w), plan, passes=passes).lower(x, w)
            assert len(of_kind(captured, ALL_GATHER, backward=False)) == count


class TestRegather:
    LAYERS = 3

    def test_gathers_every_layer_again_but_not_what_is_used_last(self):
        kept, again = step_graph(without("regather")), step_graph(ALL)
        assert len(of_kind(kept, ALL_GATHER, backward=True)) == 0
        assert len(of_kind(again, ALL_GATHER, backward=True)) == self.LAYERS
        assert len(of_kind(again, ALL_GATHER, backward=False)) == self.LAYERS + 2
        units = {label(node).unit for node in of_kind(again, ALL_GATHER, backward=True)}
        assert units == {("state/params/layers", i) for i in range(self.LAYERS)}

    def test_keeps_two_layers_whole_whatever_the_depth(self):
        shallow, deep = (most_gathered(step_graph(ALL, layers)) for layers in (3, 6))
        assert deep == shallow
        shallow, deep = (most_gathered(step_graph(without("regather"), layers)) for layers in (3, 6))
        assert deep - shallow >= 3 * LAYER_BYTES


class TestBucket:
    LAYERS = 3

    @pytest.mark.parametrize(("kind", "backward"), [(ALL_GATHER, False), (ALL_GATHER, True), (REDUCE_SCATTER, True)])
    def test_sends_the_same_bytes_in_one_call_a_layer(self, kind, backward):
        alone, together = (of_kind(step_graph(passes), kind, backward) for passes in (without("bucket"), ALL))
        in_backward = kind is ALL_GATHER and backward  # of layers alone
        assert len(together) == self.LAYERS + (0 if in_backward else 2)
        assert len(alone) == self.LAYERS * LAYER_PARAMS + (0 if in_backward else 3)
        assert sent_bytes(alone) == sent_bytes(together)


class TestPrefetch:
    def test_gathers_are_under_way_while_the_layer_before_computes(self):
        for backward in (False, True):
            behind, ahead = step_graph(without("prefetch")), step_graph(ALL)
            assert set(products_under_way(behind, of_kind(behind, ALL_GATHER, backward))) == {0}
            under_way = products_under_way(ahead, of_kind(ahead, ALL_GATHER, backward))
            # Nothing computes before the embedding and the first layer are there.
            assert all(under_way[0 if backward else 2 :])

    def test_a_gather_starts_when_the_one_before_has_arrived(self):
        captured = step_graph(ALL, 6)
        order = {node: i for i, node in enumerate(captured.graph.graph.nodes)}
        gathers = [node for phase in (False, True) for node in of_kind(captured, ALL_GATHER, phase)]
        gathers.sort(key=order.__getitem__)
        for before, after in zip(gathers, gathers[1:]):
            assert order[wait_of(before)] < order[after]

    def test_reductions_are_under_way_while_the_next_layer_computes(self):
        behind, ahead = step_graph(without("prefetch")), step_graph(ALL)
        assert set(products_under_way(behind, of_kind(behind, REDUCE_SCATTER, True))) == {0}
        under_way = products_under_way(ahead, of_kind(ahead, REDUCE_SCATTER, True))
        assert all(under_way[:-2])  # behind the first layer only the embedding follows, without a product

    def test_sends_the_same(self):
        calls = [
            sorted((str(node.target), sent_bytes([node])) for node in collectives(step_graph(passes).graph.graph))
            for passes in (without("prefetch"), ALL)
        ]
        assert calls[0] == calls[1]


class TestReuse:
    """A buffer that is being sent is read until it has been waited for, whoever else reads it last."""

    @staticmethod
    def graph(wait_first):
        with cost.fake_group(2):
            group = dist.group.WORLD.group_name

            def fun(x):
                y = x * 2
                sending = torch.ops._c10d_functional.all_gather_into_tensor(y, 2, group)
                if wait_first:
                    arrived = torch.ops._c10d_functional.wait_tensor(sending)
                    return [y + 1, arrived]
                z = y + 1
                return [z, torch.ops._c10d_functional.wait_tensor(sending)]

            module = capture(fun, [torch.zeros(4, 4)])
            run_passes(module.graph, (), ("reuse",))
            compile_graph(module)
        return module.graph

    @staticmethod
    def target_of_add(graph):
        (add,) = (node for node in ops(graph) if "aten.add" in str(node.target))
        return add.kwargs.get("out")

    def test_writes_nothing_over_what_is_sent(self):
        graph = self.graph(wait_first=False)
        assert self.target_of_add(graph) is None

    def test_writes_over_it_once_it_has_arrived(self):
        graph = self.graph(wait_first=True)
        assert "aten.mul" in str(self.target_of_add(graph).target)

    def test_holds_in_a_whole_step(self):
        graph = step_graph(ALL).graph.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        written = [(node.kwargs["out"], order[node]) for node in ops(graph) if "out" in node.kwargs]
        assert len(written) > 20 and len(placeholders(graph)) > 20
        for node in collectives(graph):
            done = order[wait_of(node)]
            assert not any(target is node.args[0] and order[node] < at < done for target, at in written)
        assert sum(node.target is WAIT for node in ops(graph)) == len(collectives(graph))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    ranks = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def with_all(pool):
    return pool.run(train, Case({"fsdp": 2}, passes=ALL), timeout=120)


@pytest.mark.parametrize(
    "passes", [(), *(without(name) for name in COMMUNICATION)], ids=["none", *(f"no {name}" for name in COMMUNICATION)]
)
def test_no_bit_changes(pool, with_all, passes):
    for got, expected in zip(pool.run(train, Case({"fsdp": 2}, passes=passes), timeout=120), with_all, strict=True):
        assert (got.losses, got.norms, got.tokens) == (expected.losses, expected.norms, expected.tokens)
        assert all(torch.equal(got.params[path], x) for path, x in expected.params.items())
