"""jit: one graph a signature, the plain function's numbers, donation that saves memory, refusals with a line."""

import logging
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functitan import tree
from functitan.compiler.capture import CaptureError
from functitan.compiler.donation import DonatedError
from functitan.compiler.jit import disable_jit, jit
from functitan.transforms import grad, value_and_grad, vmap


def initial_state():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(4, 64, 64, generator=generator) / 8, "b": torch.zeros(64)}
    return {"params": params, "mu": tree.map(torch.zeros_like, params), "step": torch.tensor(0)}


def loss_fn(params, x):
    for w in params["w"].unbind(0):
        x = torch.tanh(x @ w + params["b"])
    return (x**2).mean()


def train_step(state, x, lr=0.1):
    loss, grads = value_and_grad(loss_fn)(state["params"], x)
    mu = tree.map(lambda m, g: m * 0.9 + g, state["mu"], grads)
    params = tree.map(lambda p, m: p - lr * m, state["params"], mu)
    return {"params": params, "mu": mu, "step": state["step"] + 1}, {"loss": loss, "lr": lr}


X = torch.linspace(-1, 1, 8 * 64).reshape(8, 64)


def run(step, n=3):
    state = initial_state()
    for _ in range(n):
        state, metrics = step(state, X)
    return state, metrics


def assert_equal(a, b):
    assert tree.structure(a) == tree.structure(b)
    for (path, x), y in zip(tree.leaves_with_path(a), tree.leaves(b)):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, path


@pytest.mark.parametrize(
    "options", [{}, {"donate": ("state",)}, {"passes": ()}, {"donate": ("state",), "passes": ("cse",)}]
)
def test_numbers_are_those_of_the_plain_function(options):
    step = jit(train_step, **options)
    assert_equal(run(step), run(train_step))
    assert len(step.captures) == 1


def test_pure_without_donation():
    step, state = jit(train_step), initial_state()
    first, second = step(state, X), step(state, X)
    assert_equal(first, second)
    assert_equal(state, initial_state())


def test_one_capture_for_one_signature_and_a_reason_for_each_other(caplog):
    step = jit(train_step)
    state = initial_state()
    step(state, X)
    step(state, X + 1)
    assert len(step.captures) == 1
    with caplog.at_level(logging.WARNING, logger="functitan.jit"):
        step(state, X[:4])
        step(state, X[:4], lr=0.2)
        step(state | {"more": None}, X[:4], lr=0.2)
        step(state | {"more": None}, X[:4].T.contiguous().T, lr=0.2)
        step(state | {"more": torch.ones(1)}, X[:4].T.contiguous().T, lr=0.2)
    reasons = [c.reason for c in step.captures]
    assert reasons[0] == "first call"
    assert "x: float32[8, 64]" in reasons[1] and "float32[4, 64]" in reasons[1]
    assert reasons[2] == "lr: 0.1 -> 0.2"
    assert "structure" in reasons[3]
    assert reasons[5] == "the arguments now have state/more"
    assert "stride" in reasons[4]
    messages = [r.getMessage() for r in caplog.records if r.name == "functitan.jit"]
    assert [m.split(": ", 1)[1] for m in messages] == reasons[1:]


def test_integer_and_boolean_statics_do_not_collide():
    step = jit(lambda x, flag: x * flag)
    one, true = step(torch.tensor([2]), 1), step(torch.tensor([2]), True)
    assert len(step.captures) == 2 and torch.equal(one, true)


def test_static_outputs_numpy_inputs_and_keywords():
    step = jit(lambda a, *, b, **more: {"y": a + b + more["c"], "name": "fixed", "n": 3})
    out = step(np.ones(2, np.float32), b=torch.ones(2), c=1)
    assert out["name"] == "fixed" and out["n"] == 3 and out["y"].tolist() == [3, 3]


def test_donated_memory_is_reused_and_the_old_state_says_so():
    step = jit(train_step, donate=("state",))
    state = initial_state()
    before = {x.untyped_storage().data_ptr() for x in tree.leaves(state) if x.numel() > 1}
    new, _ = step(state, X)
    after = {x.untyped_storage().data_ptr() for x in tree.leaves(new) if x.numel() > 1}
    assert after == before
    with pytest.raises(DonatedError, match="donated to a jitted function"):
        state["params"]["w"] + 1
    with pytest.raises(DonatedError):
        print(state["params"]["w"])


def test_donating_one_buffer_twice_is_refused():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="cannot donate a: b lives in the same memory"):
        jit(lambda a, b: a + b, donate=("a",))(x, x)
    with pytest.raises(ValueError, match="donate names 'stat'; its arguments are state, x, lr"):
        jit(train_step, donate=("stat",))


def test_input_that_shares_memory_without_donation_is_fine():
    x = torch.ones(4)
    assert jit(lambda a, b: (a + b, a))(x, x)[0].eq(2).all()


