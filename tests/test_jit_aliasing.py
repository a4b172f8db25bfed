"""Memory that is shared, kept or given away: jit agrees with the plain function and harms nothing it was not given."""

import attrs
import numpy as np
import pytest
import torch

import functitan as ft
from functitan import tree
from functitan.compiler.capture import CaptureError
from functitan.compiler.graphs import ops
from functitan.compiler.jit import disable_jit, jit
from functitan.remat import remat
from functitan.transforms import grad

BACKENDS = [{}, {"inductor": True}]


def fresh():
    return {"x": torch.arange(12.0).reshape(3, 4), "y": torch.ones(3, 4)}


@pytest.mark.parametrize("options", BACKENDS, ids=["graph", "inductor"])
@pytest.mark.parametrize(
    "fun",
    [
        lambda s: {"new": s["x"] + 1, "old": s["x"]},
        lambda s: {"old": s["x"].t(), "new": s["x"] + 1, "y": s["y"] * 2},
        lambda s: {"a": s["x"], "b": s["x"], "c": s["x"].view(12)},
        lambda s: {"x": s["y"] + 0 * s["x"], "y": s["x"] * 2},
        lambda s: {"x": s["y"], "y": s["x"]},
    ],
)
def test_a_result_that_is_a_donated_input_keeps_its_value(fun, options):
    expected = fun(fresh())
    got = jit(fun, donate=("s",), **options)(fresh())
    for (path, a), b in zip(tree.leaves_with_path(got), tree.leaves(expected)):
        assert torch.equal(a, b), path
    buffers = [x.untyped_storage().data_ptr() for x in tree.leaves(got)]
    assert len(set(buffers)) == len(buffers)


def test_results_can_be_donated_without_harm_to_anything_else():
    x = torch.arange(4.0)
    twice, transposed, same = jit(lambda x: (x * 2, (x * 2).view(2, 2).t(), x))(x)
    bump = jit(lambda y: y + 100, donate=("y",))
    bump(twice)
    assert transposed.tolist() == [[0, 4], [2, 6]]
    bump(same)
    assert x.tolist() == [0, 1, 2, 3]


def test_donating_a_view_leaves_the_rest_of_its_buffer_alone():
    bump = jit(lambda y: y + 100, donate=("y",))
    bump(torch.zeros(4))  # captured for a whole buffer of the same shape and strides
    big = torch.zeros(3, 4)
    assert bump(big[0]).tolist() == [100] * 4
    assert big.eq(0).all()


def test_donating_a_numpy_array_leaves_it_alone():
    array = np.zeros(4, np.float32)
    assert jit(lambda y: y + 1, donate=("y",))(array).tolist() == [1] * 4
    assert (array == 0).all()


def test_closed_over_tensors_are_copied_at_capture():
    constant = torch.ones(3)
    step = jit(lambda x: (x + constant, x + constant * 2), donate=("x",))
    first = step(torch.zeros(3))
    constant.add_(10)
    again = step(torch.zeros(3))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    step(constant)  # donates what was closed over: the graph has its own
    assert torch.equal(step(torch.zeros(3))[0], torch.ones(3))


def test_gradients_reach_what_a_jitted_function_closes_over():
    weight = torch.tensor([1.0, 2.0, 3.0])
    x = torch.ones(3)

    def loss(w):
        return jit(lambda x: torch.tanh(x * w + 1))(x).sum()

    assert torch.equal(grad(loss)(weight), grad(lambda w: torch.tanh(x * w + 1).sum())(weight))
    parameter = torch.nn.Parameter(weight)
    step = jit(lambda x: torch.tanh(x * parameter).exp() + 1)
    assert step(x).requires_grad
    with torch.no_grad():
        assert torch.equal(step(x), torch.tanh(x * parameter).exp() + 1)


def test_changing_a_closed_over_tensor_is_refused_and_does_not_happen():
    total = torch.zeros(3)

    def fun(x):
        total.add_(1)
        return x + total

    def by_index(x):
        total[0] = 9
        return x

    def by_view(x):
        total.view(3, 1)[1:].mul_(x.sum())
        return x

    for change in (fun, by_index, by_view):
        with pytest.raises(CaptureError, match="changes a tensor from outside the function in place"):
            jit(change)(torch.zeros(3))
        assert total.eq(0).all()
    for target in (lambda x: x, lambda x: total):
        with pytest.raises(CaptureError, match=r"sets \.data"):
            jit(lambda x, target=target: (setattr(target(x), "data", x * 2), x)[1])(torch.ones(2))
    assert total.tolist() == [0, 0, 0]


@pytest.mark.parametrize("write", [1.0, "x"])
def test_a_copy_of_a_closed_over_tensor_may_be_changed(write):
    constant = torch.ones(3)

    def fun(x):
        y = constant.clone()
        y[1:] = x[1:] if write == "x" else write + 4
        z = constant * 2
        z[0] = 7
        return x + y + z

    x = torch.arange(3.0)
    step = jit(fun)
    assert torch.equal(step(x), fun(x)) and torch.equal(step(x), fun(x))
    assert constant.tolist() == [1, 1, 1]




