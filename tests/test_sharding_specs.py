import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding_specs import (
    PRESETS,
    STANDARD_AXES,
    STANDARD_NAMES,
    MeshSpec,
    P,
    Param,
    Problem,
    Rules,
    SpecError,
    param_bytes,
    param_count,
    param_leaves,
    stage_layers,
)
from sharding_specs.mesh import divisors
from sharding_specs.partition import entry_axes

# The first example of a test may import jax or meet a busy machine.
no_deadline = settings(deadline=None)


def zeros(key, shape, dtype):
    raise AssertionError("declaring a parameter must not make it")


AXES = ("x", "y", "z", "w")


@st.composite
def entries(draw):
    """Entries of a spec, in any spelling, that use no axis twice."""
    axes = list(draw(st.permutations(AXES)))
    spec = []
    for kind in draw(st.lists(st.sampled_from(["none", "empty", "name", "tuple", "list"]), max_size=5)):
        taken = [axes.pop() for _ in range(min(len(axes), draw(st.integers(1, 2))))]
        if kind == "none" or not taken:
            spec.append(None)
        elif kind == "empty":
            spec.append(())
        elif kind == "name":
            spec.append(taken[0])
        else:
            spec.append(tuple(taken) if kind == "tuple" else taken)
    return spec


class TestP:
    @no_deadline
    @given(entries(), entries())
    def test_equality_length_entries_and_text_are_those_of_jax(self, one, other):
        jax_p = pytest.importorskip("jax").sharding.PartitionSpec
        assert (P(*one) == P(*other)) == (jax_p(*one) == jax_p(*other))
        assert tuple(P(*one)) == tuple(jax_p(*one))
        assert len(P(*one)) == len(jax_p(*one))
        assert repr(P(*one)) == repr(jax_p(*one)).replace("PartitionSpec(", "P(")
        if P(*one) == P(*other):
            assert hash(P(*one)) == hash(P(*other))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (("x",), (("x",),)),
            (("x",), (["x"],)),
            ((None,), ((),)),
            (("x",), ("x", None)),
            ((), (None,)),
            ((("x", "y"),), (("y", "x"),)),
            ((("x", "y"),), (["x", "y"],)),
        ],
    )
    def test_spellings_are_equal_where_jax_says_so(self, one, other):
        jax_p = pytest.importorskip("jax").sharding.PartitionSpec
        assert (P(*one) == P(*other)) == (jax_p(*one) == jax_p(*other))

    def test_a_single_axis_needs_no_tuple_and_a_trailing_none_counts(self):
        assert P("x") == P(("x",)) and hash(P("x")) == hash(P(("x",)))
        assert P("x") != P("x", None)
        assert P("x") != ("x",)

    def test_it_reads_as_a_sequence(self):
        spec = P("x", None, ("y", "z"))
        assert list(spec) == ["x", None, ("y", "z")]
        assert spec[2] == ("y", "z") and spec[:1] == ("x",) and len(spec) == 3
        assert spec.axes == ("x", "y", "z")
        assert repr(spec) == "P('x', None, ('y', 'z'))"
        assert eval(repr(spec)) == spec

    @pytest.mark.parametrize("twice", [("x", "x"), (("x", "x"),), ("x", ("y", "x"))])
    def test_an_axis_splits_one_dim_only(self, twice):
        with pytest.raises(ValueError, match="'x' more than once"):
            P(*twice)

    @pytest.mark.parametrize("entry", [3, ("x", 3), ("x", ("y",)), (None, "x"), "", {"x"}])
    def test_other_entries_are_refused(self, entry):
        with pytest.raises(TypeError, match="axis name"):
            P(entry)

    @pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
    def test_copies_are_equal_and_nothing_can_be_changed(self, clone):
        spec = P("x", ("y", "z"))
        assert clone(spec) == spec
        with pytest.raises(AttributeError):
            spec.partitions = ()


