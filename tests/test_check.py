import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding_specs import PRESETS, BatchSpec, MeshSpec, Param, Rules, check, check_leaves

# The first example of a test may import jax or meet a busy machine.
no_deadline = settings(deadline=None)


def zeros(key, shape, dtype):
    raise AssertionError("checking a parameter must not make it")


def declare(layers=4, embed=64, heads=8, kv_heads=4, mlp=128, vocab=96):
    return {
        "embedding": Param((vocab, embed), ("vocab", "embed"), zeros),
        "layers": {
            "wq": Param((layers, embed, heads, 16), ("layers", "embed", "heads", "head_dim"), zeros),
            "wk": Param((layers, embed, kv_heads, 16), ("layers", "embed", "kv_heads", "head_dim"), zeros),
            "up": Param((layers, embed, mlp), ("layers", "embed", "mlp"), zeros),
            "norm": Param((layers, embed), ("layers", "embed"), zeros),
        },
    }


ALL = PRESETS["all"]


def only(problems):
    """The one problem there is."""
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


class TestSoundLayouts:
    @pytest.mark.parametrize(
        "mesh",
        [MeshSpec(), MeshSpec(dp=2), MeshSpec(fsdp=4, tp=2), MeshSpec(dp=2, fsdp=2, cp=2, tp=4, pp=4), MeshSpec(ep=2)],
    )
    @pytest.mark.parametrize("preset", PRESETS)
    def test_have_no_problem(self, mesh, preset):
        if preset != "all":
            mesh = MeshSpec(**{axis: size for axis, size in mesh.items() if axis not in ("pp", "ep")})
        batch = BatchSpec(32, 64, microbatches=2, accumulation=2)
        assert check(declare(), PRESETS[preset], mesh, batch, mesh.size) == []

    def test_of_the_default_rules_have_no_problem(self):
        assert check(declare(), Rules(), MeshSpec()) == []
        assert check(declare(), Rules(), MeshSpec(dp=2, cp=2), BatchSpec(4, 8), 4) == []
        assert check({}, Rules(), MeshSpec()) == []

    def test_with_a_free_axis_are_checked_with_what_the_devices_leave(self):
        assert check(declare(), ALL, MeshSpec(fsdp=-1, tp=2), devices=8) == []
        problem = only(check({"w": Param((6,), ("embed",), zeros)}, ALL, MeshSpec(fsdp=-1, tp=2), devices=8))
        assert "embed=6" in problem.message and "fsdp=4" in problem.message and problem.legal == (1, 2, 3, 6)

    def test_with_axes_of_the_users_own(self):
        assert check({"w": Param((6,), ("embed",), zeros)}, Rules(embed="shard"), MeshSpec(shard=3)) == []

    def test_of_trees_of_other_kinds_are_checked_by_their_leaves(self):
        assert check_leaves([("a/b", Param((6,), ("embed",), zeros))], Rules(embed="fsdp"), MeshSpec(fsdp=3)) == []


