"""Learning rates: optax's values, bounds at any count, and errors that name the legal values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import optim

PAIRS = {
    "constant": lambda o: o.constant_schedule(3e-4),
    "linear": lambda o: o.linear_schedule(1e-3, 1e-5, 17, 5),
    "linear_0": lambda o: o.linear_schedule(1e-3, 1e-5, 0),
    "polynomial": lambda o: o.polynomial_schedule(1e-3, 1e-5, 2.5, 20, 3),
    "cosine": lambda o: o.cosine_decay_schedule(3e-4, 25, alpha=0.1),
    "cosine_exponent": lambda o: o.cosine_decay_schedule(3e-4, 25, alpha=0.1, exponent=1.7),
    "warmup_constant": lambda o: o.warmup_constant_schedule(0.0, 3e-4, 7),
    "warmup_cosine": lambda o: o.warmup_cosine_decay_schedule(1e-6, 3e-4, 5, 30, 3e-5),
    "warmup_cosine_no_warmup": lambda o: o.warmup_cosine_decay_schedule(1e-6, 3e-4, 0, 30, 3e-5, exponent=2.0),
    "join": lambda o: o.join_schedules(
        [o.linear_schedule(0.0, 1.0, 5), o.constant_schedule(1.0), o.cosine_decay_schedule(1.0, 10)], [5, 20]
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_optax_for_ints_and_tensors(name):
    optax = pytest.importorskip("optax")
    ours, theirs = PAIRS[name](optim), PAIRS[name](optax)
    for count in range(45):
        expected = float(theirs(count))
        assert float(ours(count)) == pytest.approx(expected, rel=1e-6, abs=1e-10)
        assert float(ours(torch.tensor(count, dtype=torch.int32))) == pytest.approx(expected, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_wsd_equals_its_definition(decay):
    shape = {
        "linear": lambda t: 1 - t,
        "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
        "sqrt": lambda t: 1 - t**0.5,
    }
    schedule = optim.wsd_schedule(1e-3, 40, 10, 15, init_value=1e-5, end_value=1e-4, decay=decay)
    for count in range(60):
        if count < 10:
            expected = 1e-5 + (1e-3 - 1e-5) * count / 10
        else:
            t = min(max(0, count - 25) / 15, 1)
            expected = 1e-4 + (1e-3 - 1e-4) * shape[decay](t)
        assert schedule(count) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_always_between_minimum_and_peak(data):
    """Case N2: counts -1 to 2·total, with and without warm-up and decay."""
    total = data.draw(st.integers(0, 12), "total")
    warmup = data.draw(st.integers(0, total), "warmup")
    decay = data.draw(st.integers(0, total - warmup), "decay")
    values = st.floats(0, 10, allow_subnormal=False, width=32)
    init, peak, end = (data.draw(values, label) for label in ("init", "peak", "end"))
    schedules = {
        "wsd linear": optim.wsd_schedule(peak, total, warmup, decay, init_value=init, end_value=end),
        "wsd cosine": optim.wsd_schedule(peak, total, warmup, decay, init_value=init, end_value=end, decay="cosine"),
        "wsd sqrt": optim.wsd_schedule(peak, total, warmup, decay, init_value=init, end_value=end, decay="sqrt"),
        "linear": optim.linear_schedule(init, end, decay, warmup),
    }
    low, high = min(init, peak, end), max(init, peak, end)
    if end <= peak:
        schedules["warmup cosine"] = optim.warmup_cosine_decay_schedule(init, peak, warmup, total, end)
    for name, schedule in schedules.items():
        for count in range(-1, 2 * total + 1):
            value, traced = schedule(count), float(schedule(torch.tensor(count)))
            assert low <= value <= high, (name, count)
            assert low <= traced <= high, (name, count)  # the bounds are float32 numbers, so they do not round
            assert traced == pytest.approx(value, rel=1e-5, abs=1e-6 * high), (name, count)


def test_no_warmup_begins_at_the_peak_and_no_decay_stays_there():
    for schedule in (
        optim.wsd_schedule(1.0, 10),
        optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5),
        optim.warmup_constant_schedule(0.0, 1.0, 0),
    ):
        assert schedule(5) == schedule(100) == 1.0
    assert optim.wsd_schedule(1.0, 10, 0, 10)(0) == optim.warmup_cosine_decay_schedule(0.0, 1.0, 0, 10)(0) == 1.0
    assert optim.wsd_schedule(1.0, 10, 0, 10)(10) == 0.0


@pytest.mark.parametrize("name", PAIRS)
def test_traceable_without_reading_the_count(name):
    schedule = PAIRS[name](optim)

    def value(count):
        return torch.zeros(()) + schedule(count)

    graph = make_fx(value, tracing_mode="fake")(torch.tensor(0, dtype=torch.int32))
    for count in (0, 6, 50):
        assert graph(torch.tensor(count, dtype=torch.int32)) == value(torch.tensor(count, dtype=torch.int32))


@pytest.mark.parametrize("count", [3, np.int64(3)])
def test_a_python_number_gives_a_float(count):
    assert isinstance(optim.warmup_cosine_decay_schedule(0.0, 1.0, 2, 9)(count), float)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.linear_schedule(1.0, 0.0, -1), "transition_steps=-1; legal: an int >= 0"),
        (lambda: optim.linear_schedule(-1.0, 0.0, 5), "init_value=-1.0; legal: finite, >= 0"),
        (lambda: optim.linear_schedule(1.0, math.nan, 5), "end_value=nan; legal: finite, >= 0"),
        (lambda: optim.polynomial_schedule(1.0, 0.0, 0, 5), "power=0; legal: finite, > 0"),
        (lambda: optim.cosine_decay_schedule(1.0, -5), "decay_steps=-5; legal: an int >= 0"),
        (lambda: optim.cosine_decay_schedule(1.0, 5, exponent=-1.0), "exponent=-1.0; legal: finite, > 0"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 11, 10), "legal warmup_steps: 0 to 10"),
        (lambda: optim.wsd_schedule(1.0, 10, 6, 5), "legal decay_steps: 0 to 4"),
        (lambda: optim.wsd_schedule(1.0, 10, -1), "warmup_steps=-1; legal: an int >= 0"),
        (lambda: optim.wsd_schedule(1.0, 10, decay="exp"), "legal: 'linear', 'cosine', 'sqrt'"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), "one boundary less"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)] * 3, [3, 2]), "must not descend"),
    ],
)
def test_illegal_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_steps_must_be_ints():
    with pytest.raises(TypeError, match="warmup_steps must be an int >= 0, not float 0.1"):
        optim.wsd_schedule(1.0, 10, 0.1)
