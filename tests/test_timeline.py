"""Who does what when: against closed forms, and by the words and pictures of it."""

import json

import pytest
from matplotlib.image import imread

from functitan.compiler.pipeline.schedules import SCHEDULES, legal_microbatches, make_schedule
from functitan.compiler.pipeline.timeline import simulate
from train.errors import UserError
from train.timeline_plot import COLOURS, plot_timeline

RANKS = (1, 2, 3, 4, 8)


def bubble(name, ranks, microbatches, stages_per_rank=None, **durations):
    return simulate(make_schedule(name, ranks, microbatches, stages_per_rank), **durations).bubble


class TestClosedForms:
    """Narayanan et al., 2021, https://arxiv.org/abs/2104.04473, section 2.2, as a share of the whole time."""

    @pytest.mark.parametrize("name", ["GPipe", "1F1B"])
    @pytest.mark.parametrize("p", RANKS)
    @pytest.mark.parametrize("backward", [1.0, 2.0, 2.5])
    def test_one_stage_a_rank(self, name, p, backward):
        for m in {*range(p, 2 * p + 3), 4 * p}:
            expected = (p - 1) / (m + p - 1)
            assert bubble(name, p, m, durations={"F": 1.0, "B": backward}) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("p", RANKS)
    @pytest.mark.parametrize("v", [1, 2, 3, 4])
    def test_interleaved(self, p, v):
        for m in (p, 2 * p, 3 * p):
            expected = (p - 1) / (v * m + p - 1)
            assert bubble("Interleaved1F1B", p, m, v) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
    @pytest.mark.parametrize("p", [2, 4, 8])
    def test_zero_bubble_schedules_wait_less_than_1f1b(self, name, p):
        for m in (2 * p, 4 * p):
            assert 0 < bubble(name, p, m) < bubble("Interleaved1F1B", p, m, 2) < bubble("1F1B", p, m)

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_one_rank_never_waits(self, name):
        assert bubble(name, 1, 4) == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("send", [0.0, 0.3])
def test_what_is_read_has_arrived_and_ranks_do_one_thing_at_a_time(name, p, send):
    for m in legal_microbatches(name, p, None, 3 * p):
        schedule = make_schedule(name, p, m)
        durations = {kind: [1 + 0.1 * stage for stage in range(schedule.stages)] for kind in "FBIW"}
        timeline = simulate(schedule, durations, send)
        made = {row.action.gives(): row for row in timeline.rows}
        for row in timeline.rows:
            assert row.end - row.start == pytest.approx(1 + 0.1 * row.action.stage)
            for need in row.action.needs(schedule.stages):
                maker = made[need]
                assert row.start >= maker.end + send * (maker.rank != row.rank)
        for rank in range(p):
            own = timeline.of_rank(rank)
            assert [row.action for row in own] == [action for action in schedule.order[rank] if action]
            assert all(after.start >= before.end for before, after in zip(own, own[1:]))


def test_sends_make_it_longer():
    schedule = make_schedule("1F1B", 4, 4)
    # The first microbatch goes through 3 hops forward, and the last gradient through 3 backward.
    assert simulate(schedule, send=0.5).makespan >= simulate(schedule).makespan + 6 * 0.5


def test_an_uneven_stage_sets_the_pace():
    timeline = simulate(make_schedule("1F1B", 2, 8), {"F": (1.0, 3.0), "B": (2.0, 6.0)}, unit="ms")
    assert timeline.makespan == 1 + 8 * 9 + 2
    assert timeline.bubble == pytest.approx(1 - 8 * (3 + 9) / (2 * timeline.makespan))


@pytest.mark.parametrize(
    ("durations", "send", "message"),
    [
        ({"F": 1.0}, 0.0, "1F1B needs durations of F, B; B missing"),
        ({"F": (1.0,), "B": 1.0}, 0.0, r"durations of F: \(1.0,\); legal: .*, or 2, one a stage"),
        ({"F": 0.0, "B": 1.0}, 0.0, "durations of F: 0.0; legal: a finite time above 0"),
        ({"F": 1.0, "B": float("nan")}, 0.0, "durations of B: nan"),
        ({"F": 1.0, "B": 1.0}, -1.0, "a send of -1.0; legal: a finite time of at least 0"),
    ],
)
def test_durations_that_are_none(durations, send, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("1F1B", 2, 2), durations, send)


