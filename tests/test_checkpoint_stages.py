"""Checkpoints of layers in stages: what each rank writes and reads are its own, and any mesh resumes any other's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from checkpoint_helpers import abstract, assert_bit_equal, raw
from mesh_cases import MODEL
from rank_pool import RankPool

import functitan as ft
from functitan import cost, optim, random, tree
from functitan.compiler.pipeline.schedules import SCHEDULES
from functitan.compiler.pipeline.stages import make_pipeline
from functitan.state import TrainState
from models import llama
from sharding_specs import PRESETS, ContextParallel, MeshSpec
from train.checkpoint import Checkpointer, latest, load, pieces, storage
from train.checkpoint.ranks import Ranks


class Layout(NamedTuple):
    """A mesh, and how its stages are run; uneven ones come from 9 layers."""

    mesh: dict[str, int]
    schedule: str | None = None
    split: str = "auto"

    def __str__(self) -> str:
        mesh = "x".join(f"{axis}{size}" for axis, size in self.mesh.items()) or "one"
        return "-".join([mesh, *([self.schedule] if self.schedule else []), *([self.split] if self.schedule else [])])


OPTIMIZER = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
CFG = attrs.evolve(MODEL, n_layers=9, dim=12, hidden_dim=20, n_heads=4, n_kv_heads=2)


def plan_of(layout: Layout) -> ft.Plan:
    params, mesh = llama.declare(CFG), MeshSpec(**layout.mesh)
    rules = PRESETS["all"].allow_uneven("embed")  # 12 over 8 ranks, and 4 ranks with 3 each
    pipeline = None
    if layout.schedule is not None:
        pipeline = make_pipeline(params, rules, mesh, layout.schedule, split=layout.split)
    return ft.compile_specs(params, rules, mesh, context=ContextParallel("auto", "auto"), pipeline=pipeline)


def state_of(plan: ft.Plan) -> TrainState:
    """A state of which no two numbers are alike; the same on every mesh, bit for bit."""
    state = ft.init_state(plan, random.key(5), OPTIMIZER)
    clip, (adam, *rest) = state.opt_state
    adam = adam._replace(
        mu=tree.map(lambda p: p * 2, state.params),
        nu=tree.map(lambda p: p * 4, state.params),
        count=adam.count + 3,
    )
    return attrs.evolve(state, opt_state=(clip, (adam, *rest)), step=state.step + 3)


@functools.cache
def whole_state() -> dict[str, torch.Tensor]:
    return storage.named_tensors(state_of(plan_of(Layout({}))))


def local(x: Any) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


STAGES = [
    *(Layout({"pp": 2}, schedule) for schedule in SCHEDULES),
    Layout({"pp": 2, "fsdp": 2, "tp": 2}, "1F1B", "7,2"),
    Layout({"pp": 4, "fsdp": 2}, "1F1B", "1,4,3,1"),
    Layout({"pp": 2, "fsdp": 8}, "Interleaved1F1B", "1,2,5,1"),
    Layout({"pp": 2, "cp": 2, "tp": 2}, "ZBVZeroBubble", "3,1,1,4"),
]


@pytest.mark.parametrize("layout", STAGES, ids=str)
def test_the_ranks_write_every_element_once_where_it_belongs(layout):
    """Without ranks: a fake process group for each in turn. Pieces are small, so that stages are cut further."""
    plan, expected = plan_of(layout), whole_state()
    written = {path: torch.zeros_like(x) for path, x in expected.items()}
    times = {path: torch.zeros(x.shape, dtype=torch.int64) for path, x in expected.items()}
    for rank in range(plan.mesh.size):
        with cost.fake_group(plan.mesh.size, rank), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "PIECE_BYTES", 1000)
            tensors = storage.named_tensors(state_of(plan))
            for piece in pieces.own_pieces(tensors, Ranks(None, rank, plan.mesh.size), plan):
                chunk = piece.item.tensor_data.chunk
                where = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
                path = piece.item.index.fqn
                assert piece.item.tensor_data.size == expected[path].shape
                written[path][where] = piece.data
                times[path][where] += 1
    for path, x in expected.items():
        assert bool((times[path] == 1).all()), path
        assert raw(written[path]) == raw(x), path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one device."""
    folder = tmp_path_factory.mktemp("one")
    Checkpointer(folder, asynchronous=False).save(3, state_of(plan_of(Layout({}))))
    return latest(folder).path


