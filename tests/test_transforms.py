"""The transforms against JAX's conventions, and against jax itself where it is installed."""

import pytest
import torch

from functitan.remat import remat
from functitan.transforms import constrain, grad, jvp, scan, value_and_grad, vjp, vmap


def quadratic(params, x):
    return ((x @ params["w"] + params["b"]) ** 2).sum()


@pytest.fixture
def params():
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(3, 2, generator=generator), "b": torch.randn(2, generator=generator), "none": None}


X = torch.arange(12.0).reshape(4, 3) / 7


def test_value_and_grad_gives_a_tree_like_the_argument(params):
    value, grads = value_and_grad(quadratic)(params, X)
    residual = X @ params["w"] + params["b"]
    torch.testing.assert_close(value, (residual**2).sum())
    torch.testing.assert_close(grads["w"], 2 * X.T @ residual)
    torch.testing.assert_close(grads["b"], 2 * residual.sum(0))
    assert grads["none"] is None
    assert not value.requires_grad and not grads["w"].requires_grad and not params["w"].requires_grad


def test_argnums_and_aux(params):
    def fun(params, x, scale):
        y = quadratic(params, x) * scale
        return y, {"twice": 2 * y}

    (value, aux), (dp, dx) = value_and_grad(fun, argnums=(0, 1), has_aux=True)(params, X, 3.0)
    torch.testing.assert_close(aux["twice"], 2 * value)
    assert not aux["twice"].requires_grad
    assert dx.shape == X.shape and dp["w"].shape == params["w"].shape
    only, aux = grad(fun, argnums=1, has_aux=True)(params, X, 3.0)
    torch.testing.assert_close(only, dx)


def test_unused_leaf_gets_zeros_and_constant_value_too():
    value, grads = value_and_grad(lambda p: p["used"].sum())({"used": torch.ones(2), "unused": torch.ones(3)})
    assert grads["unused"].eq(0).all() and grads["used"].eq(1).all()
    assert grad(lambda p: torch.tensor(2.0))(torch.ones(2)).eq(0).all()


def test_integer_leaf_is_refused_with_its_path():
    with pytest.raises(TypeError, match="argument 0 at step is int64"):
        grad(lambda s: s["w"].sum())({"w": torch.ones(1), "step": torch.tensor(3)})


def test_complex_is_refused():
    """JAX and torch differ in its conjugate, and no transformer has one."""
    with pytest.raises(TypeError, match="complex64"):
        grad(lambda z: z.abs().sum())(torch.ones(2, dtype=torch.complex64))


def test_inference_mode_and_repeated_argnums_are_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="use torch.no_grad"):
        grad(lambda x: x.sum())(torch.ones(2))
    with pytest.raises(ValueError, match="twice"):
        grad(lambda x, y: (x * y).sum(), argnums=(0, -2))(torch.ones(2), torch.ones(2))


def test_value_must_be_a_scalar():
    with pytest.raises(TypeError, match=r"shape \(3,\)"):
        grad(lambda x: x * 2)(torch.ones(3))
    with pytest.raises(ValueError, match="argument 2"):
        grad(lambda x: x.sum(), argnums=2)(torch.ones(3))


