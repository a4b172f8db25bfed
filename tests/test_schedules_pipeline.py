"""The order of a pipeline's actions: each once, after what it needs, and nobody waits for ever."""

import itertools
from collections import Counter

import pytest

from functitan.compiler.pipeline.actions import COMPUTES, Action
from functitan.compiler.pipeline.schedules import (
    SCHEDULES,
    fewest_microbatches,
    legal_microbatches,
    make_schedule,
    stages_per_rank_of,
)
from functitan.compiler.pipeline.transport import box_of, receipts

INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
CASES = [
    (name, ranks, m, v)
    for name in SCHEDULES
    for ranks in (1, 2, 3, 4)
    for v in ((1, 2, 3) if name in INTERLEAVED else (stages_per_rank_of(name),))
    for m in legal_microbatches(name, ranks, v, 3 * ranks)
]


def make(case):
    name, ranks, microbatches, stages_per_rank = case
    return make_schedule(name, ranks, microbatches, stages_per_rank)


def computes(schedule, rank):
    return [action for action in schedule.order[rank] if action is not None]


def run_blocking(schedule, *, rendezvous):
    """Runs every rank's list with real queues, one a pair of ranks and direction; returns what each rank computed.

    A send goes into the queue of its pair; a receive has to find its own message at the head. With ``rendezvous`` a
    send also waits until that message has been taken.
    """
    lists = schedule.with_sends()
    queues = {pair: [] for pair in itertools.permutations(range(schedule.ranks), 2)}
    place, sent = [0] * schedule.ranks, [False] * schedule.ranks
    has = [set() for _ in lists]
    done = [[] for _ in lists]

    def peer(action):
        step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[action.kind]
        return action.stage + step

    def step(rank):
        """Whether the rank could do, or begin, its next action."""
        action = lists[rank][place[rank]]
        if action.kind in COMPUTES:
            assert set(action.needs(schedule.stages)) <= has[rank], f"rank {rank} lacks something for {action}"
            if given := action.gives():
                has[rank].add(given)
            done[rank].append(action)
        elif action.kind.startswith("SEND"):
            stage = peer(action)
            message = ("x" if action.kind == "SEND_F" else "dx", action.stage, action.microbatch)
            assert message in has[rank]
            queue = queues[rank, schedule.stage_ranks[stage]]
            if not sent[rank]:
                queue.append(message)
                sent[rank] = rendezvous
                if rendezvous:
                    return True
            elif message in queue:
                return False
            sent[rank] = False
        else:
            queue = queues[schedule.stage_ranks[peer(action)], rank]
            message = ("x" if action.kind == "RECV_F" else "dx", peer(action), action.microbatch)
            if not queue:
                return False
            assert queue.pop(0) == message, "two ranks do not agree on the order of what passes between them"
            has[rank].add(message)
        place[rank] += 1
        return True

    moved = True
    while moved:
        moved = [rank for rank in range(schedule.ranks) if place[rank] < len(lists[rank]) and step(rank)]
    assert place == [len(actions) for actions in lists], f"deadlock at {place}"
    assert not any(queues.values()), "a message is left over"
    return done


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_each_stage_does_each_microbatch_once(case):
    schedule = make(case)
    name, ranks, microbatches, stages_per_rank = case
    assert (schedule.ranks, schedule.microbatches, schedule.stages) == (ranks, microbatches, ranks * stages_per_rank)
    counts = Counter(action for rank in range(ranks) for action in computes(schedule, rank))
    assert set(counts.values()) == {1}
    for stage, microbatch in itertools.product(range(schedule.stages), range(microbatches)):
        kinds = "".join(kind for kind in COMPUTES if Action(kind, stage, microbatch) in counts)
        assert kinds in ("FB", "FIW")
    for rank in range(ranks):
        assert {action.stage for action in computes(schedule, rank)} == set(schedule.stages_of(rank))