def test_json_has_every_action():
    timeline = simulate(make_schedule("ZBVZeroBubble", 2, 4), unit="ms")
    read = json.loads(timeline.to_json())
    assert read["schedule"] == "ZBVZeroBubble" and read["stage_ranks"] == [0, 1, 1, 0] and read["unit"] == "ms"
    assert (read["bubble"], read["makespan"]) == (timeline.bubble, timeline.makespan)
    assert read["in_flight"] == [timeline.schedule.in_flight(rank) for rank in (0, 1)]
    assert [(row["rank"], row["action"], row["start"], row["end"]) for row in read["actions"]] == [
        (row.rank, str(row.action), row.start, row.end) for row in timeline.rows
    ]


class TestPicture:
    def test_one_column_a_unit(self):
        timeline = simulate(make_schedule("1F1B", 2, 2))
        assert timeline.makespan == 9
        assert timeline.picture(len("rank 0 ") + 9 * 2).splitlines() == [
            "rank 0 F0F1....B0--..B1--",
            "rank 1 ..F0B0--F1B1--....",
        ]

    def test_stages_are_named_where_there_is_room(self):
        timeline = simulate(make_schedule("Interleaved1F1B", 2, 2, 2))
        assert "0F0" in timeline.picture(200) and "0F0" not in timeline.picture(40)

    @pytest.mark.parametrize("name", SCHEDULES)
    @pytest.mark.parametrize("width", [None, 8, 40, 300])
    def test_dots_are_idle(self, name, width):
        timeline = simulate(make_schedule(name, 4, 8))
        lines = timeline.picture(width).splitlines()
        assert len(lines) == 4 and len({len(line) for line in lines}) == 1
        assert width is None or len(lines[0]) == width
        if width == 300:
            room = 300 - len("rank 0 ")
            assert sum(line.count(".") for line in lines) / (4 * room) == pytest.approx(timeline.bubble, abs=0.01)

    def test_too_narrow(self):
        with pytest.raises(ValueError, match="a picture 7 characters wide; legal: 8 and more"):
            simulate(make_schedule("1F1B", 2, 2)).picture(7)

    def test_the_title_has_the_figures(self):
        title = str(simulate(make_schedule("1F1B", 4, 8))).splitlines()[0]
        assert title == "1F1B: 4 ranks, 4 stages, 8 microbatches; 33, bubble 27.3%, in flight 4 3 2 1"


class TestPlot:
    @pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
    def test_the_boxes_have_the_colours_of_what_is_done(self, name, tmp_path):
        timeline = simulate(make_schedule(name, 2, 4))
        path = plot_timeline(timeline, tmp_path / "timeline.png")
        pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
        drawn = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in {tuple(pixel) for pixel in pixels.tolist()}}
        used = {row.action.kind for row in timeline.rows}
        assert {kind for kind, colour in COLOURS.items() if colour in drawn} == used

    def test_numbers_and_the_bubble_are_written(self, tmp_path):
        timeline = simulate(make_schedule("1F1B", 2, 4), unit="ms")
        text = plot_timeline(timeline, tmp_path / "timeline.svg").read_text()
        for words in ("1F1B, 4 microbatches: bubble 20.0%", "rank 1", "time (ms)", "backward", "idle", "<!-- 3 -->"):
            assert words in text

    @pytest.mark.parametrize("path", ["timeline.txt", "timeline"])
    def test_other_kinds_of_files(self, path, tmp_path):
        with pytest.raises(UserError, match="a timeline is drawn as .png, .svg, .pdf: end the name with one of these"):
            plot_timeline(simulate(make_schedule("1F1B", 2, 2)), tmp_path / path)

    def test_a_path_that_cannot_be_written(self, tmp_path):
        with pytest.raises(UserError, match="cannot be written to .*: No such file or directory") as error:
            plot_timeline(simulate(make_schedule("1F1B", 2, 2)), tmp_path / "missing" / "timeline.png")
        assert "\n" not in str(error.value)
