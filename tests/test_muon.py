"""Muon against optax where the two agree, and the dims of a transformer's stacked weights."""

import math

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import optim, tree
from functitan.optim import MuonDimensionNumbers
from sharding_specs import Param


def init(key, shape, dtype):
    raise AssertionError("no parameter is made here")


SPECS = {
    "embedding": Param((11, 8), ("vocab", "embed"), init),
    "head": Param((8, 11), ("embed", "vocab"), init),
    "layers": {
        "norm": Param((3, 8), ("layers", "embed"), init),
        "wq": Param((3, 8, 4, 5), ("layers", "embed", "heads", "head_dim"), init),
        "wk": Param((3, 8, 2, 5), ("layers", "embed", "kv_heads", "head_dim"), init),
        "wo": Param((3, 4, 5, 8), ("layers", "heads", "head_dim", "embed"), init),
        "up": Param((3, 8, 12), ("layers", "embed", "mlp"), init),
        "experts": Param((3, 2, 12, 8), ("layers", "experts", "mlp", "embed"), init),
        "bias": Param((3, 4, 5), ("layers", "heads", "head_dim"), init),
    },
}


def random_params(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return tree.map(lambda s: np.asarray(rng.standard_normal(s.shape), dtype), SPECS)


def to_torch(values):
    return tree.map(lambda x: torch.from_numpy(np.array(x)), values)


def optax_numbers(contrib):
    ours = optim.muon_dimension_numbers(SPECS)
    convert = lambda n: n and contrib.MuonDimensionNumbers(n.reduction_dims, n.output_dims)  # noqa: E731
    return tree.map(convert, ours, is_leaf=lambda n: n is None)


def test_dimension_numbers_follow_from_the_names():
    assert optim.muon_dimension_numbers(SPECS) == {
        "embedding": None,
        "head": None,
        "layers": {
            "norm": None,
            "wq": MuonDimensionNumbers((1,), (2, 3)),
            "wk": MuonDimensionNumbers((1,), (2, 3)),
            "wo": MuonDimensionNumbers((1, 2), (3,)),
            "up": MuonDimensionNumbers(1, 2),
            "experts": MuonDimensionNumbers(2, 3),
            "bias": None,
        },
    }


def test_names_that_make_no_matrix_are_refused_with_the_path():
    specs = {"conv": Param((3, 4, 5), ("width", "embed", "mlp"), init)}
    with pytest.raises(ValueError, match="conv with dims .* is no matrix: .*batch="):
        optim.muon_dimension_numbers(specs)
    assert optim.muon_dimension_numbers(specs, batch=("width",)) == {"conv": MuonDimensionNumbers(1, 2)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "beta": 0.9, "ns_steps": 3},
        {"consistent_rms": 0.2, "weight_decay": 0.1, "adam_learning_rate": 1e-3},
        {"ns_coeffs": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)), "ns_steps": 3},
    ],
)
def test_equals_optax_over_20_steps(options):
    """In float64: the iteration amplifies the rounding of small singular values by up to 3.4445**5."""
    jax, contrib = pytest.importorskip("jax"), pytest.importorskip("optax.contrib")
    if not hasattr(jax, "enable_x64"):
        pytest.skip("needs jax.enable_x64")
    ours = optim.muon(0.05, dimension_numbers=optim.muon_dimension_numbers(SPECS), **options)
    params = to_torch(random_params(0))
    state = ours.init(params)
    with jax.enable_x64(True):
        theirs = contrib.muon(0.05, muon_weight_dimension_numbers=optax_numbers(contrib), **options)
        expected = jax.tree.map(jax.numpy.asarray, random_params(0))
        their_state, their_update = theirs.init(expected), jax.jit(theirs.update)
        for step in range(20):
            updates, state = ours.update(to_torch(random_params(step + 1)), state, params)
            params = optim.apply_updates(params, updates)
            grads = jax.tree.map(jax.numpy.asarray, random_params(step + 1))
            their_updates, their_state = their_update(grads, their_state, expected)
            expected = jax.tree.map(lambda p, u: p + u, expected, their_updates)
            for (path, x), y in zip(tree.leaves_with_path(params), tree.leaves(expected), strict=True):
                y = np.asarray(y)
                assert x.dtype == torch.float64 and y.dtype == np.float64
                assert np.abs(x.numpy() - y).max() <= 1e-6 * np.abs(y).max(), (path, step)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10), (2, 3, 10, 6)])
