"""Runs from the command line: resume, stop, refusals. Tiny models; several runs in one process."""

import contextlib
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
from train.build import build, build_schedule
from train.cli import main
from train.metrics import read_metrics
from train.recipes import RECIPES, recipe

TINY = [
    "debug", "--model.dim", "16", "--model.n-layers", "1", "--model.n-heads", "2", "--model.n-kv-heads", "1",
    "--model.hidden-dim", "32", "--model.dropout", "0.1", "--train.batch-size", "4", "--train.seq-len", "16",
    "--train.log-every", "1", "--train.eval-every", "2", "--train.eval-batches", "1", "--optim.warmup-steps", "1",
    "--train.accumulation", "2",
]  # fmt: skip


def args(corpus, out, *more):
    return ["train", *TINY, "--data.path", str(corpus), "--out", str(out), *map(str, more)]


def state_of(out: Path, step: int | None = None):
    config = configs.parse((out / "config.yaml").read_text())
    parts = build(config)
    folder = out / "checkpoints"
    path = checkpoint.latest(folder).path if step is None else checkpoint.path_of(folder, step)
    return checkpoint.load(path, ft.abstract_state(parts.plan, parts.optimizer))


def assert_same(a, b):
    assert tree.structure(a) == tree.structure(b)
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


@pytest.mark.parametrize(
    ("first", "second", "interrupted"),
    [
        ("SIGTERM", "SIGTERM", False),
        ("SIGINT", "SIGINT", True),
        ("SIGTERM", "SIGINT", True),
        ("SIGINT", "SIGTERM", True),
    ],
)
def test_a_second_signal(first, second, interrupted):
    with loop._stop_signals() as received:
        signal.raise_signal(signal.Signals[first])
        assert received == [signal.Signals[first]]
        with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            signal.raise_signal(signal.Signals[second])


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

    original = loop._placed
    count = iter(range(1, 100))

    def placed(this, rows):
        scale = torch.full(rows["tokens"].shape, float("inf") if next(count) == 3 else 1.0)
        return original(this, rows | {"scale": scale})

    monkeypatch.setattr(loop, "make_train_step", poisoned)
    monkeypatch.setattr(loop, "_placed", placed)
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
    make = loop.make_train_step

    def hopeless(model, *rest):
        return make(lambda params, batch, key=None: model(params, batch, key=key) * torch.inf, *rest)

    monkeypatch.setattr(loop, "make_train_step", hopeless)
    assert main(args(corpus, tmp_path / "run", "--train.steps", 9)) == 1
    assert "the run has diverged. The same command with a lower" in capsys.readouterr().err


def test_nothing_is_saved_while_steps_change_nothing(corpus, tmp_path, monkeypatch, capsys):
    """A state from which only skipped steps follow must not push the good ones out."""
    out = tmp_path / "run"
    options = args(corpus, out, "--checkpoint.every", 1, "--checkpoint.keep", 2, "--train.log-every", 3)
    assert main([*options, "--train.steps", "2"]) == 0
    good = state_of(out)
    make = loop.make_train_step

    def hopeless(model, *rest):
        return make(lambda params, batch, key=None: model(params, batch, key=key) * torch.inf, *rest)

    monkeypatch.setattr(loop, "make_train_step", hopeless)
    assert main([*options, "--train.steps", "9"]) == 0
    assert "step 9: not saved, since the last 7 steps changed nothing" in capsys.readouterr().out
    newest = checkpoint.latest(out / "checkpoints")
    assert newest.step == 3  # one skipped step is a hiccup
    assert_same(state_of(out).params, good.params)


def test_parameters_that_are_not_finite_are_never_saved(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    options = args(corpus, out, "--checkpoint.every", 1, "--checkpoint.keep", 1, "--optim.schedule", "constant")
    assert main([*options, "--train.steps", "2"]) == 0
    good = state_of(out)
    make = loop.make_train_step

    def overflowing(*parts):
        step = make(*parts)

        def poisoned(state, batch):
            state, metrics = step(state, batch)
            return attrs.evolve(state, params=tree.map(lambda p: p * torch.inf, state.params)), metrics

        return poisoned

    monkeypatch.setattr(loop, "make_train_step", overflowing)
    assert main([*options, "--train.steps", "6"]) == 1
    error = capsys.readouterr().err
    assert "the parameters are not finite after step 3" in error and "goes on from step 2" in error
    assert_same(state_of(out), good)


def test_another_model_in_the_same_folder_is_refused(corpus, whole, capsys):
    before = (whole / "config.yaml").read_text()
    assert main(args(corpus, whole, "--train.steps", 4, "--model.rope-theta", "77")) == 1
    assert "model.rope_theta: 500000.0 -> 77.0" in capsys.readouterr().err
    assert (whole / "config.yaml").read_text() == before


@pytest.mark.parametrize("change", [("--optim.name", "sgd"), ("--optim.clip-norm", "None")])
def test_a_resume_that_is_refused_changes_nothing(corpus, whole, capsys, change):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert main([*args(corpus, whole, "--train.steps", 9), *change]) == 1
    assert "does not fit this model and optimizer" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}


def test_two_runs_in_one_folder_are_refused(corpus, whole, capsys):
    with loop.run_folder(whole):
        assert main(args(corpus, whole, "--train.steps", 9)) == 1
    assert "another process is training in" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_runs_of_any_length_have_a_schedule(schedule):
    """N2 for whole configurations: also shorter than the warm-up, the rate stays within 0 and the peak."""
    for name in RECIPES:
        config = recipe(name)
        for warmup in (0, 20):
            optim = attrs.evolve(config.optim, schedule=schedule, warmup_steps=warmup)
            for steps in (1, warmup, warmup + 1, 200):
                rate = build_schedule(optim, max(steps, 1))
                values = [float(rate(count)) for count in range(-1, 2 * steps + 1)]
                assert min(values) >= 0 and max(values) <= optim.learning_rate * (1 + 1e-6), (name, warmup, steps)


def test_a_failed_background_save_ends_the_run_soon(corpus, tmp_path, monkeypatch, capsys):
    real = checkpoint.storage.write

    def full(folder, step, *rest):
        if step == 2:
            raise OSError(28, "No space left on device")
        return real(folder, step, *rest)

    monkeypatch.setattr(checkpoint.storage, "write", full)
    out = tmp_path / "run"
    assert main(args(corpus, out, "--train.steps", 3000, "--checkpoint.every", 2, "--train.eval-every", 0)) == 1
    captured = capsys.readouterr()
    assert "checkpoint of step 2" in captured.err and "No space left" in captured.err
    assert read_metrics(out)[-1]["step"] < 1000


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
        (("--mesh.fsdp", "2"), 2, "fsdp=2"),
        (("--train.batch-size", "5"), 2, "accumulation"),
        (("--out", "/proc/nowhere"), 1, "/proc/nowhere"),
        (("--optim.learning-rate", "-1"), 2, "learning_rate"),
        (("--optim.weight-decay", "1e300"), 2, "weight_decay"),
        (("--train.batch-size", "2147483648"), 2, "train.batch_size"),
        (("--optim.warmup-steps", "99999999999999999999"), 2, "optim.warmup_steps"),
        (("--seed", "99999999999999999999"), 2, "seed"),
        (("--checkpoint.keep", "0"), 2, "checkpoint.keep"),
        (("--model.dim", "10000000000"), 2, "dim"),
        (("--out", "x" * 300), 1, "File name too long"),
        (("--out", ""), 2, "out"),
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
