"""Every mesh of dp, fsdp and tp trains as one device does: same losses, same gradients, same parameters."""

import itertools

import pytest
from mesh_cases import Case, check
from rank_pool import RankPool

AXES = ("dp", "fsdp", "tp")


def meshes(product: int) -> list[dict[str, int]]:
    """Every mesh of the three axes with this many ranks."""
    sizes = [1, 2, 4, 8]
    found = [dict(zip(AXES, s)) for s in itertools.product(sizes, repeat=3) if s[0] * s[1] * s[2] == product]
    return [{axis: size for axis, size in mesh.items() if size > 1} for mesh in found]


def layouts(product: int) -> list[Case]:
    """Every mesh with sequence parallelism on and, where that makes a difference, off."""
    choices = {True: (True, False), False: (True,)}
    return [Case(mesh, sequence_parallel=on) for mesh in meshes(product) for on in choices["tp" in mesh]]


def quick(product: int) -> list[Case]:
    """Every layout of up to 4 ranks, and three of 8; the options take turns, each at its own pace."""
    remats = ("none", "full", "selective")
    cases = layouts(product)
    if product == 8:
        cases = [case for case in cases if case.sequence_parallel and len(case.mesh) > 1][::3]
    return [
        case._replace(
            remat=remats[i // 2 % 3], tied=i % 2 == 1, captured=i % 3 != 2,
            accumulation=2 if i % 5 == 0 and product < 8 else 1,
        )  # fmt: skip
        for i, case in enumerate(cases)
    ]


def every(product: int) -> list[Case]:
    """The whole matrix."""
    return [
        case._replace(remat=remat, captured=captured, tied=tied)
        for case in layouts(product)
        for remat in ("none", "full")
        for captured in (True, False)
        for tied in (False, True)
    ]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """``pool(size)``: ranks that are there until another size is asked for."""
    running: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        if size not in running:
            for old in running.values():
                old.close()
            running.clear()
            running[size] = RankPool(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return running[size]

    yield of
    for old in running.values():
        old.close()


@pytest.mark.parametrize("case", quick(1) + quick(2) + quick(4) + quick(8), ids=str)
def test_a_mesh_trains_as_one_device_does(pool, case):
    size = 1
    for axis_size in case.mesh.values():
        size *= axis_size
    if size == 1:
        check(0, case)
    else:
        pool(size).run(check, case, timeout=150)


@pytest.mark.matrix
@pytest.mark.parametrize("case", every(1) + every(2) + every(4) + every(8), ids=str)
def test_the_whole_matrix(pool, case):
    test_a_mesh_trains_as_one_device_does(pool, case)
