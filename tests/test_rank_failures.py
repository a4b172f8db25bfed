"""Ranks that fail, alone or together: who is named, once, and that all of them end. Real Gloo ranks."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import psutil
import pytest
from test_ranks import ENV, args, as_ranks
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from train import loop, spawn
from train.cli import main
from train.config_text import ConfigError
from train.errors import UserError
from train.launch import launch_command


def failing(corpus, tmp_path, function):
    options = args(corpus, tmp_path / "run", "--train.steps", 4, "--mesh.fsdp", 2, "--jit.no-enabled")
    return as_ranks(2, function, options, folder=tmp_path)


def _as_rank_one(argv, change) -> int:
    if os.environ["RANK"] == "1":
        change(argv)
    return main(argv)


def _differing(argv) -> int:
    return _as_rank_one(argv, lambda argv: argv.extend(["--optim.learning-rate", "7e-5", "--data.no-shuffle"]))


def test_ranks_of_different_configurations_do_not_start(corpus, tmp_path):
    ended = failing(corpus, tmp_path, _differing)
    assert ended.status == [2, 2]
    said = "functitan: error: the ranks differ in their configuration: "
    assert ended.said.splitlines() == [
        f"{said}data.shuffle: True on rank 0, False on rank 1",
        f"{said}optim.learning_rate: 0.004 on rank 0, 7e-05 on rank 1",
    ]
    assert not (tmp_path / "run").exists()


def _other_data(argv) -> int:
    def change(argv):
        build = loop.build_data
        loop.build_data = lambda config, *rest: build(attrs.evolve(config, held_out=0.5), *rest)

    return _as_rank_one(argv, change)


def test_ranks_that_read_different_text_do_not_start(corpus, tmp_path):
    ended = failing(corpus, tmp_path, _other_data)
    assert ended.status == [2, 2] and len(ended.said.splitlines()) == 1
    assert "the ranks differ in their data (--data.path): tokens: " in ended.said


def _raising(argv, error) -> int:
    """Rank 1 fails in step 2, when the other one is already waiting for it."""

    def change(argv):
        place, count = loop._placed, iter(range(99))

        def placed(this, rows):
            if next(count) == 1:
                time.sleep(0.5)
                raise error
            return place(this, rows)

        loop._placed = placed

    return _as_rank_one(argv, change)


def _user_error(argv) -> int:
    return _raising(argv, UserError("the disk of this machine is full"))


def _config_error(argv) -> int:
    return _raising(argv, ConfigError(["data.path: has changed"]))


@pytest.mark.parametrize(
    ("function", "status", "line"),
    [(_user_error, 1, "the disk of this machine is full"), (_config_error, 2, "data.path: has changed")],
)
def test_a_mistake_on_one_rank_is_one_line_and_ends_all(corpus, tmp_path, function, status, line):
    ended = failing(corpus, tmp_path, function)
    assert ended.status == [status, status], ended.said
    assert [text for text in ended.said.splitlines() if "error" in text] == [f"functitan: error: {line}"]
    assert "Traceback" not in ended.said


FAULTY = """
import os, signal, sys, time
from train import loop
from train.cli import main
place, count = loop._placed, iter(range(99))
def placed(this, rows):
    if next(count) == 1 and this.ranks.rank == 1:
        time.sleep(0.5)
        {fault}
    return place(this, rows)
loop._placed = placed
sys.exit(main(sys.argv[1:]))
"""

RUN = "import sys; from train.spawn import run_ranks; sys.exit(run_ranks(sys.argv[1:], 2, 60))"


def run_faulty(corpus, tmp_path, fault):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(fault=fault))
    options = args(corpus, tmp_path / "run", "--train.steps", 4, "--mesh.fsdp", 2, "--jit.no-enabled")
    return subprocess.run(
        [sys.executable, "-c", RUN, str(script), *options], env=ENV, capture_output=True, text=True, timeout=90
    )


def test_a_bug_on_one_rank_is_the_only_traceback(corpus, tmp_path):
    done = run_faulty(corpus, tmp_path, "raise ZeroDivisionError('injected')")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "Connection" not in done.stderr, done.stderr
    assert "[rank1]: ZeroDivisionError: injected" in done.stderr.splitlines()


FAULTY_STAGE = """
import os, sys
from functitan.compiler.pipeline import executor
from train.cli import main
backward, count = executor._Run._backward, iter(range(99))
def failing(this, *action):
    if next(count) == 1 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("injected")
    backward(this, *action)
