"""Each graph pass alone: it keeps every bit of a whole training step, and its effect can be seen in the graph."""

import functools
import itertools

import attrs
import pytest
import torch

import functitan as ft
from functitan import optim, random, tree
from functitan.compiler.capture import capture
from functitan.compiler.execute import compile_graph
from functitan.compiler.graphs import ops, value
from functitan.compiler.passes import PASSES, run_passes
from functitan.compiler.passes.inductor import _products_with_vectors_as_sums
from functitan.compiler.passes.recompute import recompute_elementwise
from models import llama
from train.step import make_train_step

CFG = llama.LlamaConfig(vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, dropout=0.1)
SUBSETS = [names for n in (0, 1, len(PASSES) - 1, len(PASSES)) for names in itertools.combinations(PASSES, n)]


@pytest.fixture(scope="module")
def step():
    return flat_step(CFG)


def flat_step(cfg, accumulation=1, batch=4):
    """``(flat function, inputs, how many of them are the state)`` of a training step with clipping."""
    specs = llama.declare(cfg)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, mask=optim.decay_mask(specs)))
    model = functools.partial(llama.apply, cfg=cfg)
    train_step = make_train_step(model, optimizer, optim.constant_schedule(1e-2), accumulation)
    state = ft.init_state(ft.compile_specs(specs), random.key(0), optimizer)
    text = random.randint(random.key(1), (batch, 65), 0, 64).to(torch.int64)
    arguments = (state, {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()})
    leaves, treedef = tree.flatten(arguments)

    def flat(*inputs):
        return tree.leaves(train_step(*tree.unflatten(treedef, inputs)))

    return flat, leaves, len(tree.leaves(state))


def run(module, inputs):
    compiled, source = compile_graph(module)
    return compiled([x.clone() for x in inputs]), source


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_every_set_of_passes_keeps_every_bit(step, names):
    flat, inputs, n_state = step
    module = capture(flat, inputs)
    run_passes(module.graph, range(n_state), names)
    results, _ = run(module, inputs)
    for i, (got, expected) in enumerate(zip(results, flat(*inputs))):
        assert torch.equal(got, expected), i


def count(module, name):
    return sum(name in str(node.target) for node in ops(module.graph))


def test_cse_drops_detach_and_duplicates(step):
    flat, inputs, n_state = step
    before, after = capture(flat, inputs), capture(flat, inputs)
    run_passes(after.graph, range(n_state), ("cse",))
    assert count(before, "aten.detach") > 0 and count(after, "aten.detach") == 0
    # The gradient norm is wanted twice, by the metrics and by the clipping: one is enough.
    assert count(after, "linalg_vector_norm") < count(before, "linalg_vector_norm")


def test_cse_tells_numbers_of_different_types_apart():
    def fun(x):
        return [x * 2, x * 2.0, x * True, x * 2]

    module = capture(fun, [torch.tensor([3])])
    run_passes(module.graph, (), ("cse",))
    results, _ = run(module, [torch.tensor([3])])
    assert [r.dtype for r in results] == [torch.int64, torch.float32, torch.int64, torch.int64]
    assert count(module, "mul") == 3


def test_fold_leaves_no_angle_to_compute(step):
    flat, inputs, n_state = step
    module = capture(flat, inputs)
    assert count(module, "aten.cos") == 1
    run_passes(module.graph, range(n_state), ("cse", "fold"))
    assert count(module, "aten.cos") == 0 and count(module, "aten.sin") == 0


def peak_of_graph(module):
    """Bytes alive at the worst moment by the graph's own last uses, inputs aside."""
    nodes = list(module.graph.nodes)
    last = {}
    for i, node in enumerate(nodes):
        for source in (*node.all_input_nodes, node):
            if source.op == "call_function" and value(source) is not None:
                storage = value(source).untyped_storage()
                last[storage._cdata] = (i, storage.nbytes())
    dies = {}
    for i, size in last.values():
        dies.setdefault(i, []).append(size)
    seen, alive, peak = set(), 0, 0
    for i, node in enumerate(nodes):
        if node.op == "call_function" and value(node) is not None:
            storage = value(node).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                alive += storage.nbytes()
        peak = max(peak, alive)
        alive -= sum(dies.get(i, ()))
    return peak


