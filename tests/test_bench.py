"""The benchmark measures what it says: all variants compute the same, and one that fails leaves the others' figures."""

import functools
import json
import os
import time

import attrs
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from functitan.compiler.passes import DEFAULT
from models.llama import LlamaConfig
from train.bench import shard, sharded, step
from train.bench.report import make_console, write_json
from train.bench.rounds import Figures, Work, measure
from train.bench.variants import VARIANTS, Setting
from train.cli import main
from train.config_text import ConfigError
from train.errors import UserError

TINY = LlamaConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64)


def test_every_variant_computes_the_same_steps():
    pytest.importorskip("jax")
    losses = {}
    for name in ("plain", "jit", "module", "jax.jit"):  # the compiled ones are these, and take their time
        work = VARIANTS[name](Setting(TINY, 2, 16))
        losses[name] = [work.step() for _ in range(5)]
    for name, values in losses.items():
        assert values == pytest.approx(losses["module"], rel=2e-4), name
    assert losses["module"][-1] < losses["module"][0]


def broken():
    raise UserError("not here")


def test_rounds_and_a_variant_that_fails():
    makers = {name: [functools.partial(VARIANTS[name], Setting(TINY, 2, 16))] for name in ("jit", "module")}
    figures, failed = measure({**makers, "broken": [broken]}, rounds=3, steps=1)
    assert failed == {"broken": "UserError: not here"}
    assert list(figures) == ["jit", "module"]
    for f in figures.values():
        assert len(f.seconds) == 3 and min(f.seconds) > 0 and f.start_seconds > 0
        assert f.peak_bytes is None or f.peak_bytes > 0
    assert figures["jit"].loss == pytest.approx(figures["module"].loss, rel=1e-3)
    assert figures["module"].ratios(figures["module"]) == [1.0] * 3


def test_the_command_prints_a_table_and_writes_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step, "model_config", lambda name: TINY)
    path = tmp_path / "figures.json"
    options = ["--batch-size", "2", "--seq-len", "16", "--rounds", "5", "--steps", "1", "--json", str(path)]
    assert main(["bench", "step", *options, "--only", "jit", "module"]) == 0
    text = capsys.readouterr().out
    assert "jit" in text and "over module" in text and "2 x 16 tokens a step, 5 rounds of 1 steps" in text
    data = json.loads(path.read_text())
    assert data["ratios_over_module"]["module"] == [1.0] * 5 and len(data["figures"]["jit"]["seconds"]) == 5
    assert main(["bench", "step", "--rounds", "2", "--only", "jit", "jut"]) == 2
    error = capsys.readouterr().err
    assert "--rounds: is 2; give 5 or more" in error and 'did you mean "jit"' in error


def work(losses, state_bytes=0):
    """A rank that is done with a step at once, and fails when the losses are used up."""
    values = iter(losses)

    def run():
        value = next(values, None)
        if value is None:
            raise RuntimeError("no more\nof them")
        return value

    return Work(run, state_bytes)


def gone():
    os._exit(1)


def stuck():
    time.sleep(600)


def test_ranks_answer_together_and_their_failures_are_told_apart(capsys):
    good = [functools.partial(work, [loss] * 50, 2**30 * (1 + rank)) for rank, loss in enumerate((1.0, 3.0))]
    late = [good[0], functools.partial(work, [1.0] * 6)]  # 3 steps to prepare, 2 in each round
    makers = {"good": good, "late": late, "gone": [good[0], gone]}
    figures, failed = measure(makers, rounds=3, steps=1)
    assert list(figures) == ["good"]
    assert len(figures["good"].seconds) == 3
    assert figures["good"].first_losses == [2.0] * 3 and figures["good"].loss == 2.0
    assert figures["good"].peak_bytes is None or 2**31 <= figures["good"].peak_bytes < 2**31 + 2**26
    assert failed == {"late": "rank 1: RuntimeError: no more", "gone": "rank 1: its process ended (out of memory?)"}
    error = capsys.readouterr().err
    assert error.startswith("late: Traceback") and error.count("Traceback") == 1  # an ended process leaves none


def test_a_variant_without_an_answer_is_given_up_and_leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    figures, failed = measure({"stuck": [stuck, stuck]}, rounds=1, steps=1, timeout=0.5)
    assert figures == {} and failed == {"stuck": "ranks 0, 1: no answer for 0.5 s"}
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if "spawn_main" in " ".join(process.cmdline())]


