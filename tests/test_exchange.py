"""The pass that exchanges and adds on Gloo instead of reducing and scattering: the same numbers, by other messages."""

import pytest
import torch
from rank_pool import RankPool

import functitan as ft
from functitan import cost, nn
from functitan.compiler.collectives import REDUCE_SCATTER, collectives
from functitan.compiler.passes import DEFAULT
from sharding_specs import MeshSpec, Param, Rules

WITHOUT = tuple(name for name in DEFAULT if name != "exchange")


def gradient(passes):
    """The captured gradient of a product over fsdp, and its arguments."""
    params = {"w": Param((6, 8), ("embed", None), ft.init.normal())}
    plan = ft.compile_specs(params, Rules(embed="fsdp").allow_uneven("embed"), MeshSpec(fsdp=4))
    w = ft.init_params(plan, ft.random.key(0))
    x = ft.shard_batch(plan, {"x": ft.random.normal(ft.random.key(torch.distributed.get_rank()), (3, 6))})["x"]
    step = ft.jit(ft.grad(lambda w, x: (nn.linear(x, w["w"]) ** 2).sum()), plan, passes=passes)
    return step, w, x


def kinds(captured):
    return [node.target for node in collectives(captured.graph.graph)]


def compare(rank):
    results = []
    for passes in (DEFAULT, WITHOUT):
        step, w, x = gradient(passes)
        results.append(ft.gather(step(w, x))["w"])
        reduced = REDUCE_SCATTER in kinds(step.captures[0])
        assert reduced == (passes is WITHOUT)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert results[0].abs().max() > 0.01


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    pool = RankPool(4, tmp_path_factory.mktemp("ranks4"))
    yield pool
    pool.close()


def test_gradients_are_the_same_and_nothing_is_reduced_twice(four):
    """With an uneven last shard: 6 rows over 4 ranks."""
    four.run(compare)


def test_other_backends_are_left_alone():
    with cost.fake_group(4):
        step, w, x = gradient(DEFAULT)
        assert REDUCE_SCATTER in kinds(step.lower(w, x))
