"""Checkpoints over ranks: any layout to any other, bit-equal."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import (
    AdamState,
    State,
    abstract,
    assert_bit_equal,
    local,
    make_state,
    names,
    place,
    raw,
)
from rank_pool import RankPool
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

from functitan import random, tree
from train.checkpoint import Checkpoint, Checkpointer, latest, load, pieces, storage
from train.checkpoint.ranks import Ranks

RANKS = 4
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@attrs.frozen
class Layout:
    """A mesh, and how a tensor of so many dims lies on it; ``shape`` () is no mesh: plain tensors."""

    shape: tuple[int, ...]
    matrix: tuple = ()
    vector: tuple = ()
    meta: bool = False

    def place(self, tensors: Any) -> Any:
        if not self.shape:
            return abstract(tensors) if self.meta else tensors
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=("a", "b")[: len(self.shape)])
        by_dims = {0: (R,) * len(self.shape), 1: self.vector}
        return tree.map(
            lambda leaf: place(leaf.detach(), mesh, *by_dims.get(leaf.ndim, self.matrix), meta=self.meta), tensors
        )


PLAIN = Layout(())
FSDP4 = Layout((4,), (S0,), (S0,))
FSDP2_TP2 = Layout((2, 2), (S0, S1), (R, S0))
SAME_DIM = Layout((2, 2), (S0, S0), (S0, S0))
COLUMNS = Layout((4,), (S1,), (R,))
REPLICATED = Layout((2, 2), (R, R), (R, R))
LAYOUTS = {
    "plain": PLAIN,
    "fsdp4": FSDP4,
    "fsdp2_tp2": FSDP2_TP2,
    "same_dim": SAME_DIM,
    "columns": COLUMNS,
    "replicated": REPLICATED,
}


def training_state() -> State:
    """make_state's every kind of leaf, and dims of 3, 7 and 8 for four ranks: even, uneven, with an empty shard."""
    state = make_state()
    params = {name: leaf for name, leaf in state.params.items() if name != "layers"}
    params |= {
        "wq": state.params["layers"][0]["wq"],
        "eight": torch.arange(24).reshape(8, 3),
        "seven": torch.arange(21.0).reshape(7, 3),
        "three": torch.tensor([1.0, -0.0, float("inf")]),
    }
    adam = AdamState(torch.tensor(3), tree.map(torch.zeros_like, params), tree.map(torch.ones_like, params))
    return attrs.evolve(state, params=params, opt_state=adam)


def save_on_ranks(rank: int, folder: str, layout: Layout, asynchronous: bool, state: Any) -> None:
    placed = layout.place(state)
    checkpointer = Checkpointer(folder, keep=1, asynchronous=asynchronous)
    checkpointer.save(3, placed)
    checkpointer.close()


def load_on_ranks(rank: int, folder: str, layout: Layout, want: Any) -> list[Checkpoint]:
    """Every rank has its own shard of ``want``, bit for bit, in a DTensor of the layout."""
    found = latest(folder)
    loaded = load(found.path, attrs.evolve(layout, meta=True).place(want))
    placed = layout.place(want)
    assert tree.structure(loaded) == tree.structure(want)
    for (path, a), b in zip(tree.leaves_with_path(loaded), tree.leaves(placed)):
        assert type(a) is type(b) and (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, False), path
        assert local(a).shape == local(b).shape and raw(local(a)) == raw(local(b)), path
        if isinstance(a, DTensor):
            assert a.placements == b.placements and a.device_mesh.shape == b.device_mesh.shape, path
            assert local(a).device.type == "cpu" and a.stride() == torch.empty(a.shape, device="meta").stride(), path
    return [found]


@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_to_any_other(pool, tmp_path, saved):
    """Cases K1 (fsdp=4 to fsdp=2 x tp=2), K2 and K3, and every other pair, one process without a group included."""
    state = training_state()
    pool.run(save_on_ranks, str(tmp_path), LAYOUTS[saved], saved != "fsdp4", state)
    want = tree.map(torch.Tensor.detach, state)
    for layout in LAYOUTS.values():
        assert pool.run(load_on_ranks, str(tmp_path), layout, want) == [[Checkpoint(3, tmp_path / "step-00000003")]] * 4
    assert_bit_equal(load(latest(tmp_path).path, abstract(state)), want)


def test_one_process_to_ranks(pool, tmp_path):
    state = training_state()
    Checkpointer(tmp_path, asynchronous=False).save(3, state)
    for layout in LAYOUTS.values():
        pool.run(load_on_ranks, str(tmp_path), layout, tree.map(torch.Tensor.detach, state))


