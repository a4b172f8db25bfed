"""Optimizers against optax and torch over 20 steps, and what is ours: masks, accumulation, dtypes, errors."""

import contextlib
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import optim, tree

STEPS = 20


class Pair(NamedTuple):
    left: object
    right: object


def random_tree(seed: int, scale: float = 1.0, dtype=np.float32):
    """The same structure for every seed: nested containers, a None, and leaves of 0 to 3 dims."""
    rng = np.random.default_rng(seed)
    make = lambda *shape: np.asarray(scale * rng.standard_normal(shape), dtype)  # noqa: E731
    return {
        "layers": [{"w": make(7, 3), "b": make(3)}, {"w": make(3, 5), "b": None}],
        "embed": (make(2, 3, 4), make()),
        "norms": Pair(make(6), make(1, 6)),
    }


def to_torch(values):
    return tree.map(lambda x: torch.from_numpy(np.array(x)), values)


def assert_close(ours, theirs, rtol=1e-6, least_scale=0.0):
    """Each leaf to ``rtol`` of its largest element, or of ``least_scale`` where that is larger."""
    assert tree.structure(ours) == tree.structure(theirs)
    for (path, x), y in zip(tree.leaves_with_path(ours), tree.leaves(theirs)):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape, path
        error = np.abs(x - y).max() / (max(least_scale, np.abs(y).max()) or 1.0)
        assert error <= rtol, (path, error)


def run_ours(optimizer, seed):
    params = to_torch(random_tree(seed))
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = to_torch(random_tree(1000 * seed + step + 1, scale=0.1 + step % 3))
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        yield params, updates, state


def run_optax(optimizer, seed):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    params = jax.tree.map(jax.numpy.asarray, random_tree(seed))
    state = optimizer.init(params)

    @jax.jit
    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), updates, state

    for step in range(STEPS):
        grads = jax.tree.map(jax.numpy.asarray, random_tree(1000 * seed + step + 1, scale=0.1 + step % 3))
        params, updates, state = update(grads, state, params)
        yield params, updates, state


def matrices(o, params):
    """The default mask, as optax needs it."""
    mapped = tree.map if o is optim else __import__("jax").tree.map
    return mapped(lambda x: x.ndim >= 2, params)


def schedule(o):
    return o.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 18, 1e-3)