def test_orthogonalized_as_by_singular_values(shape):
    """A polynomial that is odd in X acts on the singular values alone: U p(S) Vᵀ."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(
        optim.orthogonalize_via_newton_schulz(x), u @ torch.diag_embed(s) @ vh, rtol=1e-6, atol=1e-7
    )
    assert s.min() > 0.3 and s.max() < 1.3


def test_stacked_layers_equal_separate_ones():
    numbers = MuonDimensionNumbers((1,), (2, 3))
    x = torch.randn(3, 8, 4, 5, generator=torch.Generator().manual_seed(1))
    stacked = optim.orthogonalize_via_newton_schulz(x, dimension_numbers=numbers)
    for layer, result in zip(x, stacked):
        separate = optim.orthogonalize_via_newton_schulz(layer.reshape(8, 20)).reshape(8, 4, 5)
        torch.testing.assert_close(result, separate, rtol=1e-4, atol=1e-5)


def test_default_dims_are_the_last_two():
    params = {"w": torch.randn(3, 4, 6), "norm": torch.randn(4)}
    optimizer = optim.muon(0.1)
    state = optimizer.init(params)
    assert {path for path, _ in tree.leaves_with_path(state)} >= {
        "inner_states/muon/inner_state/0/mu/w", "inner_states/adam/inner_state/0/mu/norm",
    }  # fmt: skip
    assert not any("muon" in path and "norm" in path for path, _ in tree.leaves_with_path(state))
    updates, _ = optimizer.update(params, state, params)
    # All gradients point one way in the first step, so the update is the orthogonalized gradient itself.
    expected = -0.1 * math.sqrt(6 / 4) * optim.orthogonalize_via_newton_schulz(params["w"])
    torch.testing.assert_close(updates["w"], expected, rtol=1e-4, atol=1e-5)
    nesterov = 0.9 * 0.1 / (1 - 0.9**2) + 1
    torch.testing.assert_close(updates["norm"], -0.1 * nesterov * params["norm"].sign(), rtol=1e-5, atol=1e-6)


def test_leaves_are_chosen_by_a_prefix_tree():
    params = {"embedding": {"w": torch.ones(4, 4)}, "rest": {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}}
    state = optim.muon(0.1, dimension_numbers={"embedding": None, "rest": MuonDimensionNumbers(0, 1)}).init(params)
    assert list(state.inner_states["muon"].inner_state[0].mu["rest"]) == ["a", "b"]
    assert tree.leaves(state.inner_states["muon"].inner_state[0].mu["embedding"]) == []
    assert len(tree.leaves(state.inner_states["adam"].inner_state[0].mu)) == 1


def test_pure_and_equal_when_captured():
    optimizer = optim.muon(0.1, dimension_numbers=optim.muon_dimension_numbers(SPECS), weight_decay=0.1)
    params, grads = to_torch(random_params(0, np.float32)), to_torch(random_params(1, np.float32))
    leaves, treedef = tree.flatten((params, grads, optimizer.init(params)))
    copies = [x.clone() for x in leaves]

    def step(*flat):
        params, grads, state = tree.unflatten(treedef, flat)
        updates, state = optimizer.update(grads, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state))

    expected = step(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(leaves, copies))
    graph = make_fx(step, tracing_mode="fake")(*leaves)
    assert all(torch.equal(x, y) for x, y in zip(graph(*leaves), expected, strict=True))


def test_momentum_is_float32_for_bfloat16_parameters():
    params = {"w": torch.randn(4, 4).bfloat16()}
    optimizer = optim.muon(0.1)
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    assert state.inner_states["muon"].inner_state[0].mu["w"].dtype == updates["w"].dtype == torch.float32
    assert optim.apply_updates(params, updates)["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.muon(0.1, beta=1.0), "beta=1.0; legal: 0 <= value < 1"),
        (lambda: optim.muon(0.1, ns_steps=0), "ns_steps=0; legal: an int >= 1"),
        (lambda: optim.muon(0.1, ns_coeffs=(1.0, 2.0)), "give one triple, or one for each step"),
        (lambda: optim.muon(0.1, ns_coeffs=((1.0, 2.0, 3.0),)), "give one triple, or one for each step"),
        (lambda: MuonDimensionNumbers(0, 0), "no dim may occur twice"),
        (lambda: optim.muon(0.1, dimension_numbers={"b": None}).init({"a": torch.ones(2, 2)}), "do not fit the tree"),
        (lambda: optim.orthogonalize_via_newton_schulz(torch.ones(3)), "dim -2 of .* shape \\(3,\\)"),
        (
            lambda: optim.orthogonalize_via_newton_schulz(
                torch.ones(3, 3), dimension_numbers=MuonDimensionNumbers(1, -1)
            ),
            "names a dim twice",
        ),
    ],
)
def test_illegal_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
