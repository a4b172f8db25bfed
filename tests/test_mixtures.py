"""Mixtures of all axes train as one device does: same losses, same gradients, same parameters."""

import itertools
import math

import pytest
from pipeline_cases import Case, check
from rank_pool import RankPool

from functitan.compiler.pipeline.schedules import SCHEDULES

OF_EIGHT_AND_SIXTEEN = (
    Case({"pp": 2, "fsdp": 2, "tp": 2}, "Interleaved1F1B", remat="full"),
    Case({"pp": 2, "fsdp": 2, "cp": 2, "tp": 2}, "1F1B"),
)


def every() -> list[Case]:
    """Every mixture with cp or pp on 4 and 8 ranks, and on 16 of axes of 2; schedules and other options take turns."""
    axes = ("pp", "dp", "fsdp", "cp", "tp")
    meshes = [dict(zip(axes, sizes)) for sizes in itertools.product((1, 2, 4), repeat=len(axes))]
    meshes = [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes]
    found = []
    for mesh in sorted(meshes, key=lambda mesh: math.prod(mesh.values())):
        ranks = math.prod(mesh.values())
        if len(mesh) < 2 or not {"pp", "cp"} & set(mesh) or not (ranks in (4, 8) or ranks == 16 == 2 ** len(mesh)):
            continue
        turn = len(found)
        rows = 16 // (mesh.get("dp", 1) * mesh.get("fsdp", 1))
        schedule = tuple(SCHEDULES)[turn % len(SCHEDULES)] if "pp" in mesh else None
        case = Case(
            mesh, schedule, microbatches=min(rows, 8), layers=2 * mesh.get("pp", 1), tied=turn % 4 == 1,
            captured=turn % 5 != 4, remat=("none", "full", "selective")[turn // 2 % 3],
        )  # fmt: skip
        found.append(case)
    return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """``pool(size)``: ranks that are there until another size is asked for."""
    running: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        if size not in running:
            for old in running.values():
                old.close()
            running.clear()
            # Where 16 ranks share two cores, the first may have captured its graph minutes before the last.
            running[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}"), collective_timeout=40 * size)
        return running[size]

    yield of
    for old in running.values():
        old.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", OF_EIGHT_AND_SIXTEEN, ids=str)
def test_a_mixture_trains_as_one_device_does(pool, case):
    size = math.prod(case.mesh.values())
    pool(size).run(check, case, timeout=550)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", every(), ids=str)
def test_every_mixture(pool, case):
    test_a_mixture_trains_as_one_device_does(pool, case)