class TestMeshSpec:
    def test_it_reads_as_an_ordered_mapping(self):
        mesh = MeshSpec(dp=2, fsdp=4, my_axis=1)
        assert mesh.axes == tuple(mesh) == ("dp", "fsdp", "my_axis")
        assert dict(mesh) == {"dp": 2, "fsdp": 4, "my_axis": 1}
        assert mesh["fsdp"] == 4 and mesh.get("tp") is None and mesh.get("tp", 1) == 1
        assert "dp" in mesh and "tp" not in mesh and len(mesh) == 3
        assert mesh.values() == (2, 4, 1)
        assert mesh.size == 8
        assert eval(repr(mesh)) == mesh
        with pytest.raises(KeyError, match="tp"):
            mesh["tp"]

    def test_the_order_of_the_axes_is_part_of_the_mesh(self):
        assert MeshSpec(dp=2, tp=4) == MeshSpec(dp=2, tp=4)
        assert hash(MeshSpec(dp=2, tp=4)) == hash(MeshSpec(dp=2, tp=4))
        assert MeshSpec(dp=2, tp=4) != MeshSpec(tp=4, dp=2)
        assert MeshSpec(dp=2, tp=4).replace(dp=3, cp=1) == MeshSpec(dp=3, tp=4, cp=1)

    def test_no_axis_is_one_device(self):
        assert MeshSpec().size == 1
        assert MeshSpec().resolve(1) == MeshSpec()

    @no_deadline
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
    def test_resolve_fills_in_what_the_devices_leave(self, sizes, data):
        mesh = MeshSpec(**dict(zip(STANDARD_AXES, sizes)))
        assert mesh.resolve(mesh.size) == mesh
        free = data.draw(st.sampled_from(mesh.axes))
        assert mesh.replace(**{free: -1}).resolve(mesh.size) == mesh

    @no_deadline
    @given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 100), st.booleans())
    def test_resolve_uses_every_device_or_names_both_numbers(self, sizes, devices, free):
        mesh = MeshSpec(**dict(zip(STANDARD_AXES, sizes)), **({"rest": -1} if free else {}))
        try:
            assert mesh.resolve(devices).size == devices
        except SpecError as error:
            product = mesh.replace(rest=1).size
            assert devices % product if free else product != devices
            assert str(product) in str(error) and str(devices) in str(error)

    def test_a_product_that_does_not_fit_comes_with_a_change_that_does(self):
        with pytest.raises(ValueError, match=r"dp=2 x tp=3 = 6, but there are 8 devices.*tp=4"):
            MeshSpec(dp=2, tp=3).resolve(8)
        with pytest.raises(ValueError, match=r"tp=3 does not divide 8 devices, so fsdp=-1 has no size.*1, 2, 4, 8"):
            MeshSpec(fsdp=-1, tp=3).resolve(8)
        with pytest.raises(ValueError, match=r"no axis = 1, but there are 8 devices"):
            MeshSpec().resolve(8)

    def test_every_wrong_size_is_named_at_once(self):
        with pytest.raises(SpecError) as caught:
            MeshSpec(dp=0, fsdp=-1, tp=-1, cp=-2).resolve(8)
        assert [problem.path for problem in caught.value.problems] == ["mesh/dp", "mesh/cp", "mesh"]
        assert len(str(caught.value).splitlines()) == 4
        with pytest.raises(ValueError, match="0 devices"):
            MeshSpec(dp=-1).resolve(0)

    def test_a_size_is_unknown_before_it_is_resolved(self):
        with pytest.raises(ValueError, match="resolve"):
            _ = MeshSpec(dp=-1).size

    @pytest.mark.parametrize("size", [2.0, "2", None, True])
    def test_sizes_are_ints(self, size):
        with pytest.raises(TypeError, match="'dp'"):
            MeshSpec(dp=size)

    @no_deadline
    @given(st.lists(st.integers(1, 4), max_size=4))
    def test_coordinates_number_the_ranks_row_by_row(self, sizes):
        np = pytest.importorskip("numpy")
        mesh = MeshSpec(**dict(zip(AXES, sizes)))
        for rank in range(mesh.size):
            expected = np.unravel_index(rank, mesh.sizes) if sizes else ()
            assert list(mesh.coordinate(rank).items()) == list(zip(mesh.axes, expected))

    @pytest.mark.parametrize("rank", [-1, 8])
    def test_ranks_that_are_not_there_have_no_coordinate(self, rank):
        with pytest.raises(ValueError, match=f"no rank {rank} on .*legal: 0 to 7"):
            MeshSpec(dp=2, tp=4).coordinate(rank)
        with pytest.raises(ValueError, match="resolve"):
            MeshSpec(dp=-1).coordinate(0)

    def test_shards_of_an_entry(self):
        mesh = MeshSpec(dp=2, fsdp=4, tp=1)
        assert mesh.shards(None) == 1
        assert mesh.shards("fsdp") == 4
        assert mesh.shards(("dp", "fsdp", "cp")) == 8
        assert mesh.describe(("dp", "fsdp", "tp", "cp")) == "dp=2 x fsdp=4"

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
    def test_copies_are_equal(self, clone):
        assert clone(MeshSpec(dp=2, tp=-1)) == MeshSpec(dp=2, tp=-1)


