"""What training over ranks gets wrong in the field, case by case (L, R, K, N), on the model of ``mesh_cases``."""

import pytest
import torch
import torch.distributed as dist
from mesh_cases import BATCH, MODEL, SEQ, Case, check, global_batch, own_rows, parts
from rank_pool import RankPool
from torch.distributed.tensor import DTensor, Replicate, Shard

import functitan as ft
from functitan import nn, optim, random, tree
from functitan.compiler.collectives import collectives
from functitan.compiler.plan import placements
from functitan.sharding.move import from_local, region
from models import llama
from sharding_specs import MeshSpec, P, Param, Rules
from train.checkpoint import Checkpointer, latest, load
from train.step import make_train_step


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """``pool(size)``: ranks that are there until the end of this file."""
    running: dict[int, RankPool] = {}

    def of(size):
        if size not in running:
            running[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return running[size]

    yield of
    for ranks in running.values():
        ranks.close()


def leaves(x):
    return dict(tree.leaves_with_path(ft.gather(x)))


def assert_same(got, expected):
    """Two gathered trees, bit by bit."""
    assert got.keys() == expected.keys()
    different = [path for path in expected if not torch.equal(got[path], expected[path])]
    assert not different, different


def local_copies(x):
    """What this rank holds, copied: path -> plain tensor."""
    return {path: (x.to_local() if isinstance(x, DTensor) else x).clone() for path, x in tree.leaves_with_path(x)}


def laid_out(plan, x, spec):
    """The whole ``x`` as a DTensor of this layout."""
    mesh = ft.device_mesh(plan.mesh)
    layout = placements(spec, plan.mesh)
    span = tuple(slice(start, start + size) for start, size in region(x.shape, mesh, layout))
    return from_local(x[span].contiguous(), mesh, layout, x.shape)


def linear_plan(mesh, rules=None, shape=(16, 8), **options):
    rules = rules or Rules(embed="fsdp", mlp="tp", **options).allow_uneven("embed", "mlp")
    return ft.compile_specs({"w": Param(shape, ("embed", "mlp"), ft.init.normal(1.0))}, rules, MeshSpec(**mesh))


# L1


def test_l1_the_loss_does_not_depend_on_the_mesh(pool):
    pool(4).run(check, Case({"fsdp": 2, "tp": 2}), timeout=150)


# L3


def mean_loss(rank, accumulation):
    """Rank 0 has one label that counts, with a loss of 2, rank 1 has nine with a mean of 10: (2 + 9 * 10) / 10."""
    plan = linear_plan({"fsdp": 2}, shape=(1, 2))
    # Of logits (a, 0) label 1 costs log(1 + e^a): the a that gives the wanted loss.
    wanted = torch.full((2, 10), 10.0, dtype=torch.float64)
    wanted[0] = 2.0
    labels = torch.full((2, 10), -100)
    labels[0, 3], labels[1, 1:] = 1, 1
    if accumulation == 2:  # a microbatch is rows i::2 of the global batch: each has both ranks' rows, as unevenly
        wanted, labels = (torch.cat((x[:1], x[:1], x[1:], x[1:])) for x in (wanted, labels))
        labels[1], labels[2] = -100, -100  # the first has a label of rank 0, the second nine of rank 1
    x = (wanted.exp() - 1).log()

    def model(params, batch, *, key=None):
        logits = torch.stack((batch["x"], torch.zeros_like(batch["x"])), -1)
        return logits + 0.0 * params["w"].sum()

    optimizer = optim.sgd(0.1)
    step = make_train_step(model, optimizer, lambda step: 0.1, accumulation)
    rows = slice(rank * accumulation, (rank + 1) * accumulation)
    batch = ft.shard_batch(plan, {"x": x[rows].float(), "labels": labels[rows], "tokens": labels[rows]})
    _, metrics = ft.jit(step, plan)(ft.init_state(plan, random.key(0), optimizer), batch)
    return metrics["loss"].item(), metrics["tokens"].item()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_l3_ignored_labels_weigh_nothing(pool, accumulation):
    for loss, tokens in pool(2).run(mean_loss, accumulation):
        assert loss == pytest.approx(9.2, rel=1e-6)
        assert tokens == 10


# L4


def row_parallel(rank, sequence_parallel):
    plan = linear_plan({"tp": 2}, Rules(embed=None, mlp="tp", seq=("cp", "tp") if sequence_parallel else "cp"))
    x = laid_out(plan, torch.rand(2, 4, 8), P(None, None, "tp"))
    w, bias = laid_out(plan, torch.zeros(8, 6), P("tp", None)), laid_out(plan, torch.ones(6), P(None))

    def fun(x, w, bias):
        return ft.constrain(nn.linear(x, w, bias), ("batch", "seq", "embed"))

    with ft.use_plan(plan):
        plain = fun(x, w, bias)
    for y in (plain, ft.jit(fun, plan)(x, w, bias)):
        assert torch.equal(y.full_tensor(), torch.ones(2, 4, 6))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_l4_the_bias_of_a_row_parallel_linear_counts_once(pool, sequence_parallel):
    pool(2).run(row_parallel, sequence_parallel)


# L5


def norm_weight_gradient(rank):
    plan = linear_plan({"tp": 2}, Rules(embed=None, mlp="tp", seq=("cp", "tp")))
    x, weight = random.normal(random.key(0), (2, 6, 8)), random.uniform(random.key(1), (8,))

    def grad(x, weight):
        return ft.grad(lambda w: (nn.rms_norm(ft.constrain(x, ("batch", "seq", "embed")), w) ** 3).sum())(weight)

    given = laid_out(plan, x, P(None, None, None)), laid_out(plan, weight, P(None))
    got = ft.jit(grad, plan)(*given)
    assert got.placements == (Replicate(),)
    torch.testing.assert_close(got.to_local(), grad(x, weight), rtol=1e-5, atol=1e-5)


def test_l5_norm_weights_see_the_whole_sequence(pool):
    pool(2).run(norm_weight_gradient)


# L6


def norm_of_ones(rank, mesh):
    plan = linear_plan(mesh, shape=(4, 4))
    params = ft.init_params(plan, random.key(0))

    def norm(params):
        return optim.global_norm(ft.grad(lambda p: p["w"].sum())(params))

    return ft.jit(norm, plan)(params).item()


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_l6_the_gradient_norm_is_that_of_the_whole(pool, mesh):
    size = MeshSpec(**mesh).size
    assert pool(size).run(norm_of_ones, mesh) == pytest.approx([4.0] * size, rel=1e-6)


# L7


def purity(rank):
    plan, optimizer, step = parts(Case({"fsdp": 2}))
    state = ft.init_state(plan, random.key(0), optimizer)
    batch = ft.shard_batch(plan, own_rows(plan, rank, global_batch()))
    before = local_copies((state, batch))
    lent = ft.jit(step, plan)
    first, second = lent(state, batch), lent(state, batch)
    assert_same(local_copies((state, batch)), before)
    assert_same(local_copies(first), local_copies(second))

    given = ft.jit(step, plan, donate=("state",))
    third = given(state, batch)
    assert_same(local_copies(third), local_copies(first))
    for use in (lambda x: x.full_tensor(), lambda x: x.to_local(), repr):
        with pytest.raises(ft.DonatedError, match="donated"):
            use(state.params["embed"])
    assert_same(local_copies(batch), {path[2:]: x for path, x in before.items() if path.startswith("1/")})


def test_l7_a_step_is_pure(pool):
    pool(2).run(purity, timeout=120)


def use_donated(rank):
    plan = linear_plan({"fsdp": 2})
    params = ft.init_params(plan, random.key(0))
    ft.jit(lambda params: tree.map(lambda x: x * 2, params), plan, donate=("params",))(params)
    for use in (lambda x: x + 1, lambda x: x.sum().item(), lambda x: x.clone(), lambda x: x.detach(), nn.silu):
        with pytest.raises(ft.DonatedError, match="donated"):
            use(params["w"])


def test_l7_no_operator_takes_a_donated_dtensor(pool):
    pool(2).run(use_donated)


# R1

SHAPES = {"even": (8, 4), "uneven": (7, 3)}


def initial(rank, mesh, dim, shape):
    axes = tuple(mesh)
    rules = Rules(embed=axes if dim == 0 else None, mlp=axes if dim == 1 else None, batch=None)
    plan = linear_plan(mesh, rules.allow_uneven("embed", "mlp"), shape)
    params = ft.init_params(plan, random.key(3))
    if mesh:
        assert all(p == Shard(dim) for p in params["w"].placements)
    return leaves(params)["w"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_r1_initial_parameters_do_not_depend_on_the_mesh(pool, dim, shape):
    expected = initial(0, {}, dim, shape)
    for mesh in ({"fsdp": 2}, {"fsdp": 4}, {"fsdp": 2, "tp": 2}):
        for whole in pool(MeshSpec(**mesh).size).run(initial, mesh, dim, shape):
            assert torch.equal(whole, expected), mesh


# R2, K1


def batch_at(plan, rank, position):
    """The batch of the samples from ``position`` on: another one after every step."""
    whole = {name: torch.roll(x, position // BATCH, 0) for name, x in global_batch().items()}
    return ft.shard_batch(plan, own_rows(plan, rank, whole))


def advance(rank, case, state, count):
    plan, _, step = parts(case)
    step = ft.jit(step, plan)
    for _ in range(count):
        state, _ = step(state, batch_at(plan, rank, state.data["position"].item()))
    return state


def save(folder, state):
    checkpointer = Checkpointer(folder, asynchronous=False)
    checkpointer.save(state.step.item(), state)
    checkpointer.close()


def save_after(rank, case, folder, count, more):
    """The state after ``count`` steps, which is saved, and that after ``more``: both whole; and the batch between."""
    plan, optimizer, _ = parts(case)
    state = advance(rank, case, ft.init_state(plan, random.key(0), optimizer), count)
    save(folder, state)
    rows = leaves(batch_at(plan, rank, state.data["position"].item()))
    return leaves(state), leaves(advance(rank, case, state, more)), rows


def go_on(rank, case, folder, more):
    """The same of the state that was saved, on the mesh of ``case``."""
    plan, optimizer, _ = parts(case)
    state = load(latest(folder).path, ft.abstract_state(plan, optimizer))
    rows = leaves(batch_at(plan, rank, state.data["position"].item()))
    return leaves(state), leaves(advance(rank, case, state, more)), rows


def test_r2_a_resumed_run_is_the_same_run(pool, tmp_path):
    case = Case({"fsdp": 2})
    assert MODEL.dropout > 0
    _, end, _ = pool(2).run(save_after, case, tmp_path, 2, 2, timeout=120)[0]
    fresh = RankPool(2, tmp_path)  # other processes
    try:
        _, resumed, _ = fresh.run(go_on, case, tmp_path, 2, timeout=120)[0]
    finally:
        fresh.close()
    assert resumed["step"] == 4
    assert_same(resumed, end)


def test_k1_a_run_goes_on_on_another_mesh(pool, tmp_path):
    first, second = Case({"fsdp": 4}), Case({"fsdp": 2, "tp": 2})
    saved, end, rows = pool(4).run(save_after, first, tmp_path, 3, 1, timeout=120)[0]
    got, after, next_rows = pool(4).run(go_on, second, tmp_path, 1, timeout=120)[0]
    assert saved["step"] == 3 and saved["data/position"] == 3 * BATCH
    assert_same(got, saved)
    assert_same(next_rows, rows)
    assert not torch.equal(rows["tokens"], global_batch()["tokens"])
    for path, value in end.items():
        torch.testing.assert_close(after[path], value, rtol=1e-5, atol=1e-5)


# K3


def three_rows(rank, mesh, folder):
    """Initial values, the gradient norm and the state after a step, and what loading brings back."""
    plan = linear_plan(mesh, shape=(3, 8))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))

    def model(params, batch, *, key=None):
        return nn.linear(nn.embedding(params["w"], batch["tokens"]), params["w"].t())

    step = ft.jit(make_train_step(model, optimizer, lambda step: 0.1), plan)
    state = ft.init_state(plan, random.key(0), optimizer)
    initial = leaves(state)
    tokens = torch.arange(8).reshape(4, 2) % 3
    rows = slice(rank, rank + 1) if mesh else slice(None)
    batch = ft.shard_batch(plan, {"tokens": tokens[rows], "labels": (tokens[rows] + 1) % 3})
    state, metrics = step(state, batch)
    held = tree.leaves(state.params)[0].to_local().shape[0] if mesh else 3
    if mesh:
        save(folder, state)
        back = load(latest(folder).path, ft.abstract_state(plan, optimizer))
        assert_same(local_copies(back), local_copies(state))
    return held, initial, metrics["grad_norm"].item(), leaves(state)


def test_k3_three_rows_over_four_ranks(pool, tmp_path):
    _, initial, norm, end = three_rows(0, {}, None)
    answers = pool(4).run(three_rows, {"fsdp": 4}, tmp_path)
    assert [held for held, *_ in answers] == [1, 1, 1, 0]
    for _, got_initial, got_norm, got_end in answers:
        assert_same(got_initial, initial)
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for path, value in end.items():
            torch.testing.assert_close(got_end[path], value, rtol=1e-5, atol=1e-6)


# N1


def infinite_once(rank):
    """Four steps, in the third of which the second rank's rows give infinite gradients."""
    plan, optimizer, _ = parts(Case({"fsdp": 2}))

    def model(params, batch, *, key=None):
        return llama.apply(params, batch, MODEL, key=key) * batch["scale"].unsqueeze(-1)

    step = ft.jit(make_train_step(model, optimizer, lambda step: 1e-2), plan)
    state = ft.init_state(plan, random.key(0), optimizer)
    rows = own_rows(plan, rank, global_batch())
    history, skipped = [], []
    for i in range(4):
        scale = torch.full((BATCH // 2, SEQ), torch.inf if i == 2 and rank == 1 else 1.0)
        state, metrics = step(state, ft.shard_batch(plan, rows | {"scale": scale}))
        history.append(leaves((state.params, state.opt_state)))
        skipped.append(metrics["skipped"].item())
    return history, skipped, state.skipped.item(), state.step.item()


def test_n1_an_infinite_gradient_on_one_rank_changes_nothing_on_any(pool):
    for history, skipped, total, step in pool(2).run(infinite_once, timeout=120):
        assert (skipped, total, step) == ([0, 0, 1, 0], 1, 4)
        assert_same(history[2], history[1])
        assert any(not torch.equal(history[3][path], x) for path, x in history[2].items())
        assert all(torch.isfinite(x).all() for x in history[3].values())


# What a step gives


def sums(rank):
    """What a row-parallel product leaves to be added is added before anyone outside sees it."""
    plan = linear_plan({"tp": 2}, Rules(embed=None, mlp="tp"))
    x, w = random.normal(random.key(0), (2, 4, 8)), random.normal(random.key(1), (8, 6))
    given = laid_out(plan, x, P(None, None, "tp")), laid_out(plan, w, P("tp", None))
    with ft.use_plan(plan):
        assert any(p.is_partial() for p in nn.linear(*given).placements)
    y = ft.jit(lambda x, w: {"y": nn.linear(x, w)}, plan)(*given)["y"]
    assert not any(p.is_partial() for p in y.placements)
    torch.testing.assert_close(y.to_local(), x @ w, rtol=1e-5, atol=1e-5)


def test_no_partial_sum_leaves_a_step(pool):
    pool(2).run(sums)


def state_is_laid_out(rank):
    plan, optimizer, step = parts(Case({"fsdp": 2, "tp": 2}))
    state = ft.init_state(plan, random.key(0), optimizer)
    new, metrics = ft.jit(step, plan)(state, ft.shard_batch(plan, own_rows(plan, rank, global_batch())))
    before = {path: x.placements for path, x in tree.leaves_with_path(state)}
    assert {path: x.placements for path, x in tree.leaves_with_path(new)} == before
    everywhere = (Replicate(),) * 2
    assert all(x.placements == everywhere for x in metrics.values() if isinstance(x, DTensor))
    return {name: x.item() for name, x in metrics.items()}


def test_a_step_keeps_layouts_and_its_metrics_are_the_same_on_all(pool):
    answers = pool(4).run(state_is_laid_out, timeout=120)
    assert all(answer == answers[0] for answer in answers)


# Ranks that do not do the same


def disagree(rank):
    plan = linear_plan({"fsdp": 2})

    def total(x):
        added = optim.global_norm([x])
        return added if dist.get_rank() == 0 else (added, ft.constrain(x, (None, None)))

    with pytest.raises(RuntimeError) as raised:
        ft.jit(total, plan)(ft.init_params(plan, random.key(0))["w"])
    dist.barrier()  # nobody waits for what another did not start
    return str(raised.value)


def test_ranks_that_captured_different_steps_say_where(pool):
    texts = pool(2).run(disagree)
    assert texts[0] == texts[1]
    assert (
        "jit(total): the ranks captured different steps: rank 0 has nothing, rank 1 has collective "
        "all_gather_into_tensor of float32"
    ) in texts[0]


# Layouts are rules


def block_under(rank, rules):
    plan = linear_plan({"tp": 2}, Rules(embed=None, **rules))
    x, up, down = (random.normal(random.key(i), shape) for i, shape in enumerate([(2, 4, 8), (8, 12), (12, 8)]))

    def block(x, up, down):
        x = ft.constrain(x, ("batch", "seq", "embed"))
        h = ft.constrain(nn.linear(x, up), ("batch", "seq", "mlp"))
        return ft.constrain(nn.linear(h, down), ("batch", "seq", "embed"))

    names = ("embed", "mlp"), ("mlp", "embed")
    weights = (laid_out(plan, w, plan.rules.spec(n, plan.mesh)) for n, w in zip(names, (up, down)))
    step = ft.jit(block, plan)
    y = step(laid_out(plan, x, P(None, None, None)), *weights)
    torch.testing.assert_close(y.full_tensor(), block(x, up, down), rtol=1e-5, atol=1e-5)
    return [node.target.overloadpacket.__name__ for node in collectives(step.captures[0].graph.graph)]


@pytest.mark.parametrize(
    ("rules", "sent"),
    [
        ({"mlp": None}, []),
        ({"mlp": "tp"}, ["all_reduce"]),
        # On Gloo a reduce-scatter is an exchange and a sum.
        ({"mlp": "tp", "seq": ("cp", "tp")}, ["all_gather_into_tensor", "all_to_all_single"]),
    ],
    ids=["replicated", "tensor parallel", "and sequence parallel"],
)
def test_another_rule_is_another_graph_of_the_same_function(pool, rules, sent):
    assert pool(2).run(block_under, rules) == [sent, sent]
