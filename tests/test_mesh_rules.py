"""What holds on a mesh beside the numbers of a step: what is refused, what is in force where, what readers get."""

import functools

import attrs
import numpy as np
import pytest
import torch
from mesh_cases import MODEL, Case, global_batch, own_rows, parts
from rank_pool import RankPool
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import functitan as ft
from functitan import cost, nn, optim, random, tree
from functitan.compiler.collectives import WAIT, collectives
from functitan.sharding.move import from_local
from models import llama
from sharding_specs import PRESETS, MeshSpec, Param, Rules
from train.step import make_train_step

FSDP = MeshSpec(fsdp=2)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    ranks = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def plan_of(mesh=FSDP, **rules):
    params = {"w": Param((8, 4), ("embed", "mlp"), ft.init.normal(1.0)), "b": Param((4,), ("mlp",), ft.init.ones())}
    return ft.compile_specs(params, Rules(**{"embed": "fsdp", "mlp": "tp", **rules}), mesh)


def loss_of(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).sum(), {"total": (x @ params["w"]).sum()}


def gradients_of_plain_operators(rank):
    plan, x = plan_of(), random.normal(random.key(5), (6, 8))
    params = ft.init_params(plan, random.key(0))
    grad_fn = ft.value_and_grad(loss_of, has_aux=True)
    (expected, expected_aux), expected_grads = grad_fn(ft.gather(params), x)
    rows = ft.shard_batch(plan, {"x": x[3 * rank : 3 * rank + 3]})["x"]
    jitted = ft.jit(grad_fn, plan)
    for run in (grad_fn, jitted):
        with ft.use_plan(plan), ft.disable_jit() if run is grad_fn else ft.use_plan(None):
            (loss, aux), grads = run(params, rows)
        for x_, y in ((loss, expected), (aux["total"], expected_aux["total"])):
            assert not any(p.is_partial() for p in x_.placements)
            torch.testing.assert_close(torch.tensor(x_.item()), y)
        for name, param in params.items():
            assert grads[name].placements == param.placements, name
            torch.testing.assert_close(grads[name].full_tensor(), expected_grads[name])
    with ft.disable_jit():
        (loss, aux), _ = jitted(params, rows)
    assert loss.item() == pytest.approx(expected.item()) and aux["total"].placements == (Replicate(),)


def test_gradients_are_laid_out_as_their_parameters_and_nothing_is_left_partial(pool):
    pool.run(gradients_of_plain_operators)


def refusals(rank):
    plan, optimizer, step = parts(Case({"fsdp": 2}))
    state = ft.init_state(plan, random.key(0), optimizer)
    rows = own_rows(plan, rank, global_batch())
    jitted = ft.jit(step, plan)
    with pytest.raises(ValueError, match=r"batch/documents is a plain array of shape \(8, 16\).*shard_batch"):
        jitted(state, rows)
    with pytest.raises(ValueError, match="batch/documents is a plain array"):
        jitted(state, {name: np.asarray(x) for name, x in rows.items()})
    other = ft.compile_specs(plan.params, plan.rules, MeshSpec(dp=2))
    with pytest.raises(ValueError, match="state/params/embed is on the mesh .*, and the plan on"):
        jitted(ft.init_state(other, random.key(0), optimizer), ft.shard_batch(plan, rows))
    uneven = ft.jit(parts(Case({"fsdp": 2}, accumulation=3))[2], plan)
    with pytest.raises(ValueError, match="a batch of 16 rows .8 on this rank. does not divide into 3 parts"):
        uneven(state, ft.shard_batch(plan, rows))
    with pytest.raises(ValueError, match="same number of rows, .* they have {'x': 4, 'y': 3}"):
        ft.shard_batch(plan, {"x": torch.ones(4, 2), "y": torch.ones(3)})
    same = ft.replicate(plan, {"x": torch.arange(3)})["x"]
    assert same.placements == (Replicate(),) and same.full_tensor().tolist() == [0, 1, 2]


def test_what_is_not_on_the_mesh_is_refused(pool):
    pool.run(refusals)


def plans_within_plans(rank):
    outer, inner = plan_of(), plan_of(embed=None)
    x = ft.shard_batch(outer, {"x": torch.ones(2, 4, 4)})["x"]

    @ft.jit
    def lay_out(x):
        return ft.constrain(x * 2, ("batch", "seq", "mlp"))

    with ft.use_plan(outer):
        with ft.use_plan(inner):
            assert (x + torch.ones(4)).placements == (Shard(0),)
        assert (x + torch.ones(4)).placements == (Shard(0),)  # a plain tensor still counts as replicated
        assert lay_out(x).placements == (Shard(0),)
    whole = plan_of(batch=None)
    with ft.use_plan(whole):
        assert lay_out(x).placements == (Replicate(),)
    assert len(lay_out.captures) == 2
    assert "layout" in lay_out.captures[1].reason


