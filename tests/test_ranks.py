"""Runs over ranks: the same numbers, and one voice. Real Gloo ranks; test_rank_failures.py has how they fail."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
import test_loop
import torch
import torch.distributed as dist

from train import loop
from train.cli import main
from train.config_text import ConfigError
from train.distributed import disagreements, start
from train.errors import UserError
from train.metrics import read_metrics

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def args(corpus, out, *more):
    return test_loop.args(corpus, out, "--model.n-kv-heads", 2, *more)


# Ranks as forks of a process that has loaded everything: they cost a tenth of a second, not five.


@attrs.frozen
class Ended:
    status: list[int]
    """The exit status of each rank."""
    said: str
    """What all of them printed."""


def as_ranks(size, function, *arguments, folder, timeout=60) -> Ended:
    """Runs ``function(*arguments)``, whose value is the exit status, on ranks that meet as those of torchrun do."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.loop", "torch.distributed.tensor"])
    said = folder / "said.txt"
    processes = [
        context.Process(target=_rank, args=(rank, size, store.port, said, function, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        status = [process.exitcode for process in processes]
        assert None not in status, f"ranks {status} did not end: {said.read_text()}"
        return Ended(status, said.read_text())
    finally:
        for process in processes:
            process.kill()


def _rank(rank, size, port, said, function, arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


# Agreement -------------------------------------------------------------------------------------------------------


def test_a_disagreement_names_the_fact_its_values_and_the_ranks():
    same = {"seed": "0", "train.steps": "9"}
    assert disagreements([same, dict(reversed(same.items()))]) == []
    assert disagreements([same, same, {**same, "seed": "1"}, same, {"seed": "0"}]) == [
        "seed: 0 on ranks 0-1, 3-4, 1 on rank 2",
        "train.steps: 9 on ranks 0-3, nothing on rank 4",
    ]


def test_alone_there_is_nothing_to_agree_on():
    with start(1, env={}) as ranks:
        assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True) and not dist.is_initialized()
        assert ranks.maxima(2, 1) == [2, 1] and ranks.gather("x") == ["x"] and ranks.from_first(5) == 5
        ranks.agree({"seed": 0}, "configuration")
        ranks.wait()
        with pytest.raises(UserError, match="no room"):
            ranks.on_first(_no_room)


def _no_room():
    raise UserError("no room")


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_half_an_environment_is_refused(missing):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match=f"{missing}='' is no number, beside WORLD_SIZE=2"):
        with start(1, {name: value for name, value in env.items() if name != missing}):
            pass


def test_ranks_that_do_not_come_are_not_waited_for_longer_than_said():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = "import sys; from train.distributed import start\nwith start(1): pass"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV | env | where, capture_output=True, text=True, timeout=60
    )
    assert done.returncode and f"rank 0 of 2 could not meet the others at 127.0.0.1:{store.port}" in done.stderr
    assert time.monotonic() - begin < 40


def _agree() -> int:
    with start(20) as ranks:
        assert ranks.maxima(ranks.rank, -ranks.rank, 2**53 - ranks.size + ranks.rank) == [2, 0, 2**53 - 1]
        assert ranks.gather(ranks.rank * 2) == [0, 2, 4]
        assert ranks.from_first(f"of {ranks.rank}") == "of 0"
        assert ranks.on_first(lambda: "mine") == ("mine" if ranks.is_first else None)
        with pytest.raises(UserError, match="no room"):
            ranks.on_first(_no_room)
        with pytest.raises(ConfigError) as caught:
            ranks.raise_any(ConfigError(["a: 1", "b: 2"]) if ranks.rank else None)
        assert caught.value.problems == ("a: 1", "b: 2")
        with pytest.raises(ConfigError, match="the ranks differ in their data: tokens: 7 on ranks 0, 2, 8 on rank 1"):
            ranks.agree({"tokens": 8 if ranks.rank == 1 else 7}, "data")
        ranks.wait()
    assert not dist.is_initialized()
    return 0


def test_agreement_of_ranks(tmp_path):
    ended = as_ranks(3, _agree, folder=tmp_path)
    assert ended.status == [0, 0, 0], ended.said


# Numbers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main(args(corpus, out, "--train.steps", 4, "--checkpoint.every", 2)) == 0
    return out


def assert_same_losses(out, alone):
    a, b = read_metrics(out), read_metrics(alone)
    assert [row["step"] for row in a] == [row["step"] for row in b]
    for name in ("loss", "held_out_loss", "grad_norm", "tokens"):
        values = [[row[name] for row in rows if name in row] for rows in (a, b)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name


def test_a_run_of_nproc_ranks(corpus, alone, tmp_path):
    """The whole way from the command line: the numbers of one device, each file and each line once."""
    out = tmp_path / "run"
    done = command(args(corpus, out, "--nproc", 2, "--train.steps", 4, "--mesh.fsdp", 2))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("step 4/4") == 1 and "on 2 x cpu: fsdp=2" in done.stdout
    assert done.stdout.count("a sample after 4 steps") == 1
    assert_same_losses(out, alone)
    row = read_metrics(out)[-1]
    assert row["tokens_per_s"] == pytest.approx(2 * row["tokens_per_s_per_device"]) and row["memory_peak_bytes"] > 0
    assert main(["sample", str(out), "--tokens", "3"]) == 0, "of a run on a mesh, by one process"


def command(argv, **options):
    return subprocess.run(
        [sys.executable, "-m", "train", *argv], env=ENV, capture_output=True, text=True, timeout=120, **options
    )


def test_one_signal_stops_all_ranks_and_another_mesh_goes_on(corpus, alone, tmp_path):
    """K1: both halves of a run on different meshes are the run of one device."""
    out = tmp_path / "run"
    options = args(corpus, out, "--train.steps", 4)
    stopped = as_ranks(2, _stopped_in_step_two, [*options, "--mesh.fsdp", "2"], folder=tmp_path)
    assert stopped.status == [128 + signal.SIGTERM] * 2, stopped.said
    assert stopped.said.count("stopped by SIGTERM at step 2") == 1
    ended = as_ranks(2, main, [*options, "--mesh.tp", "2"], folder=tmp_path)
    assert ended.status == [0, 0], ended.said
    assert "going on from step 2" in ended.said and "mesh.fsdp: 2 -> 1" in ended.said
    # The step that was stopped at is saved and not validated.
    losses = [[row["loss"] for row in read_metrics(folder)] for folder in (out, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 4


def _stopped_in_step_two(argv) -> int:
    """A SIGTERM that reaches one rank alone, in the middle of step 2."""
    make = loop.train_batches

    def batches(*of, **rows):
        for number, batch in enumerate(make(*of, **rows), 1):
            if number == 2 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    loop.train_batches = lambda *of, **rows: _WithWait(batches(*of, **rows))
    return main(argv)


class _WithWait:
    """A generator as a Loader."""

    wait_s = 0.0

    def __init__(self, batches):
        self.__next__ = self._next = batches.__next__
        self.close = batches.close

    def __next__(self):
        return self._next()


def test_d3_validation_that_does_not_divide(tmp_path):
    """5 samples over dp=2, validated every 2 steps: no rank waits for another, and every label counts once."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefg " * 10)  # 81 tokens with the end of the document, and so 5 samples of 16
    options = [
        "--data.eval-path", text, "--train.steps", 4, "--train.accumulation", 1, "--train.batch-size", 2,
        "--train.eval-batches", 9, "--model.dropout", 0,
    ]  # fmt: skip
    assert main(args(text, tmp_path / "alone", *options)) == 0
    ended = as_ranks(2, _counted, args(text, tmp_path / "ranks", *options, "--mesh.dp", 2), folder=tmp_path)
    assert ended.status == [0, 0], ended.said
    counted = sorted(re.findall(r"^rank (.): (.*) labels in (.) batches$", ended.said, re.MULTILINE))
    assert counted == [("0", "80", "3")] * 2 + [("1", "80", "3")] * 2
    assert_same_losses(tmp_path / "ranks", tmp_path / "alone")


def _counted(argv) -> int:
    evaluate = loop._evaluate

    def counting(this, eval_step):
        counts = []

        def step(params, batch):
            sums = eval_step(params, batch)
            counts.append(int(sums["tokens"]))
            return sums

        loss = evaluate(this, step)
        os.write(1, f"rank {this.ranks.rank}: {sum(counts)} labels in {len(counts)} batches\n".encode())
        return loss

    loop._evaluate = counting
    return main(argv)
