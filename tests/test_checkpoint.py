"""Checkpoints: bit-equal round trips, the last k, asynchrony. What goes wrong is in test_checkpoint_failures.py."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import (
    AdamState,
    abstract,
    assert_bit_equal,
    full_disk,
    make_state,
    names,
    records,
    run_python,
    save,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from functitan import tree
from train.checkpoint import CheckpointConfig, Checkpointer, latest, load, path_of, storage
from train.errors import UserError

# Round trips


@pytest.mark.parametrize("asynchronous", [False, True])
def test_round_trip_is_bit_equal(tmp_path, asynchronous):
    state = make_state()
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", asynchronous=asynchronous)
    checkpointer.save(10, state)
    checkpointer.close()
    found = latest(tmp_path / "run" / "checkpoints")
    assert (found.step, found.path.name) == (10, "step-00000010")
    assert found.path == path_of(tmp_path / "run" / "checkpoints", 10)
    for like in (abstract(state), state):
        loaded = load(found.path, like)
        assert_bit_equal(loaded, state)
        assert isinstance(loaded.opt_state[0], AdamState)
        assert loaded.params["layers"][0]["bias"] is None
        assert loaded.note == state.note
    # `like` is not written to, and the two tied tensors come back apart: a step that donates needs separate memory.
    assert loaded.params["embed"].data_ptr() not in (state.params["embed"].data_ptr(), loaded.params["head"].data_ptr())


def test_like_may_be_any_objects_with_shape_and_dtype_and_a_subset(tmp_path):
    @attrs.frozen
    class Shape:
        shape: tuple[int, ...]
        dtype: torch.dtype

    state = make_state()
    save(tmp_path, 0)
    like = {"params": tree.map(lambda leaf: Shape(tuple(leaf.shape), leaf.dtype), state.params)}
    assert_bit_equal(load(tmp_path / "step-00000000", like, subset=True), {"params": state.params})
    with pytest.raises(UserError, match="step int64.. is only in it"):
        load(tmp_path / "step-00000000", like)


def test_like_may_be_fake(tmp_path):
    state = make_state()
    save(tmp_path, 0)
    mode = FakeTensorMode()
    like = tree.map(lambda leaf: mode.from_tensor(leaf.detach()), state)
    assert_bit_equal(load(tmp_path / "step-00000000", like), state)


def test_dtensors_keep_their_layout(tmp_path):
    """One rank only: that several can write and read is shown where the sharded training is tested."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "tp"))
        whole = torch.arange(21.0).reshape(7, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        checkpointer = Checkpointer(tmp_path, asynchronous=True)
        checkpointer.save(1, {"w": sharded})
        checkpointer.close()
        other = distribute_tensor(torch.zeros(7, 3), mesh, [Replicate(), Shard(0)])
        loaded = load(tmp_path / "step-00000001", {"w": other})["w"]
        assert isinstance(loaded, DTensor) and loaded.placements == (Replicate(), Shard(0))
        assert torch.equal(loaded.full_tensor(), whole)
        assert torch.equal(load(tmp_path / "step-00000001", {"w": whole})["w"], whole)
    finally:
        dist.destroy_process_group()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def step(state: dict) -> dict:
        grad = torch.cos(state["w"] * state["step"])
        mu = 0.9 * state["mu"] + grad
        return {"w": state["w"] - 0.1 * mu, "mu": mu, "step": state["step"] + 1}

    state = {"w": torch.linspace(-1, 1, 50), "mu": torch.zeros(50), "step": torch.tensor(0)}
    checkpointer = Checkpointer(tmp_path, keep=1)
    for count in range(1, 5):
        state = step(state)
        if count == 2:
            checkpointer.save(count, state)
    checkpointer.close()
    resumed = load(latest(tmp_path).path, abstract(state))
    assert resumed["step"] == 2
    assert_bit_equal(step(step(resumed)), state)


def test_metadata_is_readable_and_names_no_other_folder(tmp_path):
    save(tmp_path, 10)
    folder = tmp_path / "step-00000010"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["step"] == 10 and metadata["torch"] == torch.__version__
    assert metadata["tensors"]["params/layers/0/wq"] == {"shape": [8, 8], "dtype": "bfloat16"}
    assert {**metadata["files"], "metadata.json": 0}.keys() == set(names(folder))
    assert str(tmp_path).encode() not in (folder / ".metadata").read_bytes()


# Keeping the last k


def test_keeps_the_last_k(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_a_run_that_was_taken_back_keeps_its_own_and_the_later_ones(tmp_path):
    save(tmp_path, 10, 20, 30)
    save(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "__0_0.distcp").unlink()
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_older_ones_stay_until_the_new_one_is_complete(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(storage.os, "fsync", full_disk)
    with pytest.raises(UserError):
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step-00000001"]


def test_the_same_step_again_replaces(tmp_path):
    save(tmp_path, 1)
    Checkpointer(tmp_path, asynchronous=False).save(1, {"other": torch.ones(2)})
    assert names(tmp_path) == ["step-00000001"]
    assert_bit_equal(load(tmp_path / "step-00000001", {"other": torch.zeros(2)}), {"other": torch.ones(2)})


# Asynchrony


class Gate:
    """Holds the background thread before it writes, until opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Any = storage.write) -> None:
        self.event = threading.Event()

        def write(*args: Any) -> None:
            assert self.event.wait(30)
            then(*args)

        monkeypatch.setattr(storage, "write", write)

    def open(self) -> None:
        self.event.set()


def test_the_snapshot_is_taken_before_save_returns(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    state = {"w": torch.ones(5), "view": torch.ones(6)[1:4], "step": torch.tensor(1)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    for leaf in tree.leaves(state):
        leaf.zero_()
    assert names(tmp_path) == []
    gate.open()
    checkpointer.wait()
    want = {"w": torch.ones(5), "view": torch.ones(3), "step": torch.tensor(1)}
    assert_bit_equal(load(tmp_path / "step-00000001", state), want)


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": torch.ones(2)})
    threading.Timer(0.2, gate.open).start()
    checkpointer.save(2, {"w": torch.ones(2)})
    assert "step-00000001" in names(tmp_path)
    checkpointer.close()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("where", ["wait", "close", "save"])
def test_an_error_in_the_background_surfaces_once_and_is_logged(tmp_path, monkeypatch, caplog, where):
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full_disk)
        checkpointer.save(1, {"w": torch.ones(2)})
        checkpointer._thread.join()
    (record,) = records(caplog)
    assert record.levelname == "ERROR" and "No space left" in record.message
    with pytest.raises(UserError, match="step 1 .*No space left"):
        checkpointer.save(2, {"w": torch.ones(2)}) if where == "save" else getattr(checkpointer, where)()
    checkpointer.save(3, {"w": torch.ones(2)})
    checkpointer.close()
    assert names(tmp_path) == ["step-00000003"]


def test_a_bug_in_the_background_is_not_dressed_up(tmp_path, monkeypatch):
    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    gate = Gate(monkeypatch, then=bug)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": torch.ones(2)})
    gate.open()
    with pytest.raises(RuntimeError, match="a bug"):
        checkpointer.wait()


def test_the_process_waits_at_its_end(tmp_path):
    code = """
        import sys, time, torch
        from train.checkpoint import Checkpointer, storage
        write = storage.write
        storage.write = lambda *args: (time.sleep(0.5), write(*args))
        Checkpointer(sys.argv[1]).save(1, {"w": torch.ones(1000)})
    """
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert load(latest(tmp_path).path, {"w": torch.zeros(1000)})["w"].sum() == 1000


def test_config():
    assert CheckpointConfig(every=0, keep=1).asynchronous
    with pytest.raises(UserError, match="keep must be 1 or more"):
        Checkpointer("never-made", keep=0)
    assert not Path("never-made").exists()
