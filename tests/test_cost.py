"""The cost of captured graphs, against closed forms and against what a run takes."""

import json
import math

import attrs
import pytest
import torch
import torch.distributed as dist
from cost_helpers import BATCH, CONFIG, SEQ, captured_step, run_and_watch

import functitan as ft
from functitan import cost
from functitan.compiler.plan import readable_bytes
from functitan.cost.collectives import Collective, CollectiveCount
from models import llama
from sharding_specs import MeshSpec, Param, Rules

ON_FOUR = MeshSpec(fsdp=2, tp=2)
TOKENS = BATCH * SEQ


@pytest.fixture(scope="module")
def alone():
    return captured_step()


@pytest.fixture(scope="module")
def sharded():
    """``(captured, plan, explanation, facts)`` of rank 0 of four."""
    with cost.fake_group(4):
        captured, plan = captured_step(ON_FOUR)
        return captured, plan, cost.explain(captured, plan), cost.facts_of(captured, plan)


def timeline(captured):
    """``(operator, bytes)`` of the simulation, for the operators that a run dispatches."""
    start, lives = cost.timeline(captured.graph.graph, captured.donated)
    nodes = [node for node in captured.graph.graph.nodes if node.op == "call_function"]
    rows = [(str(node.target), sum(live)) for node, live in zip(nodes, lives, strict=True)]
    return sum(start), [row for row in rows if "getitem" not in row[0]]


class TestMemory:
    @pytest.mark.parametrize(
        "options",
        [{}, {"remat": "full", "accumulation": 2}, {"donate": ()}, {"names": ("cse", "fold")}],
        ids=["donated", "remat, two parts", "not donated", "nothing reused"],
    )
    def test_is_what_a_run_takes_operator_by_operator(self, options):
        captured, _ = captured_step(**options)
        start, rows = timeline(captured)
        watch = run_and_watch(captured)
        assert start == watch.start
        assert rows == watch.log

    def test_is_what_a_run_takes_with_collectives(self):
        with cost.fake_group(4):
            captured, _ = captured_step(ON_FOUR)
            start, rows = timeline(captured)
            watch = run_and_watch(captured)
        assert any("all_gather" in op for op, _ in rows)
        assert start == watch.start
        assert rows == watch.log

    def test_of_an_mlp_is_the_closed_form(self):
        n, d, h = 512, 16, 64
        params = {"a": torch.empty(d, h), "b": torch.empty(h, d)}

        def step(params, x):
            loss = lambda p: (torch.tanh(x @ p["a"]) @ p["b"]).sum()  # noqa: E731
            value, grads = ft.value_and_grad(loss)(params)
            return ft.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        captured = ft.jit(step, donate=("params",), passes=()).lower(params, torch.empty(n, d))
        found = cost.graph_facts(captured.graph.graph, captured.donated, None).memory
        # While tanh is differentiated: its result, that one's gradient, and the new one; b's gradient is there already.
        assert found.at == "aten.tanh_backward.default"
        assert found.parts["activations"] - 3 * 4 * n * h in range(0, 8)  # beside it: the loss, and the one at its end
        assert found.parts["parameters"] == 4 * 2 * d * h
        assert found.parts["gradients"] == 4 * d * h
        assert found.parts["other"] == 4 * n * d  # x
        assert found.parts["gathered"] == found.parts["optimizer"] == 0
        assert found.arguments == 4 * (2 * d * h + n * d)

    def test_parts_of_the_arguments(self, alone):
        captured, plan = alone
        start, _ = cost.timeline(captured.graph.graph, captured.donated)
        parts = dict(zip(cost.PARTS, start))
        assert parts["parameters"] == plan.param_bytes
        assert parts["optimizer"] == 2 * plan.param_bytes + 4  # two averages, and the count of steps
        assert parts["gathered"] == parts["gradients"] == parts["activations"] == 0
        assert parts["other"] >= 4 * 8 * TOKENS  # the batch

    def test_all_gradients_are_there_when_the_norm_is_taken(self, alone):
        captured, plan = alone
        found = cost.graph_facts(captured.graph.graph, captured.donated, None)
        norm = next(row for row in found.ops if row.phase == "update" and "vector_norm" in row.op)
        parts = dict(zip(cost.PARTS, norm.live))
        assert parts["gradients"] == plan.param_bytes
        assert parts["activations"] < 1024

    def test_gradients_are_told_apart_without_marks_too(self):
        """Of a step that takes its gradients in its own way, capture does not know what is backward."""
        captured, plan = captured_step()
        norm = next(n for n, phase in cost.phases_of(captured.graph.graph).items()
                    if phase == "update" and "vector_norm" in str(n.target))  # fmt: skip
        for node in captured.graph.graph.nodes:
            node.meta.pop("custom", None)
        assert set(cost.phases_of(captured.graph.graph).values()) == {None}
        _, lives = cost.timeline(captured.graph.graph, captured.donated)
        nodes = [node for node in captured.graph.graph.nodes if node.op == "call_function"]
        parts = dict(zip(cost.PARTS, lives[nodes.index(norm)]))
        assert parts["gradients"] == plan.param_bytes

    def test_gathered_parameters_are_told_apart(self, alone, sharded):
        assert cost.explain(*alone).memory.parts["gathered"] == 0
        _, plan, explanation, facts = sharded
        gathered = max(dict(zip(cost.PARTS, row.live))["gathered"] for row in facts.ops)
        layer = sum(p.bytes for path, p in ft.tree.leaves_with_path(plan.params) if "layers" in path)
        assert gathered > layer / CONFIG.n_layers / 2  # a layer's share of tp, whole over fsdp
        assert sum(explanation.memory.parts.values()) == explanation.memory.peak

    def test_has_the_most_that_each_part_takes(self, sharded):
        _, plan, explanation, facts = sharded
        memory = explanation.memory
        for i, part in enumerate(cost.PARTS):
            assert memory.part_peaks[part] == max(live[i] for live in [facts.start, *(row.live for row in facts.ops)])
            assert memory.part_peaks[part] >= memory.parts[part]
        # All gradients are there at once, for the norm, and none of them while the activations are at their most.
        assert memory.part_peaks["gradients"] >= plan.bytes_per_rank > memory.parts["gradients"]
        row = next(line.split() for line in str(explanation).splitlines() if line.startswith("  gradients"))
        assert row[1:] == [*readable_bytes(memory.parts["gradients"]).split(),
                           *readable_bytes(memory.part_peaks["gradients"]).split()]  # fmt: skip

    def test_needs_the_size_of_every_result(self, alone):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(3)
        graph.output([graph.call_function(torch.ops.aten.neg.default, (x,))])
        with pytest.raises(ValueError, match="neg.* has no fake tensor"):
            cost.timeline(graph)