def test_order_keeps_the_temporaries_of_one_parameter_at_a_time():
    n = 50_000

    def adam_like(*inputs):
        params, mu, grads = inputs[:6], inputs[6:12], inputs[12:]
        mu = [0.9 * m + g for m, g in zip(mu, grads)]
        updates = [m / (m.abs() + 1e-8) for m in mu]
        return [torch.where(p > 0, p - 0.1 * u, p).sum() for p, u in zip(params, updates)]

    inputs = [torch.ones(n) for _ in range(18)]
    peaks = {}
    for names in ((), ("order",)):
        module = capture(adam_like, inputs)
        run_passes(module.graph, (), names)
        peaks[names] = peak_of_graph(module) / (4 * n)
        assert torch.equal(run(module, inputs)[0][0], adam_like(*inputs)[0])
    assert peaks[()] >= 7 and peaks[("order",)] <= 4, peaks


def test_reuse_writes_the_new_state_over_the_old(step):
    flat, inputs, n_state = step
    module = capture(flat, inputs)
    run_passes(module.graph, range(n_state), tuple(PASSES))
    taken = [x.clone() for x in inputs]
    homes = {x.data_ptr() for x in taken[:n_state] if x.numel() > 1}
    compiled, source = compile_graph(module)
    results = compiled(taken)
    assert homes == {x.data_ptr() for x in results[:n_state] if x.numel() > 1}
    assert source.count("out=") > 50


def test_reuse_leaves_borrowed_inputs_and_live_values_alone():
    def fun(x, y):
        a = x + 1
        view = a.view(-1)
        b = a * 2  # a lives on in its view
        c = view + 1
        return [b, c, (x * y).exp(), a.t() + a]

    inputs = [torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)]
    module = capture(fun, inputs)
    run_passes(module.graph, (), ("reuse",))
    compiled, _ = compile_graph(module)
    taken = list(inputs)
    for got, expected in zip(compiled(list(taken)), fun(*inputs)):
        assert torch.equal(got, expected)
    assert taken[0].tolist() == [[0, 1], [2, 3]] and taken[1].tolist() == [[1, 1], [1, 1]]


def test_remat_is_never_merged(step):
    _, inputs, _ = step
    weights = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)) / 8

    def loss(weights, x, wrap):
        for w in weights.unbind(0):
            x = wrap(lambda x, w: torch.tanh(x @ w))(x, w)
        return x.sum()

    graphs = {}
    for name, wrap in {"none": lambda f: f, "full": ft.remat}.items():
        graphs[name] = capture(lambda w, x, wrap=wrap: [ft.grad(loss)(w, x, wrap)], [weights, torch.ones(8, 64)])
        run_passes(graphs[name].graph, (), tuple(PASSES))
    assert count(graphs["none"], "aten.tanh.") == 3 and count(graphs["full"], "aten.tanh.") == 6
    a, b = (run(g, [weights, torch.ones(8, 64)])[0][0] for g in graphs.values())
    assert torch.equal(a, b)


def test_recompute_for_inductor_keeps_every_bit_and_drops_what_is_kept():
    cfg = attrs.evolve(CFG, dropout=0.0, n_layers=6)  # so deep that activations are what takes the memory
    flat, inputs, n_state = flat_step(cfg)
    before, after = capture(flat, inputs), capture(flat, inputs)
    for module in (before, after):
        run_passes(module.graph, range(n_state), ("cse", "fold"))
    recompute_elementwise(after.graph)
    after.graph.lint()
    assert count(before, "aten.silu.") == cfg.n_layers  # its use by the product, and by the product computed again
    assert count(after, "aten.silu.") == 2 * cfg.n_layers
    assert peak_of_graph(after) < peak_of_graph(before)
    for got, expected in zip(run(after, inputs)[0], flat(*inputs)):
        assert torch.equal(got, expected)


def test_products_with_vectors_become_sums_for_inductor():
    x = random.normal(random.key(0), (8, 16, 32))
    weight = random.normal(random.key(1), (32,))

    def fun(x, weight):
        value, grads = ft.value_and_grad(lambda x, w: (ft.nn.rms_norm(x, w) ** 2).sum(), argnums=(0, 1))(x, weight)
        return [value, *grads]

    module = capture(fun, [x, weight])
    assert count(module, "aten.mm.") == 2  # a row's share in the gradient of its norm, and the weight's gradient
    _products_with_vectors_as_sums(module.graph)
    module.graph.lint()
    assert count(module, "aten.mm.") == 0
    for got, expected in zip(run(module, [x, weight])[0], fun(x, weight)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