def test_peak_memory_shows_donation():
    """Live bytes during a run, counted by an allocation hook: donation saves one copy of the state."""

    class Peak(TorchDispatchMode):
        """Bytes of distinct storages alive after each operator."""

        def __init__(self, state):
            super().__init__()
            self.live, self.peak = {}, 0
            self.count(tree.leaves(state))

        def count(self, tensors):
            for x in tensors:
                storage = x.untyped_storage()
                self.live[storage._cdata] = (weakref.ref(storage), storage.nbytes())
            self.peak = max(self.peak, sum(n for ref, n in self.live.values() if ref() is not None))

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.count(out if isinstance(out, (list, tuple)) else (out,))
            return out

    def momentum(state, g):
        mu = tree.map(lambda m, g: m * 0.9 + g, state["mu"], g)
        return {"mu": mu, "p": tree.map(lambda p, m: p - 0.1 * m, state["p"], mu)}

    n = 100_000
    make = lambda: {"p": [torch.ones(n) for _ in range(6)], "mu": [torch.ones(n) for _ in range(6)]}  # noqa: E731
    g = [torch.ones(n) for _ in range(6)]
    peaks = {}
    for name, step in {
        "plain": momentum,
        "donated": jit(momentum, donate=("state",)),
        "kept": jit(momentum),
    }.items():
        step(make(), g)
        state = make()
        with Peak(state) as peak:
            state = step(state, g)
        peaks[name] = peak.peak / (4 * n)
    assert 12 <= peaks["donated"] <= 14, peaks  # the state itself and the temporaries of one parameter
    assert peaks["kept"] >= 24 and peaks["plain"] >= 24, peaks


def test_constants_are_folded_and_never_handed_out():
    """What depends on no input is computed once; a result that is a constant is the caller's own copy."""
    kept = torch.ones(3)

    def fun(state):
        angles = torch.arange(3.0).cos()
        return {"x": state["x"] + angles + kept.view(3) * 2, "kept": kept, "same": torch.arange(3.0).sin()}

    plain = fun({"x": torch.zeros(3)})
    step = jit(fun, donate=("state",))
    first = step({"x": torch.zeros(3)})
    assert "aten_cos" not in step.captures[0].source
    second = jit(lambda state: tree.map(lambda x: x + 1, state), donate=("state",))
    second(first)
    assert kept.tolist() == [1, 1, 1]
    assert_equal(step({"x": torch.zeros(3)}), plain)


def line_of(function):
    return f"{__file__}:{function.__code__.co_firstlineno}"


def test_side_effects_name_the_users_line():
    cases = {
        "prints": lambda x: print(x),
        "formats": lambda x: f"{x.sum():.3f}",
        r"\.item\(\)": lambda x: x.sum().item(),
        "branches": lambda x: 1 if x.sum() > 0 else 2,
        "Python float": lambda x: float(x.sum()),
        "Python index": lambda x: list(range(3))[x.sum().long()],
        r"\.tolist\(\)": lambda x: x.tolist(),
        "numpy": lambda x: np.asarray(x),
        "global generator": lambda x: torch.nn.functional.dropout(x, 0.5),
        "shape depends on values": lambda x: x[x > 0],
        "in place": lambda x: x.view(-1).add_(1),
    }
    for pattern, fun in cases.items():
        with pytest.raises(CaptureError, match=pattern) as info:
            jit(lambda x, fun=fun: (fun(x), x * 2)[1])(torch.ones(3))
        assert line_of(fun) in str(info.value), (pattern, str(info.value))


def test_a_change_of_an_intermediate_in_place_is_fine():
    def fun(x):
        y = x * 2
        y.add_(1)
        y[0] = 5.0
        return y + x

    x = torch.arange(3.0)
    step = jit(fun)
    assert torch.equal(step(x), fun(x)) and x.tolist() == [0, 1, 2]


def test_jit_inside_jit_grad_and_vmap():
    inner = jit(lambda x: (x**2).sum())
    x = torch.arange(3.0)
    assert torch.equal(jit(lambda x: inner(x) * 2)(x), inner(x) * 2)
    assert torch.equal(grad(inner)(x), 2 * x)
    assert torch.equal(vmap(inner)(x[:, None]), x**2)


def test_disable_jit_runs_the_plain_function():
    calls = []
    step = jit(lambda x: (calls.append(1), x + 1)[1])
    step(X), step(X)
    assert len(calls) == 1
    with disable_jit():
        step(X), step(X)
    assert len(calls) == 3
    step(X)
    assert len(calls) == 3


def test_errors_of_the_function_are_its_own():
    with pytest.raises(RuntimeError, match="must have same reduction dim|shapes cannot be multiplied"):
        jit(lambda x: x @ torch.ones(3, 2))(torch.ones(2, 2))
    with pytest.raises(TypeError, match="neither a tensor nor hashable"):
        jit(lambda x, y: x)(torch.ones(1), {1, 2})
    with pytest.raises(TypeError, match="missing"):
        jit(train_step)(initial_state())


def test_unknown_pass_is_refused():
    with pytest.raises(ValueError, match="no pass is called 'melt'; the passes are cse, fold"):
        jit(train_step, passes=("melt",))


def test_inductor_keeps_the_numbers():
    reference, _ = run(train_step)
    compiled, _ = run(jit(train_step, donate=("state",), inductor=True))
    for a, b in zip(tree.leaves(compiled), tree.leaves(reference)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