def test_plans_nest_and_a_graph_belongs_to_one(pool):
    pool.run(plans_within_plans)


def second_derivatives(rank):
    plan = plan_of(MeshSpec(tp=2))
    mesh = ft.device_mesh(plan.mesh)
    logits, labels = random.normal(random.key(1), (3, 6)), torch.tensor([1, -100, 5])
    v = random.normal(random.key(2), (3, 6))

    def curvature(logits, v):
        loss = lambda x: nn.cross_entropy(x, labels, z_loss=0.1)[0]  # noqa: E731
        return ft.grad(lambda x: (ft.grad(loss)(x) * v).sum())(logits)

    expected = curvature(logits, v)
    for dim in (0, 1):
        size = logits.shape[dim] // 2 if dim else 2
        local = [x.narrow(dim, *((3 * rank, 3) if dim else ((0, 2) if rank == 0 else (2, 1)))) for x in (logits, v)]
        placed = [from_local(x.contiguous(), mesh, [Shard(dim)], x_.shape) for x, x_ in zip(local, (logits, v))]
        got = curvature(*placed).full_tensor()
        torch.testing.assert_close(got, expected, msg=lambda text, dim=dim, size=size: f"dim {dim} of {size}: {text}")
    for bad in (6, -3):
        split = from_local(logits[:, 3 * rank : 3 * rank + 3].contiguous(), mesh, [Shard(1)], logits.shape)
        assert torch.isnan(nn.cross_entropy(split, torch.tensor([1, bad, 5]))[0].full_tensor())
        table = from_local(torch.ones(2, 4), mesh, [Shard(0)], (4, 4))
        rows = nn.embedding(table, torch.tensor([1, bad])).full_tensor()
        assert rows[0].tolist() == [1.0] * 4 and torch.isnan(rows[1]).all()


def test_split_vocabularies_have_second_derivatives_and_no_silent_strangers(pool):
    pool.run(second_derivatives)


