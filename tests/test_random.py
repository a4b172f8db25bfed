"""functitan.random: equal to golden values of jax.random and to jax itself; moments; errors."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_helpers import DRAWS, assert_same

from functitan import random
from functitan.random import special, threefry

GOLDEN = json.loads((Path(__file__).parent / "golden" / "random.json").read_text())
ROUNDED = {"normal", "truncated_normal", "exponential", "gumbel"}


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy() if x.is_floating_point() else x.numpy()


# -- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_hash_gives_the_known_answers_of_random123(key, counter, expected):
    words = torch.tensor([*key, *counter]).to(torch.uint32).view(torch.int32)
    out = threefry.threefry2x32(*words)
    assert tuple(word.view(torch.uint32).item() for word in out) == expected


@pytest.mark.parametrize("seed", GOLDEN)
@pytest.mark.parametrize("name", DRAWS)
def test_golden_values_of_jax(seed, name):
    actual, expected = numpy(DRAWS[name](random.key(int(seed)))), np.array(GOLDEN[seed][name])
    assert actual.shape == expected.shape
    if name in ROUNDED:
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(actual, expected)


def test_hundreds_of_keys_and_shapes_equal_jax():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    shapes = [(), (0,), (3, 0, 2)] + [tuple(rng.integers(1, 9, size=dims)) for dims in (1, 2, 3, 4)]
    for shape in shapes:  # jax compiles for every shape, which is what takes time here
        seeds = rng.integers(-(2**62), 2**62, size=50).tolist()
        keys = jax.numpy.stack([jax.random.key(seed) for seed in seeds])
        draws = jax.jit(
            jax.vmap(lambda k: (jax.random.bits(k, shape), jax.random.uniform(k, shape), jax.random.normal(k, shape)))
        )
        expected = map(np.asarray, (jax.random.key_data(keys), *draws(keys)))
        for seed, key_data, bits, uniform, normal in zip(seeds, *expected):
            key = random.key(seed)
            np.testing.assert_array_equal(key.numpy(), key_data)
            np.testing.assert_array_equal(random.bits(key, shape).numpy(), bits)
            np.testing.assert_array_equal(random.uniform(key, shape).numpy(), uniform)
            np.testing.assert_allclose(random.normal(key, shape).numpy(), normal, rtol=1e-6, atol=1e-6)


def test_keys_equal_jax():
    jax = pytest.importorskip("jax")
    seeds = [0, 1, -1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**32 + 5, -(2**40), 2**63 - 1, -(2**63), True, np.int64(-5)]
    for seed in seeds:
        key = jax.random.key(seed)
        assert_same(random.key(seed), torch.tensor(np.array(jax.random.key_data(key))))
        assert_same(random.key(torch.tensor(int(seed))), random.key(seed))
        for data in (0, 7, 2**31, 2**32 - 1):
            expected = np.array(jax.random.key_data(jax.random.fold_in(key, np.uint32(data))))
            assert_same(random.fold_in(random.key(seed), data), torch.tensor(expected))
        for num in (0, 1, 5, (2, 3), ()):
            expected = np.array(jax.random.key_data(jax.random.split(key, num)))
            assert_same(random.split(random.key(seed), num), torch.tensor(expected))
    # A tensor wraps, as an array does in JAX.
    wrapped = jax.random.key_data(jax.random.fold_in(jax.random.key(3), np.int32(-7)))
    assert_same(random.fold_in(random.key(3), torch.tensor(-7)), torch.tensor(np.array(wrapped)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_of_every_dtype_equal_jax(dtype):
    jax = pytest.importorskip("jax")
    key, jax_key, n = random.key(11), jax.random.key(11), 50_000
    torch_dtype = getattr(torch, dtype)

    def compare(actual: torch.Tensor, expected: object, ulps: float) -> None:
        actual, expected = numpy(actual), np.asarray(expected).astype("float64")
        eps = torch.finfo(torch_dtype).eps
        np.testing.assert_allclose(actual, expected, rtol=ulps * eps, atol=ulps * eps)

    def erf_of(values: object) -> np.ndarray:
        return torch.erf(torch.tensor(np.asarray(values).astype("float64")) / math.sqrt(2)).numpy()

    for low, high in [(0.0, 1.0), (-1.0, 1.0), (2.0, 2.0), (-0.1, 0.1), (-0.37, 5.91), (1e-3, 1e3)]:
        # JAX leaves the roundings of 16-bit arithmetic on odd ranges to the processor, so they are not to the bit.
        exact = dtype == "float32" or (low, high) in [(0.0, 1.0), (-1.0, 1.0), (2.0, 2.0)]
        actual = random.uniform(key, (n,), torch_dtype, low, high)
        compare(actual, jax.random.uniform(jax_key, (n,), dtype, low, high), 0 if exact else 1)
    compare(random.normal(key, (n,), torch_dtype), jax.random.normal(jax_key, (n,), dtype), 4)
    for low, high in [(-2.0, 2.0), (-1.0, 3.5), (2.0, 7.0), (-10.0, 10.0), (3.0, 4.0), (-math.inf, 0.5)]:
        actual = random.truncated_normal(key, low, high, (n,), torch_dtype)
        assert low < actual.min() and actual.max() < high
        expected = jax.random.truncated_normal(jax_key, low, high, (n,), dtype)
        if dtype == "float16":
            # The uniforms in (erf(low), erf(high)) are of an odd range: where they differ by their one rounding, far
            # out in the tail the values differ by many. So what is compared is the uniforms.
            compare(torch.erf(actual.double() / math.sqrt(2)), erf_of(expected), 1)
        else:
            compare(actual, expected, 8)
    compare(random.gumbel(key, (n,), torch_dtype), jax.random.gumbel(jax_key, (n,), dtype), 8)
    compare(random.exponential(key, (n,), torch_dtype), jax.random.exponential(jax_key, (n,), dtype), 8)


def test_64_bit_types_equal_jax_with_x64():
    jax = pytest.importorskip("jax")
    key = random.key(5)
    with jax.enable_x64(True):
        jax_key = jax.random.key(5)
        np.testing.assert_array_equal(
            random.bits(key, (9,), torch.uint64).numpy(), jax.random.bits(jax_key, (9,), "uint64")
        )
        f64 = torch.float64
        np.testing.assert_array_equal(
            random.uniform(key, (999,), f64).numpy(), jax.random.uniform(jax_key, (999,), "float64")
        )
        np.testing.assert_allclose(
            random.uniform(key, (999,), f64, -0.1, 0.3).numpy(),
            jax.random.uniform(jax_key, (999,), "float64", -0.1, 0.3),
            rtol=0,
            atol=1e-16,
        )
        np.testing.assert_allclose(
            random.normal(key, (999,), f64).numpy(), jax.random.normal(jax_key, (999,), "float64"), rtol=1e-12
        )
        np.testing.assert_allclose(
            random.truncated_normal(key, -2.0, 3.0, (999,), f64).numpy(),
            jax.random.truncated_normal(jax_key, -2.0, 3.0, (999,), "float64"),
            rtol=1e-12,
        )


@pytest.mark.parametrize(
    "dtype, low, high",
    [
        ("int32", 0, 10),
        ("int32", -5, 2**31 - 1),
        ("int32", -(2**31), 2**31 - 1),
        ("int8", -128, 128),
        ("uint8", 0, 256),
        ("uint8", 3, 900),
        ("int16", -7, 20),
        ("uint16", 0, 2**16),
        ("uint32", 0, 2**31 - 1),
    ],
)
def test_randint_equals_jax(dtype, low, high):
    jax = pytest.importorskip("jax")
    for seed in range(3):
        expected = np.asarray(jax.random.randint(jax.random.key(seed), (500,), low, high, dtype))
        for bounds in ((low, high), (torch.tensor(low), torch.full((500,), high))):
            actual = random.randint(random.key(seed), (500,), *bounds, getattr(torch, dtype)).numpy()
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)


def test_discrete_draws_equal_jax():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 30, 3)).astype("float32")
    x = rng.normal(size=(5, 4, 3)).astype("float32")
    p = rng.uniform(size=(6, 1)).astype("float32")

    def draws(random, key, logits, x, p) -> list:
        """All draws by ``random``, which is jax's or ours."""
        out = [random.bernoulli(key, p, (6, 50)), random.bernoulli(key, p)]
        for axis in (0, 1, -1):
            batch = tuple(np.delete(logits.shape, axis))
            out += [random.categorical(key, logits, axis), random.categorical(key, logits, axis, (5, *batch))]
            out += [random.permutation(key, x, axis, independent) for independent in (False, True)]
        return out + [random.permutation(key, n) for n in (0, 1, 2, 3000)]  # 3000 takes two rounds of sorting

    jax_draws = jax.jit(lambda key: draws(jax.random, key, logits, x, p))
    for seed in range(20):
        expected = jax_draws(jax.random.key(seed))
        actual = draws(random, random.key(seed), *map(torch.from_numpy, (logits, x, p)))
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)


