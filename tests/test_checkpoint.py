"""Checkpoints: bit-equal round trips, kills and full disks in the middle of a save, damage, asynchrony."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from functitan import tree
from train.checkpoint import CheckpointConfig, Checkpointer, latest, load, storage
from train.errors import UserError


class AdamState(NamedTuple):
    count: torch.Tensor
    mu: Any
    nu: Any


@tree.node
@attrs.frozen
class State:
    params: Any
    opt_state: Any
    step: torch.Tensor
    key: torch.Tensor
    note: str = tree.static(default="kept by `like`")


def make_state(seed: int = 0, dim: int = 8) -> State:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tied = normal(16, dim)
    tied[0, 0] = float("nan")
    tied[0, 1] = -0.0
    params = {
        "layers": [{"wq": normal(dim, dim, dtype=torch.bfloat16), "bias": None}, {"wq": normal(dim, dim), "bias": None}],
        "embed": tied,
        "head": tied,
        "empty": torch.zeros(0, dim),
        "transposed": normal(3, dim).T,
        "expanded": normal(1, dim).expand(3, dim),
        "row": normal(4, dim)[2],
        "flags": torch.tensor([True, False]),
        "float8": normal(4).to(torch.float8_e4m3fn),
        "grad": normal(2).requires_grad_(),
    }
    optimizer = (AdamState(torch.tensor(7, dtype=torch.int32), {"a": normal(3)}, {"a": normal(3).double()}), (), None)
    key = torch.tensor([0xFFFFFFFF, 7 + seed], dtype=torch.uint32)
    return State(params, optimizer, torch.tensor(2**40 + seed), key)


def abstract(state: Any) -> Any:
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def assert_bit_equal(got: Any, want: Any) -> None:
    assert tree.structure(got) == tree.structure(want)
    for (path, a), (_, b) in zip(tree.leaves_with_path(got), tree.leaves_with_path(want)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert raw(a) == raw(b), path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def records(caplog: pytest.LogCaptureFixture) -> list:
    """Without those of DCP's own logger."""
    return [record for record in caplog.records if record.name == "train.checkpoint"]


def save(folder: Path, *steps: int, keep: int = 10, **kwargs: Any) -> None:
    checkpointer = Checkpointer(folder, keep, asynchronous=False)
    for step in steps:
        checkpointer.save(step, make_state(step, **kwargs))


# Round trips


@pytest.mark.parametrize("asynchronous", [False, True])
def test_round_trip_is_bit_equal(tmp_path, asynchronous):
    state = make_state()
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", asynchronous=asynchronous)
    checkpointer.save(10, state)
    checkpointer.close()
    found = latest(tmp_path / "run" / "checkpoints")
    assert (found.step, found.path.name) == (10, "step-00000010")
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
    from torch._subclasses.fake_tensor import FakeTensorMode

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


# Kills

KILLED_EVERYWHERE = """
import os, signal, sys
import torch
from train.checkpoint import Checkpointer, latest, load

folder = sys.argv[1]
like = {"w": torch.zeros(1000), "step": torch.tensor(0)}
state = lambda step: {"w": torch.full((1000,), float(step)), "step": torch.tensor(step)}
Checkpointer(folder, 1, asynchronous=False).save(10, state(10))

def dies_at(point, step):
    # Kills itself before the point-th call that changes what is on the disk; True if the save was over before it.
    pid = os.fork()
    if pid == 0:
        calls = 0
        def hook(event, args):
            nonlocal calls
            if event in ("os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree") or (
                event == "open" and isinstance(args[1], str) and "w" in args[1] and folder in str(args[0])
            ):
                calls += 1
                if calls > point:
                    os.kill(os.getpid(), signal.SIGKILL)
        checkpointer = Checkpointer(folder, 1, asynchronous=False)
        sys.addaudithook(hook)
        checkpointer.save(step, state(step))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)

deaths = 0
for again in (False, True):  # a new step, and the same step for the second time
    step, point, done = 10, 0, False
    while not done:
        step = latest(folder, lambda _: None).step + (0 if again else 1)
        done = dies_at(point, step)
        deaths += not done
        notices = []
        found = latest(folder, notices.append)
        loaded = load(found.path, like)
        assert found.step in (step - 1, step) and not (done and found.step != step)
        assert bool((loaded["w"] == found.step).all()) and int(loaded["step"]) == found.step
        assert all("partial" in notice for notice in notices), notices
        point += 1
Checkpointer(folder, 1, asynchronous=False).save(step + 1, state(step + 1))
assert os.listdir(folder) == [f"step-{step + 1:08d}"], os.listdir(folder)
print("deaths", deaths)
"""


def run_python(code: str, *args: object, prefix: tuple[str, ...] = (), **kwargs: Any) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


