"""What a pipeline costs a rank: memory as when it runs, messages as the schedule has them, and its picture."""

import json
import math
import time

import attrs
import pytest
from cost_helpers import CONFIG, SEQ, captured_step, run_and_watch

import functitan as ft
from functitan import cost
from functitan.cost.parts import PARTS
from sharding_specs import MeshSpec
from train import explain
from train.errors import UserError

ROWS = 16
SMALL = ["debug", "--train.seq-len", "32", "--train.batch-size", "16", "--mesh.pp", "2"]


def facts(rank, mesh, schedule, microbatches, *, layers=4, remat="none", rows=ROWS):
    """``(facts, captured)`` of a rank's step."""
    with cost.fake_group(mesh.size, rank):
        config = attrs.evolve(CONFIG, n_layers=layers)
        captured, plan = captured_step(
            mesh, config, remat=remat, accumulation=microbatches, schedule=schedule, rows=rows
        )
        return cost.facts_of(captured, plan), run_and_watch(captured)


@pytest.mark.parametrize(
    ("schedule", "mesh", "remat"),
    [
        ("1F1B", MeshSpec(pp=2), "none"),
        ("1F1B", MeshSpec(pp=2, fsdp=2), "full"),
        ("GPipe", MeshSpec(pp=2, cp=2), "none"),
        ("Interleaved1F1B", MeshSpec(pp=2, tp=2), "selective"),
        ("InterleavedZeroBubble", MeshSpec(pp=2, fsdp=2), "none"),
        ("ZBVZeroBubble", MeshSpec(pp=2), "none"),
        ("DualPipeV", MeshSpec(pp=2), "none"),
    ],
    ids=str,
)
def test_memory_is_what_it_takes_when_it_runs(schedule, mesh, remat):
    for rank in (0, mesh.size - 1):
        found, watch = facts(rank, mesh, schedule, 4, remat=remat)
        measured = max(size for _, size in watch.log)
        assert abs(found.memory.peak - measured) < 300  # scalars: keys, and sums of losses


def activations(schedule, microbatches, rank=0):
    """Their peak, at two rows a microbatch."""
    found, _ = facts(rank, MeshSpec(pp=2), schedule, microbatches, layers=2, rows=2 * microbatches)
    return found.memory.part_peaks["activations"]


def test_1f1b_keeps_pp_microbatches_and_gpipe_all_of_them():
    few, many = activations("1F1B", 2), activations("1F1B", 8)
    assert 0 <= many - few < 100  # a key more for each
    all_of_2, all_of_4, all_of_8 = (activations("GPipe", m) for m in (2, 4, 8))
    assert all_of_8 - all_of_4 == 2 * (all_of_4 - all_of_2) > 0
    assert all_of_8 > 3 * many
    # And of two microbatches both keep the same, which are pp.
    one = (all_of_4 - all_of_2) / 2
    assert abs(few - all_of_2) < 0.2 * one
    assert activations("1F1B", 8, rank=1) < few


def test_what_passes_between_stages_is_what_the_schedule_says():
    mesh, width = MeshSpec(pp=2, fsdp=2), CONFIG.dim
    for rank, kinds in ((0, {("send", "forward"): 4, ("receive", "backward"): 4}),
                        (2, {("receive", "forward"): 4, ("send", "backward"): 4})):  # fmt: skip
        found, _ = facts(rank, mesh, "1F1B", 4)
        moved = [row for row in found.collectives if row.call.kind in ("send", "receive")]
        assert {(row.call.kind, row.call.phase): row.count for row in moved} == kinds
        message = ROWS // 4 // 2 * SEQ * width * 4
        assert all(row.call.bytes_in + row.call.bytes_out == message for row in moved)
        sent = sum(row.total_bytes for row in moved)
        assert sent == 4 * message
    interleaved, _ = facts(0, mesh, "Interleaved1F1B", 4)
    counts = {(row.call.kind, row.call.phase): row.count for row in interleaved.collectives if "pp" in row.call.axes}
    assert counts["send", "forward"] == 8 and counts["receive", "forward"] == 4


def test_every_gather_is_made_again_where_other_microbatches_lie_between():
    found, _ = facts(0, MeshSpec(pp=2, fsdp=2), "1F1B", 4)
    layers = {
        phase: sum(row.count for row in found.collectives
                   if (row.call.kind, row.call.axes, row.call.phase) == ("all_gather", ("fsdp",), phase))
        for phase in ("forward", "backward")
    }  # fmt: skip
    assert layers == {"forward": 4 * 3, "backward": 4 * 2}  # two layers; and the embedding, which backward reads not
    assert found.memory.parts["gathered"] <= found.memory.part_peaks["gathered"]


def test_a_process_that_runs_all_stages_is_refused():
    config, mesh = attrs.evolve(CONFIG, n_layers=2), MeshSpec(pp=2)
    with ft.one_process():
        captured, plan = captured_step(mesh, config, accumulation=2, schedule="1F1B")
    with pytest.raises(ValueError, match="runs all stages in turn.*functitan.cost.fake_group"):
        cost.facts_of(captured, plan)


