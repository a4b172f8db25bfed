"""Runs from the command line: resume, stop, refusals. Tiny models; several runs in one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import functitan as ft
from functitan import tree
from train import checkpoint, loop
from train import config as configs
from train.build import build
from train.cli import main
from train.metrics import read_metrics

TINY = [
    "debug", "--model.dim", "16", "--model.n-layers", "1", "--model.n-heads", "2", "--model.n-kv-heads", "1",
    "--model.hidden-dim", "32", "--model.dropout", "0.1", "--train.batch-size", "4", "--train.seq-len", "16",
    "--train.log-every", "1", "--train.eval-every", "2", "--train.eval-batches", "1", "--optim.warmup-steps", "1",
    "--train.accumulation", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return path


def args(corpus, out, *more):
    return ["train", *TINY, "--data.path", str(corpus), "--out", str(out), *map(str, more)]


def state_of(out: Path, step: int | None = None):
    config = configs.parse((out / "config.yaml").read_text())
    parts = build(config)
    folder = out / "checkpoints"
    path = checkpoint.latest(folder).path if step is None else checkpoint.path_of(folder, step)
    return checkpoint.load(path, ft.abstract_state(parts.plan, parts.optimizer))


def assert_same(a, b):
    for (path, x), y in zip(tree.leaves_with_path(a), tree.leaves(b)):
        assert torch.equal(x, y), path


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """Four steps without interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(args(corpus, out, "--train.steps", 4)) == 0
    return out