class TestCases:
    def test_s2_a_sequence_that_does_not_divide_over_the_balanced_ring(self):
        problem = only(check(declare(), ALL, MeshSpec(cp=4), BatchSpec(4, 10)))
        assert problem.path == "batch/seq_len"
        assert "seq=10" in problem.message and "divisible by 8" in problem.message and "cp=4" in problem.message
        assert problem.legal == (8, 16)

    def test_c1_key_value_heads_that_do_not_divide_over_tp(self):
        problem = only(check(declare(kv_heads=2), ALL, MeshSpec(tp=4)))
        assert problem.path == "layers/wk"
        assert str(problem) == "layers/wk: dim 2, kv_heads=2, does not divide over tp=4; legal tp: 1, 2"

    def test_c2_a_product_that_is_not_the_world_size_and_everything_else(self):
        problems = check(
            declare(heads=8, kv_heads=2, mlp=96), ALL, MeshSpec(dp=2, tp=3), BatchSpec(5, 64, 2), devices=8
        )
        paths = [problem.path for problem in problems]
        assert paths == ["mesh", "layers/wk", "layers/wq", "batch/size", "batch/microbatches", "batch/seq_len"]
        assert "= 6, but there are 8 devices" in problems[0].message
        assert "tp=4" in problems[0].hint

    def test_c4_names_without_a_rule_and_rules_without_a_name(self):
        params = {"up": Param((4, 8), ("embed", "ffn_in"), zeros), "down": Param((8, 4), ("ffn", "emebd"), zeros)}
        problems = check(params, Rules(embed="fsdp", ffn="tp", ffn_out="tp"), MeshSpec(fsdp=2, tp=2))
        found = {(problem.path, problem.hint) for problem in problems}
        assert found == {
            ("rules/ffn_out", "did you mean 'ffn_in' or 'ffn'? or list the name in `activations`, if they have it"),
            ("up", "did you mean 'ffn' or 'ffn_out'?"),
            ("down", "did you mean 'embed'?"),
        }
        missing = next(problem for problem in problems if problem.path == "down")
        assert "'emebd'" in missing.message and missing.legal == ("batch", "embed", "ffn", "ffn_out", "seq")

    def test_c5_layers_over_stages(self):
        assert check(declare(layers=5), ALL, MeshSpec(pp=4)) == []
        problems = check(declare(layers=3), ALL, MeshSpec(pp=4))
        assert {problem.path for problem in problems} == {"layers/wq", "layers/wk", "layers/up", "layers/norm"}
        assert all("3 layers over pp=4" in problem.message and problem.legal == (1, 2, 3) for problem in problems)

    def test_c5_two_stacks_of_layers_agree_on_the_legal_stages(self):
        params = {
            "encoder": Param((2, 4), ("layers", "embed"), zeros),
            "decoder": Param((3, 4), ("layers", "embed"), zeros),
        }
        problems = check(params, ALL, MeshSpec(pp=4))
        assert [(problem.path, problem.legal) for problem in problems] == [("decoder", (1, 2)), ("encoder", (1, 2))]

    def test_c6_a_batch_that_does_not_divide_into_microbatches(self):
        problem = only(check(declare(), ALL, MeshSpec(), BatchSpec(6, 8, microbatches=4)))
        assert problem.path == "batch/microbatches"
        assert problem.message == "a batch of 6 does not divide into microbatches=4"
        assert problem.legal == (1, 2, 3, 6)


class TestMesh:
    def test_problems_of_the_mesh_come_with_those_of_the_parameters(self):
        problems = check(declare(embed=30), ALL, MeshSpec(dp=0, fsdp=4, cp=-1, tp=-1), devices=8)
        assert [problem.path for problem in problems[:2]] == ["mesh/dp", "mesh"]
        assert {problem.path for problem in problems[2:]} == {f"layers/{w}" for w in ("wq", "wk", "up", "norm")} | {
            "embedding"
        }

    def test_a_free_axis_needs_the_number_of_devices(self):
        problem = only(check(declare(), ALL, MeshSpec(fsdp=-1)))
        assert problem.path == "mesh/fsdp" and "-1" in problem.message

    def test_a_misspelt_axis(self):
        problem = only(check(declare(), ALL, MeshSpec(fdsp=2)))
        assert problem.path == "mesh/fdsp" and "did you mean 'fsdp'" in problem.hint

    def test_an_axis_that_no_rule_uses(self):
        problem = only(check(declare(), ALL, MeshSpec(replica=2)))
        assert problem.path == "mesh/replica" and "no rule uses axis replica=2" in problem.message

    def test_stages_and_experts_of_a_model_without_them(self):
        params = {"w": Param((4, 4), ("embed", "mlp"), zeros)}
        problems = check(params, ALL.replace(batch="dp"), MeshSpec(pp=2, ep=2))
        assert [problem.path for problem in problems] == ["mesh/pp", "mesh/ep"]
        assert problems[0].legal == (1,) and 'layers="pp"' in problems[0].hint
        assert check(params, ALL.replace(batch="dp"), MeshSpec(pp=1, ep=1)) == []

    def test_a_device_count_that_is_none(self):
        assert only(check({}, Rules(), MeshSpec(), devices=0)).path == "devices"