def data(capsys, *args):
    assert explain.main([*SMALL, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class TestCommand:
    @pytest.mark.parametrize(
        ("schedule", "m", "bubble"),
        [("GPipe", 4, 1 / 5), ("1F1B", 8, 1 / 9), ("Interleaved1F1B", 8, 1 / 17)],
    )
    def test_tells_the_stages_and_the_bubble(self, schedule, m, bubble, tmp_path, capsys):
        """(p - 1) / (v m + p - 1) of the time, Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2."""
        file = tmp_path / "t.json"
        args = ["--pipeline.schedule", schedule, "--pipeline.microbatches", str(m), "--timeline", str(file)]
        found = data(capsys, *args)
        pipeline = found["pipeline"]
        assert pipeline["bubble"] == pytest.approx(bubble)
        assert pipeline["schedule"] == schedule and pipeline["microbatches"] == m
        assert [stop - start for start, stop in pipeline["layers"]] == [4 // len(pipeline["layers"])] * len(
            pipeline["layers"]
        )
        assert sum(row["bytes"] for row in found["params"]) == found["memory"]["part_peaks"]["parameters"]
        drawn = json.loads(file.read_text())
        assert drawn["bubble"] == pipeline["bubble"]
        ended = [row for row in drawn["actions"] if row["end"] == drawn["makespan"]]
        assert ended and len(drawn["actions"]) == 2 * m * len(pipeline["layers"])

    def test_as_text_says_which_stages_it_is_of(self, tmp_path, capsys):
        file = tmp_path / "t.txt"
        args = ["--mesh.fsdp", "2", "--rank", "3", "--timeline", str(file), "--graph", str(tmp_path / "code.py")]
        assert explain.main([*SMALL, *args]) == 0
        out, notes = capsys.readouterr()
        for line in (
            "in 1 parts of 4 microbatches, 4 layers",
            "Pipeline by 1F1B: 4 layers in 2 stages on 2 ranks, 4 microbatches",
            "bubble: ranks wait for 20.0% of the time",
            "microbatches in flight at most, by rank of pp: 2 1",
            "what follows is of rank 3, which runs stage 1; for others give --rank 1",
            "Parameters on rank 3 of 4 (pp=2 x fsdp=2)",
        ):
            assert line in out
        assert "capturing the stages of the rank" in notes
        title, first, second = file.read_text().splitlines()
        assert "bubble 20.0%" in title and first.startswith("rank 0 F0") and second.startswith("rank 1 ..")
        code = (tmp_path / "code.py").read_text()
        compile(code, "code.py", "exec")
        assert "# F of stage 1" in code and "# B of stage 1" in code

    @pytest.mark.parametrize("name", ["t.png", "t.svg", "t.PDF"])
    def test_draws_a_picture(self, name, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(explain, "explain", None)  # the picture comes before what takes long
        with pytest.raises(TypeError):
            explain.main([*SMALL, "--timeline", str(tmp_path / name)])
        begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:].lower()]
        assert (tmp_path / name).read_bytes().startswith(begins)

    def test_a_picture_that_cannot_be_written_is_one_line(self, tmp_path, monkeypatch):
        def full(path, text, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("pathlib.Path.write_text", full)
        with pytest.raises(UserError, match="t.txt: No space left on device: give another file with --timeline"):
            explain.main([*SMALL, "--timeline", str(tmp_path / "t.txt")])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "args",
    [
        ["llama3-8b", "--mesh.fsdp", "8", "--jit.inductor", "--train.batch-size", "64", "--train.accumulation", "2"],
        ["llama3-70b", "--mesh.fsdp", "4", "--mesh.tp", "2", "--train.remat", "selective", "--train.batch-size", "8"],
        ["llama3-405b", "--mesh.fsdp", "8", "--mesh.tp", "8", "--mesh.pp", "8", "--mesh.cp", "4", "--train.remat",
         "full", "--pipeline.schedule", "Interleaved1F1B"],
    ],
    ids=lambda args: args[0],
)  # fmt: skip
def test_dry_runs_of_the_sizes_that_people_train(args, capsys):
    began = time.monotonic()
    assert explain.main([*args, "--train.precision", "bfloat16", "--json"]) == 0
    assert time.monotonic() - began < 300
    found = json.loads(capsys.readouterr().out)
    ranks = math.prod(found["mesh"].values())
    assert found["uncounted"] == {}
    assert 1 <= found["total_flops"] / found["model_flops_per_rank"] < 1.5
    if ranks == 2048:
        stages = found["pipeline"]["layers"]
        assert len(stages) == 16 and stages[-1][1] == 126
        shards = {row["path"]: row["local_shape"] for row in found["params"]}
        mine = sum(stop - start for (start, stop), rank in zip(stages, found["pipeline"]["stage_ranks"]) if rank == 0)
        assert shards["layers/wq"] == [mine, 16384 // 8, 128 // 8, 128]


def test_parts_add_up():
    found, _ = facts(1, MeshSpec(pp=2), "Interleaved1F1B", 4)
    assert all(min(row.live) >= 0 for row in found.ops)
    assert math.fsum(found.memory.parts[name] for name in PARTS) == found.memory.peak
