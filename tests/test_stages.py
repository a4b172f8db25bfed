"""Which layers belong to which stage, and what is refused."""

import itertools
import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functitan import init
from functitan.compiler.pipeline.schedules import SCHEDULES
from functitan.compiler.pipeline.stages import Pipeline, check_pipeline, check_rows, make_pipeline
from models.llama import LlamaConfig, declare
from sharding_specs import PRESETS, MeshSpec, Param, Rules, SpecError, stage_layers
from sharding_specs.stages import balanced_stages, listed_stages

RULES = PRESETS["all"]


def sizes(stages):
    return [len(layers) for layers in stages]


def llama(n_layers, **changes):
    return declare(LlamaConfig(n_layers=n_layers, **changes))


def every_division(n_layers, n_stages):
    for cuts in itertools.combinations(range(1, n_layers), n_stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *cuts, n_layers))]


def stage_costs(stages, costs, first, last):
    totals = [sum(costs[i] for i in layers) for layers in stages]
    totals[0] += first
    totals[-1] += last
    return totals


class TestBalancedStages:
    @settings(deadline=None, max_examples=60)
    @given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def test_no_division_has_a_cheaper_dearest_stage(self, data, costs):
        n_stages = data.draw(st.integers(1, len(costs)))
        first, last = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
        stages = balanced_stages(costs, n_stages, first=first, last=last)
        assert [i for layers in stages for i in layers] == list(range(len(costs)))
        assert min(sizes(stages)) >= 1
        best = min(max(stage_costs(each, costs, first, last)) for each in every_division(len(costs), n_stages))
        assert max(stage_costs(stages, costs, first, last)) == best

    @settings(deadline=None, max_examples=40)
    @given(st.data(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=7))
    def test_of_the_best_by_the_first_cost_the_second_is_least(self, data, costs):
        n_stages = data.draw(st.integers(1, len(costs)))
        first, last = (data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))) for _ in range(2))

        def dearest(stages):
            return tuple(max(stage_costs(stages, [c[k] for c in costs], first[k], last[k])) for k in range(2))

        stages = balanced_stages(costs, n_stages, first=first, last=last)
        assert dearest(stages) == min(dearest(each) for each in every_division(len(costs), n_stages))

    @pytest.mark.parametrize("n_layers", range(1, 14))
    def test_equal_layers_are_divided_as_by_stage_layers(self, n_layers):
        for n_stages in range(1, n_layers + 1):
            assert balanced_stages([2.5] * n_layers, n_stages) == stage_layers(n_layers, n_stages)

    def test_an_expensive_head_takes_layers_from_the_last_stage(self):
        assert sizes(balanced_stages([10] * 8, 2, last=40)) == [6, 2]
        assert sizes(balanced_stages([10] * 8, 2, first=40)) == [2, 6]

    @pytest.mark.parametrize(("costs", "what"), [([1, -1], "layer 1"), ([1, float("inf")], "layer 1"),
                                                 ([(1, 2), 3], "layer 1")])  # fmt: skip
    def test_costs_that_are_none(self, costs, what):
        with pytest.raises(ValueError, match=f"cost of {what} is .*; legal: [12] finite number"):
            balanced_stages(costs, 1)

    def test_fewer_layers_than_stages(self):
        with pytest.raises(ValueError, match="2 layers cannot fill 3 pipeline stages.*legal numbers of stages: 1 to 2"):
            balanced_stages([1, 1], 3)


class TestListedStages:
    @pytest.mark.parametrize("counts", ["2,1,1,1", " 2, 1,1 ,1", (2, 1, 1, 1), [2, 1, 1, 1]])
    def test_every_layer_once(self, counts):
        assert listed_stages(counts, 5, 4) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]

    @pytest.mark.parametrize(
        ("counts", "message"),
        [
            ("2,1,1", "3 numbers for 4 stages"),
            ("2,1,1,2", "6 in all, but there are 5"),
            ("3,0,1,1", "stage 1 is empty"),
            ("2,1,one,1", "not a list of numbers"),
            ("", "not a list of numbers"),
            ((3, -1, 2, 1), "not a list of numbers"),
        ],
    )
    def test_what_is_wrong_and_a_list_that_works(self, counts, message):
        legal = "legal: 4 numbers of at least 1 that add up to 5, such as 2,1,1,1"
        with pytest.raises(ValueError, match=f"{message}; {legal}"):
            listed_stages(counts, 5, 4)