class TestRules:
    def test_an_unknown_axis(self):
        problem = only(check(declare(), ALL.replace(mlp="tpp"), MeshSpec(tp=2)))
        assert problem.path == "rules/mlp" and "'tpp'" in problem.message
        assert "tp" in problem.legal and "did you mean 'tp'" in problem.hint

    def test_an_axis_named_twice(self):
        problem = only(check(declare(), ALL.replace(embed=("fsdp", "fsdp")), MeshSpec(fsdp=2)))
        assert problem.path == "rules/embed" and "'fsdp' is named 2 times" in problem.message

    def test_axes_that_are_not_in_mesh_order(self):
        problem = only(check(declare(), ALL.replace(embed=("tp", "fsdp")), MeshSpec(dp=2, fsdp=2, tp=2)))
        assert problem.path == "rules/embed" and problem.legal == ("('fsdp', 'tp')",)
        problem = only(check(declare(), ALL, MeshSpec(fsdp=2, dp=2)))
        assert problem.path == "rules/batch" and problem.legal == ("('fsdp', 'dp')",)

        problem = only(check(declare(), ALL, MeshSpec(tp=2, cp=2)))
        assert problem.path == "rules/seq" and problem.legal == ("('tp', 'cp')",)
        assert check(declare(), ALL.replace(seq=("tp", "cp")), MeshSpec(tp=2, cp=2)) == []

    def test_the_order_of_axes_that_the_mesh_lacks_or_that_split_nothing_does_not_matter(self):
        assert check(declare(), ALL.replace(embed=("tp", "fsdp")), MeshSpec(dp=2, fsdp=2)) == []
        assert check(declare(), ALL, MeshSpec(tp=2, cp=1)) == []
        assert only(check(declare(), ALL, MeshSpec(tp=2, cp=-1), devices=4)).path == "rules/seq"

    def test_pp_splits_layers_alone(self):
        problems = check(declare(), ALL.replace(mlp="pp", layers=("pp", "ep")), MeshSpec(pp=2, ep=2))
        assert [problem.path for problem in problems] == ["rules/layers", "rules/mlp"]
        assert check(declare(), ALL.replace(mlp="pp"), MeshSpec(tp=2)) == []

    def test_names_of_activations_can_be_listed(self):
        rules = ALL.replace(residual=("cp", "tp"))
        assert only(check(declare(), rules, MeshSpec())).path == "rules/residual"
        assert check(declare(), rules, MeshSpec(), activations=["residual"]) == []

    def test_standard_names_may_go_unused(self):
        assert check({"w": Param((4,), ("embed",), zeros)}, ALL, MeshSpec()) == []


class TestParameters:
    def test_legal_sizes_suit_every_dim_of_the_axis_and_no_other_dim(self):
        params = {"a": Param((12, 5), ("mlp", "embed"), zeros), "b": Param((8, 5), ("heads", "embed"), zeros)}
        problem = only(check(params, Rules(mlp="tp", heads="tp", embed=None), MeshSpec(tp=8)))
        assert problem.path == "a" and problem.legal == (1, 2, 4)
        problem = only(check(params, Rules(mlp="tp", heads="tp", embed="fsdp"), MeshSpec(fsdp=5, tp=8)))
        assert problem.path == "a" and problem.legal == (1, 2, 4)

    def test_a_dim_over_several_axes_names_the_legal_products(self):
        params = {"w": Param((6,), ("embed",), zeros)}
        problem = only(check(params, Rules(embed=("fsdp", "tp")), MeshSpec(fsdp=2, tp=2)))
        assert "embed=6" in problem.message and "fsdp=2 x tp=2" in problem.message
        assert problem.subject == "product of fsdp x tp" and problem.legal == (1, 2, 3, 6)

    @pytest.mark.parametrize("size", [1, 3, 5])
    def test_k3_uneven_dims_are_refused_or_allowed_by_the_rules(self, size):
        params, rules, mesh = {"w": Param((size,), ("mlp",), zeros)}, Rules(mlp="tp"), MeshSpec(tp=4)
        problem = only(check(params, rules, mesh))
        assert f"mlp={size}, does not divide over tp=4" in problem.message
        assert problem.hint == 'or let shards be uneven: rules.allow_uneven("mlp")'
        assert check(params, rules.allow_uneven("mlp"), mesh) == []

    def test_what_may_be_uneven_limits_no_axis_and_helps_no_other_dim(self):
        params = {"a": Param((7, 6), ("vocab", "embed"), zeros), "b": Param((6,), ("mlp",), zeros)}
        rules = Rules(vocab="tp", mlp="tp", embed=None).allow_uneven("vocab")
        problem = only(check(params, rules, MeshSpec(tp=4)))
        assert problem.path == "b" and problem.legal == (1, 2, 3, 6)

    def test_uneven_heads_are_no_advice_and_uneven_stages_stay_full(self):
        assert all(not problem.hint for problem in check(declare(heads=6, kv_heads=2), ALL, MeshSpec(tp=4)))
        rules = ALL.allow_uneven("layers")
        assert len(check(declare(layers=3), rules, MeshSpec(pp=4))) == 4
        assert check(declare(vocab=97), ALL, MeshSpec(fsdp=2, tp=4)) == []

    def test_sizes_that_are_not_positive(self):
        problems = check({"w": Param((0, 4, -3), ("embed", "head_dim", "heads"), zeros)}, ALL, MeshSpec(fsdp=2, tp=2))
        assert [(problem.path, "=0" in problem.message) for problem in problems] == [("w", True), ("w", False)]

    def test_leaves_that_are_no_parameters_and_paths_that_are_the_same(self):
        param = Param((4,), ("embed",), zeros)
        problems = check({"a": {"b": param}, "a/b": param, "c": 1.0}, ALL, MeshSpec())
        assert [problem.path for problem in problems] == ["a/b", "c"]
        assert "float" in problems[1].message
        assert only(check(3, ALL, MeshSpec())).path == "params"

    def test_dims_without_a_name_and_dims_that_lost_their_axis_are_whole(self):
        params = {"a": Param((7, 4), (None, "embed"), zeros), "b": Param((4, 7), ("embed", "embed"), zeros)}
        assert check(params, Rules(embed="fsdp"), MeshSpec(fsdp=4)) == []

    @no_deadline
    @given(
        st.lists(st.integers(1, 48), min_size=1, max_size=4),
        st.lists(st.integers(1, 48), min_size=1, max_size=4),
        st.integers(1, 8),
        st.integers(1, 8),
    )
    def test_it_finds_exactly_the_dims_that_do_not_divide_and_the_legal_sizes_are_all_that_work(self, a, b, fsdp, tp):
        params = {
            "a": [Param((size,), ("embed",), zeros) for size in a],
            "b": [Param((size,), ("mlp",), zeros) for size in b],
        }
        rules, mesh = Rules(embed="fsdp", mlp=("fsdp", "tp")), MeshSpec(fsdp=fsdp, tp=tp)
        problems = check(params, rules, mesh)
        expected = [f"a/{i}" for i, size in enumerate(a) if size % fsdp]
        expected += [f"b/{i}" for i, size in enumerate(b) if size % (fsdp * tp)]
        assert [problem.path for problem in problems] == expected
        helpless = {f"b/{i}" for i, size in enumerate(b) if size % tp}
        for problem in problems:
            if problem.subject == "fsdp":
                for size in range(1, 49):
                    left = {p.path for p in check(params, rules, mesh.replace(fsdp=size))}
                    assert (left <= helpless) == (size in problem.legal)


