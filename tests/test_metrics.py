"""metrics.jsonl through kills, resumes and NaN; the line on the terminal; the plot."""

import io
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from train.errors import UserError
from train.metrics import FILE, MetricsWriter, Progress, format_progress, memory, plot_loss, read_metrics


def write(folder, steps, resume_step=None, **values):
    with MetricsWriter(folder, resume_step, notices=None) as writer:
        for step in steps:
            writer.write(step, {"loss": 5.0 / step, **values})


def steps_of(folder):
    return [row["step"] for row in read_metrics(folder)]


@pytest.fixture
def no_tensorboard(monkeypatch):
    """Many short runs, without the second that TensorBoard takes to load."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def test_a_line_a_step_in_the_file_at_once(tmp_path, no_tensorboard):
    with MetricsWriter(tmp_path, notices=None) as writer:
        writer.write(1, {"loss": torch.tensor(2.5), "tokens": 4096, "mfu": None})
        assert (tmp_path / FILE).read_text() == '{"step": 1, "loss": 2.5, "tokens": 4096, "mfu": null}\n'
        writer.write(3, {"loss": 2.25})
        assert steps_of(tmp_path) == [1, 3]


def test_a_step_is_written_once(tmp_path, no_tensorboard):
    with MetricsWriter(tmp_path, notices=None) as writer:
        writer.write(2, {"loss": 1.0})
        with pytest.raises(ValueError, match="already has step 2"):
            writer.write(2, {"held_out_loss": 1.0})
        with pytest.raises(TypeError, match="not list"):
            writer.write(3, {"loss": [1.0]})
    assert steps_of(tmp_path) == [2]


def test_resuming_cuts_the_steps_that_are_done_again(tmp_path, no_tensorboard):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 7), resume_step=4, seed=1)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert ["seed" in row for row in read_metrics(tmp_path)] == [False] * 4 + [True] * 2
    write(tmp_path, [1], resume_step=None)
    assert steps_of(tmp_path) == [1], "a new run starts an empty file"


@settings(deadline=None)
@given(cut=st.integers(0, 400), resume_step=st.integers(0, 6))
def test_a_file_cut_anywhere_resumes(tmp_path_factory, cut, resume_step):
    """A kill can leave any prefix of the file; every step then still appears once, in order, and every line is JSON."""
    folder = tmp_path_factory.mktemp("run")
    text = "".join(json.dumps({"step": step, "loss": 1.25, "note": "é"}) + "\n" for step in range(1, 7)).encode()
    (folder / FILE).write_bytes(text[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        write(folder, [resume_step + 1, resume_step + 2], resume_step)
    whole = text[:cut].count(b"\n")
    assert steps_of(folder) == [*range(1, min(whole, resume_step) + 1), resume_step + 1, resume_step + 2]


def test_what_is_no_number_stays_valid_json(tmp_path, no_tensorboard):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    with MetricsWriter(tmp_path, notices=None) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "low": -math.inf})
    row = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "low": "-Infinity"}
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["loss"]) and read["grad_norm"] == math.inf and read["low"] == -math.inf


def test_errors_name_the_file_and_the_line(tmp_path, no_tensorboard):
    with pytest.raises(UserError, match="metrics.jsonl does not exist: give the folder of a run"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match=r"cannot write .*missing.metrics.jsonl: No such file or directory"):
        MetricsWriter(tmp_path / "missing", notices=None)
    (tmp_path / FILE).write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: no line of metrics"):
        MetricsWriter(tmp_path, resume_step=1, notices=None)
    (tmp_path / FILE).write_text('{"step": 2}\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: step 1 is not above the last"):
        read_metrics(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line(tmp_path, no_tensorboard):
    writer = MetricsWriter(tmp_path, notices=None)
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)
    with pytest.raises(UserError, match="No space left on device: free some space"):
        writer.write(1, {"loss": 1.0})
    writer.close()


def test_without_tensorboard_one_notice(tmp_path, no_tensorboard):
    said = io.StringIO()
    with MetricsWriter(tmp_path, notices=said) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 1.0})
    assert said.getvalue().count("pip install 'functitan[tensorboard]'") == 1
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_tensorboard_has_the_numbers_and_hides_steps_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 6), name="text", mfu=None)
    write(tmp_path, [4, 5], resume_step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert events.Tags()["tensors"] == ["mfu/text_summary"]  # "n/a", once
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert events.Scalars("loss")[0].value == 5.0


# The line on the terminal ---------------------------------------------------------------------------------------


def test_the_line():
    values = {
        "loss": torch.tensor(2.4126), "held_out_loss": 2.5, "learning_rate": 3e-4, "grad_norm": math.nan,
        "tokens_per_s": 12_345.0, "mfu": None,
    }  # fmt: skip
    assert format_progress(20, 1000, values, 3723.4).split(" · ") == [
        "step   20/1000", "loss 2.413", "held out 2.500", "lr 3.0e-04", "grad norm nan", "12.3k tokens/s",
        "1:02:03 left",
    ]  # fmt: skip
    assert "MFU 41.3%" in format_progress(20, 1000, values | {"mfu": 0.413}, None)
    assert format_progress(1, 9, {}, None) == "step 1/9"


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(3, console=Console(file=out, width=40)) as progress:
        progress.note("reading [bold]data[/bold]")
        for step in (1, 2, 3):
            progress.update(step, {"loss": 3.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_s": 5e6})
    lines = out.getvalue().splitlines()
    assert lines[0] == "reading [bold]data[/bold]"
    assert [line.split(" · ")[0] for line in lines[1:]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all("5.0M tokens/s" in line and "\x1b" not in line for line in lines[1:])


def test_one_changing_line_on_a_terminal():
    out = io.StringIO()
    with Progress(3, console=Console(file=out, width=60, force_terminal=True)) as progress:
        for step in (1, 2, 3):
            progress.update(step, {"loss": 3.0})
        progress.note("a note")
    assert "\x1b[?25l" in out.getvalue(), "the cursor is hidden while the line changes"
    assert "step 3/3 · loss 3.000" in out.getvalue() and "a note" in out.getvalue()


def test_time_left_leaves_out_what_the_first_step_took():
    progress = Progress(100, console=Console(file=io.StringIO()))
    assert progress._seconds_left(41, now=60.0) is None
    assert progress._seconds_left(51, now=80.0) == pytest.approx(2.0 * 49)


# Memory and the plot --------------------------------------------------------------------------------------------


def test_memory_of_this_process():
    before = memory("cpu")
    block = torch.ones(16, 1 << 20)  # 64 MiB
    after = memory(torch.device("cpu"))
    assert after["memory_bytes"] - before["memory_bytes"] > 48 << 20
    assert after["memory_peak_bytes"] >= after["memory_bytes"]
    del block


def test_the_plot_has_both_curves(tmp_path, no_tensorboard):
    with MetricsWriter(tmp_path, notices=None) as writer:
        for step in range(1, 40):
            held_out = {"held_out_loss": 5.0 / step + 0.1} if step % 10 == 0 else {}
            writer.write(step, {"loss": math.nan if step == 7 else 5.0 / step, **held_out})
    path = plot_loss(tmp_path)
    assert path == tmp_path / "loss.png"
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    colours = set(map(tuple, pixels.reshape(-1, 3).tolist()))
    assert {(31, 119, 180), (255, 127, 14)} <= colours, "a curve in each of matplotlib's first two colours"


def test_a_run_without_losses_has_no_plot(tmp_path, no_tensorboard):
    write_nothing = MetricsWriter(tmp_path, notices=None)
    write_nothing.write(1, {"tokens": 3})
    write_nothing.close()
    with pytest.raises(UserError, match="has no losses to plot"):
        plot_loss(tmp_path)
