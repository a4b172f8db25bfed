"""functitan.init: equal to jax.nn.initializers, on slices too; fans that know stacked layers; errors."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from functitan import init, random

GOLDEN = json.loads((Path(__file__).parent / "golden" / "random.json").read_text())
KEY = random.key(0)

ALL = {
    "zeros()": init.zeros(),
    "ones()": init.ones(),
    "constant(2.5)": init.constant(2.5),
    "normal(0.02)": init.normal(0.02),
    "uniform(0.01)": init.uniform(),
    "truncated_normal(0.02)": init.truncated_normal(0.02),
    "truncated_normal(0.02, -3.0, 3.0)": init.truncated_normal(0.02, -3, 3),
    "variance_scaling(1.0, 'fan_in', 'truncated_normal')": init.fan_in(),
    "variance_scaling(0.5, 'fan_in', 'truncated_normal', in_axis=1, out_axis=(2, 3), batch_axis=0)": init.fan_in(
        0.5, in_axis=1, out_axis=[2, 3], batch_axis=0
    ),
    "variance_scaling(2.0, 'fan_geo_avg', 'normal', batch_axis=(0, 1))": init.variance_scaling(
        2, "fan_geo_avg", "normal", batch_axis=(0, 1)
    ),
    "variance_scaling(1.0, 'fan_avg', 'uniform')": init.glorot_uniform(),
}


@pytest.mark.parametrize("text", ALL)
def test_an_initializer_is_data_that_prints_as_the_call_that_makes_it(text):
    assert repr(ALL[text]) == text
    assert eval(text, vars(init)) == ALL[text]
    assert hash(eval(text, vars(init))) == hash(ALL[text])
    assert all(other != ALL[text] for name, other in ALL.items() if name != text)


@pytest.mark.parametrize("text", ALL)
def test_a_region_is_the_slice_of_the_whole(text):
    shape = (3, 4, 6, 5)
    for dtype in (torch.float32, torch.bfloat16):
        whole = ALL[text](KEY, shape, dtype)
        assert (whole.shape, whole.dtype) == (shape, dtype)
        part = ALL[text](KEY, shape, dtype, region=((0, 3), (1, 2), (5, 1), (2, 0)))
        assert torch.equal(part, whole[:, 1:3, 5:6, 2:2])
        part = ALL[text](KEY, shape, dtype, region=((2, 1), (0, 4), (2, 3), (0, 5)))
        assert torch.equal(part, whole[2:3, :, 2:5])


@pytest.mark.parametrize("seed", GOLDEN)
def test_golden_values_of_jax(seed):
    lecun = init.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)(random.key(int(seed)), (2, 3, 4))
    np.testing.assert_allclose(lecun, GOLDEN[seed]["lecun_normal"], rtol=1e-6)
    glorot = init.glorot_uniform()(random.key(int(seed)), (3, 4))
    np.testing.assert_array_equal(glorot, GOLDEN[seed]["glorot_uniform"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_jax(dtype):
    jax = pytest.importorskip("jax")
    theirs = jax.nn.initializers
    shape, stacked = (3, 8, 5), dict(in_axis=1, out_axis=2, batch_axis=0)
    pairs = [
        (init.zeros(), theirs.zeros),
        (init.ones(), theirs.ones),
        (init.constant(0.1), theirs.constant(0.1)),
        (init.normal(0.02), theirs.normal(0.02)),
        (init.uniform(0.3), theirs.uniform(0.3)),
        (init.truncated_normal(0.02), theirs.truncated_normal(0.02)),
        (init.truncated_normal(0.1, -1, 3), theirs.truncated_normal(0.1, lower=-1.0, upper=3.0)),
        (init.lecun_normal(**stacked), theirs.lecun_normal(**stacked)),
        (init.he_normal(**stacked), theirs.he_normal(**stacked)),
        (init.glorot_normal(), theirs.glorot_normal()),
        (init.glorot_uniform(in_axis=(0, 1)), theirs.glorot_uniform(in_axis=(0, 1))),
    ]
    pairs += [
        (init.variance_scaling(0.7, mode, how, **stacked), theirs.variance_scaling(0.7, mode, how, **stacked))
        for mode in (("fan_in", "fan_out", "fan_avg", "fan_geo_avg") if dtype == "float32" else ("fan_in",))
        for how in ("truncated_normal", "normal", "uniform")
    ]
    eps = torch.finfo(getattr(torch, dtype)).eps
    for ours, theirs in pairs:
        actual = ours(random.key(3), shape, getattr(torch, dtype)).double().numpy()
        expected = np.asarray(theirs(jax.random.key(3), shape, dtype)).astype("float64")
        np.testing.assert_allclose(actual, expected, rtol=4 * eps, atol=4 * eps, err_msg=repr(ours))


def test_stacked_layers_are_no_fan_in():
    layers, dim, heads, head_dim = 6, 64, 4, 16
    stacked = init.fan_in(in_axis=1, out_axis=(2, 3), batch_axis=0)(KEY, (layers, dim, heads, head_dim))
    n = stacked.numel()
    assert abs(stacked.std().item() / dim**-0.5 - 1) < 5 / math.sqrt(2 * n)
    # Without batch_axis the layers count as a receptive field and multiply the fan.
    wrong = init.fan_in(in_axis=1, out_axis=(2, 3))(KEY, (layers, dim, heads, head_dim))
    torch.testing.assert_close(wrong * math.sqrt(layers), stacked)
    # The fans are those of the whole array, not of the region.
    part = init.fan_in()(KEY, (64, 32), region=((0, 8), (0, 32)))
    assert torch.equal(part, init.fan_in()(KEY, (64, 32))[:8])


def test_parameter_keys_depend_on_the_path_alone_and_never_change():
    # 0xcbf43926 is the check value of CRC-32 for this text: a new hash would change every model's initial values.
    expected = random.fold_in(KEY, 0xCBF43926)
    assert init.param_key(KEY, "123456789").tolist() == expected.tolist()
    paths = [f"layers/{name}" for name in ("wq", "wk", "wv", "wo", "norm")] + ["embed", "ünembed", ""]
    assert len({tuple(init.param_key(KEY, path).tolist()) for path in paths}) == len(paths)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: init.normal(-0.1), "stddev must be finite and not negative, got -0.1"),
        (lambda: init.constant(math.inf), "value must be finite, got inf"),
        (lambda: init.truncated_normal(1.0, 2.0, 2.0), "lower must be below upper, got lower=2.0, upper=2.0"),
        (lambda: init.fan_in(0.0), "scale must be finite and positive, got 0.0"),
        (lambda: init.variance_scaling(1.0, "fan", "normal"), "mode must be one of fan_in, .* got 'fan'"),
        (lambda: init.variance_scaling(1.0, "fan_in", "gauss"), "distribution must be one of .* got 'gauss'"),
        (lambda: init.fan_in()(KEY, (8,)), r"in_axis=-2.* do not fit shape \(8,\): legal are -1 to 0"),
        (lambda: init.fan_in()(KEY, ()), "a scalar has no fans"),
        (lambda: init.fan_in(batch_axis=-1)(KEY, (8, 4)), r"name a dim of shape \(8, 4\) twice"),
        (lambda: init.fan_in()(KEY, (8, 0)), r"shape \(8, 0\) has no elements"),
        (lambda: init.normal()(KEY, (8,), torch.int32), "dtype must be one of torch.float32"),
        (lambda: init.fan_in()(KEY, (8, 2), torch.int32), "init: dtype must be one of torch.float32"),
        (lambda: init.zeros()(KEY, (8,), region=((4, 5),)), "outside of its 8 elements"),
        (lambda: init.zeros()(KEY, (-8,)), "init: shape must have no negative dim"),
    ],
)
def test_errors_say_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
