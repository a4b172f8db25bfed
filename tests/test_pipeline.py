"""A model in stages trains as on one device does: by every schedule, in one process and on ranks."""

import pytest
import torch
from pipeline_cases import Case, check
from rank_pool import RankPool

import functitan as ft
from functitan import optim
from functitan.compiler.pipeline.schedules import SCHEDULES, legal_microbatches, make_schedule
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


def check_norm(rank: int) -> None:
    """L6: gradients of 16 elements, all 1, in stacks over the stages and beside them."""
    params = {"stack": Param((2, 5), ("layers", None), ft.init.ones()), "beside": Param((6,), (None,), ft.init.ones())}
    plan = ft.compile_specs(params, Rules(layers="pp"), MeshSpec(pp=2))
    with ft.use_plan(plan):
        grads = ft.init_params(plan, ft.random.key(0))
        assert optim.global_norm(grads).item() == 4.0


def test_the_norm_of_gradients_counts_each_stage_once(two):
    two.run(check_norm)


def every_schedule() -> list[Case]:
    """Over 2 and 4 ranks, with 4 and 8 microbatches, each where the schedule takes them; captured and not in turn."""
    cases = [
        (ranks, schedule, count)
        for ranks in (2, 4) for schedule in SCHEDULES for count in legal_microbatches(schedule, ranks, None, 8)
        if count in (4, 8)
    ]  # fmt: skip
    return [
        Case({"pp": ranks}, schedule, count, layers=9, tied=i % 3 == 0, captured=i % 4 != 3,
             remat=("none", "full", "selective")[i % 3])
        for i, (ranks, schedule, count) in enumerate(cases)
    ]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_that_inductor_compiles(schedule):
    with one_process():
        check(0, Case({"pp": 2}, schedule, inductor=True))


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", every_schedule(), ids=str)
def test_every_schedule_on_ranks(request, case):
    pool = request.getfixturevalue({2: "two", 4: "four"}[case.mesh["pp"]])
    pool.run(check, case, timeout=500)


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