class TestMakePipeline:
    @pytest.mark.parametrize("split", ["auto", "equal", "1,2,1,1"])
    def test_case_c5_five_layers_over_four_stages(self, split):
        made = make_pipeline(llama(5), RULES, MeshSpec(pp=4), "1F1B", 4, split=split)
        assert [layer for start, stop in made.layers for layer in range(start, stop)] == list(range(5))
        assert all(stop > start for start, stop in made.layers)
        assert made.stage_ranks == (0, 1, 2, 3)

    def test_case_c5_three_layers_over_four_stages_are_refused(self):
        with pytest.raises(SpecError, match="mesh/pp: 3 layers cannot fill the 4 stages of pp=4; legal pp: 1, 2, 3"):
            make_pipeline(llama(3), RULES, MeshSpec(pp=4), "1F1B")

    def test_stages_of_interleaved_schedules_count_as_well(self):
        message = "5 layers cannot fill the 6 stages of pp=3 with 2 stages a rank; legal pp: 1, 2;"
        with pytest.raises(SpecError, match=message):
            make_pipeline(llama(5), RULES, MeshSpec(pp=3), "Interleaved1F1B")

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_each_rank_holds_its_stages_layers(self, schedule):
        made = make_pipeline(llama(9), RULES, MeshSpec(pp=4, fsdp=2), schedule)
        held = [made.layers_of(rank) for rank in range(4)]
        assert sorted(layer for layers in held for layer in layers) == list(range(9))
        for rank, layers in enumerate(held):
            stages = [stage for stage, owner in enumerate(made.stage_ranks) if owner == rank]
            assert made.stages_of(rank) == tuple(stages) and len(stages) == made.stages_per_rank
            assert layers == tuple(i for stage in stages for i in range(*made.layers[stage]))
        with pytest.raises(ValueError, match="no rank 4; legal: 0 to 3"):
            made.layers_of(4)

    def test_v_schedules_have_the_first_and_the_last_stage_on_one_rank(self):
        made = make_pipeline(llama(8), RULES, MeshSpec(pp=2), "ZBVZeroBubble", split="equal")
        assert made.stage_ranks == (0, 1, 1, 0) and made.layers_of(0) == (0, 1, 6, 7)
        loop = make_pipeline(llama(8), RULES, MeshSpec(pp=2), "Interleaved1F1B", split="equal")
        assert loop.stage_ranks == (0, 1, 0, 1) and loop.layers_of(0) == (0, 1, 4, 5)

    def test_the_fewest_microbatches_are_two_a_rank(self):
        assert [make_pipeline(llama(8), RULES, MeshSpec(pp=4), name).microbatches for name in SCHEDULES] == [8] * 6

    def test_costs_are_those_of_the_parameters(self):
        params = llama(4, tied_embeddings=False)
        made = make_pipeline(params, RULES, MeshSpec(pp=2), "1F1B", split="equal")
        layer = sum(p.size for p in params["layers"].values()) // 4
        embed, head, norm = (params[name].size for name in ("embed", "unembed", "norm"))
        assert made.parameters == (2 * layer + embed, 2 * layer + head + norm)
        matrices = sum(p.size for name, p in params["layers"].items() if "norm" not in name) // 4
        assert made.flops == (6 * 2 * matrices, 6 * (2 * matrices + head))

    def test_tied_embeddings_are_in_both_stages_and_multiplied_in_the_last(self):
        tied = make_pipeline(llama(4, tied_embeddings=True), RULES, MeshSpec(pp=2), "1F1B", split="equal")
        untied = make_pipeline(llama(4), RULES, MeshSpec(pp=2), "1F1B", split="equal")
        assert (tied.parameters, tied.flops) == (untied.parameters, untied.flops)

    def test_auto_counts_the_head(self):
        # The head costs about as much as three layers do.
        params = llama(12, vocab_size=6000)
        made = make_pipeline(params, RULES, MeshSpec(pp=2), "1F1B")
        equal = make_pipeline(params, RULES, MeshSpec(pp=2), "1F1B", split="equal")
        assert max(made.flops) < max(equal.flops)
        assert made.layers[0][1] > 6

    def test_it_is_data(self):
        made = make_pipeline(llama(8), RULES, MeshSpec(pp=2), "DualPipeV")
        assert Pipeline(**json.loads(json.dumps(attrs.asdict(made)))) == made
        assert hash(made) == hash(attrs.evolve(made))

    def test_the_table_says_who_has_what(self):
        table = str(make_pipeline(llama(5), RULES, MeshSpec(pp=2), "ZBVZeroBubble", 4, split="2,1,1,1")).splitlines()
        assert table[0] == "ZBVZeroBubble: 5 layers in 4 stages on 2 ranks, 4 microbatches"
        rows = [line.split() for line in table[2:]]
        assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "1"], ["3", "0"]]
        assert "0 to 1" in table[2] and "embedding" in table[2] and "head" in table[5]
        assert not any(word in line for line in table[3:5] for word in ("embedding", "head"))
        assert len({len(line) for line in table[1:]}) == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"schedule": "1f1b"}, "pipeline/schedule: there is no schedule '1f1b'; did you mean '1F1B'"),
            ({"schedule": "1F1B", "microbatches": 3}, "at least one a rank, not 3; nearest legal: 4, 5"),
            ({"schedule": "GPipe", "stages_per_rank": 2}, "GPipe with 2 stages a rank; legal: 1"),
            ({"schedule": "GPipe", "split": "2,2,1"}, "pipeline/layers: .*3 numbers for 4 stages"),
            ({"schedule": "GPipe", "split": "balanced"}, "pipeline/layers: .*not a list of numbers"),
        ],
    )
    def test_refusals_have_legal_values(self, arguments, message):
        with pytest.raises(SpecError, match=message):
            make_pipeline(llama(5), RULES, MeshSpec(pp=4), **arguments)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({}, 'no parameter has a dim "layers"'),
            ({"a": ((4,), ("layers",)), "b": ((5,), ("layers",))}, r"4 \(a\) and 5 \(b\) layers"),
            ({"a": ((3, 4), ("embed", "layers"))}, 'a: the dim "layers" is dim 1; it has to come first'),
        ],
    )
    def test_models_that_are_no_stack(self, params, message):
        declared = {name: Param(shape, names, init.zeros()) for name, (shape, names) in params.items()}
        with pytest.raises(SpecError, match=message):
            make_pipeline(declared, Rules(layers="pp", embed=None), MeshSpec(pp=2), "1F1B")

    def test_rules_that_leave_the_layers_whole(self):
        with pytest.raises(SpecError, match='rules/layers: a pipeline over pp=2 needs the layers over "pp"'):
            make_pipeline(llama(4), PRESETS["data"].replace(layers=None), MeshSpec(pp=2), "1F1B")

    def test_case_c6_rows_that_do_not_divide(self):
        made = make_pipeline(llama(4), RULES, MeshSpec(pp=2), "1F1B", 4)
        check_rows(made, 8)
        with pytest.raises(SpecError, match="6 rows does not divide into 4 microbatches; legal microbatches: 2, 3, 6;"):
            check_rows(made, 6)
        with pytest.raises(SpecError, match="no number works for 1F1B over pp=2; take a multiple of 4 rows"):
            check_rows(made, 1)