executor._Run._backward = failing
sys.exit(main(sys.argv[1:]))
"""


def test_a_stage_that_fails_ends_the_stages_that_wait_for_it(corpus, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY_STAGE)
    options = args(corpus, tmp_path / "run", "--train.steps", 4, "--mesh.pp", 2, "--model.n-layers", 2,
                   "--pipeline.microbatches", 2)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script), *options], env=ENV, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1
    assert "[rank1]: ZeroDivisionError: injected" in done.stderr.splitlines()
    assert done.stderr.count("Traceback") == 1, done.stderr


def test_a_rank_that_is_killed_is_told_by_the_launcher(corpus, tmp_path):
    done = run_faulty(corpus, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    told = "functitan: error: rank 1 was killed by SIGKILL; the system does that when memory is short"
    assert done.stderr.splitlines() == [told]
    assert done.returncode == 128 + signal.SIGKILL


def test_a_signal_to_the_launcher_stops_the_ranks_with_a_checkpoint(corpus, tmp_path):
    fault = "print('ranks', os.getpid(), flush=True); os.kill(os.getppid(), signal.SIGTERM)"
    done = run_faulty(corpus, tmp_path, fault)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    stopped = re.search(r"stopped by SIGTERM at step (\d)", done.stdout)
    assert stopped and (tmp_path / "run" / "checkpoints" / f"step-0000000{stopped[1]}").is_dir()
    assert "Traceback" not in done.stderr, done.stderr
    assert not psutil.pid_exists(int(re.search(r"ranks (\d+)", done.stdout)[1]))


def _killed(argv) -> int:
    def change(argv):
        place, count = loop._placed, iter(range(99))
        loop._placed = lambda *of: os.kill(os.getpid(), signal.SIGKILL) if next(count) == 1 else place(*of)

    return _as_rank_one(argv, change)


def _hung(argv) -> int:
    def change(argv):
        place, count = loop._placed, iter(range(99))
        loop._placed = lambda *of: place(*of) if next(count) < 1 else (time.sleep(12), os._exit(70))

    return _as_rank_one([*argv, "--train.timeout-s", "4"], change)


@pytest.mark.parametrize(("function", "end"), [(_killed, -signal.SIGKILL), (_hung, 70)])
def test_ranks_that_are_left_behind_name_the_one_that_is_gone(corpus, tmp_path, function, end):
    """Where no launcher of ours is there to say it."""
    begin = time.monotonic()
    ended = failing(corpus, tmp_path, function)
    assert ended.status == [1, end] and time.monotonic() - begin < 40, ended.said
    (line,) = [text for text in ended.said.splitlines() if "error" in text]
    assert line.startswith("functitan: error: rank 1 ended or did not answer within ") and "--train.timeout-s" in line
    assert "Traceback" not in ended.said and "[c10d]" not in ended.said and line.endswith(")"), ended.said


def _no_room(argv) -> int:
    """Rank 0 alone meets with an error of the system."""

    def refuse(config):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "config.yaml")

    loop.write_config = refuse
    return main(argv)


def test_an_error_of_the_system_on_the_first_rank_is_one_line(corpus, tmp_path):
    ended = failing(corpus, tmp_path, _no_room)
    assert ended.status == [1, 1]
    assert [text for text in ended.said.splitlines() if "rror" in text] == [
        "functitan: error: config.yaml: No space left on device"
    ]


def _slow_save(argv) -> int:
    """Rank 1 fails while both write a checkpoint, for which rank 0 would take a minute."""
    loop.LAST_SAVE_S = 2
    if os.environ["RANK"] == "0":
        loop.checkpoint.storage.write = lambda *of: time.sleep(60)
    return _user_error([*argv, "--checkpoint.every", "1"])


def test_a_save_under_way_does_not_hold_up_the_end(corpus, tmp_path):
    begin = time.monotonic()
    ended = failing(corpus, tmp_path, _slow_save)
    assert ended.status == [1, 1] and time.monotonic() - begin < 30, ended.said
    assert [text for text in ended.said.splitlines() if "rror" in text] == [
        "functitan: error: the disk of this machine is full"
    ]


# The launcher ----------------------------------------------------------------------------------------------------


def failure(rank, exitcode, after=0):
    failed = ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file="none")
    failed.timestamp = 1_000_000 + after
    return failed


@pytest.mark.parametrize(
    ("failures", "status", "blamed"),
    [
        ({0: (-signal.SIGTERM,), 1: (-signal.SIGKILL,)}, 128 + signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        ({0: (1,), 1: (-signal.SIGSEGV,)}, 128 + signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),
        ({0: (-signal.SIGTERM,), 1: (2,)}, 2, ""),
        ({0: (1,), 1: (-signal.SIGKILL, 30)}, 1, ""),  # the launcher's own, of a rank that did not end
        ({0: (-signal.SIGTERM, 3), 1: (-signal.SIGTERM,)}, 128 + signal.SIGTERM, "rank 1 was killed by SIGTERM"),
    ],
)
def test_the_launcher_blames_who_was_first(capsys, failures, status, blamed):
    assert spawn._told({rank: failure(rank, *how) for rank, how in failures.items()}) == status
    said = capsys.readouterr().err
    assert blamed in said and bool(said) == bool(blamed)


def test_a_train_py_of_the_working_folder_is_not_run(corpus, tmp_path):
    (tmp_path / "train.py").write_text("print('the decoy')")
    options = args(corpus, tmp_path / "run", "--train.steps", 1, "--mesh.fsdp", 2, "--jit.no-enabled")
    functitan = [sys.executable, "-P", "-c", "import sys; from train.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*functitan, *options, "--nproc", "2"], env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "") and "decoy" not in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_the_line_of_launch_runs_from_any_folder(tmp_path):
    """With ranks that are refused: what they print shows which program they are, and is printed once."""
    (tmp_path / "train.py").write_text("print('the decoy')")
    line = launch_command(["--train.steps", "0", "--mesh.fsdp", "2"], {}, nproc=2)
    env = ENV | {"PATH": str(Path(sys.executable).parent) + os.pathsep + ENV["PATH"]}
    done = subprocess.run(shlex.split(line), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1 and "decoy" not in done.stdout
    assert done.stderr.count("functitan: error: train.steps: is 0") == 1, done.stderr


def test_a_mistake_of_rank_one_alone_is_told(tmp_path):
    code = "import os, sys; from train.cli import main; steps = ['9', '0'][int(os.environ['RANK'])]\n"
    code += "sys.exit(main(['train', '--mesh.fsdp', '2', '--train.steps', steps]))"
    done = subprocess.run(
        [sys.executable, "-c", RUN, "-c", code], env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 2
    assert [line.partition("; give")[0] for line in done.stderr.splitlines()] == ["functitan: error: train.steps: is 0"]
