"""Checkpoints over ranks: what happens to one rank is told to all, in the same words, and nobody waits for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import full_disk, local, names, place, run_python
from rank_pool import RankPool
from torch.distributed.tensor import Shard, init_device_mesh

from train.checkpoint import Checkpointer, checkpointer, latest, load, storage
from train.checkpoint.ranks import RankFailed, Ranks, Unreachable, portable
from train.errors import UserError

RANKS = 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(RANKS, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def state(step: int, meta: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    return {"w": place(torch.full((10,), float(step)), mesh, Shard(0), meta=meta)}


def text_of(error: type[BaseException], act: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        act(*args)
    assert caught.type is error
    return str(caught.value)


# A failure of one rank

STAGES = {
    "writing": (storage.os, "fsync", 2),
    "checksums": (storage, "_crc32", 3),
    "metadata": (storage.json, "dump", 0),
    "folder": (storage.Path, "mkdir", 0),
    "rename": (checkpointer, "_publish", 0),
}


def fails_on_one_rank(rank: int, folder: str, stage: str, asynchronous: bool) -> str:
    module, name, where = STAGES[stage]
    saver = Checkpointer(folder, asynchronous=asynchronous)
    saver.save(1, state(1))
    saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        if rank == where:
            patch.setattr(module, name, full_disk)

        def save() -> None:
            saver.save(2, state(2))
            saver.wait()

        text = text_of(UserError, save)
    saver.save(3, state(3))
    saver.close()
    assert latest(folder).step == 3
    assert set(local(load(latest(folder).path, state(3, meta=True))["w"]).tolist()) <= {3.0}
    return text


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_on_one_rank_fails_the_save_on_all(pool, tmp_path, stage, asynchronous):
    (text,) = set(pool.run(fails_on_one_rank, str(tmp_path), stage, asynchronous))
    where = STAGES[stage][2]
    expected = f"the checkpoint of step 2 (4e-08 GB) could not be saved to {tmp_path} on rank {where}: No space left"
    assert text.startswith(expected) and text.endswith("; step 1 is still whole"), text
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def check_fails_at_the_same_step(rank: int, folder: str) -> int:
    saver = Checkpointer(folder)
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(storage.os, "fsync", lambda fd: (time.sleep(0.3), full_disk()))
        else:
            patch.setattr(storage.os, "fsync", lambda fd: (time.sleep(rank * 0.1), fsync(fd)))
        saver.save(1, state(1))
        for step in range(1000):
            try:
                saver.check()
            except UserError as error:
                assert "on rank 1: No space left" in str(error)
                saver.check()  # told once
                saver.close()
                return step
            time.sleep(0.01 * (rank + 1))
    raise AssertionError("never told")


def test_check_tells_all_ranks_in_the_same_call(pool, tmp_path):
    (step,) = set(pool.run(check_fails_at_the_same_step, str(tmp_path)))
    assert 0 < step < 1000


def bug(*_: object) -> None:
    raise ZeroDivisionError("a bug")


def mistakes_of_one_rank(rank: int, folder: str) -> None:
    for asynchronous in (False, True):
        saver = Checkpointer(folder, asynchronous=asynchronous)

        def save(step: int, tensors: Any) -> None:
            saver.save(step, tensors)
            saver.wait()

        wrong = {"w": 3} if rank == 2 else state(1)
        if rank == 2:
            assert "w is a int" in text_of(TypeError, save, 1, wrong)
        else:
            assert "on rank 2: TypeError: w is a int" in text_of(RankFailed, save, 1, wrong)
        assert "different steps: [0, 1, 2, 3]" in text_of(ValueError, save, rank, state(1))
        for module, name in ((storage, "_own_files"), (storage._Writer, "storage_meta")):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 3:
                    patch.setattr(module, name, bug)
                if rank == 3 and name == "_own_files":
                    assert "a bug" in text_of(ZeroDivisionError, save, 1, state(1))
                else:
                    assert "on rank 3: ZeroDivisionError: a bug" in text_of(RankFailed, save, 1, state(1))


def test_mistakes_of_one_rank_do_not_hold_up_the_others(pool, tmp_path):
    pool.run(mistakes_of_one_rank, str(tmp_path))
    assert names(tmp_path) == []


def folder_of_its_own(rank: int, folder: str) -> str:
    return text_of(UserError, Checkpointer, Path(folder) / ("here" if rank < 3 else "there"))


def folder_without_permission(rank: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(checkpointer.tempfile, "TemporaryFile", full_disk)
        return text_of(UserError, Checkpointer, folder)


def test_a_folder_that_some_ranks_cannot_use_is_known_before_training(pool, tmp_path):
    (text,) = set(pool.run(folder_of_its_own, str(tmp_path)))
    assert text.startswith(f"on rank 3: cannot write checkpoints to {tmp_path}/there: what rank 0 writes there")
    (text,) = set(pool.run(folder_without_permission, str(tmp_path / "locked")))
    assert text.startswith(f"on rank 1: cannot write checkpoints to {tmp_path}/locked: No space left")
    (tmp_path / "file").touch()
    (text,) = set(pool.run(folder_that_is_a_file, str(tmp_path / "file")))
    assert text.startswith(f"cannot write checkpoints to {tmp_path}/file: File exists")  # rank 0's, for all
    assert names(tmp_path / "here") == names(tmp_path / "locked") == []


def folder_that_is_a_file(rank: int, folder: str) -> str:
    return text_of(UserError, Checkpointer, folder)


# Finding and loading


def save_two(rank: int, folder: str) -> None:
    saver = Checkpointer(folder, asynchronous=False)
    for step in (1, 2):
        saver.save(step, state(step))


def finds(rank: int, folder: str, blind: int) -> tuple[int, list[str]]:
    inspect = storage.inspect

    def damaged(path: Path) -> storage.Metadata:
        if path.name.endswith("2"):
            raise storage.Damaged("__0_0.distcp is missing")
        return inspect(path)

    notices: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == blind:
            patch.setattr(storage, "inspect", damaged)
        found = latest(folder, notices.append)
    assert found.path == Path(folder) / f"step-{found.step:08d}"
    return found.step, notices


@pytest.mark.parametrize("blind, step", [(3, 2), (0, 1)])
def test_ranks_that_see_different_files_agree(pool, tmp_path, blind, step):
    pool.run(save_two, str(tmp_path))
    (tmp_path / "step-00000003.tmp-0123456789ab").mkdir()
    answers = pool.run(finds, str(tmp_path), blind)
    assert [found for found, _ in answers] == [step] * RANKS
    assert ["partial" in notice or "damaged" in notice for notice in answers[0][1]] == [True] * (3 - step)
    assert [notices for _, notices in answers[1:]] == [[]] * 3


def finds_nothing(rank: int, folder: str) -> str | None:
    assert latest(Path(folder) / "none") is None
    return text_of(UserError, latest, folder)


def loads(rank: int, folder: str, fault: str) -> str:
    like = state(2, meta=True)
    with pytest.MonkeyPatch.context() as patch:
        if fault == "unreadable" and rank == 2:
            patch.setattr(storage._Reader, "read_data", full_disk)
        if fault == "model" and rank == 1:
            like = {"w": like["w"], "new": torch.ones(1)}
        return text_of(UserError, load, Path(folder) / "step-00000002", like)


def test_a_load_fails_on_all_ranks_or_none(pool, tmp_path):
    pool.run(save_two, str(tmp_path))
    (text,) = set(pool.run(loads, str(tmp_path), "model"))
    assert text.startswith("on rank 1: ") and "new float32[1] is not in it" in text
    (text,) = set(pool.run(loads, str(tmp_path), "unreadable"))
    assert text.startswith("on rank 2: ") and "cannot be read: No space left" in text
    file = tmp_path / "step-00000002" / "__3_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (text,) = set(pool.run(loads, str(tmp_path), "flipped"))
    assert "bytes of __3_0.distcp have changed" in text and "move it away to use step-00000001" in text
    file.unlink()
    (text,) = set(pool.run(loads, str(tmp_path), "missing"))
    assert text.startswith("the checkpoint ") and "cannot be used: __3_0.distcp is missing" in text
    (tmp_path / "step-00000001" / ".metadata").unlink()
    (text,) = set(pool.run(finds_nothing, str(tmp_path)))
    assert "no checkpoint in" in text


# Ranks that end or hang


def one_is_late(rank: int, folder: str) -> tuple[str, float]:
    saver = Checkpointer(folder, asynchronous=True, timeout=timedelta(seconds=1))
    time.sleep(2.5 if rank == 3 else 0)
    began = time.monotonic()

    def save() -> None:
        saver.save(1, state(1))
        saver.wait()

    return text_of(UserError, save), time.monotonic() - began


def test_a_rank_that_comes_too_late_is_given_up_and_learns_of_it(pool, tmp_path):
    for text, took in pool.run(one_is_late, str(tmp_path)):
        assert "step 1 (4e-08 GB) could not be saved" in text and "a rank has ended or has not answered" in text
        assert took < 2.4
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys, tempfile, time
from datetime import timedelta
import torch
import torch._dynamo  # half a second for the first DTensor, which every child would need again
import torch.distributed as dist
from checkpoint_helpers import changes_disk, place, whole_step
from torch.distributed.tensor import Shard, init_device_mesh
from train.checkpoint import Checkpointer, latest
from train.errors import UserError

folder, asynchronous = sys.argv[1], sys.argv[2] == "True"
like = {"w": torch.zeros(1001), "step": torch.tensor(0)}
state = lambda step: {"w": torch.full((1001,), float(step)), "step": torch.tensor(step)}
Checkpointer(folder, 1, asynchronous=False).save(10, state(10))

def rank_main(rank, store, victim, point, step):
    calls = 0
    def count(*_):
        nonlocal calls
        calls += 1
        if calls > point:
            os.kill(os.getpid(), signal.SIGKILL)
    def hook(event, args):
        if changes_disk(event, args, folder):
            count()
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    placed = {"w": place(state(step)["w"], mesh, Shard(0)), "step": state(step)["step"]}
    checkpointer = Checkpointer(folder, 1, asynchronous, timeout=timedelta(seconds=20))
    if rank == victim:
        for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"):
            original = getattr(dist, name)
            setattr(dist, name, lambda *a, original=original, **k: (count(), original(*a, **k))[1])
        sys.addaudithook(hook)
    try:
        checkpointer.save(step, placed)
        checkpointer.close()
    except UserError as error:
        assert "a rank has ended" in str(error), error
        os._exit(7)
    os._exit(0)

deaths, refused = 0, 0
for victim in (0, 1):
    step, point, done = latest(folder, lambda _: None).step, 0, False
    while not done:
        step = latest(folder, lambda _: None).step + 1
        store, began, pids = tempfile.mktemp(), time.monotonic(), []
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(rank, store, victim, point, step)
                finally:
                    os._exit(1)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        assert time.monotonic() - began < 15, "somebody waited for the dead"
        done = not os.WIFSIGNALED(statuses[victim])
        other = os.WEXITSTATUS(statuses[1 - victim])
        assert other in (0, 7) and not os.WIFSIGNALED(statuses[1 - victim]), statuses
        found = whole_step(folder, like, step, done)
        assert found == step or other == 7, "a rank took the cut-off save for done"
        deaths += not done
        refused += found < step
        point += 1
print(deaths, refused)
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_ranks_leave_a_whole_checkpoint(tmp_path, asynchronous):
    """Case K5: rank 0 and then rank 1 kills itself before every call that changes the disk or meets the others."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run_python(KILLED, tmp_path / "checkpoints", asynchronous, env=environment)
    assert done.returncode == 0, done.stderr
    deaths, refused = map(int, done.stdout.split())
    assert deaths >= 25 and 15 <= refused < deaths


def test_what_is_sent_to_other_ranks_survives_a_pickle():
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a}{b}")

    try:
        try:
            full_disk()
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 (as torch.save does)
    except RuntimeError as error:
        covered = error
    assert isinstance(portable(covered), OSError) and portable(covered).errno == 28
    assert str(portable(Odd(1, 2))) == "Odd: 12" and type(portable(Odd(1, 2))) is RuntimeError
    assert type(portable(Unreachable("x"))) is UserError


def test_one_process_is_alone(tmp_path):
    ranks = Ranks.of_new_group(timedelta(seconds=1))
    assert ranks.alone and (ranks.rank, ranks.size) == (0, 1)
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ranks.each(bug)