class TestPipeline:
    @pytest.mark.parametrize(
        ("layers", "stage_ranks", "message"),
        [
            ([], [], "0 stages"),
            ([(0, 2), (2, 3)], [0], "one rank a stage"),
            ([(0, 2), (3, 4)], [0, 1], "begins where the one before stops"),
            ([(0, 2), (2, 2)], [0, 1], "begins where the one before stops"),
            ([(0, 2), (2, 3)], [0, 2], "legal: 1 on each from 0 on"),
            ([(0, 2), (2, 3)], [0, 0], "legal: 1 on each from 0 on"),
        ],
    )
    def test_stages_that_cannot_be(self, layers, stage_ranks, message):
        with pytest.raises(ValueError, match=message):
            Pipeline("1F1B", 4, 1, layers, stage_ranks)

    def test_another_model_mesh_or_order_is_refused(self):
        made = make_pipeline(llama(8), RULES, MeshSpec(pp=2), "ZBVZeroBubble")
        check_pipeline(made, llama(8), RULES, MeshSpec(pp=2))
        with pytest.raises(SpecError, match="a pipeline of 2 ranks on pp=4; legal pp: 2"):
            check_pipeline(made, llama(8), RULES, MeshSpec(pp=4))
        with pytest.raises(SpecError, match="a pipeline of 8 layers for a model of 9; legal layers: 9"):
            check_pipeline(made, llama(9), RULES, MeshSpec(pp=2))
        looped = attrs.evolve(made, stage_ranks=(0, 1, 0, 1))
        with pytest.raises(SpecError, match=r"on the ranks \(0, 1, 1, 0\), not \(0, 1, 0, 1\)"):
            check_pipeline(looped, llama(8), RULES, MeshSpec(pp=2))
