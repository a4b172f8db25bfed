"""The benchmark of long sequences measures what it says: all variants compute the same, and what does not is told."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from functitan import nn
from train import cli
from train.bench import long
from train.bench.long_work import GRADIENTS, METHODS, TORCH, Setting, inputs, variants
from train.bench.report import make_console
from train.bench.rounds import FIRST_STEPS, Figures, Work, measure
from train.bench.sharded import Rank
from train.config_text import ConfigError
from train.errors import UserError

TINY = Setting(seq_len=32, batch_size=2, heads=4, kv_heads=2, head_dim=8)
ON_CPU = ("jit@1", *METHODS, "torch-allgather+cpu", "torch-alltoall+cpu")
SENDS = {
    "jit@1": set(),
    "ring": {"all_to_all"},
    "all_gather": {"all_gather", "all_to_all"},  # as Gloo scatters sums
    "ulysses": {"all_to_all"},
    "torch-allgather+cpu": {"all_gather", "all_to_all"},  # the gradients go round in any case
    "torch-alltoall+cpu": {"all_to_all"},
}
"""Beside the all_reduce of the loss."""


def wanted():
    """The checksums of dq, dk and dv, and the loss, with all scores in memory."""
    x = inputs(TINY, torch.device("cpu"))
    qkv = [x[name].requires_grad_() for name in "qkv"]
    loss = (nn.attention(*qkv, causal=True, implementation="plain") * x["cotangent"]).sum()
    pairs = zip(torch.autograd.grad(loss, qkv), (x["q"], x["v"], x["k"]))
    return [(4 * grad.norm() + (grad * probe).sum()).item() for grad, probe in pairs] + [loss.item()]


def compare(folder, number):
    """On a rank: every variant against attention on one device, what it holds, and how it sends."""
    expected, held = wanted(), {}
    for name in ON_CPU:
        alone = name == "jit@1"
        store = f"{folder}/{name}{number if alone else ''}"
        work = variants()[name](TINY, Rank(0, 1, 1, store, 60) if alone else Rank(number, 2, 1, store, 60))
        assert [work.step() for _ in range(4)] == pytest.approx(expected, rel=1e-5), name
        with CommDebugMode() as watch:
            assert work.step() == pytest.approx(expected[-1], rel=1e-5), name
        sent = " ".join(str(op) for op, count in watch.get_comm_counts().items() if count)
        assert {kind for kind in ("all_to_all", "all_gather") if kind in sent} == SENDS[name], (name, sent)
        held[name] = work.state_bytes
        dist.destroy_process_group()
    assert held == {**dict.fromkeys(ON_CPU, held["jit@1"] // 2), "jit@1": held["jit@1"]}
    for i, rotate in enumerate(("allgather", "alltoall")):
        work = variants()[f"torch-{rotate}"](TINY, Rank(number, 2, 1, f"{folder}/{i}", 60))
        with pytest.raises(UserError, match="context_parallel does not run on cpu: Operator .*for_cpu"):
            work.step()
        dist.destroy_process_group()
    return Work(lambda: 0.0, 0)


def test_every_variant_computes_the_same_attention(tmp_path):
    """On a CPU: where context_parallel runs there as well, this fails and the variants +cpu can go."""
    assert not torch.cuda.is_available() and len(GRADIENTS) == FIRST_STEPS
    ranks = [functools.partial(compare, str(tmp_path), number) for number in range(2)]
    figures, failed = measure({"all": ranks}, rounds=1, steps=1, timeout=120)
    assert failed == {} and list(figures) == ["all"]


def test_the_command_prints_a_table_and_writes_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(cli.BENCHES, "long", "attention")
    path = tmp_path / "figures.json"
    options = ["--nproc", "2", "--seq-lens", "32", "--head-dim", "8", "--rounds", "2", "--steps", "1", "--threads", "1"]
    names = ["jit@1", "ring"]  # each takes seconds to start
    assert cli.main(["bench", "long", *options, "--json", str(path), "--only", *names]) == 0
    data = json.loads(path.read_text())
    assert list(data["lengths"]) == ["32"] and data["threads_per_rank"] == 1
    length = data["lengths"]["32"]
    assert list(length["figures"]) == names and length["disagree"] == [] and length["failed"] == {}
    for name in names:
        assert length["checksums"][name] == pytest.approx(length["checksums"]["jit@1"], rel=1e-5)
        assert list(length["checksums"][name]) == ["dq", "dk", "dv"]
    assert length["torch_base"] is None and length["steps"] == 1
    assert length["ratios"]["jit@1"]["jit@1"] == [1.0] * 2 and len(length["ratios"]["jit@1"]["ring"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "4 query and 2 key/value heads of 8, causal, float32, 2 ranks (cp=2) and one" in text
    assert "2 rounds in turn, of 1 steps at 32" in text
    assert "32 tokens, ring over jit@1: time" in text


def figures_of(seconds, checksums=(30.0, 20.0, 10.0), loss=0.5, peak=2**27):
    return Figures([seconds] * 3, peak, 0, 1.0, list(checksums), loss)


def test_longer_ones_have_fewer_steps_and_what_failed_is_not_tried_again(capsys, monkeypatch):
    asked = []

    def measure(makers, rounds, steps, **options):
        asked.append((list(makers), steps))
        return {name: figures_of(1.0) for name in makers if name != "ulysses"}, {"ulysses": "no memory"}

    monkeypatch.setattr(long, "measure", measure)
    assert long.main(["--seq-lens", "64", "16", "32", "--steps", "8", "--only", "ring", "ulysses"]) == 0
    assert asked == [(["ring", "ulysses"], 8), (["ring"], 2), (["ring"], 1)]
    assert "16 tokens, ulysses: not measured, nor at longer ones: no memory" in capsys.readouterr().out


def test_what_computes_something_else_is_a_failure(tmp_path, capsys, monkeypatch):
    figures = {
        "jit@1": figures_of(2.0),
        "ring": figures_of(1.0, (30.0001, 20.0, 10.0), loss=0.50001, peak=2**26),
        "all_gather": figures_of(1.0, (30.0, 20.1, 10.0)),
        "ulysses": figures_of(1.0, (float("nan"), 20.0, 10.0), loss=0.6),
        "torch-allgather+cpu": figures_of(1.25),
        "torch-alltoall+cpu": figures_of(1.5),
    }
    assert list(long.disagreements(figures)) == ["all_gather", "ulysses"]
    assert long.disagreements({}) == {}
    monkeypatch.setattr(long, "measure", lambda makers, *args, **options: (figures, {}))
    path = tmp_path / "figures.json"
    assert long.main(["--seq-lens", "16", "--json", str(path)]) == 1
    text = capsys.readouterr().out
    assert "all_gather: not measured, nor at longer ones: DOES NOT COMPUTE THE SAME as jit@1: dk 20.1" in text
    assert "DOES NOT COMPUTE THE SAME as jit@1: loss 0.6; 0.5, dq nan; 30" in text
    assert "ring over jit@1: time 0.50 (0.50, 0.50), peak 0.50; over torch-allgather+cpu: time 0.80" in text
    data = json.loads(path.read_text())["lengths"]["16"]
    assert data["disagree"] == ["all_gather", "ulysses"] and "ulysses" not in data["figures"]
    assert data["torch_base"] == "torch-allgather+cpu" and data["ratios"]["torch"]["ring"] == [0.8] * 3
    assert data["peak_ratios"]["jit@1"]["ring"] == 0.5
    good = {name: f for name, f in figures.items() if name not in data["disagree"]}
    monkeypatch.setattr(long, "measure", lambda makers, *args, **options: (good, {}))
    assert long.main(["--seq-lens", "16"]) == 0
    monkeypatch.setattr(long, "measure", lambda makers, *args, **options: ({}, {"ring": "broken"}))
    assert long.main(["--seq-lens", "16"]) == 1  # nothing was measured


@pytest.mark.parametrize("seconds", [0.0123, 98.7654321])
def test_the_table_is_readable_in_120_columns(seconds, capsys):
    figures = {name: figures_of(seconds, peak=2**37) for name in variants() if name not in TORCH[:2]}
    lengths = {2**n: long.Length(1, figures, dict.fromkeys(TORCH[:2], "no kernel")) for n in (4, 20)}
    long._print(make_console(), long.LongBench(), 1, lengths)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text and f"{1e3 * seconds:.1f}" in text and "failed" in text
    assert all(name in text for name in variants())


def problems(*args):
    with pytest.raises(ConfigError) as caught:
        long.main(args)
    return caught.value.problems


def test_mistakes_in_the_options(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(long, "measure", None)  # calling it would be a TypeError
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    bad = ("--nproc", "1", "--kv-heads", "0", "--threads", "0", "--seq-lens", "0", "16", "--only", "rnig")
    assert problems(*bad) == (
        "--nproc: is 1; give 2 or more", "--kv-heads: is 0; give 1 or more", "--threads: is 0; give 1 or more",
        "--seq-lens: is 0; give 1 or more", "--only: unknown variant 'rnig'; did you mean \"ring\"?",
    )  # fmt: skip
    assert problems("--seq-lens") == ("--seq-lens: give one length or more",)
    (uneven,) = problems("--seq-lens", "16", "18")
    assert uneven.startswith("--seq-lens: seq=18 is not divisible by 4") and "legal seq: 16, 20, …" in uneven
    (heads,) = problems("--heads", "6", "--kv-heads", "4")
    assert heads == "--kv-heads: is 4, which does not divide --heads 6; legal: 1, 2, 3, 6"
    (split,) = problems("--nproc", "4", "--kv-heads", "2")
    assert split.startswith("--kv-heads: is 2, which is not divisible by --nproc 4; give a multiple of it, or")
    monkeypatch.setattr(long, "measure", lambda makers, *args, **options: ({}, {}))
    assert long.main(["--nproc", "4", "--only", "ring"]) == 1  # legal: ring splits no heads
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert problems("--nproc", "4", "--only", "ring") == ("--nproc: is 4, but this machine has 2 GPUs; give 2 to 2",)
    (missing,) = problems("--json", str(tmp_path / "missing" / "figures.json"))
    assert "there is no folder" in missing
    monkeypatch.setitem(cli.BENCHES, "long", "attention")
    capsys.readouterr()
    assert cli.main(["bench", "long", "--nproc", "1"]) == 2
    assert "functitan: error: --nproc: is 1; give 2 or more" in capsys.readouterr().err
