"""``functitan bench pipeline`` measures what it says: functitan's and torch's stages compute the same steps."""

import functools
import json

import attrs
import pytest
import torch
import torch.distributed as dist

from models.llama import LlamaConfig
from train import cli
from train.bench import piped, pipeline
from train.bench.report import make_console
from train.bench.rounds import Figures, Work, measure
from train.bench.sharded import Rank
from train.bench.variants import CLIP, Setting
from train.config_text import ConfigError
from train.errors import UserError
from train.layout_config import PipelineConfig

TINY = LlamaConfig(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=64)


def test_the_command_prints_a_table_and_writes_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "model_config", lambda name: TINY)
    path = tmp_path / "figures.json"
    options = ["--batch-size", "8", "--seq-len", "16", "--microbatches", "4", "--rounds", "2", "--steps", "1"]
    files = ["--threads", "1", "--json", str(path)]
    assert cli.main(["bench", "pipeline", *options, *files, "--only", "jit", "torch"]) == 0
    data = json.loads(path.read_text())
    assert data["failed"] == {} and data["disagree"] == {} and list(data["figures"]) == ["jit", "torch"]
    losses = {name: figures["first_losses"] for name, figures in data["figures"].items()}
    assert losses["jit"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["jit"][2] < losses["jit"][0] and losses["jit"][0] > 3  # of a token, not of a part of the batch
    assert data["layers"] == [[0, 2], [2, 4]] and data["threads_per_rank"] == 1
    assert data["ratios"]["torch"]["torch"] == [1.0] * 2 and len(data["ratios"]["torch"]["jit"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "debug, 2 ranks (pp=2), 1F1B, stages of 2, 2 layers, 4 microbatches" in text
    assert "8 x 16 tokens a step, float32, 2 rounds of 1 steps" in text and "DOES NOT" not in text


def compare(folder, number):
    """On a rank: other schedules and bfloat16 give the same losses on both sides, and clipping sees all stages."""
    found = {}
    cases = [("Interleaved1F1B", "float32"), ("ZBVZeroBubble", "float32"), ("GPipe", "bfloat16")]
    for schedule, precision in cases:
        for name in ("jit", "torch"):
            place = Rank(number, 2, 1, f"{folder}/{schedule} {name}", 60)
            make = pipeline.VARIANTS[name]
            run = make(Setting(TINY, 4, 16), precision, place, PipelineConfig(schedule, 4)).step
            values = torch.tensor([run() for _ in range(3)], dtype=torch.float64)
            dist.all_reduce(values)
            found[schedule, name] = (values / 2).tolist()
            if schedule == "GPipe" and name == "torch":
                weight = torch.nn.Parameter(torch.zeros(2))
                weight.grad = torch.full((2,), 3.0 + number)
                piped._clip([weight])
                assert weight.grad.tolist() == pytest.approx([CLIP * (3.0 + number) / 50**0.5] * 2, rel=1e-5)
            dist.destroy_process_group()
    for schedule, precision in cases:
        assert found[schedule, "jit"] == pytest.approx(found[schedule, "torch"], rel=pipeline.shard.AGREE[precision])
        assert found[schedule, "jit"][2] < found[schedule, "jit"][0]
    assert found["Interleaved1F1B", "torch"] == pytest.approx(found["ZBVZeroBubble", "torch"], rel=1e-5)
    assert found["GPipe", "torch"] != pytest.approx(found["ZBVZeroBubble", "torch"], rel=1e-6)
    return Work(lambda: 1.0, 0)


def test_functitan_and_torch_do_the_same_work_by_every_kind_of_schedule(tmp_path):
    makers = [functools.partial(compare, str(tmp_path), number) for number in range(2)]
    figures, failed = measure({"all": makers}, rounds=1, steps=1, timeout=120)
    assert failed == {} and list(figures) == ["all"]


def test_torch_cannot_compile_a_backward_pass_in_halves(tmp_path, monkeypatch):
    monkeypatch.setattr(piped, "need_compiler", lambda: None)
    place = Rank(0, 2, 1, str(tmp_path / "store"), 60)
    with pytest.raises(UserError, match="compiled backward pass in halves, as ZBVZeroBubble does"):
        piped.make_torch(Setting(TINY, 4, 16), "float32", place, PipelineConfig("ZBVZeroBubble", 4), compiled=True)


def figures_of(*first_losses):
    return Figures([0.1, 0.2], 2**37, 2**37, 1.0, list(first_losses), 0.5)


def test_losses_are_compared_with_torchs():
    figures = {"jit": figures_of(1.0, 0.9), "torch": figures_of(1.0, 0.9), "torch+compile": figures_of(1.0, 0.8)}
    assert list(pipeline.disagreements(figures, "float32")) == ["torch+compile"]
    del figures["torch"]
    assert list(pipeline.disagreements(figures, "float32")) == ["jit"]
    del figures["torch+compile"]
    assert pipeline.disagreements(figures, "float32") == {}
    assert pipeline.disagreements({"jit": figures_of(float("nan")), "torch": figures_of(1.0)}, "bfloat16")


def test_the_table_is_readable_in_120_columns(capsys):
    options = pipeline.PipelineBench(nproc=4, microbatches=32, batch_size=4096, seq_len=8192)
    slow = {name: attrs.evolve(figures_of(1.0), seconds=[98.7654321] * 5) for name in pipeline.VARIANTS}
    different = {**slow, "jit": figures_of(2.0)}
    pipeline._print(make_console(), options, 16, different, {"torch+compile": "rank 1: UserError: no"})
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120 and "…" not in text and "98765.4" in text
    assert all(name in text for name in pipeline.VARIANTS) and "torch+compile: not measured: rank 1" in text
    assert "jit DOES NOT COMPUTE THE SAME as torch" in text and "stages of 1, 1, 1, 1 layers" in text


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        (["--microbatches", "3"], ["--microbatches: a batch of 16 rows does not divide into 3 microbatches; legal "
                                   "microbatches: 2, 4, 8, 16"]),
        (["--nproc", "5"], ["--nproc: 4 layers cannot fill the 5 stages of pp=5; legal pp: 1, 2, 3, 4"]),
        (["--schedule", "Interleaved1F1B", "--nproc", "4"], ["--nproc: 4 layers cannot fill the 8 stages of pp=4"]),
        (["--schedule", "Interleavd1F1B"], ["--schedule: there is no schedule 'Interleavd1F1B'; did you mean "
                                            "'Interleaved1F1B' or 'InterleavedZeroBubble'? legal: GPipe, 1F1B"]),
        (["--schedule", "DualPipeV", "--microbatches", "2"], ["--schedule: DualPipeV over 2 ranks needs"]),
        (["--schedule", "GPipe", "--stages-per-rank", "2"], ["--schedule: GPipe with 2 stages a rank; legal: 1"]),
        (["--schedule", "order.csv"], ["--schedule: 'order.csv' is a file, and torch's are taken by name; legal: "]),
        (["--model", "1B"], ["--model: 1B has tied embeddings, which torch's stages cannot share; legal: debug, 160M"]),
        (["--nproc", "1", "--batch-size", "0", "--seq-len", "0", "--microbatches", "0"],
         ["--nproc: is 1; give 2 or more", "--microbatches: is 0; give 1 or more", "--batch-size: is 0",
          "--seq-len: is 0"]),
        (["--model", "debgu", "--schedule", "1f1b", "--only", "jut", "torch", "--threads", "0"],
         ["--threads: is 0", "--model: unknown size 'debgu'; did you mean \"debug\"?",
          "--schedule: there is no schedule '1f1b'; did you mean '1F1B'?", "--only: unknown variant 'jut'; did you"]),
        (["--json", "/missing/figures.json"], ["--json: /missing/figures.json: there is no folder /missing"]),
    ],
)  # fmt: skip
def test_mistakes_in_the_options_are_told_at_once(options, problems, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "measure", None)  # calling it would be a TypeError
    assert cli.main(["bench", "pipeline", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"functitan: error: {problem}")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="--nproc: is 4, but this machine has 3 GPUs; give 2 to 3"):
        pipeline.main(["--nproc", "4"])