def gather_on_ranks(rank: int, folder: str, rows: int) -> list[Any]:
    whole = torch.arange(rows * 3).reshape(rows, 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp"))
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, {"w": place(whole, mesh, S0, S0)})
    checkpointer.close()
    loaded = load(latest(folder).path, {"w": place(torch.zeros_like(whole), mesh, S0, S0, meta=True)})["w"]
    return loaded.full_tensor().tolist()


@pytest.mark.parametrize("rows", [8, 7, 3, 1])
def test_gathering_what_was_loaded_is_the_identity(pool, tmp_path, rows):
    """Case K2, through DTensor's own gather."""
    assert pool.run(gather_on_ranks, str(tmp_path), rows) == [torch.arange(rows * 3).reshape(rows, 3).tolist()] * RANKS


# What is written


def test_each_rank_writes_its_own_and_what_is_replicated_once(pool, tmp_path):
    state = {"sharded": torch.arange(4096.0).reshape(64, 64), "replicated": torch.arange(1000.0)}
    layout = Layout((4,), (S0,), (R,))
    pool.run(save_on_ranks, str(tmp_path), layout, True, state)
    folder = tmp_path / "step-00000003"
    index = storage.read_index(folder, storage.inspect(folder))
    chunks = {name: entry.chunks for name, entry in index.state_dict_metadata.items()}
    assert sorted(tuple(chunk.offsets) for chunk in chunks["sharded"]) == [(0, 0), (16, 0), (32, 0), (48, 0)]
    assert [tuple(chunk.sizes) for chunk in chunks["replicated"]] == [(1000,)]
    files = {info.relative_path for at, info in index.storage_data.items() if at.fqn == "sharded"}
    assert files == {f"__{rank}_0.distcp" for rank in range(RANKS)}
    metadata = json.loads((folder / "metadata.json").read_text())
    assert {*metadata["files"], "metadata.json"} == set(names(folder))
    assert metadata["files"].keys() == {*files, ".metadata"}
    assert metadata["tensors"]["sharded"] == {"shape": [64, 64], "dtype": "float32"}
    assert names(tmp_path) == ["step-00000003"]


def own_bytes(rank: int, layout: Layout, state: Any) -> int:
    own = pieces.own_pieces(storage.named_tensors(layout.place(state)), Ranks.of_default_group())
    return sum(piece.data.nbytes for piece in own)


def test_a_snapshot_is_of_what_the_rank_writes(pool):
    """Of what every rank has, each copies and writes a share."""
    state = {f"w{i}": torch.ones(64, 64) for i in range(100)}
    for layout in (PLAIN, REPLICATED, Layout((2, 2), (R, S0)), Layout((2, 2), (S1, R)), FSDP4):
        sizes = pool.run(own_bytes, layout, state)
        assert sum(sizes) == 100 * 64 * 64 * 4
        assert max(sizes) < 1.5 * min(sizes)


def save_in_pieces(rank: int, folder: str, layout: Layout, state: Any) -> None:
    limit, pieces.PIECE_BYTES = pieces.PIECE_BYTES, 1000
    try:
        save_on_ranks(rank, folder, layout, False, state)
    finally:
        pieces.PIECE_BYTES = limit


@pytest.mark.parametrize("name", ["plain", "fsdp4", "fsdp2_tp2", "replicated"])
def test_large_shards_are_stored_in_pieces(pool, tmp_path, name):
    w = torch.arange(60 * 63.0).reshape(60, 63)
    state = {"w": w, "transposed": w.double().T, "scalar": torch.ones(())}
    pool.run(save_in_pieces, str(tmp_path), LAYOUTS[name], state)
    folder = tmp_path / "step-00000003"
    index = storage.read_index(folder, storage.inspect(folder))
    sizes = [chunk.sizes.numel() for chunk in index.state_dict_metadata["w"].chunks]
    assert sum(sizes) == 60 * 63 and max(sizes) * 4 <= 1000
    if name in ("plain", "replicated"):  # spread over the ranks, each piece once
        written = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in range(RANKS)]
        assert min(written) > 0.7 * max(written)
    for layout in (PLAIN, COLUMNS, FSDP2_TP2):
        pool.run(load_on_ranks, str(tmp_path), layout, state)