class TestParam:
    def test_sizes(self):
        param = Param((4, 6), ("embed", "mlp"), zeros, "bfloat16")
        assert param.size == 24 and param.bytes == 48
        assert Param((), (), zeros).size == 1

    def test_torch_and_numpy_spellings_become_plain_data(self):
        torch = pytest.importorskip("torch")
        np = pytest.importorskip("numpy")
        plain = Param((4,), ("embed",), zeros, "bfloat16")
        assert Param(torch.Size([4]), ["embed"], zeros, torch.bfloat16) == plain
        assert type(Param(torch.Size([4]), ["embed"], zeros).shape) is tuple
        assert Param((np.int64(4),), ("embed",), zeros, np.dtype("float32")) == Param((4,), ("embed",), zeros)

    @pytest.mark.parametrize("dtype", ["float64", "float16", "float8_e4m3fn", "int64", "uint32", "bool", "complex64"])
    def test_bytes_of_an_element_are_those_of_torch(self, dtype):
        torch = pytest.importorskip("torch")
        assert Param((1,), ("embed",), zeros, dtype).bytes == getattr(torch, dtype).itemsize

    @pytest.mark.parametrize(
        ("names", "decay", "decays"),
        [
            (("embed", "mlp"), None, True),
            (("embed",), None, False),
            ((), None, False),
            (("layers", "embed"), None, False),
            (("layers", "embed", "mlp"), None, True),
            (("embed", None), None, True),
            (("embed",), True, True),
            (("embed", "mlp"), False, False),
        ],
    )
    def test_norms_and_biases_do_not_decay_unless_told(self, names, decay, decays):
        assert Param((2,) * len(names), names, zeros, decay=decay).decays is decays

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            (((4, 6), ("embed",), zeros), ValueError, "2 dims but 1 names"),
            (((4,), "embed", zeros), TypeError, "names"),
            (((4,), (3,), zeros), TypeError, "names"),
            (((4.0,), ("embed",), zeros), TypeError, r"\(4.0,\)"),
            (((True,), ("embed",), zeros), TypeError, "ints"),
            ((4, ("embed",), zeros), TypeError, "not 4"),
            (((4,), ("embed",), 0.02), TypeError, "init"),
            (((4,), ("embed",), zeros, "float23"), ValueError, "did you mean.*'float32'"),
            (((4,), ("embed",), zeros, "float32", 0.1), TypeError, "decay"),
        ],
    )
    def test_what_is_not_a_parameter_is_refused(self, arguments, error, match):
        with pytest.raises(error, match=match):
            Param(*arguments)

    def test_trees_have_paths_and_neither_none_nor_the_order_of_a_dict_matters(self):
        a, b, c = (Param((size,), ("embed",), zeros) for size in (1, 2, 3))
        tree = {"layers": [{"w": a, "b": None}, (b,)], "head": c}
        same = {"head": c, "layers": [{"b": None, "w": a}, (b,)]}
        assert param_leaves(tree) == [("head", c), ("layers/0/w", a), ("layers/1/0", b)]
        assert param_leaves(same) == param_leaves(tree)
        assert param_count(tree) == 6 and param_bytes(tree) == 24
        assert param_leaves(None) == [] and param_count({}) == 0
        assert param_leaves({1: a, "1a": b}) == [("1", a), ("1a", b)]

    def test_paths_are_those_of_functitan(self):
        functitan_tree = pytest.importorskip("functitan.tree")
        param = Param((1,), ("embed",), zeros)
        tree = {"b": [param, {"z": param, "a": (param, None)}], "a": param, "c": None}
        assert functitan_tree.leaves_with_path(tree) == param_leaves(tree)

    def test_another_leaf_is_named_by_its_path(self):
        with pytest.raises(TypeError, match=r"layers/1 is a float, not a Param"):
            param_count({"layers": [Param((1,), ("embed",), zeros), 1.0]})