class TestBatch:
    def test_over_data_axes(self):
        problem = only(check(declare(), ALL, MeshSpec(dp=2, fsdp=2), BatchSpec(6, 8)))
        assert problem.path == "batch/size" and "dp=2 x fsdp=2" in problem.message and problem.legal == (4, 8)
        assert only(check(declare(), ALL, MeshSpec(dp=4), BatchSpec(3, 8))).legal == (4,)

    def test_legal_counts_are_of_what_the_earlier_splits_leave(self):
        problem = only(check(declare(), ALL, MeshSpec(dp=2), BatchSpec(24, 8, microbatches=4, accumulation=2)))
        assert problem.path == "batch/microbatches" and problem.legal == (1, 2, 3, 6)
        assert "dp=2 and accumulation=2" in problem.message and "6 in each part" in problem.message
        problem = only(check(declare(), ALL, MeshSpec(dp=2), BatchSpec(24, 8, accumulation=5)))
        assert problem.path == "batch/accumulation" and problem.legal == (1, 2, 3, 4, 6, 12)

    def test_sizes_that_are_not_positive(self):
        problems = check({}, Rules(), MeshSpec(dp=2, cp=2), BatchSpec(0, -1, 0, 0))
        assert [problem.path for problem in problems] == [
            "batch/size", "batch/seq_len", "batch/microbatches", "batch/accumulation",
        ]  # fmt: skip

    @pytest.mark.parametrize("value", [1.5, "4", True, None])
    def test_sizes_are_ints(self, value):
        with pytest.raises(TypeError, match="size of a BatchSpec"):
            BatchSpec(value, 8)

    def test_an_unbalanced_sequence_needs_only_to_divide(self):
        assert check({}, Rules(), MeshSpec(cp=4), BatchSpec(4, 12, causal_balanced=False)) == []
        problem = only(check({}, Rules(), MeshSpec(cp=4), BatchSpec(4, 10, causal_balanced=False)))
        assert "divisible by 4" in problem.message and problem.legal == (8, 12)

    def test_a_sequence_over_cp_and_tp(self):
        rules = Rules(seq=("tp", "cp"))
        assert check({}, rules, MeshSpec(tp=2, cp=2), BatchSpec(1, 4)) == []
        assert only(check({}, rules, MeshSpec(tp=2, cp=2), BatchSpec(1, 6))).legal == (4, 8)
        assert check({}, rules, MeshSpec(tp=2), BatchSpec(1, 6)) == []

    def test_sequence_parallelism_needs_a_sequence_that_divides_between_layers(self):
        mesh = MeshSpec(cp=2, tp=6)
        params = declare(heads=6, kv_heads=6, mlp=126)
        problem = only(check(params, ALL, mesh, BatchSpec(1, 8)))
        assert problem.path == "batch/seq_len" and problem.legal == (12,)
        assert problem.message == (
            "seq=8 is not divisible by 12 (2 chunks on each rank of cp=2, for the balanced causal ring; "
            "split over cp=2 x tp=6 between layers)"
        )
        assert problem.hint == 'or leave sequence parallelism: rules.replace(seq="cp")'
        assert check(params, ALL.replace(seq="cp"), mesh, BatchSpec(1, 8)) == []
        # Where the tokens do not divide either, no rule helps.
        problem = only(check(params, ALL, mesh, BatchSpec(1, 7)))
        assert problem.legal == (12,) and problem.hint == ""
        problem = only(check(params, ALL, MeshSpec(tp=6), BatchSpec(1, 8)))
        assert problem.message == "seq=8 is not divisible by 6 (split over tp=6 between layers)"
        assert problem.legal == (6, 12)

    def test_a_sequence_is_split_by_what_the_layouts_of_activations_leave_to_it(self):
        rules = Rules(seq=("cp", "tp"), embed="tp", vocab="tp")
        assert check({}, rules, MeshSpec(tp=4), BatchSpec(1, 6)) == []
        assert only(check({}, rules.replace(vocab=None), MeshSpec(tp=4), BatchSpec(1, 6))).legal == (4, 8)
        problem = only(check({}, rules.replace(vocab=None), MeshSpec(cp=2, tp=3), BatchSpec(1, 8)))
        assert problem.message == (
            "seq=8 is not divisible by 12 (2 chunks on each rank of cp=2, for the balanced causal ring; "
            "split over cp=2 x tp=3)"
        )

    @no_deadline
    @given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
    def test_it_passes_exactly_where_every_part_has_the_same_size(self, size, dp, accumulation, microbatches):
        mesh, batch = MeshSpec(dp=dp), BatchSpec(size, 8, microbatches, accumulation)
        problems = check({}, Rules(), mesh, batch)
        assert (problems == []) == (size % (dp * accumulation * microbatches) == 0)
        if [problem.path for problem in problems] == ["batch/microbatches"]:
            for count in range(1, size + 1):
                works = check({}, Rules(), mesh, BatchSpec(size, 8, count, accumulation)) == []
                assert works == (count in problems[0].legal)

    @no_deadline
    @given(st.integers(1, 100), st.integers(1, 6), st.booleans())
    def test_the_nearest_legal_lengths_are_legal_and_nearest(self, seq_len, cp, balanced):
        def legal(length):
            return check({}, Rules(), MeshSpec(cp=cp), BatchSpec(1, length, causal_balanced=balanced)) == []

        problems = check({}, Rules(), MeshSpec(cp=cp), BatchSpec(1, seq_len, causal_balanced=balanced))
        if problems:
            nearest = only(problems).legal
            expected = [length for length in range(1, nearest[-1] + 1) if legal(length)]
            assert tuple(expected[-len(nearest) :]) == nearest
            assert nearest[-1] > seq_len and (len(nearest) == 1 or nearest[0] < seq_len)


def test_swapped_arguments_are_named():
    with pytest.raises(TypeError, match="rules is MeshSpec"):
        check({}, MeshSpec(), Rules())
    with pytest.raises(TypeError, match="batch is 4"):
        check({}, Rules(), MeshSpec(), 4)


def test_every_problem_is_one_line_with_a_path_and_sizes():
    rules = ALL.replace(foo="tp", mlp="tpp", heads=("tp", "tp"), embed=("tp", "fsdp"), head_dim="pp")
    mesh = MeshSpec(dp=2, fsdp=3, tp=3, pp=6, ep=-1, fdsp=2)
    problems = check(declare(layers=5, kv_heads=2), rules, mesh, BatchSpec(7, 9, 4), devices=8)
    assert len({problem.path for problem in problems}) >= 10
    for problem in problems:
        assert "\n" not in str(problem) and str(problem).startswith(f"{problem.path}: ")
    assert len(set(problems)) == len(problems)