MIB = 2**20


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_of_loading_and_saving(rank: int, folder: str, rows: int) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    local_rows = torch.empty(rows // RANKS, MIB // 4, device="meta")
    like = DTensor.from_local(local_rows, mesh, [S0], run_check=False)
    before = peak()
    loaded = load(latest(folder).path, {"w": like})
    between = peak()
    Checkpointer(folder, keep=1, asynchronous=False).save(4, loaded)
    return between - before, peak() - between


def test_memory(pool, tmp_path, monkeypatch):
    """In MiB, of a tensor of 96: a rank has its own 24, and loads and saves with little more than a piece of 4."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * MIB)
    Checkpointer(tmp_path, asynchronous=False).save(3, {"w": torch.ones(96, MIB // 4)})
    for loading, saving in pool.run(memory_of_loading_and_saving, str(tmp_path), 96):
        assert loading < 60 and saving < 20, (loading, saving)  # some of it is what the first DTensor imports
    assert load(tmp_path / "step-00000004", {"w": torch.zeros(96, MIB // 4)})["w"].mean() == 1


# Going on


def dropout_step(state: Any, place_like: Any = lambda mask, like: mask) -> Any:
    """One step whose noise is a function of the key: elementwise, so that every layout gives the same bits."""
    words = local(state["key"])
    keep = random.bernoulli(random.fold_in(words, int(local(state["step"]))), 0.5, state["w"].shape)
    update = torch.cos(state["w"] + state["mu"]) * place_like(keep.float(), state["w"])
    mu = 0.9 * state["mu"] + update
    return {"w": state["w"] - 0.1 * mu, "mu": mu, "step": state["step"] + 1, "key": state["key"]}


def two_steps_saved_then_two(rank: int, folder: str, state: Any) -> None:
    checkpointer = Checkpointer(folder)
    placed = Layout((2, 2), (S0, S1), (R, R)).place(state)

    def like(mask: torch.Tensor, leaf: DTensor) -> DTensor:
        return place(mask, leaf.device_mesh, *leaf.placements)

    for step in range(1, 5):
        placed = dropout_step(placed, like)
        if step == 2:
            checkpointer.save(2, placed)
    checkpointer.wait()
    checkpointer.save(4, placed)
    checkpointer.close()


def test_resuming_in_another_process_equals_going_on(pool, tmp_path):
    """Case R2: the noise goes on where it was, here in one process after four ranks."""
    state = {"w": torch.linspace(-1, 1, 35).reshape(7, 5), "mu": torch.zeros(7, 5), "step": torch.tensor(0)}
    state["key"] = random.key(7)
    pool.run(two_steps_saved_then_two, str(tmp_path), state)
    resumed = load(tmp_path / "step-00000002", abstract(state))
    want = load(tmp_path / "step-00000004", abstract(state))
    assert not torch.equal(resumed["w"], want["w"])
    assert_bit_equal(dropout_step(dropout_step(resumed)), want)


def save_while_training(rank: int, folder: str) -> list[int]:
    """The default group is used all the time; check() is called by all ranks, at every step."""
    checkpointer = Checkpointer(folder, keep=2)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    seen = []
    for step in range(1, 31):
        total = torch.full((1000,), float(step))
        dist.all_reduce(total)
        assert float(total[0]) == step * RANKS
        if step % 10 == 0:
            checkpointer.save(step, {"w": place(total, mesh, S0)})
            total.zero_()  # the snapshot is taken
        checkpointer.check()
        seen.append(sum(thread.name == "checkpoint" for thread in threading.enumerate()))
    checkpointer.close()
    assert max(seen) == 1
    like = {"w": place(torch.zeros(1000), mesh, S0, meta=True)}
    return [int(local(load(f"{folder}/step-{step:08d}", like)["w"])[0]) for step in (20, 30)]


def test_saving_in_the_background_while_the_default_group_is_busy(pool, tmp_path):
    assert pool.run(save_while_training, str(tmp_path)) == [[80, 120]] * RANKS
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def partial_is_refused(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    checkpointer = Checkpointer(folder)
    total = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(ValueError, match="grads/w has placements .*redistribute"):
        checkpointer.save(1, {"grads": {"w": total}})
    checkpointer.save(2, {"grads": {"w": total.redistribute(mesh, [R])}})
    checkpointer.close()
    assert load(Path(folder) / "step-00000002", {"grads": {"w": torch.ones(3)}})["grads"]["w"].tolist() == [4.0] * 3


def test_partial_sums_are_refused(pool, tmp_path):
    pool.run(partial_is_refused, str(tmp_path))