def test_gradients_of_the_bounds_equal_jax():
    jax = pytest.importorskip("jax")
    bounds = [torch.tensor(value, requires_grad=True) for value in (-1.0, 2.0)]
    actual = torch.autograd.grad(random.truncated_normal(random.key(0), *bounds, (1000,)).sum(), bounds)
    expected = jax.grad(lambda a, b: jax.random.truncated_normal(jax.random.key(0), a, b, (1000,)).sum(), (0, 1))
    np.testing.assert_allclose([g.item() for g in actual], expected(-1.0, 2.0), rtol=1e-5)


def test_erf_inv_inverts_erf_and_is_infinite_at_the_ends():
    x = torch.linspace(-3.0, 3.0, 1001)
    torch.testing.assert_close(special.erf(x), torch.erf(x), rtol=1e-6, atol=1e-6)
    u = torch.linspace(-0.99, 0.99, 1001)
    torch.testing.assert_close(special.erf(special.erf_inv(u)), u, rtol=1e-6, atol=1e-6)
    assert special.erf_inv(torch.tensor([-1.0, 1.0])).tolist() == [-math.inf, math.inf]


@given(st.floats(allow_nan=False, width=64), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_round_to_rounds_as_torch(x, dtype):
    rounded = torch.tensor(x, dtype=torch.float64).to(dtype)
    if rounded.isfinite():
        # torch goes to 16 bits by way of float32, which may round twice; so does the reference.
        single = special.round_to(x, torch.float32)
        assert special.round_to(single, dtype) == rounded.item()


# -- Statistics ------------------------------------------------------------------------------------------------------


def test_moments():
    n = 200_000
    k = random.split(random.key(2024), 5)
    normal = random.normal(k[0], (n,)).double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        error = math.sqrt(math.prod(range(1, 2 * power, 2)) / n)
        assert abs((normal**power).mean().item() - moment) < 5 * error
    assert abs(random.bernoulli(k[1], 0.3, (n,)).double().mean().item() - 0.3) < 5 * math.sqrt(0.21 / n)
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    counts = random.categorical(k[2], probabilities.log(), shape=(n,)).bincount(minlength=4) / n
    assert (counts - probabilities).abs().max() < 5 * math.sqrt(0.25 / n)
    counts = random.randint(k[3], (n,), 0, 7).bincount(minlength=7) / n
    assert (counts - 1 / 7).abs().max() < 5 * math.sqrt(0.125 / n)
    assert random.permutation(k[4], 1000).sort().values.equal(torch.arange(1000))


# -- Errors ----------------------------------------------------------------------------------------------------------

KEY = random.key(0)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: random.normal(3, (2,)), TypeError, "normal: key must be .* got int; make one with functitan"),
        (lambda: random.normal(torch.zeros(2), (2,)), TypeError, "got dtype torch.float32"),
        (lambda: random.normal(KEY[:1], (2,)), TypeError, r"got shape \(1,\)"),
        (lambda: random.normal(random.split(KEY), (2,)), TypeError, r"a batch of keys of shape \(2, 2\).*vmap"),
        (lambda: random.normal(KEY, 3), TypeError, r"shape must be a sequence of ints such as \(2, 3\), got 3"),
        (lambda: random.normal(KEY, (2.5,)), TypeError, "shape must be a sequence of ints"),
        (lambda: random.normal(KEY, (2, -1)), ValueError, r"no negative dim, got \(2, -1\)"),
        (lambda: random.normal(KEY, (2**40, 2**40)), ValueError, r"more than 2\*\*63 elements"),
        (lambda: random.normal(KEY, (2,), torch.int32), ValueError, "one of torch.float32.*got torch.int32"),
        (lambda: random.normal(KEY, (4,), region=((1, 4),)), ValueError, r"\(1, 4\) of dim 0 is outside of its 4"),
        (lambda: random.normal(KEY, (4,), region=((-1, 2),)), ValueError, "outside"),
        (lambda: random.normal(KEY, (4, 4), region=((0, 2),)), ValueError, r"has 1 dims, but shape \(4, 4\) has 2"),
        (lambda: random.normal(KEY, (4,), region=(slice(2),)), TypeError, r"a pair \(start, size\) for every dim"),
        (lambda: random.bits(KEY, (2,), torch.int32), ValueError, "one of torch.uint8"),
        (lambda: random.uniform(KEY, minval=2, maxval=1), ValueError, "got minval=2, maxval=1"),
        (lambda: random.uniform(KEY, maxval=math.nan), ValueError, "got minval=0.0, maxval=nan"),
        (lambda: random.uniform(KEY, (), torch.float16, 0, 1e6), ValueError, "finite in torch.float16"),
        (lambda: random.truncated_normal(KEY, 2.0, -2.0), ValueError, "lower must be below upper"),
        (lambda: random.bernoulli(KEY, 1.5), ValueError, r"p must be in \[0, 1\], got 1.5"),
        (lambda: random.bernoulli(KEY, torch.tensor(1)), ValueError, "got torch.int64"),
        (lambda: random.randint(KEY, (), 5, 5), ValueError, "minval must be below maxval, got minval=5, maxval=5"),
        (lambda: random.randint(KEY, (), 0.0, 5), TypeError, "minval must be an integer, got 0.0"),
        (lambda: random.randint(KEY, (), 0, 5, torch.int64), ValueError, "one of torch.int32.*got torch.int64"),
        (lambda: random.categorical(KEY, torch.zeros(3, 4), 2), ValueError, "axis 2 is out of range"),
        (lambda: random.categorical(KEY, torch.zeros(3, 4), -1, (4,)), ValueError, r"\(4,\) must end in \(3,\)"),
        (lambda: random.categorical(KEY, torch.zeros(3, 4), -1, ()), ValueError, r"\(\) must end in \(3,\)"),
        (lambda: random.permutation(KEY, 2.5), TypeError, "an int or a tensor of at least one dim, got 2.5"),
        (lambda: random.permutation(KEY, -2), ValueError, "must not be negative, got -2"),
        (lambda: random.permutation(KEY, torch.zeros(3), 1), ValueError, "axis 1 is out of range"),
        (lambda: random.split(KEY, -1), ValueError, "num must have no negative dim"),
        (lambda: random.fold_in(KEY, -1), OverflowError, r"in \[0, 2\*\*32\), got -1"),
        (lambda: random.fold_in(KEY, 1.5), TypeError, "data must be an integer, got 1.5"),
        (lambda: random.fold_in(KEY, torch.tensor(1.5)), TypeError, "data must be an integer, got torch.float32"),
        (lambda: random.fold_in(random.split(KEY, 3), torch.arange(4)), ValueError, r"\(4,\) and .* \(3,\) do not"),
        (lambda: random.bernoulli(KEY, torch.zeros(5), (1,)), ValueError, r"\(5,\) does not broadcast .* \(1,\)"),
        (lambda: random.uniform(KEY, (4,), maxval=torch.zeros(2, 4)), ValueError, r"\(2, 4\) does not broadcast"),
        (lambda: random.randint(KEY, (3,), 0, torch.ones(2).int()), ValueError, r"\(2,\) does not broadcast"),
        (lambda: random.categorical(KEY, [0.1, 0.9]), TypeError, "logits must be a tensor, got list"),
        (lambda: random.key(1.5), TypeError, "seed must be an integer, got 1.5"),
        (lambda: random.key(2**63), OverflowError, r"seed must be in \[-2\*\*63, 2\*\*63\)"),
        (lambda: random.key(torch.zeros(2)), TypeError, r"an integer scalar, got torch.float32 of shape \(2,\)"),
    ],
)
def test_errors_say_what_was_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()
