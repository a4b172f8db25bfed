"""The benchmark measures what it says: all variants compute the same, and one that fails leaves the others' figures."""

import json

import pytest

from models.llama import LlamaConfig
from train.bench import step
from train.bench.rounds import measure
from train.bench.variants import VARIANTS, Setting
from train.cli import main
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
    import functools

    makers = {name: functools.partial(VARIANTS[name], Setting(TINY, 2, 16)) for name in ("jit", "module")}
    figures, failed = measure({**makers, "broken": broken}, rounds=3, steps=1)
    assert failed == {"broken": "UserError: not here"}
    assert list(figures) == ["jit", "module"]
    for f in figures.values():
        assert len(f.seconds) == 3 and min(f.seconds) > 0 and f.start_seconds > 0
        assert f.peak_bytes is None or f.peak_bytes > 0
    assert figures["jit"].loss == pytest.approx(figures["module"].loss, rel=1e-3)
    assert figures["module"].ratios(figures["module"]) == [1.0] * 3


def test_the_command_prints_a_table_and_writes_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(step.SIZES, "debug", TINY)
    monkeypatch.setattr(step, "recipe", lambda name: type("R", (), {"model": TINY}))
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
