"""``functitan explain``: what it prints, what it refuses, and that a deep model's figures are those of its graph."""

import json

import attrs
import pytest
import torch.distributed as dist

from functitan import cost
from functitan.compiler.passes import order
from models.llama import flops_per_token
from train import explain, recipes
from train.config_text import ConfigError
from train.errors import UserError
from train.layout_config import MeshConfig

SMALL = ["debug", "--model.n-layers", "1", "--train.seq-len", "32", "--train.batch-size", "8"]


def data(capsys, *args):
    assert explain.main([*SMALL, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestOutput:
    def test_is_a_report(self, capsys):
        assert explain.main([*SMALL, "--mesh.fsdp", "2"]) == 0
        text = capsys.readouterr().out
        for line in (
            "A step: 8 sequences of 32 tokens in 1 parts, 1 layers, float32, remat none",
            "Parameters on rank 0 of 2 (fsdp=2)",
            "Collectives in a step: ",
            "Operations in a step on this rank: ",
            "Peak memory of tensors on this rank: ",
            "Model FLOPs: ",
        ):
            assert line in text
        assert "Extrapolated" not in text
        row = next(line.split() for line in text.splitlines() if line.strip().startswith("gradients"))
        assert len(row) == 5 and float(row[3]) > 0  # at the peak of all, and at its own
        assert not dist.is_initialized()

    def test_as_json_has_the_documented_keys(self, capsys):
        found = data(capsys, "--mesh.fsdp", "2")
        assert set(found) == {
            "batch_size", "seq_len", "accumulation", "layers", "precision", "remat", "model_flops",
            "model_flops_per_rank", "mesh", "rank", "params", "collectives", "wire_bytes", "flops", "total_flops",
            "uncounted", "memory", "captured_layers", "context", "pipeline",
        }  # fmt: skip
        config = attrs.evolve(recipes.recipe("debug").model, n_layers=1)
        assert found["model_flops"] == flops_per_token(config, 32) * 8 * 32 == 2 * found["model_flops_per_rank"]
        assert found["captured_layers"] == []
        assert found["uncounted"] == {}
        assert found["mesh"]["fsdp"] == 2

    @pytest.mark.parametrize(("layout", "shares"), [("contiguous", [1, 2, 3, 4]), ("balanced", [2.5] * 4)])
    def test_tells_how_attention_is_split_over_cp(self, layout, shares, capsys):
        args = ["--mesh.cp", "4", "--context.layout", layout, "--context.method", "ring"]
        found = data(capsys, *args)
        assert found["context"]["shares"] == pytest.approx([share / 10 for share in shares])
        assert found["context"]["imbalance"] == pytest.approx(max(shares) / 2.5)
        shifts = {(row["phase"], row["count"]) for row in found["collectives"] if row["kind"] == "shift"}
        assert shifts == {("forward", 3), ("backward", 6)}
        assert explain.main([*SMALL, *args]) == 0
        text = capsys.readouterr().out
        assert f"Context: attention over cp=4 by ring, {layout}: as asked" in text
        assert f"the busiest has {max(shares) / 2.5:.2f} x the mean" in text
        assert explain.main(SMALL) == 0
        assert "Context" not in capsys.readouterr().out

    def test_a_ring_holds_no_more_over_more_ranks(self, capsys):
        """At the same part of the sequence on each: over two ranks less, as nothing travels behind the second block."""
        peaks = [
            data(capsys, "--mesh.cp", str(cp), "--train.seq-len", str(32 * cp), "--context.method", "ring")["memory"]
            ["parts"]["activations"]
            for cp in (4, 8, 16)
        ]  # fmt: skip
        assert max(peaks) <= 1.01 * min(peaks)

    def test_of_512_ranks_needs_one_process(self, capsys):
        found = data(capsys, "--mesh.dp", "512", "--train.batch-size", "512", "--rank", "511")
        assert {(row["kind"], tuple(row["axes"]), row["ranks"]) for row in found["collectives"]} == {
            ("all_reduce", ("dp",), 512)
        }
        assert found["rank"] == 511
        assert found["memory"]["parts"]["parameters"] == sum(row["bytes"] for row in found["params"])

    def test_names_the_rows_of_the_last_rank(self, capsys):
        """264 rows of the vocabulary over 5 ranks: 53 on each, and 52 on the last."""
        args = ["--mesh.fsdp", "5", "--rules.embed", "none", "--rules.vocab", "fsdp", "--rules.uneven", "vocab"]
        found = data(capsys, *args, "--train.batch-size", "10", "--rank", "4")
        rows = {row["path"]: row["local_shape"] for row in found["params"]}
        assert rows["embed"][0] == 52

    def test_writes_the_code(self, tmp_path, capsys):
        file = tmp_path / "step.py"
        assert explain.main([*SMALL, "--graph", str(file)]) == 0
        code = file.read_text()
        compile(code, "step.py", "exec")
        assert code.startswith("def run(inputs):")
        assert "aten_mm_default" in code

    def test_that_cannot_be_written_is_one_line(self, tmp_path, monkeypatch):
        def full(path, source):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("pathlib.Path.write_text", lambda path, text, **options: full(path, text))
        with pytest.raises(UserError, match="cannot write .*step.py: No space left"):
            explain.main([*SMALL, "--graph", str(tmp_path / "step.py")])


class TestDeepModels:
    @pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, cp=2)], ids=["one", "fsdp2xcp2"])
    def test_have_exactly_the_figures_of_their_graph(self, mesh, capsys):
        recipe = recipes.recipe("debug")
        # So wide that what is stacked over layers is larger than SMALL_NUMEL in the shallow models as well.
        config = attrs.evolve(
            recipe,
            mesh=mesh,
            model=attrs.evolve(recipe.model, n_layers=16, dim=640, n_heads=20, n_kv_heads=2, rope_scaling=None),
            train=attrs.evolve(recipe.train, batch_size=4, seq_len=32, remat="full"),
        )
        extrapolated, _ = explain.explain(config)
        assert extrapolated.captured_layers == (4, 5, 6)
        assert "Extrapolated from captures of 4, 5, 6 layers" in str(extrapolated)
        assert "capturing 4, 5 and 6 of 16 layers" in capsys.readouterr().err
        whole, _ = explain.explain(config, whole=True)
        assert "capturing all layers (16), as asked" in capsys.readouterr().err
        assert attrs.evolve(extrapolated, captured_layers=()) == whole

    def test_are_captured_whole_where_shallow_ones_say_too_little(self, monkeypatch, capsys):
        recipe = recipes.recipe("debug")
        config = attrs.evolve(recipe, train=attrs.evolve(recipe.train, batch_size=4, seq_len=32))
        monkeypatch.setattr(explain, "_shallow", lambda config, rank: 1)
        found, _ = explain.explain(config)
        assert found.captured_layers == ()
        notes = capsys.readouterr().err.splitlines()
        assert notes[0].endswith("capturing 1, 2 and 3 of 4 layers") and len(notes) == 2
        assert "capturing all layers (4), since shallow models say too little: operator " in notes[1]

    def test_take_deeper_captures_where_three_are_not_on_one_line(self, monkeypatch, capsys):
        """As where each layer casts what the next one gathers: the last of those alike holds another cast."""

        def facts(layers):
            alike = [("layer", 100 + 10 * i) for i in range(1, layers - 1)]
            alike[-1] = ("layer", alike[-1][1] + 5)
            rows = [("first", 100), *alike, ("last", 100 + 10 * layers)]
            return cost.Facts((100, 0, 0, 0, 0, 0), tuple(
                cost.Fact(op, None, None, False, None, (live, 0, 0, 0, 0, 0)) for op, live in rows
            ))  # fmt: skip

        taken = []
        monkeypatch.setattr(explain, "capture", lambda config, layers: (taken.append(layers) or layers, None))
        monkeypatch.setattr(cost, "facts_of", lambda captured, plan: facts(captured))
        config = attrs.evolve(recipes.recipe("llama3-8b"), mesh=MeshConfig())
        found, last = explain.explain(config)
        assert taken == [4, 5, 6, 7] and last == 7
        assert found.captured_layers == (5, 6, 7)
        assert (found.collectives, found.flops, found.uncounted, found.memory) == facts(32).totals
        notes = capsys.readouterr().err.splitlines()
        assert len(notes) == 2 and notes[0].endswith("capturing 4, 5 and 6 of 32 layers")
        assert "capturing 7 layers too, since the shallower graphs say too little: layer: the memory does" in notes[1]

    def test_of_8b_on_64_ranks_are_not_captured_whole(self, capsys):
        """The README's command."""
        assert explain.main(["llama3-8b", "--mesh.fsdp", "8", "--mesh.tp", "8", "--json"]) == 0
        out, notes = capsys.readouterr()
        found = json.loads(out)
        assert len(found["captured_layers"]) == 3 and max(found["captured_layers"]) < 32 == found["layers"]
        assert "capturing all" not in notes
        gathers = {(row["phase"], row["count"]) for row in found["collectives"]
                   if (row["kind"], row["axes"]) == ("all_gather", ["fsdp"])}  # fmt: skip
        assert {("forward", 32), ("backward", 32)} <= gathers  # one of each layer
        parts = found["memory"]["parts"], found["memory"]["part_peaks"]
        assert parts[0]["gradients"] < parts[1]["gradients"]
        assert parts[1]["parameters"] == sum(row["bytes"] for row in found["params"])

    @pytest.mark.matrix
    @pytest.mark.parametrize(("size", "whole"), [("llama3-8b", True), ("llama3-70b", False)])
    def test_of_any_size_on_512_ranks(self, size, whole, capsys):
        args = [size, "--mesh.fsdp", "64", "--mesh.tp", "8", "--train.batch-size", "64", "--json"]
        assert explain.main(args) == 0
        out, notes = capsys.readouterr()
        found = json.loads(out)
        assert (found["captured_layers"] == []) == whole
        reason = "models of 17, 18 and 19, the least, are no less work"
        assert (f"capturing all layers (32), since shallow models say too little: {reason}" in notes) == whole
        layers = max(row["count"] for row in found["collectives"] if row["axes"] == ["fsdp"])
        assert layers == found["layers"]

    def test_are_not_extrapolated_from_smaller_stacks_than_the_pass_order_tells_apart(self):
        assert explain.SMALL_NUMEL == order._SCALAR_NUMEL
        big = recipes.recipe("llama3-70b")
        for ranks, layers in ((64, 4), (512, 9)):  # 8192 / 64 ranks of fsdp = 128: 1,024 are in 8 layers
            config = attrs.evolve(big, mesh=MeshConfig(fsdp=ranks // 8, tp=8))
            assert explain._shallow(config, 0) == layers

    def test_are_captured_whole_where_ranks_share_the_layers_out(self):
        config = attrs.evolve(recipes.recipe("llama3-8b"), mesh=MeshConfig(fsdp=8))
        assert explain._shallow(config, 0) == 4
        with pytest.raises(cost.NotRegularError, match="share out Muon's work"):
            explain._shallow(attrs.evolve(config, optim=attrs.evolve(config.optim, name="muon")), 0)
        with pytest.raises(cost.NotRegularError, match="rules.layers splits them"):
            explain._shallow(attrs.evolve(config, rules=attrs.evolve(config.rules, layers="fsdp")), 0)


class TestMistakes:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["llama3-8b"], "mesh.fsdp: is -1.*--devices"),
            (["llama3-8b", "--devices", "0"], "--devices: is 0"),
            (["llama3-8b", "--mesh.fsdp", "8", "--mesh.tp", "3"], "legal tp: 1, 2, 4, 8"),
            (["debug", "--mesh.fsdp", "2", "--devices", "3"], "fsdp=2.*3 devices"),
            (["debug", "--mesh.ep", "2"], "mesh.ep: is 2, but this version runs"),
            (["debug", "--timeline", "t.gif"], "(?s)t.gif ends in none of .png, .svg, .pdf, .txt, .json.*mesh.pp is 1"),
            (["debug", "--mesh.pp", "2", "--timeline", "no/such/t.png"], "--timeline: no/such/t.png is no file"),
            (["debug", "--rank", "1"], "--rank: is 1; give 0 to 0"),
            (["debug", "--rank", "-1"], "--rank: is -1"),
            (["debug", "--graph", "no/such/folder/step.py"], "--graph: no/such/folder/step.py is no file"),
            (["debug", "--train.batch-size", "6", "--train.accumulation", "4"], "accumulation"),
            (["debug", "--jit.passes", "magic"], "unknown pass 'magic'"),
            (["debug", "--jit.no-enabled"], "jit.enabled: is false, .*: give --jit.enabled"),
        ],
    )
    def test_are_told_before_anything_is_captured(self, args, message, monkeypatch):
        monkeypatch.setattr(explain, "explain", None)  # calling it would be a TypeError
        monkeypatch.setenv("WORLD_SIZE", "7")  # has nothing to say here
        with pytest.raises(ConfigError, match=message):
            explain.main(args)

    def test_a_mesh_of_minus_one_takes_what_the_devices_leave(self):
        parsed = explain.ExplainOptions(explain.RunOptions(recipes.recipe("llama3-70b")), devices=512)
        assert explain._checked(parsed).mesh.fsdp == 64

    def test_a_process_in_a_group_is_refused(self):
        config = attrs.evolve(recipes.recipe("debug"), mesh=MeshConfig(fsdp=2))
        with cost.fake_group(2), pytest.raises(RuntimeError, match="can only be made in a process that is in none"):
            explain.explain(config)
