"""Attention over a sequence that is split over cp equals attention on one device: every method, layout and mask."""

import mesh_cases
import pytest
from context_cases import MASKS, Case, check
from rank_pool import RankPool

METHODS, LAYOUTS = ("ring", "all_gather", "ulysses"), ("contiguous", "balanced")


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_over_two_ranks(two, method, layout):
    """S3 for every mask, with 2:1 heads as written and 1:1 heads captured."""
    for mask in MASKS:
        two.run(check, Case(2, method, layout, mask, kv_heads=2))
        two.run(check, Case(2, method, layout, mask, captured=True))
    for remat in ("selective", "full"):
        two.run(check, Case(2, method, layout, "documents", captured=True, remat=remat))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ("ring", "all_gather"))
def test_output_and_gradients_over_four_ranks(four, method, layout):
    """S3 with 4:1 heads, where whole chunks see nothing of others."""
    for mask in ("causal", "short", "documents"):
        four.run(check, Case(4, method, layout, mask, kv_heads=1), timeout=120)


@pytest.mark.parametrize("options", [{}, {"captured": False, "remat": "full"}], ids=str)
def test_a_model_trains_over_cp_as_on_one_device(two, options):
    """Documents (S1), dropout, ignored labels (L3), three steps."""
    two.run(mesh_cases.check, mesh_cases.Case({"cp": 2}, **options), timeout=120)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "cp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_a_model_trains_over_cp_and_another_axis(four, mesh):
    """L1."""
    four.run(mesh_cases.check, mesh_cases.Case(mesh), timeout=150)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv_heads", [16, 8, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_model_trains_by_every_method(request, cp, method, kv_heads):
    """Three steps with documents, and 1, 2 and 4 query heads to one of keys and values."""
    pool = request.getfixturevalue({2: "two", 4: "four"}[cp])
    pool.run(mesh_cases.check, mesh_cases.Case({"cp": cp}, method=method, kv_heads=kv_heads), timeout=250)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mask", ["causal", "window", "documents", "all"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4])
def test_every_mask_by_every_method(request, cp, method, mask):
    """The operator and its gradients, captured, with 1, 2 and 4 query heads to one of keys and values."""
    pool = request.getfixturevalue({2: "two", 4: "four"}[cp])
    for heads, kv_heads in ((4, 4), (8, 4), (16, 4)):
        for layout in LAYOUTS:
            pool.run(check, Case(cp, method, layout, mask, heads, kv_heads, captured=True), timeout=120)