def test_grad_of_grad():
    second = grad(lambda x: grad(lambda y: (y**3).sum())(x).sum())(torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(second, torch.tensor([12.0, 18.0]))
    third = grad(grad(grad(lambda x: x**4)))(torch.tensor(2.0))
    torch.testing.assert_close(third, torch.tensor(48.0))


def test_grad_inside_a_closure_over_the_outer_variable():
    mixed = grad(lambda x: grad(lambda y: x * x * y)(torch.tensor(1.0)))(torch.tensor(3.0))
    torch.testing.assert_close(mixed, torch.tensor(6.0))


def test_per_example_gradients(params):
    per_example = vmap(grad(quadratic), in_axes=(None, 0))(params, X)
    assert per_example["w"].shape == (4, 3, 2)
    for i in range(4):
        torch.testing.assert_close(per_example["w"][i], grad(quadratic)(params, X[i])["w"])


def test_vmap_axes():
    a = torch.arange(6.0).reshape(2, 3)
    out = vmap(lambda t, s: {"sum": t["x"] + s, "none": None}, in_axes=({"x": 1}, None), out_axes=1)({"x": a}, 10.0)
    torch.testing.assert_close(out["sum"], (a + 10))
    assert out["none"] is None
    assert vmap(lambda: torch.ones(2), axis_size=3)().shape == (3, 2)
    with pytest.raises(ValueError, match="axis_size"):
        vmap(lambda x: x, in_axes=None)(a)
    with pytest.raises(ValueError, match="2 entries for 1"):
        vmap(lambda x: x, in_axes=(0, 0))(a)
    with pytest.raises(ValueError, match="out_axes has a None"):
        vmap(lambda x: x, out_axes=None)(a)
    with pytest.raises(TypeError, match="result at n is int"):
        vmap(lambda x: {"n": 3, "x": x})(a)
    with pytest.raises(ValueError, match="no prefix"):
        vmap(lambda t: t["x"], in_axes=({"y": 0},))({"x": a})


def test_jvp_and_vjp_agree(params):
    def fun(x):
        return {"y": torch.sin(x) @ params["w"]}

    tangent = torch.ones_like(X)
    out, out_tangent = jvp(fun, (X,), (tangent,))
    primal, pull = vjp(fun, X)
    torch.testing.assert_close(out["y"], primal["y"])
    cotangent = torch.full_like(out["y"], 0.5)
    (dx,) = pull({"y": cotangent})
    torch.testing.assert_close((out_tangent["y"] * cotangent).sum(), (dx * tangent).sum())
    *_, aux = jvp(lambda x: (x.sum(), x.mean()), (X,), (tangent,), has_aux=True)
    torch.testing.assert_close(aux, X.mean())
    _, _, aux = vjp(lambda x: (x.sum(), x.mean()), X, has_aux=True)
    torch.testing.assert_close(aux, X.mean())


def test_remat_recomputes_and_keeps_the_numbers():
    calls = []

    def layer(p, x):
        calls.append(1)
        return torch.tanh(x @ p["w"])

    p = {"w": torch.eye(3) * 0.5}
    plain = grad(lambda p: layer(p, layer(p, X)).sum())(p)
    assert len(calls) == 2
    again = grad(lambda p: remat(layer)(p, remat(layer)(p, X)).sum())(p)
    assert len(calls) == 6
    torch.testing.assert_close(again["w"], plain["w"], rtol=0, atol=0)
    assert vmap(grad(lambda p, x: remat(layer)(p, x).sum()), in_axes=(None, 0))(p, X)["w"].shape == (4, 3, 3)


def test_scan():
    def step(carry, x):
        return {"n": carry["n"] + x["v"]}, carry["n"] * 2

    xs = {"v": torch.arange(4.0)}
    carry, ys = scan(step, {"n": torch.tensor(1.0)}, xs)
    assert carry["n"] == 7 and ys.tolist() == [2, 2, 4, 8]
    carry, ys = scan(step, {"n": torch.tensor(1.0)}, xs, reverse=True)
    assert carry["n"] == 7 and ys.tolist() == [14, 12, 8, 2]
    carry, ys = scan(lambda c, _: (c * 2, None), torch.tensor(1), None, length=5)
    assert carry == 32 and ys is None
    carry, ys = scan(step, {"n": torch.tensor(1.0)}, {"v": torch.ones(0)})
    assert carry["n"] == 1 and ys.shape == (0,)


def test_scan_refuses_what_jax_refuses():
    with pytest.raises(ValueError, match="leading dims must agree"):
        scan(lambda c, x: (c, x), 0, (torch.ones(2), torch.ones(3)))
    with pytest.raises(ValueError, match="length"):
        scan(lambda c, x: (c, x), 0)
    with pytest.raises(TypeError, match="float32 to .*float64"):
        scan(lambda c, x: (c.double(), None), torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError, match="xs at 0 is int"):
        scan(lambda c, x: (c, x), 0, [1, 2])
    with pytest.raises(TypeError, match="structure"):
        scan(lambda c, x: ((c, c), None), torch.ones(2), torch.ones(3))


def test_constrain_is_the_identity_and_checks_names():
    assert constrain(X, ("batch", None)) is X
    with pytest.raises(ValueError, match=r"3 names .* 2 dims \(4, 3\)"):
        constrain(X, ("batch", "seq", "embed"))


def test_against_jax():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    def fun(lib):
        return lambda w, x: (lib.tanh(x @ w) ** 2).sum()

    w = torch.linspace(-1, 1, 6).reshape(3, 2)
    ours = value_and_grad(fun(torch), argnums=(0, 1))(w, X)
    theirs = jax.value_and_grad(fun(jnp), argnums=(0, 1))(jnp.asarray(w.numpy()), jnp.asarray(X.numpy()))
    torch.testing.assert_close(ours[0], torch.tensor(float(theirs[0])))
    for a, b in zip(ours[1], theirs[1]):
        torch.testing.assert_close(a, torch.tensor(b.tolist()))
    batched = vmap(vmap(lambda a, b: a * b, in_axes=(None, 0)), in_axes=(0, None), out_axes=1)(X[0], X[1])
    expected = jax.vmap(jax.vmap(lambda a, b: a * b, (None, 0)), (0, None), 1)(X[0].numpy(), X[1].numpy())
    torch.testing.assert_close(batched, torch.tensor(expected.tolist()))
