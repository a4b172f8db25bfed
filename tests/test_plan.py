import pickle

import attrs
import pytest

from functitan import tree
from functitan.compiler.plan import compile_specs
from sharding_specs import PRESETS, MeshSpec, P, Param, Rules, SpecError, param_count


def zeros(key, shape, dtype):
    raise AssertionError("planning a parameter must not make it")


def declare(layers=5):
    return {
        "norm": Param((64,), ("embed",), zeros, "bfloat16"),
        "layers": {
            "wq": Param((layers, 64, 8, 16), ("layers", "embed", "heads", None), zeros),
            "wk": Param((layers, 64, 2, 16), ("layers", "embed", "kv_heads", "head_dim"), zeros),
        },
        "scale": Param((), (), zeros),
        "bias": None,
    }


MESH = MeshSpec(dp=2, fsdp=2, tp=2, pp=4)


def test_every_parameter_has_its_layout():
    plan = compile_specs(declare(), PRESETS["all"], MESH)
    assert plan.specs == {
        "layers/wk": P("pp", "fsdp", "tp", None),
        "layers/wq": P("pp", "fsdp", "tp", None),
        "norm": P("fsdp"),
        "scale": P(),
    }
    assert list(plan.specs) == [path for path, _ in tree.leaves_with_path(plan.params)]
    assert plan.spec("layers/wq") == P("pp", "fsdp", "tp", None)
    assert plan.param("norm").dtype == "bfloat16"
    assert plan.rules == PRESETS["all"] and plan.mesh == MESH


def test_axes_that_the_mesh_lacks_are_in_no_layout():
    plan = compile_specs(declare(), PRESETS["all"], MeshSpec(fsdp=2))
    assert plan.spec("layers/wq") == P(None, "fsdp", None, None)


def test_sizes_on_a_rank():
    plan = compile_specs(declare(), PRESETS["all"], MESH)
    wq, wk = 5 * 64 * 8 * 16, 5 * 64 * 2 * 16
    assert plan.param_count == param_count(declare()) == wq + wk + 64 + 1
    assert plan.param_bytes == 4 * (wq + wk) + 2 * 64 + 4
    # 5 layers over 4 stages: the first holds 2.
    assert plan.shard_shape("layers/wq") == (2, 32, 4, 16)
    assert plan.shard_bytes("layers/wq") == 4 * 2 * 32 * 4 * 16
    assert plan.shard_shape("scale") == ()
    assert plan.bytes_per_rank == 4 * 2 * 32 * (4 + 1) * 16 + 2 * 32 + 4


def test_by_default_everything_is_whole_on_one_device():
    plan = compile_specs(declare())
    assert plan.mesh == MeshSpec() and plan.rules == Rules()
    assert all(set(spec) <= {None} for spec in plan.specs.values())
    assert plan.bytes_per_rank == plan.param_bytes
    assert compile_specs({}).param_count == 0


def test_plans_of_the_same_data_are_equal():
    plan = compile_specs(declare(), PRESETS["all"], MESH)
    assert plan == compile_specs(dict(reversed(declare().items())), PRESETS["all"], MESH)
    assert plan == pickle.loads(pickle.dumps(plan))
    assert plan != compile_specs(declare(6), PRESETS["all"], MESH)
    assert plan != compile_specs(declare(), PRESETS["all"], MESH.replace(dp=1))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.mesh = MeshSpec()


def test_printing_is_an_aligned_table_with_totals():
    params = {
        "layers": {"wq": Param((5, 64, 8, 16), ("layers", "embed", "heads", None), zeros)},
        "norm": Param((64,), ("embed",), zeros, "bfloat16"),
        "scale": Param((), (), zeros),
    }
    assert str(compile_specs(params, PRESETS["all"], MESH)).splitlines() == [
        "path       shape           dtype     names                    layout                       bytes per rank",
        "layers/wq  (5, 64, 8, 16)  float32   layers, embed, heads, -  P('pp', 'fsdp', 'tp', None)        16.0 KiB",
        "norm       (64,)           bfloat16  embed                    P('fsdp',)                             64 B",
        "scale      ()              float32                            P()                                     4 B",
        "41,025 parameters, 160.1 KiB; 16.1 KiB per rank of MeshSpec(dp=2, fsdp=2, tp=2, pp=4)",
    ]


@pytest.mark.parametrize(("count", "text"), [(1023, "1023 B"), (1024, "1.0 KiB"), (3 * 1024**2, "3.0 MiB")])
def test_bytes_are_readable(count, text):
    plan = compile_specs({"w": Param((count,), ("embed",), zeros, "int8")})
    assert str(plan).splitlines()[1].endswith(f"  {text}")


def test_problems_are_one_error_with_one_line_each():
    with pytest.raises(SpecError) as caught:
        compile_specs(declare(layers=3), PRESETS["all"].replace(residual="tp"), MeshSpec(fsdp=3, tp=4, pp=4))
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["rules/residual"] + ["layers/wk"] * 3 + ["layers/wq"] * 2 + ["norm"]
    text = str(caught.value)
    assert isinstance(caught.value, ValueError) and len(text.splitlines()) == 1 + len(paths)
    assert "layers/wk: dim 2, kv_heads=2, does not divide over tp=4; legal tp: 1, 2" in text
    assert compile_specs(declare(), PRESETS["all"].replace(residual="tp"), activations=["residual"]).param_count


def test_a_mesh_must_be_resolved():
    mesh = MeshSpec(fsdp=-1)
    with pytest.raises(SpecError, match="number of devices"):
        compile_specs(declare(), PRESETS["all"], mesh)
    assert compile_specs(declare(), PRESETS["all"], mesh.resolve(4)).spec("norm") == P("fsdp")


def test_a_path_that_is_not_there_is_an_error_that_names_near_ones():
    plan = compile_specs(declare())
    for look_up in (plan.spec, plan.param, plan.shard_shape, plan.shard_bytes):
        with pytest.raises(ValueError, match=r"'layers/wz'; did you mean 'layers/w"):
            look_up("layers/wz")


def test_parameters_may_be_in_nodes_of_functitan():
    @tree.node
    @attrs.frozen
    class Layer:
        weight: Param
        bias: Param | None = None

    plan = compile_specs([Layer(Param((4, 4), ("embed", "mlp"), zeros))], PRESETS["data"], MeshSpec(fsdp=2))
    assert plan.specs == {"0/weight": P("fsdp", None)}


def test_a_plan_of_a_large_model_is_numbers_alone():
    params = {"w": Param((126, 16384, 53248), ("layers", "embed", "mlp"), zeros, "bfloat16")}
    plan = compile_specs(params, PRESETS["all"], MeshSpec(fsdp=64, tp=8, pp=16))
    assert plan.shard_shape("w") == (8, 256, 6656)
    assert plan.bytes_per_rank == 2 * 8 * 256 * 6656
    assert plan.param_count == 126 * 16384 * 53248
