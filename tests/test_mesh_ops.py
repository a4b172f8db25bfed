"""Every operator over a mesh against the same on whole tensors: values and gradients, in many placements.

What a test does is done by every rank of one pool, in loops: a rank is slow to start and quick to use.
"""

import itertools
import random as python_random

import pytest
import torch
from rank_pool import RankPool

import functitan as ft
from functitan import nn, optim, random
from functitan.compiler.collectives import ALL_GATHER, collectives
from functitan.precision import Precision
from functitan.sharding.move import DTensor, Partial, Replicate, Shard, from_local, move, redistribute, region, to_local
from sharding_specs import PRESETS, MeshSpec, Param

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
MESHES = {"fsdp2xtp2": MeshSpec(fsdp=2, tp=2), "tp4": MeshSpec(tp=4), "fsdp4": MeshSpec(fsdp=4)}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    ranks = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def plan_on(mesh, precision=Precision()):  # noqa: B008 (immutable)
    weights = {"w": Param((8, 8), ("embed", "mlp"), ft.init.ones())}
    return ft.compile_specs(weights, PRESETS["all"], MESHES[mesh], precision=precision)


def layouts(plan, *choices, most=80):
    """Tuples with one layout for each tensor, of its choices on every axis; a fixed sample where there are many."""
    axes = ft.device_mesh(plan.mesh).ndim
    every = list(itertools.product(*(itertools.product(options, repeat=axes) for options in choices)))
    return every if len(every) <= most else python_random.Random(0).sample(every, most)


def values(seed, *shape, dtype=torch.float64):
    return random.normal(random.key(seed), shape).to(dtype)


def laid_out(x, plan, placements):
    """The whole ``x`` in these placements. Of what is Partial, every rank holds another share."""
    mesh = ft.device_mesh(plan.mesh)
    local = x[tuple(slice(start, start + size) for start, size in region(x.shape, mesh, placements))].clone()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            n = mesh.size(axis)
            local = local * ((mesh.get_local_rank(axis) + 1) * 2 / (n * (n + 1)))
    return from_local(local, mesh, placements, x.shape).detach()