def compare(folder, number):
    """On a rank: the losses of the first steps, by variant, equal among all."""
    cases = [(tied, "float32", name) for tied in (False, True) for name in ("jit", "plain", "fsdp2")]
    cases += [(False, "float32", name) for name in ("jit-regather", "fsdp2+keep")]
    losses, gathers = {}, {}
    for tied, precision, name in [*cases, (False, "bfloat16", "plain"), (False, "bfloat16", "fsdp2")]:
        setting = Setting(attrs.evolve(TINY, tied_embeddings=tied), 2, 16)
        place = sharded.Rank(number, 2, 1, f"{folder}/{tied} {precision} {name}", 60)
        run = shard.variants(2)[name](setting, precision, place).step
        values = [run() for _ in range(3)]
        with CommDebugMode() as watch:
            run()
        gathers[tied, precision, name] = sum(n for op, n in watch.get_comm_counts().items() if "gather" in str(op))
        mean = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(mean)  # fsdp2's are of the rank's own rows
        losses[tied, precision, name] = (mean / 2).tolist()
        dist.destroy_process_group()
    for (tied, precision, name), values in losses.items():
        wanted = losses[tied, precision, "fsdp2"]
        assert values == pytest.approx(wanted, rel=shard.AGREE[precision]), (tied, precision, name)
        assert values[2] < values[0]
    assert losses[False, "float32", "plain"] != losses[False, "bfloat16", "plain"]
    assert losses[False, "float32", "plain"] != losses[True, "float32", "plain"]
    layers = TINY.n_layers
    # The embedding is gathered for forward alone, the last norm and the unembedding once for both.
    assert gathers[False, "float32", "fsdp2"] - gathers[False, "float32", "fsdp2+keep"] >= layers
    assert gathers[False, "float32", "jit"] - gathers[False, "float32", "jit-regather"] >= layers
    assert gathers[False, "float32", "fsdp2+keep"] >= layers <= gathers[False, "float32", "jit-regather"]
    return work([1.0] * 50)


def test_functitan_and_fsdp2_do_the_same_work(tmp_path):
    makers = [functools.partial(compare, str(tmp_path), number) for number in range(2)]
    figures, failed = measure({"all": makers}, rounds=1, steps=1, timeout=240)
    assert failed == {} and list(figures) == ["all"]