# For both modules at once. optax decays every leaf where no mask is given, ours needs mask=True for that.
OPTIMIZERS = {
    "adam": lambda o: o.adam(1e-2),
    "adamw_all_decay": lambda o: o.adamw(1e-2, weight_decay=0.1, **({"mask": True} if o is optim else {})),
    "adamw_default_mask": lambda o: o.adamw(
        1e-2, weight_decay=0.1, mask=None if o is optim else lambda p: matrices(o, p)
    ),
    "adamw_options": lambda o: o.adamw(
        schedule(o), b1=0.8, b2=0.95, eps=1e-5, eps_root=1e-6, weight_decay=0.1, mask=lambda p: matrices(o, p)
    ),
    "adamw_b1_0": lambda o: o.adamw(1e-2, b1=0.0, mask=lambda p: matrices(o, p)),
    "nadamw": lambda o: o.adamw(1e-2, nesterov=True, mask=lambda p: matrices(o, p)),
    "lion": lambda o: o.lion(1e-3, weight_decay=0.1, mask=lambda p: matrices(o, p)),
    "sgd": lambda o: o.sgd(1e-2),
    "momentum": lambda o: o.sgd(schedule(o), momentum=0.9),
    "nesterov": lambda o: o.sgd(1e-2, momentum=0.9, nesterov=True),
    "clipped_adamw": lambda o: o.chain(
        o.clip_by_global_norm(5.0), o.adamw(1e-2, weight_decay=0.1, mask=lambda p: matrices(o, p))
    ),
    "clip": lambda o: o.chain(o.clip_by_global_norm(5.0), o.scale(-0.1)),
    "decay_schedule": lambda o: o.chain(
        o.trace(0.9), o.add_decayed_weights(schedule(o), mask=lambda p: matrices(o, p)), o.scale_by_learning_rate(0.1)
    ),
    "masked": lambda o: o.chain(
        o.masked(o.trace(0.9), lambda p: matrices(o, p)), o.scale_by_learning_rate(0.1, flip_sign=False)
    ),
    "partition": lambda o: o.partition(
        {"a": o.adam(1e-2), "b": o.sgd(1e-1, momentum=0.9)}, {"layers": "a", "embed": "b", "norms": "a"}
    ),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_equal_optax_over_20_steps(name, seed):
    optax = pytest.importorskip("optax")
    ours, theirs = run_ours(OPTIMIZERS[name](optim), seed), run_optax(OPTIMIZERS[name](optax), seed)
    steps = 0
    for (params, _, _), (expected, _, _) in zip(ours, theirs, strict=True):
        # Parameters are of order 1; a 0-dim leaf on its way through 0 has no smaller rounding errors for it.
        assert_close(params, expected, least_scale=1.0)
        steps += 1
    assert steps == STEPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_optax_over_20_steps(name):
    """The updates themselves; in 64-bit mode, where optax's ``1 - b2**count`` does not lose four digits."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else contextlib.nullcontext():
        theirs = list(run_optax(OPTIMIZERS[name](optax), seed=3))
    for (_, updates, _), (_, expected, _) in zip(run_ours(OPTIMIZERS[name](optim), seed=3), theirs, strict=True):
        # A single element may be the small difference of a moment and a gradient: relative to the largest of all.
        assert_close(updates, expected, least_scale=max(np.abs(u).max() for u in tree.leaves(expected)))


def test_adam_state_has_optax_names_and_values():
    optax = pytest.importorskip("optax")
    *_, (_, _, ours) = run_ours(optim.scale_by_adam(), 1)
    *_, (_, _, theirs) = run_optax(optax.scale_by_adam(), 1)
    assert ours._fields == theirs._fields
    assert ours.count.dtype == torch.int32 and ours.count.shape == () and int(ours.count) == int(theirs.count) == STEPS
    assert_close(ours.mu, theirs.mu)
    assert_close(ours.nu, theirs.nu)


def test_adamw_equals_torch():
    for seed in (1, 2):
        reference = tree.map(lambda x: x.requires_grad_(), to_torch(random_tree(seed)))
        leaves = tree.leaves(reference)
        theirs = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        ours = run_ours(optim.adamw(1e-2, 0.9, 0.95, weight_decay=0.1, mask=True), seed)
        for step, (params, _, _) in enumerate(ours):
            grads = to_torch(random_tree(1000 * seed + step + 1, scale=0.1 + step % 3))
            for p, g in zip(leaves, tree.leaves(grads)):
                p.grad = g
            theirs.step()
            assert_close(params, tree.map(torch.detach, reference))


def test_first_update_of_adam_is_the_sign_to_full_precision():
    """At count 1 m̂ / sqrt(v̂) is the sign; 1 - b2**count in float32 would be wrong by 1e-5."""
    optimizer = optim.scale_by_adam(b2=0.999, eps=0.0)
    updates, _ = optimizer.update(torch.tensor([0.3, -7.0]), optimizer.init(torch.zeros(2)))
    torch.testing.assert_close(updates, torch.tensor([1.0, -1.0]), rtol=3e-7, atol=0)


# Accumulation


def test_two_accumulation_steps_weight_by_valid_labels():
    """Case L3: 1 label with loss 2 and 9 labels with loss 10 have the mean 9.2, not 6.0."""
    optimizer = optim.multi_steps(optim.sgd(1.0), every=2)
    w = torch.tensor(0.0)
    state = optimizer.init(w)
    # Each label's loss is c·w, so the gradient of the summed loss is the sum of the c.
    first, state = optimizer.update(torch.tensor(2.0), state, w, weight=torch.tensor(1))
    second, state = optimizer.update(torch.tensor(9 * 10.0), state, w, weight=torch.tensor(9))
    assert first == 0
    assert second.item() == pytest.approx(-9.2)

    acc = optim.accumulate(optim.zero_gradients(w), torch.tensor(2.0), 1)
    assert optim.mean_gradients(optim.accumulate(acc, torch.tensor(90.0), 9)).item() == pytest.approx(9.2)


def test_multi_steps_equals_the_whole_batch():
    inner = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule(optim), weight_decay=0.1))
    split = optim.multi_steps(inner, every=3)
    params = expected = to_torch(random_tree(0))
    state, inner_state = split.init(params), inner.init(params)
    for step in range(4):
        parts = [(to_torch(random_tree(10 * step + i)), weight) for i, weight in enumerate([3, 0, 5])]
        whole = tree.map(lambda *gs: sum(gs) / 8, *(g for g, _ in parts))
        updates, inner_state = inner.update(whole, inner_state, expected)
        expected = optim.apply_updates(expected, updates)
        for i, (grads, weight) in enumerate(parts):
            before = params
            updates, state = split.update(grads, state, params, weight=weight)
            params = optim.apply_updates(params, updates)
            if i < 2:
                assert_close(params, before, rtol=0)
        assert state.mini_step == 0 and state.accumulated.weight == 0
        assert_close(params, expected)
        assert_close(state.inner_state, inner_state)


def test_accumulation_without_any_valid_label_is_zero_not_nan():
    acc = optim.accumulate(optim.zero_gradients(torch.ones(2)), torch.zeros(2), torch.tensor(0))
    assert torch.equal(optim.mean_gradients(acc), torch.zeros(2))


def test_multi_steps_needs_a_weight():
    optimizer = optim.multi_steps(optim.sgd(1.0), 2)
    p = torch.ones(2)
    with pytest.raises(ValueError, match="needs the weight"):
        optim.chain(optimizer).update(p, optim.chain(optimizer).init(p), p)
    with pytest.raises(ValueError, match="legal: >= 0"):
        optimizer.update(p, optimizer.init(p), p, weight=-1)
    with pytest.raises(ValueError, match="shape \\(2,\\)"):
        optimizer.update(p, optimizer.init(p), p, weight=torch.ones(2))
    with pytest.raises(ValueError, match="every=0; legal: an int >= 1"):
        optim.multi_steps(optim.sgd(1.0), 0)
    with pytest.raises(TypeError, match="not float 2.0"):
        optim.multi_steps(optim.sgd(1.0), 2.0)


# Numbers


@pytest.mark.parametrize("name", ["adamw_default_mask", "lion", "nesterov", "clipped_adamw"])
def test_bfloat16_parameters_have_float32_moments(name):
    optimizer = OPTIMIZERS[name](optim)
    params = tree.map(lambda x: x.bfloat16(), to_torch(random_tree(1)))
    grads = tree.map(lambda x: x.bfloat16(), to_torch(random_tree(2)))
    state = optimizer.init(params)
    updates, new_state = optimizer.update(grads, state, params)
    for s in (state, new_state):
        assert {x.dtype for x in tree.leaves(s)} <= {torch.float32, torch.int32}
    assert {x.dtype for x in tree.leaves(updates)} == {torch.float32}
    assert {x.dtype for x in tree.leaves(optim.apply_updates(params, updates))} == {torch.bfloat16}
    # Rounding happens only where values come in and go out.
    wide_params, wide_grads = (tree.map(lambda x: x.float(), t) for t in (params, grads))
    if "clip" not in name:
        expected, _ = optimizer.update(wide_grads, optimizer.init(wide_params), wide_params)
        assert_close(updates, expected, rtol=1e-7)


@pytest.mark.parametrize("make", [optim.scale_by_adam, optim.scale_by_lion])
def test_mu_dtype_keeps_momentum_in_it_and_computes_in_float32(make):
    params, grads = to_torch(random_tree(1)), to_torch(random_tree(2))
    low, full = make(mu_dtype=torch.bfloat16), make()
    low_state = low.init(params)
    updates, low_state = low.update(grads, low_state)
    expected, full_state = full.update(grads, full.init(params))
    assert {x.dtype for x in tree.leaves(low_state.mu)} == {torch.bfloat16}
    assert_close(updates, expected, rtol=0)
    assert_close(
        tree.map(lambda x: x.float(), low_state.mu), tree.map(lambda x: x.bfloat16().float(), full_state.mu), rtol=0
    )


def test_global_norm():
    assert optim.global_norm({"a": torch.ones(3, 4), "b": [torch.ones(4), None]}) == 4.0  # case L6's 16 ones
    assert optim.global_norm({}) == 0.0
    assert optim.global_norm([torch.full((1,), 300.0, dtype=torch.float16)] * 2) == pytest.approx(300 * 2**0.5)
    mixed = optim.global_norm([torch.tensor([4.0], dtype=torch.float64), torch.ones(9)])
    assert mixed == 5.0 and mixed.dtype == torch.float64


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_clipping_does_not_hide_a_broken_step(bad):
    clip = optim.clip_by_global_norm(1.0)
    updates, _ = clip.update({"a": torch.tensor([bad, 1.0])}, clip.init(None))
    assert not updates["a"].isfinite().all()


def test_clipping_does_not_turn_an_overflowing_norm_into_zeros():
    clip = optim.clip_by_global_norm(1.0)
    updates, _ = clip.update({"a": torch.full((4,), 1e30)}, clip.init(None))
    assert not updates["a"].isfinite().any()


def test_count_stays_at_the_largest_int32():
    optimizer = optim.scale_by_adam()
    state = optimizer.init(torch.ones(2))._replace(count=torch.tensor(2**31 - 1, dtype=torch.int32))
    updates, state = optimizer.update(torch.ones(2), state)
    assert state.count == 2**31 - 1 and updates.isfinite().all()


# Purity and capture

PURE = {**OPTIMIZERS, "multi_steps": lambda o: optim.multi_steps(optim.adamw(1e-2), 2)}


@pytest.mark.parametrize("name", PURE)
def test_pure_and_equal_when_captured(name):
    optimizer = PURE[name](optim)
    extra = {"weight": torch.tensor(3)} if name == "multi_steps" else {}
    params, grads = to_torch(random_tree(1)), to_torch(random_tree(2))
    state = optimizer.init(params)
    _, state = optimizer.update(grads, state, params, **extra)
    leaves, treedef = tree.flatten((params, grads, state, extra))
    copies = [x.clone() for x in leaves]

    def step(*flat):
        params, grads, state, extra = tree.unflatten(treedef, flat)
        updates, state = optimizer.update(grads, state, params, **extra)
        return tree.leaves((optim.apply_updates(params, updates), state))

    once, twice = step(*leaves), step(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(leaves, copies)), "inputs changed"
    assert all(torch.equal(x, y) for x, y in zip(once, twice))
    graph = make_fx(step, tracing_mode="fake")(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(graph(*leaves), once, strict=True))


def test_state_keeps_structure_shapes_and_dtypes():
    for name, make in PURE.items():
        optimizer = make(optim)
        params = to_torch(random_tree(1))
        state = optimizer.init(params)
        extra = {"weight": 1} if name == "multi_steps" else {}
        _, new = optimizer.update(to_torch(random_tree(2)), state, params, **extra)
        assert tree.structure(new) == tree.structure(state), name
        assert [(x.shape, x.dtype) for x in tree.leaves(new)] == [(x.shape, x.dtype) for x in tree.leaves(state)], name


def test_few_passes_over_memory():
    """Operators on whole leaves for one AdamW step, clipping and the addition included: each is a pass over memory."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule(optim)))
    w = torch.ones(2, 3)
    leaves, treedef = tree.flatten((w, w, optimizer.init(w)))

    def step(*flat):
        params, grads, state = tree.unflatten(treedef, flat)
        updates, state = optimizer.update(grads, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state))

    nodes = make_fx(step, tracing_mode="fake")(*leaves).graph.nodes
    assert sum(n.op == "call_function" and n.meta["val"].shape == w.shape for n in nodes) <= 11