def results(fun, tensors):
    """``fun(*tensors)`` and the gradients of all floating ``tensors`` for a fixed, uneven weighting, all whole."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    outputs = fun(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    whole = [to_local(y, [R] * y.device_mesh.ndim) if isinstance(y, DTensor) else y for y in outputs]
    total = sum((y * values(90 + i, *y.shape)).sum() for i, y in enumerate(whole) if y.is_floating_point())
    grads = torch.autograd.grad(total, [x for x in leaves if x.requires_grad])
    return [ft.gather(x) for x in (*whole, *grads)]


def agree(plan, fun, tensors, placements, exact=False):
    """``fun`` of the tensors in these placements gives the values and the gradients of ``fun`` of the whole ones."""
    expected = results(fun, tensors)
    with ft.use_plan(plan):
        got = results(fun, [laid_out(x, plan, p) for x, p in zip(tensors, placements, strict=True)])
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, i=i: f"{i} with {placements}: {text}")


def check_moves(rank, mesh):
    plan = plan_on(mesh)
    x = values(0, 5, 3)
    device_mesh = ft.device_mesh(plan.mesh)
    for source, target in layouts(plan, (R, P, S0, S1), (R, S0, S1), most=50):
        laid = laid_out(x, plan, source)
        moved = move(laid, target)
        assert moved.placements == target
        span = region(x.shape, device_mesh, target)
        assert tuple(moved.to_local().shape) == tuple(size for _, size in span)
        mine = x[tuple(slice(start, start + size) for start, size in span)]
        torch.testing.assert_close(moved.to_local(), mine, msg=lambda text, s=source, t=target: f"{s} to {t}: {text}")
        agree(plan, lambda a, t=target: redistribute(a, t) if isinstance(a, DTensor) else a, [x], [source])


def check_regions(rank, mesh):
    from torch.distributed.tensor import distribute_tensor

    plan = plan_on(mesh)
    for placements in layouts(plan, (R, S0, S1)):
        for shape in ((3, 9), (1, 4), (8, 8)):
            x = torch.arange(shape[0] * shape[1]).reshape(shape)
            theirs = distribute_tensor(x, ft.device_mesh(plan.mesh), *placements, src_data_rank=None).to_local()
            span = region(shape, ft.device_mesh(plan.mesh), *placements)
            assert torch.equal(x[tuple(slice(start, start + size) for start, size in span)], theirs), placements


def check_gradient_placements(rank, mesh):
    """A whole value that every rank uses for other rows: the gradient is the sum of what the ranks give."""
    plan = plan_on(mesh)
    device_mesh = ft.device_mesh(plan.mesh)
    leaf = laid_out(values(0, 6), plan, [S0] * device_mesh.ndim).requires_grad_()
    local = to_local(leaf, [R] * device_mesh.ndim, [P] * device_mesh.ndim)
    (grad,) = torch.autograd.grad((local * (rank + 1)).sum(), leaf)
    assert grad.placements == leaf.placements
    torch.testing.assert_close(grad.full_tensor(), torch.full((6,), 10.0, dtype=torch.float64))


def check_elementwise(rank, mesh):
    """What optimizers compute, without gradients: at once where the layouts are one, else as DTensor finds it."""
    plan = plan_on(mesh)
    x, y, number = values(0, 5, 6).abs() + 0.5, values(1, 5, 6).abs() + 0.5, torch.tensor(3.0, dtype=torch.float64)
    replicated = laid_out(number, plan, [R] * ft.device_mesh(plan.mesh).ndim)
    functions = {
        "operators": lambda x, y, n: (1 - x) * y / n + x**2 - y * 3,
        "calls": lambda x, y, n: torch.lerp(x, y, 0.25) + torch.addcmul(x, x, y, value=0.5) - torch.sqrt(y).neg(),
        "scalars": lambda x, y, n: torch.where(n > 2, x, y) + torch.maximum(x, n) + x.clamp(min=1.0) + n,
        "dtypes": lambda x, y, n: x.to(torch.float32) * y,
        "masks": lambda x, y, n: torch.where(x > y, x, n * y) + (x > y).to(x.dtype),
        "in place": lambda x, y, n: (x + 0).mul_(y).add_(y, alpha=2),
    }
    pairs = layouts(plan, (R, P, S0, S1), (R, P, S0, S1), most=24) + [(p, p) for (p,) in layouts(plan, (R, S0, S1))]
    for name, fun in functions.items():
        expected = fun(x, y, number)
        for a, b in pairs:
            if name in ("calls", "scalars", "masks") and P in (*a, *b):
                continue  # torch.maximum and the like of shares that are still to be added up: DTensor's own matter
            with ft.use_plan(plan), torch.no_grad():
                got = fun(laid_out(x, plan, a), laid_out(y, plan, b), replicated if rank % 2 == 0 else number)
            where = f"{name} of {a} and {b}"
            assert got.dtype == expected.dtype, where
            if a == b and P not in a:
                assert got.placements == tuple(a), where
            torch.testing.assert_close(ft.gather(got), expected, msg=lambda text, where=where: f"{where}: {text}")


def check_linear(rank, mesh):
    plan = plan_on(mesh)
    # Of 6 the fourth rank gets none, of 5 the third one less.
    x, w, bias = values(0, 3, 4, 6), values(1, 6, 5), values(2, 5)
    for placements in layouts(plan, (R, P, S0, S1, S2), (R, P, S0, S1), (R, S0), most=100):
        agree(plan, nn.linear, [x, w, bias], placements)


def check_linears(rank, mesh):
    plan = plan_on(mesh)
    x, a, b = values(0, 4, 4, 6), values(1, 6, 8, 3), values(2, 6, 4, 3)
    for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0, S1, S2), (R, S0, S1, S2), most=30):
        agree(plan, lambda x, a, b: nn.linears(x, (a, b)), [x, a, b], placements)
    y, out = values(3, 4, 4, 8, 3), values(4, 8, 3, 6)
    for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0, S1, S2), most=60):
        agree(plan, lambda y, out: nn.linear(y, out, n_in=2), [y, out], placements)


def check_row_parallel_bias(rank, mesh):
    """Case L4."""
    plan = plan_on(mesh)
    axes = ft.device_mesh(plan.mesh).ndim
    with ft.use_plan(plan):
        x = laid_out(torch.randn(2, 4, 8), plan, [R] * axes)
        w = laid_out(torch.zeros(8, 8), plan, [S0] * axes)
        y = nn.linear(x, w, laid_out(torch.ones(8), plan, [R] * axes))
        assert torch.equal(ft.gather(ft.constrain(y, ("batch", "seq", "embed"))), torch.ones(2, 4, 8))


def check_embedding(rank, mesh):
    plan = plan_on(mesh)
    for rows in (3, 6):
        table, ids = values(0, rows, 5), torch.arange(12).reshape(4, 3) % rows
        for placements in layouts(plan, (R, P, S0, S1), (R, S0, S1), most=50):
            agree(plan, nn.embedding, [table, ids], placements)


def check_cross_entropy(rank, mesh):
    plan = plan_on(mesh)
    for vocab, z_loss in ((3, 0.0), (7, 0.1)):
        logits = values(0, 4, 3, vocab)
        labels = torch.arange(12).reshape(4, 3) % vocab
        labels[0] = -100  # where the rows are split, a rank without a label that counts
        labels[2, 1] = -100
        for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0, S1), most=60):
            agree(plan, lambda x, y, z=z_loss: nn.cross_entropy(x, y, z_loss=z), [logits, labels], placements)
        no_label = torch.full_like(labels, -100)
        for placements in layouts(plan, (S0, S2), (S0,), most=4):
            agree(plan, lambda x, y, z=z_loss: nn.cross_entropy(x, y, z_loss=z), [logits, no_label], placements)


def check_logits_stay(rank, mesh):
    """Nothing of the logits' size is sent, forward or backward; of the two results every rank has all."""
    plan = plan_on(mesh)
    axes = ft.device_mesh(plan.mesh).ndim
    placements = [S0] * (axes - 1) + [S2]

    def fun(logits, labels):
        return ft.value_and_grad(lambda x: nn.cross_entropy(x, labels, z_loss=1e-4), has_aux=True)(logits)

    logits = laid_out(values(0, 4, 3, 7), plan, placements)
    labels = laid_out(torch.ones(4, 3, dtype=torch.int64), plan, placements[:-1] + [R])
    graph = ft.jit(fun, plan).lower(logits, labels).graph.graph
    sent = [(node.target, node.args[0].meta["val"].numel()) for node in collectives(graph)]
    assert sent and all(target is not ALL_GATHER for target, _ in sent)
    rows = 3 * 4 // (1 if axes == 1 else 2)
    assert {size for _, size in sent} <= {rows, 2 * rows, 1}


