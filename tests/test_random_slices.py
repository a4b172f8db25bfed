"""functitan.random on slices of arrays of any size, under capture, under vmap and on other devices."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_helpers import DRAWS, as_signed, assert_same, threefry_numpy
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import random
from functitan.random import threefry

# -- Slices ----------------------------------------------------------------------------------------------------------


@st.composite
def shape_and_region(draw):
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    starts = [draw(st.integers(0, dim)) for dim in shape]
    return tuple(shape), tuple((start, draw(st.integers(0, dim - start))) for start, dim in zip(starts, shape))


@settings(max_examples=100, deadline=None)
@given(shape_and_region(), st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 1 << 15]))
def test_region_equals_the_slice_of_the_whole_in_blocks_of_any_size(shape_region, seed, block):
    shape, region = shape_region
    key = random.key(seed)
    cut = tuple(slice(start, start + size) for start, size in region)
    index = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threefry, "_CPU_BLOCK", block)
        whole, part = random.bits(key, shape), random.bits(key, shape, region=region)
        normal, normal_part = random.normal(key, shape), random.normal(key, shape, region=region)
    np.testing.assert_array_equal(whole.numpy(), threefry_numpy(key.numpy(), index))
    assert_same(part, as_signed(whole)[cut].view(torch.uint32))
    assert_same(normal_part, normal[cut])


@pytest.mark.parametrize(
    "draw",
    [
        lambda key, shape, **kw: random.uniform(key, shape, torch.float16, -0.1, 0.3, **kw),
        lambda key, shape, **kw: random.truncated_normal(key, -2.0, 1.0, shape, torch.bfloat16, **kw),
        lambda key, shape, **kw: random.gumbel(key, shape, **kw),
        lambda key, shape, **kw: random.exponential(key, shape, **kw),
        lambda key, shape, **kw: random.bernoulli(key, 0.25, shape, **kw),
        lambda key, shape, **kw: random.randint(key, shape, 0, 99, **kw),
    ],
)
def test_every_distribution_takes_a_region(draw):
    key, shape = random.key(9), (6, 5, 4)
    assert_same(draw(key, shape, region=((2, 3), (0, 5), (1, 2))), draw(key, shape)[2:5, :, 1:3])


def test_tensor_parameters_belong_to_the_region():
    key, p = random.key(1), torch.linspace(0.0, 1.0, 8)
    whole = random.bernoulli(key, p, (4, 8))
    assert_same(random.bernoulli(key, p[2:6], (4, 8), region=((1, 2), (2, 4))), whole[1:3, 2:6])


@pytest.mark.parametrize(
    "shape, region",
    [
        ((2**20, 2**14), ((2**18 - 2, 4), (2**14 - 3, 3))),  # crosses element 2**32
        ((2**20, 2**14), ((2**20 - 1, 1), (100, 50))),
        ((2**32 + 10,), ((2**32 - 5, 10),)),
        ((2**31, 2**31), ((2**31 - 2, 2), (2**31 - 4, 4))),
        ((3, 2**33), ((0, 3), (2**31 - 2, 4))),
    ],
)
def test_slices_of_arrays_past_32_bit_indices(shape, region):
    key = random.key(2**31 + 7)
    index = np.zeros((), np.uint64)
    for dim, (start, size) in enumerate(region):
        stride = np.uint64(math.prod(shape[dim + 1 :]))
        index = index[..., None] + np.arange(start, start + size, dtype=np.uint64) * stride
    np.testing.assert_array_equal(
        random.bits(key, shape, region=region).numpy(), threefry_numpy(key.numpy(), index)
    )


def test_large_draws_in_blocks_equal_one_capture():
    shape = (3, 70_000)  # several blocks when run, none when captured
    key = random.key(4)
    graph = make_fx(lambda k: random.normal(k, shape), tracing_mode="fake")(key)
    assert len(graph.graph.nodes) < 300
    assert_same(graph(key), random.normal(key, shape))


# -- Transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_capture_gives_a_pure_graph_of_the_key(name):
    graph = make_fx(DRAWS[name], tracing_mode="fake")(random.key(0))
    schemas = [node.target._schema for node in graph.graph.nodes if hasattr(node.target, "_schema")]
    assert not any(schema.is_mutable for schema in schemas)
    assert_same(graph(random.key(1)), DRAWS[name](random.key(1)))


def test_a_key_can_be_made_from_a_traced_seed():
    graph = make_fx(lambda seed: random.normal(random.key(seed), (3,)), tracing_mode="fake")(torch.tensor(0))
    assert_same(graph(torch.tensor(8)), random.normal(random.key(8), (3,)))


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_over_keys_is_a_loop(name):
    keys = random.split(random.key(3), 4)
    loop = [as_signed(DRAWS[name](key)) for key in keys]
    assert torch.equal(as_signed(vmap(DRAWS[name])(keys)), torch.stack(loop))


def test_vmap_over_parameters_and_blocks():
    key, p = random.key(3), torch.tensor([0.1, 0.9])
    mapped = vmap(lambda p: random.bernoulli(key, p, (50_000,)))(p)
    assert_same(mapped, torch.stack([random.bernoulli(key, value, (50_000,)) for value in p]))
    data = torch.arange(3)
    assert_same(vmap(lambda i: random.fold_in(key, i))(data), random.fold_in(key, data))


def test_batches_of_keys():
    keys = random.split(random.key(0), (2, 3))
    assert_same(random.split(keys, 4), vmap(vmap(lambda key: random.split(key, 4)))(keys))
    assert_same(random.fold_in(keys, 9), vmap(vmap(lambda key: random.fold_in(key, 9)))(keys))
    assert random.fold_in(keys, torch.arange(3)).shape == (2, 3, 2)


def test_draws_live_on_the_device_of_the_key():
    key = torch.empty(2, dtype=torch.uint32, device="meta")
    for name, draw in DRAWS.items():
        assert draw(key).device.type == "meta", name
    # Tables of any size can be planned without a loop over their blocks.
    assert random.normal(key, (2**20, 2**14)).shape == (2**20, 2**14)