names_of_rules = st.sampled_from(["batch", "seq", "embed", "mlp", "heads"])
rule_values = st.lists(st.sampled_from(STANDARD_AXES), max_size=3, unique=True).map(tuple)


class TestRules:
    def test_reading(self):
        rules = Rules(embed="fsdp", mlp=("tp",), heads=None)
        assert rules["mlp"] == "tp" and rules["heads"] is None and rules["batch"] == ("dp", "fsdp")
        assert "mlp" in rules and "vocab" not in rules
        assert dict(rules) == {"batch": ("dp", "fsdp"), "embed": "fsdp", "heads": None, "mlp": "tp", "seq": "cp"}
        assert rules.get("vocab") is None and len(rules) == 5
        assert eval(repr(rules)) == rules

    def test_the_order_of_rules_does_not_matter_and_replace_changes_a_copy(self):
        rules = Rules(embed="fsdp", mlp="tp")
        assert rules == Rules(mlp="tp", embed="fsdp") and hash(rules) == hash(Rules(mlp="tp", embed="fsdp"))
        assert rules.replace(mlp=None, vocab="tp") == Rules(embed="fsdp", mlp=None, vocab="tp")
        assert rules["mlp"] == "tp"

    def test_one_entry_a_dim_and_none_is_never_split(self):
        rules = Rules(embed="fsdp", mlp="tp", head_dim=None)
        assert rules.spec(("embed", "head_dim", None, "mlp")) == P("fsdp", None, None, "tp")
        assert rules.spec(()) == P()

    def test_of_a_parameters_dims_the_first_that_asks_for_an_axis_gets_it(self):
        rules = Rules(embed=("fsdp", "tp"), mlp="tp")
        assert rules.spec(("embed", "embed")) == P(("fsdp", "tp"), None)
        assert rules.spec(("mlp", "embed")) == P("tp", "fsdp")
        assert rules.spec(("batch", "seq", "embed")) == P(("dp", "fsdp"), "cp", "tp")

    def test_batch_comes_first_then_the_context_of_seq_then_other_dims_then_the_rest_of_seq(self):
        rules = Rules(seq=("cp", "tp"), embed="fsdp", mlp="tp", wide=("cp", "tp"), deep="dp")
        assert rules.spec(("batch", "seq", "embed")) == P(("dp", "fsdp"), ("cp", "tp"), None)
        assert rules.spec(("batch", "seq", "mlp")) == P(("dp", "fsdp"), "cp", "tp")
        assert rules.spec(("batch", "seq", "wide")) == P(("dp", "fsdp"), "cp", "tp")
        # The turns do not depend on where the dims stand.
        assert rules.spec(("mlp", "seq", "batch")) == P("tp", "cp", ("dp", "fsdp"))
        assert rules.spec(("deep", "embed", "batch")) == P(None, None, ("dp", "fsdp"))
        assert rules.spec(("wide", "mlp", "seq")) == P("tp", None, "cp")
        assert rules.spec(("wide", "embed")) == P(("cp", "tp"), "fsdp")

    def test_the_axes_of_seq_keep_the_order_of_its_rule(self):
        assert Rules(seq=("tp", "cp")).spec(("batch", "seq")) == P(("dp", "fsdp"), ("tp", "cp"))

    def test_sequence_parallelism_is_a_rule(self):
        mesh = MeshSpec(fsdp=2, tp=2)
        for preset in ("tensor", "all"):
            rules = PRESETS[preset]
            assert rules.spec(("batch", "seq", "embed"), mesh) == P("fsdp", "tp", None)
            assert rules.spec(("batch", "seq", "mlp"), mesh) == P("fsdp", None, "tp")
            assert rules.replace(seq="cp").spec(("batch", "seq", "embed"), mesh) == P("fsdp", None, None)
        assert PRESETS["data"].spec(("batch", "seq", "embed"), mesh) == P("fsdp", None, None)

    def test_a_batch_is_laid_out_as_the_logits_are(self):
        rules = PRESETS["tensor"]
        assert rules.batch_spec() == P(("dp", "fsdp"), "cp")
        assert rules.batch_spec(MeshSpec(fsdp=2, tp=2)) == P("fsdp", None)
        assert rules.replace(vocab=None).batch_spec() == P(("dp", "fsdp"), ("cp", "tp"))
        assert Rules(embed="fsdp").batch_spec(MeshSpec(cp=2)) == P(None, "cp")
        assert Rules().batch_spec() == P(("dp", "fsdp"), "cp")

    def test_axes_that_the_mesh_lacks_split_nothing(self):
        rules = Rules(embed="fsdp", mlp="tp")
        assert rules.spec(("batch", "embed"), MeshSpec(fsdp=2)) == P("fsdp", None)
        assert rules.spec(("batch", "mlp"), MeshSpec(dp=2, tp=2)) == P("dp", "tp")
        assert rules.spec(("batch", "mlp"), ()) == P(None, None)

    @no_deadline
    @given(
        st.dictionaries(names_of_rules, rule_values),
        st.lists(names_of_rules, max_size=5),
        st.sets(st.sampled_from(STANDARD_AXES)),
    )
    def test_a_spec_uses_no_axis_twice_and_loses_none_that_was_asked_for(self, table, names, mesh):
        rules = Rules(**{"embed": None, "mlp": None, "heads": None, **table})
        spec = rules.spec(names, mesh)
        asked = {axis for name in names for axis in entry_axes(rules[name])}
        assert len(spec) == len(names)
        assert sorted(spec.axes) == sorted(asked & mesh)

    def test_storage_axes_are_those_that_activations_need_for_other_dims(self):
        rules, mesh = PRESETS["all"], MeshSpec(pp=2, dp=2, fsdp=2, ep=2, cp=2, tp=2)
        assert rules.compute_spec(("layers", "embed", "heads", None), mesh) == P("pp", None, "tp", None)
        assert rules.compute_spec(("vocab", "embed"), mesh) == P("tp", None)
        assert rules.compute_spec(("experts", "embed", "mlp"), mesh) == P("ep", None, "tp")
        assert rules.compute_spec((), mesh) == P()
        assert rules.compute_spec(("embed",), MeshSpec(tp=2)) == P(None)
        assert Rules().compute_spec(("embed", "mlp")) == P(None, None)

    def test_one_dim_can_have_storage_and_compute_axes(self):
        rules = Rules(embed=("fsdp", "cp", "tp"), mlp="tp")
        assert rules.spec(("embed", "mlp")) == P(("fsdp", "cp", "tp"), None)
        assert rules.compute_spec(("embed", "mlp")) == P("tp", None)
        assert rules.compute_spec(("mlp", "embed")) == P("tp", None)
        # An axis that seq has left over stays with the parameter, and one that splits the sequence does not.
        assert rules.replace(seq=("cp", "tp")).compute_spec(("embed",)) == P("tp")
        assert Rules(seq=("cp", "tp"), embed=None).compute_spec(("seq", "embed")) == P(("cp", "tp"), None)

    def test_names_may_be_uneven_where_the_rules_say_so(self):
        rules = Rules(vocab="tp", embed="fsdp")
        uneven = rules.allow_uneven("vocab")
        assert rules.uneven == frozenset() and uneven.uneven == {"vocab"}
        assert uneven != rules and hash(uneven) == hash(rules.allow_uneven("vocab"))
        assert dict(uneven) == dict(rules) and Rules(**uneven) == rules
        assert uneven.spec(("vocab", "embed")) == rules.spec(("vocab", "embed"))
        both = uneven.allow_uneven("embed", "vocab")
        assert both.uneven == {"vocab", "embed"} and both == rules.allow_uneven("embed").allow_uneven("vocab")
        assert uneven.replace(embed="tp") == rules.replace(embed="tp").allow_uneven("vocab")
        assert eval(repr(both)) == both and pickle.loads(pickle.dumps(both)) == both
        assert repr(both).endswith(".allow_uneven('embed', 'vocab')")
        for preset in PRESETS.values():
            assert preset.uneven == {"vocab"}

    @pytest.mark.parametrize("name", ["batch", "seq"])
    def test_a_batch_can_not_be_uneven(self, name):
        with pytest.raises(ValueError, match=f"'{name}' can not be uneven"):
            PRESETS["all"].allow_uneven("mlp", name)

    def test_only_names_with_a_rule_can_be_uneven(self):
        with pytest.raises(ValueError, match="'vocb'; did you mean 'vocab'"):
            PRESETS["all"].allow_uneven("vocb")

    def test_without_rules_parameters_are_replicated_and_the_batch_is_split(self):
        assert Rules().spec(("embed", "mlp")) == P(None, None)
        assert Rules().spec(("batch", "seq", "embed"), MeshSpec(dp=2, cp=2)) == P("dp", "cp", None)

    def test_a_name_without_a_rule_is_an_error_that_names_near_ones(self):
        with pytest.raises(ValueError, match="'emebd'; did you mean 'embed'"):
            Rules(embed="fsdp").spec(("emebd",))
        with pytest.raises(ValueError, match="'qqq'; rules exist for batch, embed, seq"):
            Rules(embed="fsdp").spec(("qqq",))

    def test_values_that_are_no_axes_are_refused(self):
        with pytest.raises(TypeError, match=r"'mlp'.*not by 3"):
            Rules(mlp=3)

    def test_presets_know_every_standard_name_and_only_standard_axes(self):
        assert set(PRESETS) == {"data", "tensor", "all"}
        for rules in PRESETS.values():
            assert set(rules) == set(STANDARD_NAMES)
            assert set(rules.spec(STANDARD_NAMES).axes) <= set(STANDARD_AXES)
        weight = ("layers", "embed", "heads", "head_dim")
        assert PRESETS["data"].spec(weight) == P(None, "fsdp", None, None)
        assert PRESETS["tensor"].spec(weight) == P(None, "fsdp", "tp", None)
        assert PRESETS["all"].spec(weight) == P("pp", "fsdp", "tp", None)
        assert PRESETS["all"].spec(("experts", "embed", "mlp")) == P("ep", "fsdp", "tp")