def test_a_run_leaves_what_it_promises(whole, capsys):
    rows = read_metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "memory_bytes", "mfu", "data_wait_s"):
        assert name in rows[-1], name
    assert rows[-1]["tokens_per_s"] > 0 and rows[-1]["mfu"] is None
    assert ["held_out_loss" in row for row in rows] == [False, True, False, True]
    assert all(json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines())
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "config.yaml").exists() and list((whole / "tensorboard").iterdir())
    assert main(["sample", str(whole), "--prompt", "line 1", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("line 1")


def test_resume_in_a_new_process_is_bit_equal(corpus, whole, tmp_path):
    """R2, and the data goes on with the next sample: 2 steps, then 2 more in another process."""
    out = tmp_path / "run"
    # The learning rate follows from train.steps, so the first part is stopped by a signal and not by fewer steps.
    first = subprocess.run(
        [sys.executable, "-c", STOP_AFTER_TWO, *args(corpus, out, "--train.steps", 4)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )  # fmt: skip
    assert first.returncode == 128 + signal.SIGTERM, first.stderr
    assert "stopped by SIGTERM at step 2" in first.stdout
    assert int(state_of(out).step) == 2
    assert main(args(corpus, out, "--train.steps", 4)) == 0
    assert_same(state_of(out), state_of(whole))
    assert [r["loss"] for r in read_metrics(out)] == [r["loss"] for r in read_metrics(whole)]


STOP_AFTER_TWO = """
import os, signal, sys
from train import loop
from train.cli import main
step = loop._Meter.add
def add(self, at, *rest, **kwargs):
    step(self, at, *rest, **kwargs)
    if at == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # arrives before step 2, which is finished and saved
loop._Meter.add = add
sys.exit(main(sys.argv[1:]))
"""


def test_more_steps_go_on_where_it_finished(corpus, tmp_path, capsys):
    """K4: finish at step 2, ask for 3 more, run again: the optimizer's state is that of step 2."""
    out = tmp_path / "run"
    options = args(corpus, out, "--optim.schedule", "constant")
    assert main([*options, "--train.steps", "2"]) == 0
    before = state_of(out)
    assert main([*options, "--train.steps", "2"]) == 0
    assert "all 2 steps are done already" in capsys.readouterr().out
    assert_same(state_of(out), before)
    assert main([*options, "--train.steps", "5"]) == 0
    text = capsys.readouterr().out
    assert "going on from step 2" in text and "train.steps: 2 -> 5" in text
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5]
    straight = tmp_path / "straight"
    assert main([*args(corpus, straight, "--optim.schedule", "constant"), "--train.steps", "5"]) == 0
    assert_same(state_of(out), state_of(straight))


def test_the_config_file_runs_it_again(corpus, whole, tmp_path):
    out = tmp_path / "again"
    assert main(["train", "--config", str(whole / "config.yaml"), "--out", str(out)]) == 0
    assert_same(state_of(out), state_of(whole))
    assert configs.parse((out / "config.yaml").read_text()) == attrs.evolve(
        configs.parse((whole / "config.yaml").read_text()), out=out
    )


def test_without_jit_the_numbers_are_the_same(corpus, whole, tmp_path):
    out = tmp_path / "plain"
    assert main(args(corpus, out, "--train.steps", 4, "--jit.no-enabled")) == 0
    for a, b in zip(tree.leaves(state_of(out).params), tree.leaves(state_of(whole).params)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_non_finite_gradient_is_logged_and_changes_nothing(corpus, tmp_path, monkeypatch, capsys):
    """N1 in a whole run: infinite at step 3 of 4."""
    make = loop.make_train_step

    def poisoned(model, *rest):
        def scaled(params, batch, key=None):
            return model(params, batch, key=key) * batch["scale"][:, :, None]

        return make(scaled, *rest)

    original = loop._to
    count = iter(range(1, 100))

    def to(batch, device):
        scale = torch.full(batch["tokens"].shape, float("inf") if next(count) == 3 else 1.0)
        return original(batch | {"scale": scale}, device)

    monkeypatch.setattr(loop, "make_train_step", poisoned)
    monkeypatch.setattr(loop, "_to", to)
    out = tmp_path / "run"
    options = args(corpus, out, "--train.steps", 4, "--checkpoint.every", 1, "--checkpoint.keep", 9)
    assert main([*options, "--train.eval-every", "0", "--train.log-every", "4"]) == 0
    assert_same(state_of(out, 3).params, state_of(out, 2).params)
    assert_same(state_of(out, 3).opt_state, state_of(out, 2).opt_state)
    assert all(torch.isfinite(p).all() for p in tree.leaves(state_of(out, 4).params))
    text = capsys.readouterr().out
    assert "step 3: the gradient was not finite" in text and "1 of 4 steps were skipped" in text
    assert [row["step"] for row in read_metrics(out) if row["skipped"]] == [3]


def test_a_diverged_run_stops(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 2)
    out = tmp_path / "run"
    # A learning rate of 1e38 makes the parameters infinite in one step: every later gradient is not finite.
    options = args(corpus, out, "--train.steps", 9, "--optim.schedule", "constant")
    assert main([*options, "--optim.learning-rate", "1e38"]) == 1
    assert "the run has diverged" in capsys.readouterr().err


def test_another_model_in_the_same_folder_is_refused(corpus, whole, capsys):
    before = (whole / "config.yaml").read_text()
    assert main(args(corpus, whole, "--train.steps", 4, "--model.rope-theta", "77")) == 1
    assert "model.rope_theta: 500000.0 -> 77.0" in capsys.readouterr().err
    assert (whole / "config.yaml").read_text() == before


def test_a_damaged_newest_checkpoint_falls_back_with_a_notice(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    options = args(corpus, out, "--checkpoint.every", 2)
    assert main([*options, "--train.steps", "4"]) == 0
    expected = state_of(out, 4)
    newest = checkpoint.path_of(out / "checkpoints", 4)
    file = next(newest.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert main([*options, "--train.steps", "4"]) == 0
    text = capsys.readouterr().out
    assert "skipped the damaged checkpoint" in text and "going on from step 2" in text
    assert_same(state_of(out, 4), expected)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--train.step", "5"), 2, "train.steps"),
        (("--data.path", "/nowhere/x.txt"), 1, "/nowhere/x.txt"),
        (("--train.seq-len", "100000"), 1, "100001"),
        (("--model.vocab-size", "100"), 1, "100"),
        (("--mesh.fsdp", "2"), 1, "fsdp=2"),
        (("--train.batch-size", "5"), 2, "accumulation"),
        (("--out", "/proc/nowhere"), 1, "/proc/nowhere"),
        (("--optim.learning-rate", "-1"), 2, "learning_rate"),
        (("--jit.passes", "melt"), 2, "melt"),
    ],
)
def test_bad_input_is_one_clear_line(corpus, tmp_path, capsys, options, status, message):
    try:
        found = main([*args(corpus, tmp_path / "run", "--train.steps", "2"), *options])
    except SystemExit as exit:
        found = exit.code
    error = capsys.readouterr().err
    assert found == status and message in error and "Traceback" not in error, (found, error)
    if status == 1 or "functitan: error" in error:
        assert len(error.strip().splitlines()) == 1, error