def test_killed_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """Case K5, for every call of a save that changes the disk: the process kills itself right before it."""
    done = run_python(KILLED_EVERYWHERE, tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 15


def test_killed_while_the_tensors_are_written(tmp_path):
    """Case K5 from outside: the signal comes while the background thread is writing."""
    code = """
        import sys, torch
        from train.checkpoint import Checkpointer
        checkpointer = Checkpointer(sys.argv[1], keep=1)
        checkpointer.save(1, {"w": torch.ones(1000)})
        while True:  # until killed, the second save is always under way
            checkpointer.wait()
            checkpointer.save(2, {"w": torch.ones(20_000_000)})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not any(file.stat().st_size > 1_000_000 for file in tmp_path.glob("*.tmp-*/*.distcp")):
            assert process.poll() is None and time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert [name.split("-")[1] for name in names(tmp_path)] == ["00000001", "00000002.tmp"]
    notices: list[str] = []
    found = latest(tmp_path, notices.append)
    assert_bit_equal(load(found.path, {"w": torch.zeros(1000)}), {"w": torch.ones(1000)})
    assert len(notices) == 1 and "step-00000002.tmp-" in notices[0] and "partial" in notices[0]
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """A power cut right after the rename must not leave a complete name with empty files."""
    events: list[tuple[str, int | str]] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("sync", os.fstat(fd).st_ino)), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (events.append(("name", Path(new).name)), rename(old, new))[1])
    save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    named = events.index(("name", folder.name))
    before = {inode for kind, inode in events[:named] if kind == "sync"}
    assert before >= {path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert ("sync", tmp_path.stat().st_ino) in events[named:]


def test_a_kill_in_the_first_save_means_a_fresh_start(tmp_path, caplog):
    assert latest(tmp_path / "none") is None
    (tmp_path / "step-00000005.tmp-0123456789ab").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000007").write_text("a file, not ours")
    assert latest(tmp_path) is None
    (record,) = records(caplog)
    assert record.levelname == "WARNING" and "step-00000005.tmp" in record.message


# Failures of a save


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk(tmp_path):
    """On a file system of 3 MB in a mount namespace of its own; where that is not allowed, a limit on file sizes."""
    code = """
        import resource, signal, sys, torch
        from train.checkpoint import Checkpointer, latest, load
        from train.errors import UserError
        if sys.argv[2] == "limit":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        checkpointer = Checkpointer(sys.argv[1], keep=1)
        for step, size in ((1, 1000), (2, 2_000_000)):
            checkpointer.save(step, {"w": torch.ones(size)})
            try:
                checkpointer.wait()
            except UserError as error:
                print(error)
        checkpointer.save(3, {"w": torch.ones(100)})
        checkpointer.wait()
        assert latest(sys.argv[1], print).step == 3
        assert load(latest(sys.argv[1]).path, {"w": torch.ones(100)})["w"].sum() == 100
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=3m none "{folder}" && exec "$@"', "sh")
    private = shutil.which("unshare") is not None
    private = private and subprocess.run([*mount, "true"], capture_output=True).returncode == 0
    kind, prefix, reason = ("disk", mount, "No space left on device") if private else ("limit", (), "File too large")
    done = run_python(code, folder, kind, prefix=prefix)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert f"checkpoint of step 2 (0.008 GB) could not be saved to {folder}: {reason}; " in line
    assert "step 1 is still whole" in line


@pytest.mark.parametrize("module", [storage.os, storage.json])
def test_an_error_in_any_stage_of_writing_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, module):
    save(tmp_path, 1)
    monkeypatch.setattr(module, {"os": "fsync", "json": "dump"}[module.__name__], full_disk)
    with pytest.raises(UserError, match="step 2 .* No space left on device.*--checkpoint.keep.*step 1 is still whole"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


def test_an_unwritable_folder_is_known_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write checkpoints to .*file/checkpoints: Not a directory.*--out"):
        Checkpointer(tmp_path / "file" / "checkpoints")
    with pytest.raises(UserError, match="cannot write checkpoints to .*file: File exists"):
        Checkpointer(tmp_path / "file")


def test_a_folder_without_permission(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root is not stopped by permissions
    try:
        with pytest.raises(UserError, match="cannot write checkpoints to .*locked: Permission denied; change its perm"):
            Checkpointer(locked)
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_vanishes_during_the_run(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run", asynchronous=False)
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match="step 1 .* could not be saved to .*run: No such file or directory"):
        checkpointer.save(1, make_state())


def test_mistakes_in_the_state(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    with pytest.raises(TypeError, match="opt/count is a int"):
        checkpointer.save(1, {"opt": {"count": 3}})
    with pytest.raises(ValueError, match="path 'a/b'"):
        checkpointer.save(1, {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}})
    assert names(tmp_path) == []


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


# Damage, other versions, other models


def spoil(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "truncated":
        file.write_bytes(content[:-3])
    elif how == "longer":
        file.write_bytes(content + b"\0")
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "longer"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json"])
def test_cut_files_are_found_at_once_and_the_older_one_is_used(tmp_path, name, how):
    save(tmp_path, 1, 2)
    spoil(tmp_path / "step-00000002" / name, how)
    notices: list[str] = []
    assert latest(tmp_path, notices.append).step == 1
    assert len(notices) == 1 and "step-00000002" in notices[0] and name in notices[0]
    with pytest.raises(UserError, match=f"step-00000002 cannot be used: {name}.*; move it away to use step-00000001"):
        load(tmp_path / "step-00000002", abstract(make_state()))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_changed_bytes_are_refused(tmp_path, name):
    save(tmp_path, 1)
    save(tmp_path, 2)
    spoil(tmp_path / "step-00000002" / name, "flipped")
    with pytest.raises(UserError, match=f"bytes of {name} have changed .*move it away to use step-00000001") as caught:
        load(tmp_path / "step-00000002", abstract(make_state()))
    assert "\n" not in str(caught.value)


def test_any_changed_bit_of_the_metadata_is_refused_or_harmless(tmp_path):
    state = {"w": torch.arange(4.0)}
    Checkpointer(tmp_path, asynchronous=False).save(1, state)
    file = tmp_path / "step-00000001" / "metadata.json"
    content = file.read_bytes()
    refused = 0
    for position in range(0, len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        try:
            assert_bit_equal(load(tmp_path / "step-00000001", state), state)
        except UserError:
            refused += 1
    assert refused > len(content) / 2


def test_when_all_are_damaged_training_does_not_silently_start_again(tmp_path):
    save(tmp_path, 1)
    spoil(tmp_path / "step-00000001" / "__0_0.distcp", "truncated")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole \(step-00000001\).*start from the beginning"):
        latest(tmp_path, lambda _: None)
    with pytest.raises(UserError, match="no other in .* is whole"):
        load(tmp_path / "step-00000001", abstract(make_state()))


def test_another_format_is_refused_and_not_passed_over(tmp_path):
    save(tmp_path, 1, 2)
    file = tmp_path / "step-00000002" / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99, "functitan": "9.0"}))
    for act in (lambda: latest(tmp_path), lambda: load(file.parent, abstract(make_state()))):
        with pytest.raises(UserError, match="step-00000002 has format 99, written by functitan 9.0; .* reads format 1"):
            act()


def test_another_model_names_paths_and_sizes(tmp_path):
    save(tmp_path, 1, dim=8)
    other = abstract(make_state(dim=4))
    other = attrs.evolve(other, params={**other.params, "new": torch.ones(2), "grad": torch.ones(2).int()})
    del other.params["flags"]
    with pytest.raises(UserError) as caught:
        load(tmp_path / "step-00000001", other)
    message = str(caught.value)
    for part in ("step-00000001 does not fit", "params/embed is float32[16, 8] in it and float32[16, 4] here", "more"):
        assert part in message, message
    small = {"a": torch.ones(2), "b": torch.ones(3).int(), "new": torch.ones(1)}
    Checkpointer(tmp_path, asynchronous=False).save(2, {"a": torch.ones(2), "b": torch.ones(3), "gone": torch.ones(1)})
    with pytest.raises(UserError) as caught:
        load(tmp_path / "step-00000002", small)
    message = str(caught.value)
    assert "(3 of 4 tensors)" in message and "\n" not in message
    for part in ("b is float32[3] in it and int32[3] here", "new float32[1] is not in it", "gone float32[1] is only in"):
        assert part in message, message


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint .*step-00000009"):
        load(tmp_path / "step-00000009", {})


class Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["FUNCTITAN_TEST_EVIL"],)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_no_code_from_the_files_is_run(tmp_path, monkeypatch, file):
    """Even where sizes and checksums were made to fit."""
    monkeypatch.setenv("FUNCTITAN_TEST_EVIL", str(tmp_path / "evil"))
    state = {"w": torch.ones(4)}
    Checkpointer(tmp_path, asynchronous=False).save(1, state)
    folder = tmp_path / "step-00000001"
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), folder / file)
        index = pickle.loads((folder / ".metadata").read_bytes())
        for info in index.storage_data.values():
            info.length = (folder / file).stat().st_size
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    metadata = json.loads((folder / "metadata.json").read_text())
    for name, entry in metadata["files"].items():
        entry |= {"bytes": (folder / name).stat().st_size, "crc32": storage._crc32(folder / name)}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises((UserError, pickle.UnpicklingError), match="mkdir"):
        load(folder, state)
    assert not (tmp_path / "evil").exists()


def test_config():
    assert CheckpointConfig(every=0, keep=1).asynchronous
    with pytest.raises(UserError, match="checkpoint.keep is 0; it must be 1 or more"):
        CheckpointConfig(keep=0)
    with pytest.raises(UserError, match="checkpoint.every is -1; it must be 0 or more"):
        CheckpointConfig(every=-1)
    with pytest.raises(UserError, match="keep must be 1 or more"):
        Checkpointer("never-made", keep=0)
    assert not Path("never-made").exists()