def layouts_in_memory(rank):
    plan = plan_of(MeshSpec(dp=2))
    q = random.normal(random.key(1), (4, 5, 2, 6))
    rows = ft.shard_batch(plan, {"q": q[2 * rank : 2 * rank + 2]})["q"]

    def heads_together(q):
        return nn.attention(q, q, q, causal=True, implementation="plain").reshape(q.shape[0], 5, 12)

    with ft.use_plan(plan):
        torch.testing.assert_close(heads_together(rows).full_tensor(), heads_together(q))
    jitted = ft.jit(lambda x: x.reshape(-1), plan)
    mesh = ft.device_mesh(plan.mesh)
    dense = torch.arange(6.0).reshape(2, 3)
    for local in (dense, dense.t().contiguous().t()):
        got = jitted(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
        assert got.full_tensor().tolist() == dense.flatten().tolist()


def test_any_layout_in_memory_will_do(pool):
    pool.run(layouts_in_memory)


def torchs_own_operators(rank):
    plan = plan_of(MeshSpec(tp=2))
    mesh = ft.device_mesh(plan.mesh)
    whole = torch.arange(24.0).reshape(2, 3, 4)
    x = from_local(whole[..., 2 * rank : 2 * rank + 2].contiguous(), mesh, [Shard(2)], whole.shape)
    table = from_local(whole[0, :, 2 * rank : 2 * rank + 2].contiguous(), mesh, [Shard(1)], (3, 4))
    with ft.use_plan(plan):
        torch.testing.assert_close(x.cumsum(-1).full_tensor(), whole.cumsum(-1))
        for run in (lambda x: torch.cumprod(x, dim=-1), lambda x: x.logcumsumexp(-1)):
            try:
                got = run(x).full_tensor()
            except NotImplementedError:  # refused, as torch 2.11 does, is as good as right
                continue
            torch.testing.assert_close(got, run(whole))
        ids = torch.tensor([2, 0])
        assert torch.equal(torch.nn.functional.embedding(ids, table).full_tensor(), whole[0][ids])
        with pytest.raises(NotImplementedError, match="conv1d over a mesh: an operand is split along dim 2"):
            torch.nn.functional.conv1d(x, torch.ones(1, 3, 2))
        with pytest.raises(NotImplementedError, match="use functitan.nn.attention"):
            torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_what_dtensor_gets_wrong_is_put_right_or_refused(pool):
    pool.run(torchs_own_operators)


def ranks_that_differ(rank):
    plan = plan_of()
    with pytest.raises(RuntimeError, match="the key of the parameters is not the same on every rank"):
        ft.init_params(plan, random.key(rank))
    params = ft.init_params(plan, random.key(0))
    jitted = ft.jit(lambda params, x, lr: (x["x"] @ params["w"]).sum() * lr, plan)
    rows = ft.shard_batch(plan, {"x": torch.ones(4, 8)})
    with pytest.raises(RuntimeError, match="rank 0 has argument lr: 0.1, rank 1 has argument lr: 0.2"):
        jitted(params, rows, 0.1 * (rank + 1))
    uneven = ft.shard_batch(plan, {"x": torch.ones(4 - 2 * rank, 8)})
    with pytest.raises(RuntimeError, match=r"rank 0 has argument x/x: float32\[8, 8\] .*, rank 1 has .*\[4, 8\]"):
        jitted(params, uneven, 0.1)


def test_ranks_that_differ_are_told(pool):
    pool.run(ranks_that_differ)


def test_names_of_activations_are_checked_on_one_device_too():
    plan = plan_of(MeshSpec())
    for run in (ft.jit(lambda x: ft.constrain(x, ("batch", "mpl")), plan), lambda x: ft.constrain(x, ("batch", "mpl"))):
        with ft.use_plan(plan), pytest.raises(ValueError, match="'mpl'; did you mean 'mlp'. or add"):
            run(torch.ones(2, 2))
    assert ft.constrain(torch.ones(2, 2), ("batch", "mpl")).shape == (2, 2)


def two_waits(rank):
    plan = plan_of(MeshSpec(dp=2))
    group = ft.device_mesh(plan.mesh).get_group(0).group_name
    ops = torch.ops._c10d_functional

    def fun(x):
        y = ops.all_reduce(x, "sum", group)
        once = (ops.wait_tensor(y) * 2).exp()
        return once + ops.wait_tensor(y) * 3

    x = torch.linspace(0, 1, 300).reshape(2, 150)
    expected = fun(x)
    for passes in ((), ("reuse",), ("cse", "reuse")):
        assert torch.equal(ft.jit(fun, passes=passes)(x), expected), passes


def test_a_result_that_is_waited_for_twice_is_one_buffer(pool):
    pool.run(two_waits)


def graph_of(remat, passes=None):
    model = attrs.evolve(MODEL, dropout=0.0)
    params = llama.declare(model)
    plan = ft.compile_specs(params, PRESETS["all"], MeshSpec(fsdp=2, tp=2))
    optimizer = optim.sgd(0.1)
    step = make_train_step(functools.partial(llama.apply, cfg=model, remat=remat), optimizer, lambda count: 0.1)
    batch = ft.abstract_batch(plan, ["tokens", "labels"], 8, 16)
    options = {} if passes is None else {"passes": passes}
    return ft.jit(step, plan, **options).lower(ft.abstract_state(plan, optimizer), batch).graph.graph


def test_selective_remat_computes_again_what_is_cheap_and_nothing_else():
    counts = {}
    with cost.fake_group(4):
        for remat in ("none", "selective", "full"):
            targets = [node.target for node in graph_of(remat).nodes if node.op == "call_function"]
            names = [getattr(target, "overloadpacket", target).__name__ for target in targets]
            counts[remat] = {
                "products": names.count("mm"),
                "attention": names.count("_scaled_dot_product_flash_attention_for_cpu"),
                "sums over ranks": names.count("reduce_scatter_tensor"),
                "activations": names.count("sigmoid") + names.count("silu") + names.count("rsqrt"),
            }
    none, selective, full = counts["none"], counts["selective"], counts["full"]
    assert selective["activations"] > none["activations"]
    assert {k: v for k, v in selective.items() if k != "activations"} == {
        k: v for k, v in none.items() if k != "activations"
    }
    assert all(full[k] > none[k] for k in none)


def test_nothing_is_sent_while_capturing(pool):
    with cost.fake_group(2):
        plan = plan_of(MeshSpec(dp=2))
        mesh = ft.device_mesh(plan.mesh)

        def constant_sum(x):
            return x + from_local(torch.arange(4.0), mesh, [Partial()], (4,))

        graph = ft.jit(constant_sum, plan).lower(ft.replicate(plan, torch.zeros(4))).graph.graph
        assert [node.target.overloadpacket.__name__ for node in collectives(graph)] == ["all_reduce"]
        assert any(node.target is WAIT for node in graph.nodes)


def test_bfloat16_gradients_of_several_microbatches_are_added_in_float32():
    seen = []
    model = attrs.evolve(MODEL, dropout=0.0)
    params = tree.map(lambda p: attrs.evolve(p, dtype="bfloat16"), llama.declare(model))
    plan = ft.compile_specs(params, PRESETS["all"], MeshSpec())
    inner = optim.sgd(0.1)

    def update(grads, state, params=None):
        seen.extend({g.dtype for g in tree.leaves(grads)})
        return inner.update(grads, state, params)

    optimizer = optim.GradientTransformation(inner.init, update)
    step = make_train_step(functools.partial(llama.apply, cfg=model), optimizer, lambda count: 0.1, parts=2)
    step(ft.init_state(plan, random.key(0), optimizer), global_batch())
    assert seen == [torch.float32]