def test_vmap_over_ensembles():
    optimizer = optim.adamw(1e-2)
    params, grads = torch.randn(4, 3, 2), torch.randn(4, 3, 2)

    def first(p, g):
        return optim.apply_updates(p, optimizer.update(g, optimizer.init(p), p)[0])

    torch.testing.assert_close(torch.func.vmap(first)(params, grads), torch.stack([*map(first, params, grads)]))


# Errors


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.adamw(1e-3, b1=1.0), "b1=1.0; legal: 0 <= value < 1"),
        (lambda: optim.adamw(1e-3, b2=-0.1), "b2=-0.1; legal: 0 <= value < 1"),
        (lambda: optim.adamw(1e-3, eps=-1e-8), "eps=-1e-08; legal: finite, >= 0"),
        (lambda: optim.adamw(-1e-3), "learning_rate=-0.001; legal: finite, >= 0"),
        (lambda: optim.adamw(1e-3, weight_decay=-0.1), "weight_decay=-0.1; legal: finite, >= 0"),
        (lambda: optim.adam(torch.ones(2)), "learning_rate must be a 0-dim tensor; it has shape \\(2,\\)"),
        (lambda: optim.lion(1e-3, b1=2), "b1=2; legal: 0 <= value < 1"),
        (lambda: optim.sgd(1e-3, momentum=1.5), "decay=1.5; legal: 0 <= value < 1"),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm=0.0; legal: > 0"),
    ],
)
def test_illegal_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="learning_rate must be a number .* not str '1e-3'"):
        optim.adamw("1e-3")


def test_updates_that_do_not_fit_are_named_with_their_path():
    params = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    optimizer = optim.adamw(1e-3)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="scale_by_adam: b has shape \\(1, 2\\), in mu \\(2, 2\\)"):
        optimizer.update({"a": torch.ones(3), "b": torch.ones(1, 2)}, state, params)
    with pytest.raises(ValueError, match="mu has another structure .*only there: b"):
        optimizer.update({"a": torch.ones(3)}, state, params)
    with pytest.raises(ValueError, match="apply_updates: .*missing there: b; only there: c"):
        optim.apply_updates(params, {"a": torch.ones(3), "c": torch.ones(1)})
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match="a state of 2 parts for 3 transformations"):
        optimizer.update(params, state[:2], params)