class TestFlops:
    def test_are_six_for_each_weight_and_token_and_what_attention_adds(self, alone):
        flops = cost.explain(*alone).flops
        cfg, K = CONFIG, CONFIG.resolved_head_dim
        square = BATCH * cfg.n_heads * SEQ * SEQ * K * cfg.n_layers
        weights = (llama.flops_per_token(cfg, SEQ) - 12 * cfg.n_layers * cfg.n_heads * K * SEQ) / 6
        # A norm's backward pass sums over channels, and over tokens, by products with vectors.
        norms = 2 * 2 * TOKENS * cfg.dim * (2 * cfg.n_layers + 1)
        assert flops == {
            "matmul": 6 * weights * TOKENS + norms,
            "attention": 2 * 2 * square,
            "attention backward": 5 * 2 * square,
        }

    def test_of_a_rank_are_its_share(self, alone):
        whole = cost.explain(*alone).flops
        with cost.fake_group(4):
            share = cost.explain(*captured_step(MeshSpec(fsdp=4))).flops
        assert {kind: 4 * number for kind, number in share.items()} == whole

    def test_with_remat_have_the_layers_forward_again(self, alone):
        before = cost.explain(*alone).flops
        after = cost.explain(*captured_step(remat="full")).flops
        cfg, K = CONFIG, CONFIG.resolved_head_dim
        weights = cfg.dim * K * (2 * cfg.n_heads + 2 * cfg.n_kv_heads) + 3 * cfg.dim * cfg.hidden_dim
        assert after["attention"] == 2 * before["attention"]
        again = after["matmul"] - before["matmul"]
        last = 2 * TOKENS * cfg.dim * cfg.hidden_dim  # w_down of a layer: nothing in backward needs its result
        assert again == cfg.n_layers * (2 * TOKENS * weights - last)

    def test_report_an_operator_without_a_formula(self):
        @torch.library.custom_op("functitan_test::secret_product", mutates_args=())
        def secret_product(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        secret_product.register_fake(torch.empty_like)
        captured = ft.jit(lambda x: secret_product(x) + 1).lower(torch.empty(4, 4))
        explanation = cost.explain(captured, ft.compile_specs({}))
        assert explanation.uncounted == {"functitan_test.secret_product.default": 1}
        assert explanation.total_flops == 0
        assert "secret_product" in str(explanation)

    def test_miss_no_operator_of_a_train_step(self, alone, sharded):
        assert cost.explain(*alone).uncounted == {}
        assert sharded[2].uncounted == {}


class TestCollectives:
    @pytest.mark.parametrize(
        ("kind", "n_in", "n_out", "sent"),
        [
            ("all_gather", 100, 400, 300),
            ("reduce_scatter", 400, 100, 300),
            ("all_reduce", 400, 400, 600),
            ("all_to_all", 400, 400, 300),
            ("all_reduce", 4, 4, 6),
            ("all_reduce", 1, 1, 2),
            ("isend", 7, 7, 7),
        ],
    )
    def test_wire_bytes_are_those_of_a_ring(self, kind, n_in, n_out, sent):
        call = Collective(kind, ("tp",), 4, "float32", n_in, n_out, None)
        assert call.wire_bytes == sent
        assert CollectiveCount(call, 3).total_bytes == 3 * sent

    @pytest.mark.parametrize(
        ("ranks", "axes"),
        [
            ((0, 1), ("tp",)),
            ((2, 3), ("tp",)),
            ((0, 4), ("fsdp",)),
            ((1, 5), ("fsdp",)),
            ((0, 1, 4, 5), ("fsdp", "tp")),
            (tuple(range(8)), ("dp", "fsdp", "tp")),
            ((0, 3), ()),
            ((0, 1, 2), ()),
            ((0, 99), ()),
        ],
    )
    def test_axes_of_a_group(self, ranks, axes):
        assert cost.axes_of(ranks, MeshSpec(fsdp=2, dp=2, tp=2)) == tuple(a for a in ("fsdp", "dp", "tp") if a in axes)

    def test_data_parallel_reduces_each_gradient_once(self):
        ones = ft.init.ones()
        declared = {"w": Param((8, 6), ("in", "out"), ones), "v": Param((6, 8), ("out", "in"), ones)}
        plan = ft.compile_specs(declared, Rules(**{"in": None, "out": None}), MeshSpec(dp=4))

        def step(params, x):
            loss = lambda p: (x @ p["w"] @ p["v"]).sum()  # noqa: E731
            return ft.value_and_grad(loss)(params)

        with cost.fake_group(4):
            from torch.distributed.tensor import DTensor, Replicate, Shard

            mesh = ft.device_mesh(plan.mesh)
            with torch.device("meta"):
                whole = {name: DTensor.from_local(torch.empty(p.shape), mesh, [Replicate()], run_check=False)
                         for name, p in declared.items()}  # fmt: skip
                x = DTensor.from_local(torch.empty(3, 8), mesh, [Shard(0)], run_check=False)
            captured = ft.jit(step, plan, passes=()).lower(whole, x)
            explanation = cost.explain(captured, plan)
        reduced = {(row.call.kind, row.call.axes, row.call.ranks, row.call.bytes_in): row.count
                   for row in explanation.collectives}  # fmt: skip
        assert reduced == {("all_reduce", ("dp",), 4, 4 * 48): 2, ("all_reduce", ("dp",), 4, 4): 1}
        assert explanation.wire_bytes == 2 * (2 * 4 * 48 * 3 // 4) + 6

    def test_of_one_call_that_sends_several(self):
        """The coalesced forms, and those that write into a given buffer."""
        ops = torch.ops._c10d_functional
        graph = torch.fx.Graph()
        x, y, out = (graph.placeholder(name) for name in "xyo")
        x.meta["val"], y.meta["val"], out.meta["val"] = torch.empty(4), torch.empty(6), torch.empty(8)
        many = graph.call_function(ops.all_gather_into_tensor_coalesced.default, ([x, y], 2, "g"))
        many.meta["val"] = [torch.empty(8), torch.empty(12)]
        into = graph.call_function(ops.all_gather_into_tensor_out.default, (x, 2, "g"), {"out": out})
        into.meta["val"] = out.meta["val"]
        graph.output([many, into])
        found = cost.graph_facts(graph, (), lambda name: (("fsdp",), 2)).collectives
        assert [(row.call.kind, row.call.bytes_in, row.call.bytes_out) for row in found] == [
            ("all_gather", 40, 80),
            ("all_gather", 16, 32),
        ]

    def test_on_one_device_there_are_none(self, alone):
        explanation = cost.explain(*alone)
        assert explanation.collectives == () and explanation.wire_bytes == 0
        assert "Collectives in a step: none" in str(explanation)

    def test_have_the_phases_of_the_step(self, sharded):
        found = {row.call.phase for row in sharded[2].collectives}
        assert found == {"forward", "backward", "update"}


class TestExplanation:
    def test_survives_json(self, sharded):
        data = sharded[2].to_json()
        assert json.loads(json.dumps(data)) == data
        assert data["mesh"] == {"fsdp": 2, "tp": 2}
        assert data["memory"]["peak"] == sum(data["memory"]["parts"].values())
        assert set(data["memory"]["part_peaks"]) == set(cost.PARTS)
        assert data["wire_bytes"] == sum(row["total_bytes"] for row in data["collectives"])
        assert {row["path"] for row in data["params"]} == set(sharded[1].specs)

    def test_lists_what_the_rank_holds(self, sharded):
        _, plan, explanation, _ = sharded
        for row in explanation.params:
            assert row.local_shape == plan.local_shape(row.path, 0)
            assert row.bytes == 4 * math.prod(row.local_shape)
        rows = {row.path: row for row in explanation.params}
        assert rows["layers/wq"].layout == ((), ("fsdp",), ("tp",), ())
        assert rows["layers/wq"].gathered == ("fsdp",)
        assert "Parameters on rank 0 of 4 (fsdp=2 x tp=2)" in str(explanation)

    def test_needs_the_groups_of_the_capture(self, sharded):
        with pytest.raises(RuntimeError, match="only while the groups exist"):
            cost.explain(sharded[0], sharded[1])


class TestDepth:
    def test_of_two_shallow_graphs_give_the_deep_one_exactly(self):
        # So wide that what is stacked over layers is never small to the pass "order": see functitan.cost.depth.
        cfg = attrs.evolve(CONFIG, dim=640, n_heads=10, n_kv_heads=2)
        found = {}
        with cost.fake_group(4):
            for layers in (4, 5, 7):
                captured, plan = captured_step(ON_FOUR, attrs.evolve(cfg, n_layers=layers))
                found[layers] = cost.facts_of(captured, plan)
        assert cost.extrapolate(found[4], found[5], 4, 1) == found[5]
        predicted = cost.extrapolate(found[4], found[5], 4, 3)
        assert predicted.totals == found[7].totals
        assert predicted == found[7]

    def test_of_other_graphs_is_refused(self, alone, sharded):
        one = cost.graph_facts(alone[0].graph.graph, alone[0].donated, None)
        with pytest.raises(cost.NotRegularError):
            cost.extrapolate(one, sharded[3], 2, 1)


class TestFakeGroup:
    def test_is_there_within_and_gone_behind(self):
        with cost.fake_group(64, rank=63):
            assert (dist.get_world_size(), dist.get_rank()) == (64, 63)
            with pytest.raises(RuntimeError, match="rank 63 of a process group of 64 .*fake"), cost.fake_group(2):
                pass
        assert not dist.is_initialized()

    def test_ends_with_an_error_too(self):
        with pytest.raises(ZeroDivisionError), cost.fake_group(2):
            raise ZeroDivisionError
        assert not dist.is_initialized()

    def test_of_one_is_none(self):
        with cost.fake_group(1):
            assert not dist.is_initialized()

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_has_only_its_ranks(self, rank):
        with pytest.raises(ValueError, match="legal: 0 to 1"), cost.fake_group(2, rank):
            pass