@pytest.mark.parametrize("rendezvous", [False, True], ids=["asynchronous", "rendezvous"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_nobody_waits_for_ever(case, rendezvous):
    schedule = make(case)
    done = run_blocking(schedule, rendezvous=rendezvous)
    assert done == [computes(schedule, rank) for rank in range(schedule.ranks)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_one_rank_send_nothing(name):
    schedule = make_schedule(name, 2, 4)
    sends = Counter(action.kind for row in schedule.with_sends() for action in row if action.kind not in COMPUTES)
    hops = sum(a != b for a, b in itertools.pairwise(schedule.stage_ranks))
    assert sends == {kind: 4 * hops for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")}
    assert hops == (2 if name in V_SHAPED else 3 if name in INTERLEAVED else 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_in_flight(ranks):
    for microbatches in (ranks, 2 * ranks, 5 * ranks):
        gpipe, one = (make_schedule(name, ranks, microbatches) for name in ("GPipe", "1F1B"))
        assert [gpipe.in_flight(rank) for rank in range(ranks)] == [microbatches] * ranks
        assert [one.in_flight(rank) for rank in range(ranks)] == [ranks - rank for rank in range(ranks)]


def taken(schedule, action):
    """The message that a compute action reads, if it reads one."""
    direction, source = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
    across = action.kind in "FBI" and 0 <= source < schedule.stages
    across = across and schedule.stage_ranks[source] != schedule.stage_ranks[action.stage]
    return (direction, action.stage, action.microbatch) if across else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_receipt_is_for_what_was_taken_before(case):
    schedule = make(case)
    lists = schedule.with_sends()
    known = receipts(lists, schedule.stage_ranks)
    sender = {box_of(a): rank for rank, row in enumerate(lists) for a in row if a.kind.startswith("SEND")}
    assert set(known) == set(sender)
    for box, before in known.items():
        row = lists[sender[box]]
        at = next(i for i, a in enumerate(row) if a.kind.startswith("SEND") and box_of(a) == box)
        assert set(before) <= {taken(schedule, a) for a in row[:at]}
        assert {schedule.stage_ranks[b[1]] for b in before} <= {sender[box]}
        assert all(sender[b] == schedule.stage_ranks[box[1]] for b in before if b in sender)
    assert max(Counter(b for before in known.values() for b in before).values(), default=1) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_has_been_sent_is_kept_no_longer_than_what_is_in_flight(ranks):
    microbatches = 3 * ranks
    for name in ("1F1B", "GPipe"):
        schedule = make_schedule(name, ranks, microbatches)
        lists = schedule.with_sends()
        known = receipts(lists, schedule.stage_ranks)
        for rank, row in enumerate(lists):
            leaving, most = set(), 0
            for action in row:
                if action.kind.startswith("SEND"):
                    leaving.add(box_of(action))
                    most = max(most, len(leaving))
                elif action.kind in COMPUTES and (box := taken(schedule, action)):
                    leaving -= set(known[box])
            # Forward, and the gradient that goes the other way before the next receipt comes.
            bound = schedule.in_flight(rank) + microbatches * (name == "GPipe") + 1
            assert most <= bound, (name, rank, most)


def test_backward_follows_at_once_on_the_last_rank_of_1f1b_alone():
    assert [make_schedule("1F1B", 4, 8).apart(stage) for stage in range(4)] == [True, True, True, False]
    assert all(make_schedule("GPipe", 4, 8).apart(stage) for stage in range(4))
    assert not make_schedule("GPipe", 1, 1).apart(0)


def test_in_flight_lasts_until_the_weights_gradient():
    schedule = make_schedule("InterleavedZeroBubble", 1, 2, 1)
    assert [str(action) for action in schedule.order[0] if action] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]
    assert schedule.in_flight(0) == 1
    with pytest.raises(ValueError, match="no rank 1; legal: 0 to 0"):
        schedule.in_flight(1)


def test_1f1b_is_the_order_that_torch_runs():
    rows = [" ".join(map(str, row)) for row in make_schedule("1F1B", 3, 4).order]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_overlapping_actions_are_taken_in_turn():
    # DualPipeV's eight steps on rank 0 of 2; (0F3 3B1), (3F2 0B0) and (3F3 0B1) are overlapping pairs.
    rank0 = " ".join(map(str, computes(make_schedule("DualPipeV", 2, 4), 0)))
    assert rank0 == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_legal_counts_are_those_of_torch(name, ranks):
    from types import SimpleNamespace

    from torch.distributed.pipelining.schedules import get_schedule_class

    v = stages_per_rank_of(name)

    def torch_takes(microbatches):
        stages = [SimpleNamespace(num_stages=ranks * v, group_size=ranks, group_rank=0, stage_index=i, submod=None)
                  for i in range(v)]  # fmt: skip
        try:
            get_schedule_class(name)(stages if v > 1 else stages[0], microbatches)
        except ValueError:
            return False
        return True

    counts = range(1, 4 * ranks + 3)
    assert legal_microbatches(name, ranks, None, counts[-1]) == tuple(filter(torch_takes, counts))
    assert fewest_microbatches(name, ranks, None) == 2 * ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 2, 4), "no schedule '1f1b'; did you mean '1F1B'. legal: GPipe, 1F1B, Interleaved1F1B"),
        (("DualPipe", 2, 4), "no schedule 'DualPipe'; did you mean 'DualPipeV'"),
        (("1F1B", 4, 3), "1F1B over 4 ranks needs .* at least one a rank, not 3; nearest legal: 4, 5"),
        (("Interleaved1F1B", 4, 9), "not 9; nearest legal: 8, 10, 12"),
        (("InterleavedZeroBubble", 2, 5), "not 5; nearest legal: 4, 6, 8"),
        (("DualPipeV", 4, 7), "at least two a rank, not 7; nearest legal: 8, 9"),
        (("GPipe", 4, 0), "not 0; nearest legal: 1, 2"),
        (("ZBVZeroBubble", 4, -1), "not -1; nearest legal: 1, 2"),
        (("1F1B", 4, 8, 2), "1F1B with 2 stages a rank; legal: 1"),
        (("DualPipeV", 4, 8, 1), "DualPipeV with 1 stages a rank; legal: 2"),
        (("Interleaved1F1B", 4, 8, 0), "Interleaved1F1B with 0 stages a rank; legal: 1 and more"),
        (("GPipe", 0, 4), "a pipeline over 0 ranks; legal: 1 and more"),
    ],
)
def test_refusals_have_legal_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