def test_reading_a_closed_over_tensor_is_allowed():
    size = torch.tensor(3)
    assert jit(lambda x: x * int(size) if size.item() > 2 else x)(torch.ones(2)).tolist() == [3, 3]


def test_a_tensor_made_of_traced_values_is_refused_with_the_line():
    with pytest.raises(CaptureError, match="torch.stack"):
        jit(lambda x: torch.tensor([x.sum(), 1.0]))(torch.ones(2))
    with pytest.raises(CaptureError, match="address"):
        jit(lambda x: x * x.data_ptr())(torch.ones(2))


def test_in_place_operators_elsewhere_do_not_undo_remat():
    weights = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))

    def fun(weights, x):
        def loss(weights):
            y = x
            for w in weights.unbind(0):
                y = remat(lambda y, w: torch.tanh(y @ w))(y, w)
            return y.sum()

        g = grad(loss)(weights).clone()
        g.add_(1)
        return g

    step = jit(fun)
    got = step(weights, torch.ones(2, 8))
    assert torch.equal(got, fun(weights, torch.ones(2, 8)))
    assert sum("aten.tanh." in str(node.target) for node in ops(step.captures[0].graph.graph)) == 6


def test_settings_of_torch_belong_to_the_key():
    step = jit(lambda x: x @ x)
    x = torch.eye(4)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(x).dtype == torch.bfloat16
    assert step(x).dtype == torch.float32
    assert "autocast" in step.captures[1].reason


def test_static_floats_are_told_apart_to_the_bit():
    step = jit(lambda x, s: torch.copysign(x, s))
    x = torch.ones(1)
    assert step(x, 0.0) > 0 > step(x, -0.0)
    step(x, float("nan"))
    step(x, float("nan"))
    assert len(step.captures) == 3
    single = jit(lambda x, s: torch.copysign(x, float(s)))
    assert single(x, np.float32(0.0)) > 0 > single(x, np.float32(-0.0))


def test_disable_jit_is_of_one_thread():
    import threading

    step = jit(lambda x: x + 1)
    with disable_jit():
        thread = threading.Thread(target=step, args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert len(step.captures) == 1


def test_donation_that_cannot_be_is_said(caplog):
    step = jit(lambda x: x * 2, donate=("x",))
    x = torch.ones(2, requires_grad=True)
    step(x).sum().backward()
    step(x)
    assert x.grad.tolist() == [2, 2]
    messages = [r.getMessage() for r in caplog.records if r.name == "functitan.jit"]
    assert len(messages) == 1 and "donates nothing" in messages[0]


def test_microbatches_do_not_keep_their_gradients():
    """The default passes need no more memory for eight microbatches than for two."""
    from test_passes import CFG, capture, flat_step, peak_of_graph, run_passes

    peaks = []
    for accumulation in (2, 8):
        flat, inputs, n_state = flat_step(attrs.evolve(CFG, dropout=0.0, n_layers=1), accumulation, batch=8)
        module = capture(flat, inputs)
        run_passes(module.graph, range(n_state), ("cse", "fold", "order"))
        peaks.append(peak_of_graph(module))
    assert peaks[1] <= peaks[0], peaks


@pytest.mark.parametrize("options", BACKENDS, ids=["graph", "inductor"])
@pytest.mark.parametrize("make", [
    lambda: torch.arange(24.0).view(3, 8)[:, :4], lambda: torch.ones(1).expand(3), lambda: torch.ones(4)[::2],
    lambda: torch.arange(6.0).view(2, 3).t(), lambda: torch.arange(24.0).view(2, 3, 4)[1],
])  # fmt: skip
def test_donated_views_of_every_layout(make, options):
    assert torch.equal(jit(lambda s: s * 2 + 1, donate=("s",), **options)(make()), make() * 2 + 1)


def test_memory_shared_through_numpy_is_seen():
    array = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="cannot donate s: y lives in the same memory"):
        jit(lambda s, y: (s + 1, y * 1), donate=("s",))(torch.from_numpy(array), torch.from_numpy(array[2:]))
    assert (array == 0).all()


def test_donating_what_requires_grad_without_gradients():
    weight = torch.ones(3, requires_grad=True)
    state = {"a": torch.ones(3), "b": weight * 2, "c": weight}
    with torch.no_grad():
        new = jit(lambda s: tree.map(lambda x: x + 1, s), donate=("s",))(state)
    assert new["b"].tolist() == [3, 3, 3] and new["c"].tolist() == [2, 2, 2]


def test_state_survives_many_donated_steps():
    step = jit(lambda s: tree.map(lambda x: x * 0.5 + 1, s), donate=("s",))
    state, plain = fresh(), fresh()
    for _ in range(50):
        state = step(state)
        plain = ft.tree.map(lambda x: x * 0.5 + 1, plain)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(plain)))
