"""Checkpoints: kills and full disks in the middle of a save, damaged files, other versions and other models."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest
import torch
from checkpoint_helpers import abstract, assert_bit_equal, full_disk, make_state, names, records, run_python, save

from train.checkpoint import Checkpointer, latest, load, storage
from train.errors import UserError

# Kills

KILLED_EVERYWHERE = """
import os, signal, sys
import torch
from checkpoint_helpers import changes_disk, whole_step
from train.checkpoint import Checkpointer, latest

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
            if changes_disk(event, args, folder):
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
        whole_step(folder, like, step, done)
        point += 1
Checkpointer(folder, 1, asynchronous=False).save(step + 1, state(step + 1))
assert os.listdir(folder) == [f"step-{step + 1:08d}"], os.listdir(folder)
print("deaths", deaths)
"""


def test_killed_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    """Case K5, for every call of a save that changes the disk: the process kills itself right before it."""
    done = run_python(KILLED_EVERYWHERE, tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 15


def test_killed_while_the_tensors_are_written(tmp_path):
    """Case K5 from outside: the signal comes while the background thread is between two tensors of one file."""
    code = """
        import sys, threading, time, torch
        from train.checkpoint import Checkpointer
        checkpointer = Checkpointer(sys.argv[1], keep=1)
        checkpointer.save(1, {"w": torch.ones(1000)})
        checkpointer.wait()
        write = torch.save
        def write_then_hang(*args):
            write(*args)
            print("writing", threading.current_thread().name, flush=True)
            time.sleep(60)
        torch.save = write_then_hang
        checkpointer.save(2, {"w": torch.ones(1_000_000), "b": torch.ones(1_000_000)})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing checkpoint\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert [name.split("-")[1] for name in names(tmp_path)] == ["00000001", "00000002.tmp"]
    (file,) = tmp_path.glob("step-00000002.tmp-*/*.distcp")
    assert 3_900_000 < file.stat().st_size < 4_100_000
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
    for part in ("b is float32[3] in it and int32[3] here", "new float32[1] is not in it", "gone float32[1] is only"):
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