class TestFiles:
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_round_trip(self, name, tmp_path):
        file = tmp_path / "schedule.csv"
        made = make_schedule(name, 2, 4)
        file.write_text(made.to_csv())
        read = make_schedule(str(file), 2, 4, made.stages_per_rank)
        assert (read.order, read.stage_ranks, read.stages) == (made.order, made.stage_ranks, made.stages)
        assert read.with_sends() == made.with_sends()
        assert legal_microbatches(str(file), 2, None, 100) == (4,)
        assert legal_microbatches(str(file), 2, None, 3) == ()
        assert fewest_microbatches(str(file), 2, None) == 4
        assert stages_per_rank_of(str(file)) == made.stages_per_rank

    def test_a_file_that_torch_wrote(self, tmp_path):
        from types import SimpleNamespace

        from torch.distributed.pipelining.schedules import ScheduleDualPipeV

        stages = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, stage_index=i, submod=None) for i in (0, 3)]
        file = tmp_path / "schedule.csv"
        ScheduleDualPipeV(stages, 4)._dump_csv(str(file), format="compute_only")
        assert "OVERLAP_F_B" in file.read_text()
        assert make_schedule(str(file), 2, 4).order == make_schedule("DualPipeV", 2, 4).order

    def read(self, tmp_path, text, ranks=2, microbatches=1, stages_per_rank=None):
        file = tmp_path / "mine.csv"
        file.write_text(text)
        return make_schedule(str(file), ranks, microbatches, stages_per_rank)

    def test_empty_cells_and_lines_are_idle_and_nothing(self, tmp_path):
        made = self.read(tmp_path, "0F0,,,0B0\n\n , 1F0 ,1B0\n")
        assert [[a and str(a) for a in row] for row in made.order] == [["0F0", None, None, "0B0"], [None, "1F0", "1B0"]]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is no action; legal: a stage, one of F, B, I, W and a"),
            ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "line 1, cell 2: '0SEND_F0' is no action"),
            ("0F0,0B0,\n1F0,1F0,1B0\n", "line 2, cell 2: 1F0 is already at line 2, cell 1"),
            ("0F0,0B0\n1F0\n", "stage 1 has F for microbatch 0 of 1; legal: F and B, or F, I and W"),
            ("0F0,0B0\n1F0,1I0\n", "stage 1 has F and I for microbatch 0"),
            ("0F0,0B0,0W0\n1F0,1B0\n", "stage 0 has F and B and W for microbatch 0"),
            ("0F0,0B0\n2F0,2B0\n", "stage 1 has nothing for microbatch 0"),
            ("0F0,0B0,1B0\n1F0\n", "line 2, cell 1: 1F0 is on rank 1, but stage 1 has actions on rank 0"),
            ("0F0,1F0,1B0,0B0,2F0,2B0\n3F0,3B0\n", r"the ranks have \[3, 1\] stages; each rank needs equally many"),
            ("0B0,0F0\n1F0,1B0\n", r"line 1, cell 1: 0B0 needs 0F0 \(line 1, cell 2\) to come before it"),
            ("0F0,0W0,0I0\n1F0,1B0\n", r"line 1, cell 2: 0W0 needs 0I0 \(line 1, cell 3\) to come before it"),
            ("", "there are no actions"),
            ('0F0,"0B0\n1F0', "cannot be read: .*unexpected end of data"),
        ],
    )
    def test_what_is_malformed_and_where(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=message):
            self.read(tmp_path, text)

    def test_ranks_that_wait_for_each_other(self, tmp_path):
        # Rank 0 wants a gradient of microbatch 1 before it has run that forward, which rank 1 waits for.
        text = "0F0,0B1,0F1,0B0\n1F0,1F1,1B1,1B0\n"
        with pytest.raises(ValueError, match=r"0B1 needs 0F1 .*ranks wait for ever: 0 at 0B1, 1 at 1F1"):
            self.read(tmp_path, text, microbatches=2)

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [((3, 1, None), r"has 2 ranks \(lines\), not 3; legal: 2"), ((2, 2, None), "1 microbatches, not 2; legal: 1"),
         ((2, 1, 2), "has 1 stages a rank, not 2; legal: 1")],
    )  # fmt: skip
    def test_other_numbers_than_the_file_has(self, tmp_path, numbers, message):
        with pytest.raises(ValueError, match=message):
            self.read(tmp_path, "0F0,,,0B0\n,1F0,1B0\n", *numbers)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(ValueError, match="missing.csv' cannot be read: No such file or directory; give a .csv"):
            make_schedule(str(tmp_path / "missing.csv"), 2, 4)