def test_the_command_on_ranks_prints_a_table_and_writes_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shard, "model_config", lambda name: TINY)
    path = tmp_path / "figures.json"
    options = ["--nproc", "2", "--batch-size", "2", "--seq-len", "16", "--rounds", "2", "--steps", "1"]
    names = ["jit", "jit-regather", "fsdp2", "fsdp2+keep", "jit@1"]
    assert shard.main([*options, "--threads", "1", "--json", str(path), "--only", *names]) == 0
    data = json.loads(path.read_text())
    assert data["failed"] == {} and data["disagree"] == {} and list(data["figures"]) == names
    losses = {name: figures["first_losses"] for name, figures in data["figures"].items()}
    for name in names[:-1]:
        assert losses[name] == pytest.approx(losses["fsdp2"], rel=1e-4), name
    assert losses["jit@1"] != pytest.approx(losses["fsdp2"], rel=1e-4)  # half of the batch
    assert data["ratios"]["fsdp2"]["fsdp2"] == [1.0] * 2 and len(data["ratios"]["fsdp2"]["jit"]) == 2
    assert data["ratios"]["fsdp2+keep"]["fsdp2+keep"] == [1.0] * 2 and "jit-regather" in data["ratios"]["fsdp2+keep"]
    assert data["threads_per_rank"] == 1 and len(data["weak_scaling"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "2 ranks (fsdp=2), 2 x 16 tokens a step and rank, float32, 2 rounds of 1 steps" in text
    assert "weak scaling, 1 -> 2 ranks" in text and "jit over fsdp2: time" in text
    assert "jit-regather over fsdp2+keep: time" in text


def figures_of(seconds, first_losses=(1.0, 0.9, 0.8)):
    return Figures(list(seconds), None, 0, 1.0, list(first_losses), 0.5)


def test_what_is_compared_with_what():
    slow, fast = figures_of([3.0, 3.0, 1.0]), figures_of([2.0, 2.0, 9.0])
    assert shard.faster({"fsdp2+compile": slow, "fsdp2+compile-whole": fast}) == "fsdp2+compile-whole"
    assert shard.faster({"fsdp2+compile": slow}) == "fsdp2+compile"
    assert shard.faster({"fsdp2": fast}) is None
    figures = {
        "fsdp2": figures_of([1.0]),
        "jit": figures_of([1.0], (1.0, 0.9, 0.80001)),
        "plain": figures_of([1.0], (1.0, 0.9, 0.801)),
        "jit+inductor": figures_of([1.0], (float("nan"),) * 3),
        "jit@1": figures_of([1.0], (5.0, 5.0, 5.0)),
    }
    assert list(shard.disagreements(figures, "float32")) == ["plain", "jit+inductor"]
    assert list(shard.disagreements(figures, "bfloat16")) == ["jit+inductor"]
    assert shard.disagreements({"jit": figures["jit"]}, "float32") == {}
    learnt = {"fsdp2": figures_of([1.0], (9.0, 1e-2, 1e-5)), "jit": figures_of([1.0], (9.0, 1.001e-2, 2e-5))}
    assert shard.disagreements(learnt, "float32") == {}


@pytest.mark.parametrize("seconds", [0.0123, 98.7654321])
def test_the_tables_are_readable_in_120_columns(seconds, capsys):
    names = list(shard.variants(2, DEFAULT))
    figures = {name: attrs.evolve(figures_of([seconds] * 5), peak_bytes=2**37, resident_bytes=2**37) for name in names}
    shard._print(make_console(), shard.ShardBench(), 1, figures, {})
    options = step.StepBench()
    step._print(make_console(), options, {name: figures["jit"] for name in VARIANTS}, {})
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text and f"{1e3 * seconds:.1f}" in text
    assert all(name in text for name in (*names, *VARIANTS))


def test_ablation_of_all_runs_every_pass(monkeypatch):
    measured = {}
    monkeypatch.setattr(shard, "measure", lambda makers, *args, **options: (measured.update(makers), ({}, {}))[1])
    monkeypatch.setattr(shard, "model_config", lambda name: TINY)
    assert shard.main(["--ablate", "all"]) == 1  # nothing was measured
    for name in DEFAULT:
        for rank in measured[f"jit-{name}"]:
            passes = rank.keywords["passes"]
            assert set(passes) == set(DEFAULT) - {name} and len(passes) == len(DEFAULT) - 1
    assert shard.ablated(["cse", "all", "cse", "magic"]) == ("cse", *(p for p in DEFAULT if p != "cse"), "magic")


@pytest.mark.parametrize("command", [shard, step])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(command, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", None)  # calling it would be a TypeError
    with pytest.raises(ConfigError, match="there is no folder .*missing"):
        command.main(["--json", str(tmp_path / "missing" / "figures.json")])
    with pytest.raises(ConfigError, match="is a folder; give a file"):
        command.main(["--json", str(tmp_path)])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may not be written"):
        command.main(["--json", str(tmp_path / "figures.json")])


def test_a_disk_that_is_full_when_all_is_measured_is_no_traceback(tmp_path):
    with pytest.raises(UserError, match="cannot write .*: Is a directory; the figures are in the table above"):
        write_json(tmp_path, {})


def test_variants_and_mistakes_in_the_options():
    assert {"jit", "jit-cse", "plain", "jit+inductor", "fsdp2", "jit@1"} <= shard.variants(2, ["cse"]).keys()
    assert {"jit-regather", "fsdp2+keep"} <= shard.variants(2).keys()
    assert "regather" not in shard.variants(2)["jit-regather"].keywords["passes"]
    assert "jit@1" not in shard.variants(1)
    assert "cse" not in shard.variants(2, ["cse"])["jit-cse"].keywords["passes"]
    with pytest.raises(ConfigError) as caught:
        shard.main(["--nproc", "0", "--model", "debgu", "--ablate", "cs", "--only", "jit-fold", "--threads", "0"])
    problems = caught.value.problems
    assert problems[:3] == (
        "--nproc: is 0; give 1 or more", "--threads: is 0; give 1 or more",
        "--model: unknown size 'debgu'; did you mean \"debug\"?",
    )  # fmt: skip
    assert problems[3].startswith("--ablate: unknown pass 'cs'; did you mean \"cse\"")
    assert problems[4].startswith("--only: unknown variant 'jit-fold'") and len(problems) == 5
