"""A model in stages trains as on one device does: by every schedule, in one process and on ranks."""

import pytest
import torch
from pipeline_cases import Case, check
from rank_pool import RankPool

import functitan as ft
from functitan.compiler.pipeline.schedules import SCHEDULES, make_schedule
from functitan.sharding.layout import one_process
from sharding_specs import MeshSpec, Param, Rules


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_stages_in_one_process(schedule, captured):
    """L2 and F2: the gradients of every schedule, tied embeddings over the first and the last stage."""
    with one_process():
        check(0, Case({"pp": 2}, schedule, tied=True, captured=captured))


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "DualPipeV"])
def test_eight_microbatches_of_nine_layers_over_four(schedule):
    with one_process():
        check(0, Case({"pp": 4}, schedule, microbatches=8, layers=9, captured=False))


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(make_schedule("1F1B", 2, 4).to_csv())
    with one_process():
        check(0, Case({"pp": 2}, str(path), captured=False))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    pool = RankPool(2, tmp_path_factory.mktemp("ranks2"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    pool = RankPool(4, tmp_path_factory.mktemp("ranks4"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "case",
    [Case({"pp": 2}, "1F1B", captured=False), Case({"pp": 2}, "Interleaved1F1B", layers=5, tied=True),
     Case({"pp": 2}, "ZBVZeroBubble", layers=6)],
    ids=str,
)  # fmt: skip
def test_stages_on_two_ranks(two, case):
    two.run(check, case, timeout=120)


@pytest.mark.parametrize(
    "case",
    [Case({"pp": 2, "fsdp": 2}, "1F1B", remat="full"), Case({"pp": 2, "tp": 2}, "Interleaved1F1B", tied=True)],
    ids=str,
)
def test_stages_that_are_meshes(four, case):
    four.run(check, case, timeout=150)


class TestRefused:
    def test_a_model_that_does_not_fold_over_its_layers(self):
        params = {"w": Param((2, 4, 4), ("layers", "embed", None), ft.init.ones())}
        rules = Rules(layers="pp", embed=None)
        with one_process():
            plan = ft.compile_specs(params, rules, MeshSpec(pp=2))
            weights = ft.init_params(plan, ft.random.key(0))

            def loss(params, x, key):
                return (x @ params["w"].sum(0)).sum(), {}

            with ft.use_plan(plan), pytest.raises(ValueError, match="calls functitan.fold 0 times"):
                ft.sum_and_grad(loss, 4)(weights, torch.ones(4, 4))

    def test_parts_that_are_no_multiple_of_the_microbatches(self):
        params = {"w": Param((2, 4, 4), ("layers", "embed", None), ft.init.ones())}
        with one_process():
            plan = ft.compile_specs(params, Rules(layers="pp", embed=None), MeshSpec(pp=2))
            weights = ft.init_params(plan, ft.random.key(0))
            with ft.use_plan(plan), pytest.raises(ValueError, match="give parts=4, or a multiple of it"):
                ft.sum_and_grad(lambda params, x, key: (x.sum(), {}), 3)(weights, torch.ones(6, 4))

    def test_other_axes_in_one_process(self):
        params = {"w": Param((2, 4, 4), ("layers", "embed", None), ft.init.ones())}
        with one_process():
            plan = ft.compile_specs(params, Rules(layers="pp", embed="fsdp"), MeshSpec(pp=2, fsdp=2))
            with pytest.raises(ValueError, match="start 4 ranks"):
                ft.init_params(plan, ft.random.key(0))