class TestStages:
    @no_deadline
    @given(st.integers(1, 40), st.integers(1, 40))
    def test_every_layer_once_no_stage_empty_and_sizes_at_most_one_apart(self, layers, stages):
        if layers < stages:
            with pytest.raises(ValueError, match=f"{layers} layers cannot fill {stages} pipeline stages"):
                stage_layers(layers, stages)
            return
        ranges = stage_layers(layers, stages)
        assert len(ranges) == stages
        assert [layer for stage in ranges for layer in stage] == list(range(layers))
        sizes = [len(stage) for stage in ranges]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)

    def test_c5_five_layers_over_four_stages(self):
        assert stage_layers(5, 4) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
        with pytest.raises(ValueError, match=r"3 layers cannot fill 4 .*1 to 3"):
            stage_layers(3, 4)

    @pytest.mark.parametrize(("layers", "stages"), [(0, 1), (4, 0), (-1, -1)])
    def test_there_is_at_least_one_of_each(self, layers, stages):
        with pytest.raises(ValueError, match="stage"):
            stage_layers(layers, stages)


class TestProblem:
    def test_it_is_one_line_with_path_message_values_and_hint(self):
        problem = Problem("layers/wk", "kv_heads=2 does not divide", "tp", [1, 2], "use less")
        assert problem.legal == (1, 2)
        assert str(problem) == "layers/wk: kv_heads=2 does not divide; legal tp: 1, 2; use less"
        assert str(Problem("mesh", "is wrong")) == "mesh: is wrong"

    def test_long_lists_are_cut_in_the_text_only(self):
        problem = Problem("a", "b", "c", range(1, 101))
        assert str(problem) == "a: b; legal c: 1, 2, 3, 4, 5, 6, 7, ..., 100"
        assert len(problem.legal) == 100

    def test_an_error_lists_every_problem_and_survives_pickling(self):
        problems = (Problem("a", "one"), Problem("b", "two"))
        error = pickle.loads(pickle.dumps(SpecError(problems)))
        assert isinstance(error, ValueError) and error.problems == problems
        assert str(error).splitlines() == ["2 problems with the layout:", "a: one", "b: two"]


@no_deadline
@given(st.integers(1, 3000))
def test_divisors(number):
    assert list(divisors(number)) == [n for n in range(1, number + 1) if number % n == 0]