@pytest.mark.parametrize("layout", STAGES, ids=str)
def test_each_rank_reads_its_own_of_what_one_device_saved(saved, layout):
    plan, index = plan_of(layout), storage.read_index(saved, storage.inspect(saved))
    for rank in range(plan.mesh.size):
        with cost.fake_group(plan.mesh.size, rank):
            want = storage.named_tensors(state_of(plan))
            like = storage.named_leaves(ft.abstract_state(plan, OPTIMIZER))
            got = storage.read(saved, index, like, None, plan)
            assert got.keys() == want.keys()
            for path, x in want.items():
                assert (got[path].shape, got[path].placements) == (x.shape, x.placements), path
                assert raw(local(got[path])) == raw(local(x)), (path, rank)


def test_layers_over_pp_need_their_plan(saved):
    plan, other = (plan_of(Layout({"pp": 2}, "1F1B", split)) for split in ("5,4", "4,5"))
    fewer = ft.compile_specs(llama.declare(attrs.evolve(CFG, n_layers=4)), PRESETS["all"], MeshSpec(pp=2))
    none = ft.compile_specs(llama.declare(CFG), PRESETS["all"], MeshSpec(fsdp=2))
    index = storage.read_index(saved, storage.inspect(saved))
    with cost.fake_group(2):
        tensors = storage.named_tensors(state_of(plan))
        alone, layers = Ranks(None, 0, 2), {"w": tensors["params/layers/wq"]}
        with pytest.raises(ValueError, match=r"layers of \[9, 12\] are split over pp .*save\(step, state, plan"):
            pieces.own_pieces(tensors, alone)
        like = {"params/layers/wq": ft.abstract_state(plan, OPTIMIZER).params["layers"]["wq"]}
        with pytest.raises(ValueError, match=r"only their plan knows: .*load\(path, like, plan=plan\)"):
            storage.read(saved, index, like, None, None)
        with pytest.raises(ValueError, match="9 layers over pp=2, and the plan has 4 layers over pp=2: give the plan"):
            pieces.own_pieces(layers, alone, fewer)
        with pytest.raises(ValueError, match="the plan has no pipeline: give the plan"):
            pieces.own_pieces(layers, alone, none)
        with pytest.raises(ValueError, match="this rank holds 5 layers of .*, and the plan gives it 4"):
            pieces.own_pieces(layers, alone, other)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


ON_RANKS = [
    Layout({"fsdp": 4}),
    Layout({"fsdp": 2, "tp": 2}),
    Layout({"cp": 2, "tp": 2}),
    Layout({"pp": 4}, "1F1B", "1,4,3,1"),
    Layout({"pp": 2, "fsdp": 2}, "Interleaved1F1B", "1,2,5,1"),
    Layout({"pp": 2, "tp": 2}, "DualPipeV", "3,1,1,4"),
    Layout({"pp": 2, "cp": 2}, "ZBVZeroBubble", "1,1,6,1"),
]


def save_on_ranks(rank: int, folder: str, layout: Layout) -> None:
    plan = plan_of(layout)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(3, state_of(plan), plan)
    checkpointer.close()


def load_on_ranks(rank: int, folder: str, layout: Layout) -> None:
    plan = plan_of(layout)
    loaded = load(latest(folder).path, ft.abstract_state(plan, OPTIMIZER), plan=plan)
    want = state_of(plan)
    assert tree.structure(loaded) == tree.structure(want)
    for (path, a), b in zip(tree.leaves_with_path(loaded), tree.leaves(want)):
        assert (a.shape, a.dtype, a.placements) == (b.shape, b.dtype, b.placements), path
        assert raw(local(a)) == raw(local(b)), path


@pytest.mark.parametrize("number", range(len(ON_RANKS)), ids=lambda number: str(ON_RANKS[number]))
def test_any_mesh_resumes_any_other(four, tmp_path, number):
    """Cases K1 and K3 with cp and pp: parameters and optimizer state are bit-equal, on one device too.

    Each is saved once, and loaded by one device, by itself, and by the next two.
    """
    four.run(save_on_ranks, str(tmp_path), ON_RANKS[number])
    want = state_of(plan_of(Layout({})))
    assert_bit_equal(load(latest(tmp_path).path, abstract(want)), want)
    for step in range(3):
        four.run(load_on_ranks, str(tmp_path), ON_RANKS[(number + step) % len(ON_RANKS)])
    if number == 0:
        Checkpointer(tmp_path / "one", asynchronous=False).save(3, want)
        for layout in ON_RANKS:
            four.run(load_on_ranks, str(tmp_path / "one"), layout)