def check_norms(rank, mesh):
    """With the rows split in whatever way, the gradients of the scales are those of all rows: case L5 among them."""
    plan = plan_on(mesh)
    x, weight, bias = values(0, 3, 5, 6), values(1, 6), values(2, 6)
    for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0), most=50):
        agree(plan, nn.rms_norm, [x, weight], placements)
    for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0), (R, S0), most=50):
        agree(plan, nn.layer_norm, [x, weight, bias], placements)
    for (placements,) in layouts(plan, (R, P, S0, S1, S2), most=10):
        agree(plan, nn.layer_norm, [x], [placements])


def check_rotary(rank, mesh):
    plan = plan_on(mesh)
    x, positions = values(0, 3, 5, 4, 6), torch.arange(15).reshape(3, 5) % 7
    for placements in layouts(plan, (R, P, S0, S1, S2, Shard(3)), (R, S0, S1), most=40):
        agree(plan, lambda x, at: nn.rotary(x, nn.rotary_table(at, 6)), [x, positions], placements)
    for (placements,) in layouts(plan, (R, S0, S1, S2), most=10):
        agree(plan, lambda x: nn.rotary(x, nn.rotary_table(torch.arange(5), 6)), [x], [placements])


def check_attention(rank, mesh):
    plan = plan_on(mesh)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2], [0] * 6, [0, 0, 1, 2, 2, 2]])
    for kv_heads in (8, 4, 2):  # of 2, four ranks have no share: every rank does all
        q, k, v = values(0, 4, 6, 8, 4), values(1, 4, 6, kv_heads, 4), values(2, 4, 6, kv_heads, 4)
        for placements in layouts(plan, (R, P, S0, S1, S2), (R, S0, S2), (R, S0, S2), most=20):
            agree(plan, lambda q, k, v: nn.attention(q, k, v, causal=True), [q, k, v], placements)
        for same, rows in layouts(plan, (R, S0, S2), (R, S0), most=12):
            agree(
                plan,
                lambda q, k, v, d: nn.attention(q, k, v, causal=True, documents=d),
                [q, k, v, documents],
                [same, same, same, rows],
            )


