import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding_specs import (
    STANDARD_AXES,
    MeshSpec,
    P,
    Param,
    Problem,
    SpecError,
    param_bytes,
    param_count,
    param_leaves,
    stage_layers,
)
from sharding_specs.mesh import divisors

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
        tree = {"b": [param, {"z": param, "a": (param, None)}], "a": param, "c": None, "": {"": param, "d": param}}
        assert functitan_tree.leaves_with_path(tree) == param_leaves(tree)
        assert functitan_tree.leaves_with_path(param) == param_leaves(param)

    def test_another_leaf_is_named_by_its_path(self):
        with pytest.raises(TypeError, match=r"layers/1 is a float, not a Param"):
            param_count({"layers": [Param((1,), ("embed",), zeros), 1.0]})


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