def check_dropout(rank, mesh):
    plan = plan_on(mesh)
    x, key = values(0, 3, 5, 6), random.key(7)
    expected = nn.dropout(key, x, 0.3)
    assert 0 < (expected == 0).sum() < x.numel()
    for (placements,) in layouts(plan, (R, S0, S1, S2), most=20):
        agree(plan, lambda x: nn.dropout(key, x, 0.3), [x], [placements], exact=True)
    # What is a sum over ranks is dropped as the sum, not share by share.
    agree(plan, lambda x: nn.dropout(key, x, 0.3), [x], [[P] * ft.device_mesh(plan.mesh).ndim])


def check_constrain(rank, mesh):
    plan = plan_on(mesh)
    x = values(0, 4, 4, 8)
    for names in (("batch", "seq", "embed"), ("batch", "seq", "mlp"), ("batch", "seq", None), (None, "batch", None)):
        for (placements,) in layouts(plan, (R, P, S0, S1, S2), most=15):
            agree(plan, lambda x, names=names: ft.constrain(x, names), [x], [placements])
            with ft.use_plan(plan):
                y = ft.constrain(laid_out(x, plan, placements), names)
            expected = ft.sharding.Layout(plan, ft.device_mesh(plan.mesh)).placements(names)
            assert y.placements == expected


def check_global_norm(rank, mesh):
    """Case L6 among them: what is replicated counts once, an empty shard nothing."""
    plan = plan_on(mesh)
    ones = [torch.ones(8), torch.ones(2, 4)]
    for placements in layouts(plan, (R, S0), (R, S0, S1), most=40):
        leaves = [laid_out(x, plan, p) for x, p in zip(ones, placements)]
        assert optim.global_norm(leaves).item() == pytest.approx(4.0), placements
    mixed = [values(0, 3, dtype=torch.float32), values(1, 5, 3, dtype=torch.float32), torch.tensor(2.0)]
    expected = optim.global_norm(mixed)
    axes = ft.device_mesh(plan.mesh).ndim
    for placements in layouts(plan, (R, P, S0), (R, P, S0, S1), most=40):
        leaves = [laid_out(x, plan, p) for x, p in zip(mixed, (*placements, [R] * axes))]
        torch.testing.assert_close(ft.gather(optim.global_norm(leaves)), expected)


def check_reduction_dtype(rank, reduce):
    """Four ranks' gradients 256, 1, 1, 1 of a float32 parameter used in bfloat16, which has no 257 and no 259."""
    plan = plan_on("fsdp4", Precision(compute="bfloat16", reduce=reduce))
    x = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).unsqueeze(1).expand(4, 4).contiguous()
    ids = torch.zeros(4, dtype=torch.int64)

    def looked_up(x, table):
        return nn.embedding(table, laid_out(ids, plan, [S0]), dtype=torch.bfloat16) * x

    def scaled(x, weight):  # of rows of ones, whose norm is 1
        return nn.rms_norm(torch.ones_like(x), weight, 0.0) * x

    for fun, shape in ((nn.linear, (4, 1)), (looked_up, (4, 4)), (scaled, (4,))):
        leaf = laid_out(torch.ones(shape), plan, [S0]).requires_grad_()
        with ft.use_plan(plan):
            y = fun(laid_out(x, plan, [S0]), leaf)
            (grad,) = torch.autograd.grad(to_local(y, [R]).sum(), leaf)
        assert y.dtype == torch.bfloat16 and grad.dtype == torch.float32 and grad.placements == (S0,)
        whole = grad.full_tensor()
        used = whole[0] if fun is looked_up else whole
        assert (used == 259.0).all() == (reduce != "bfloat16"), (fun, used)
        assert ((used - 259.0).abs() <= 3.0).all(), (fun, used)


CHECKS = [
    check_moves, check_gradient_placements, check_elementwise, check_linear, check_linears, check_row_parallel_bias,
    check_embedding, check_cross_entropy, check_logits_stay, check_norms, check_rotary, check_attention, check_dropout,
    check_constrain, check_global_norm,
]  # fmt: skip


@pytest.mark.parametrize("mesh", ["fsdp2xtp2", "tp4"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_over_a_mesh_as_on_one_device(pool, check, mesh):
    pool.run(check, mesh)


@pytest.mark.parametrize("mesh", ["fsdp2xtp2", "tp4"])
def test_regions_are_those_of_dtensor(pool, mesh):
    pool.run(check_regions, mesh)


@pytest.mark.parametrize("reduce", [None, "float32", "bfloat16"])
def test_gradients_are_added_up_in_the_dtype_of_the_policy(pool, reduce):
    pool.run(check_reduction_dtype, reduce)
