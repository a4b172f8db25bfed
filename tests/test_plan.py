import functools
import pickle
import subprocess
import sys

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from functitan import tree
from functitan.compiler.pipeline.stages import make_pipeline
from functitan.compiler.plan import compile_specs, partition, placements
from sharding_specs import PRESETS, BatchSpec, MeshSpec, P, Param, Rules, SpecError, param_count, region

# The first example of a test may meet a busy machine.
no_deadline = settings(deadline=None)


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


def test_rows_of_a_batch_are_those_of_the_ranks_place_on_the_batchs_axes():
    plan = compile_specs(declare(), PRESETS["all"], MeshSpec(dp=2, fsdp=2, tp=2))
    assert [plan.batch_rows(rank, 8) for rank in range(8)] == [(2 * (rank // 2), 2) for rank in range(8)]
    assert compile_specs(declare(), PRESETS["all"], MeshSpec()).batch_rows(0, 7) == (0, 7)
    for size in (6, 0):
        with pytest.raises(ValueError, match=f"a batch of {size} does not divide over dp=2 x fsdp=2; legal: multiples"):
            plan.batch_rows(0, size)


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
    assert str(compile_specs(params, PRESETS["all"], MESH)).splitlines()[:5] == [
        "path       shape           dtype     names                    "
        "layout                       gathered  bytes per rank",
        "layers/wq  (5, 64, 8, 16)  float32   layers, embed, heads, -  "
        "P('pp', 'fsdp', 'tp', None)  fsdp            16.0 KiB",
        "norm       (64,)           bfloat16  embed                    "
        "P('fsdp',)                   fsdp                64 B",
        "scale      ()              float32                            "
        "P()                          -                    4 B",
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
    look_ups = (plan.spec, plan.param, plan.shard_shape, plan.shard_bytes, plan.compute_spec, plan.storage_axes)
    at_rank_0 = (functools.partial(look_up, rank=0) for look_up in (plan.region, plan.local_shape))
    for look_up in (*look_ups, plan.placements, *at_rank_0):
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


def test_a_batch_is_checked_as_well_and_every_problem_is_in_one_error():
    with pytest.raises(SpecError) as caught:
        compile_specs(declare(3), PRESETS["all"], MeshSpec(fsdp=2, tp=2, pp=4), batch=BatchSpec(3, 9), devices=8)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["mesh", "layers/wk", "layers/wq", "batch/size", "batch/seq_len"]
    assert compile_specs(declare(), PRESETS["all"], MESH, batch=BatchSpec(4, 8)) == compile_specs(
        declare(), PRESETS["all"], MESH
    )


def test_the_devices_fill_the_mesh():
    plan = compile_specs(declare(), PRESETS["all"], MeshSpec(fsdp=-1, tp=2), devices=8)
    assert plan.mesh == MeshSpec(fsdp=4, tp=2)
    with pytest.raises(SpecError, match="there are 6 devices"):
        compile_specs(declare(), PRESETS["all"], MeshSpec(fsdp=2, tp=2), devices=6)


def test_what_is_gathered_at_use_and_what_stays():
    plan = compile_specs(declare(), PRESETS["all"], MESH)
    assert plan.compute_spec("layers/wq") == P("pp", None, "tp", None)
    assert plan.storage_axes("layers/wq") == ("fsdp",)
    assert plan.storage_axes("scale") == ()
    assert plan.compute_spec("norm") == P(None) and plan.batch_spec == P(("dp", "fsdp"), None)
    # An axis of one rank has nothing to gather.
    alone = compile_specs(declare(), PRESETS["all"], MeshSpec(fsdp=1, tp=2))
    assert alone.spec("norm") == P("fsdp") and alone.storage_axes("norm") == ()
    # In the order of the mesh, whatever the order of the dims.
    params = {"w": Param((4, 4), ("mlp", "embed"), zeros)}
    both = compile_specs(params, Rules(embed="dp", mlp="fsdp"), MeshSpec(dp=2, fsdp=2))
    assert both.spec("w") == P("fsdp", "dp") and both.storage_axes("w") == ("dp", "fsdp")


def test_placements_are_one_an_axis_of_more_than_one_rank():
    mesh = MeshSpec(pp=1, dp=2, fsdp=2, tp=4)
    assert placements(P(None, ("fsdp", "tp")), mesh) == (Replicate(), Shard(1), Shard(1))
    assert placements(P("pp", "tp"), mesh) == (Replicate(), Replicate(), Shard(1))
    assert placements(P(), mesh) == (Replicate(),) * 3
    assert placements(P("tp"), MeshSpec(tp=1)) == placements(P(), MeshSpec()) == ()
    plan = compile_specs(declare(4), PRESETS["all"], MESH)
    assert plan.placements("layers/wq") == (Replicate(), Shard(1), Shard(2), Shard(0))


def test_layouts_without_placements_are_refused():
    with pytest.raises(ValueError, match=r"splits a dim over tp, fsdp.*that works: fsdp, tp"):
        placements(P(("tp", "fsdp")), MeshSpec(fsdp=2, tp=2))
    assert placements(P(("tp", "fsdp")), MeshSpec(fsdp=2, tp=1)) == (Shard(0),)
    with pytest.raises(ValueError, match="names ep, which MeshSpec"):
        placements(P("ep"), MeshSpec(fsdp=2))


def test_layers_in_stages_of_unequal_size_have_regions():
    plan = compile_specs(declare(5), PRESETS["all"], MESH)
    assert plan.placements("layers/wq") == (Replicate(), Shard(1), Shard(2), Shard(0))
    held = [plan.regions("layers/wq", plan_rank)[0][0] for plan_rank in range(4)]
    assert held == [(0, 2), (2, 1), (3, 1), (4, 1)]
    pipeline = make_pipeline(declare(8), PRESETS["all"], MeshSpec(pp=2), "Interleaved1F1B")
    plan = compile_specs(declare(8), PRESETS["all"], MeshSpec(pp=2), pipeline=pipeline)
    assert [[one[0] for one in plan.regions("layers/wq", rank)] for rank in (0, 1)] == [
        [(0, 2), (4, 2)], [(2, 2), (6, 2)],
    ]  # fmt: skip
    assert plan.local_shape("layers/wq", 0)[0] == 4
    with pytest.raises(ValueError, match="rank 0 has the layers of 2 stages"):
        plan.region("layers/wq", 0)


def test_placements_that_no_layout_describes_are_refused():
    mesh = MeshSpec(fsdp=2, tp=2)
    with pytest.raises(ValueError, match="1 placements for the 2 axes"):
        partition([Shard(0)], mesh, 1)
    with pytest.raises(ValueError, match="axis tp has placement .*legal: Shard, Replicate"):
        partition([Shard(0), Partial()], mesh, 1)
    with pytest.raises(ValueError, match="axis fsdp has placement .*the array has 1 dims"):
        partition([Shard(1), Replicate()], mesh, 1)
    assert partition([Shard(-1), Replicate()], mesh, 2) == P(None, "fsdp")


AXES = ("a", "b", "c")
meshes = st.tuples(*[st.integers(1, 4)] * 3).map(lambda sizes: MeshSpec(**dict(zip(AXES, sizes))))


@st.composite
def layouts(draw):
    """A mesh, a shape and a layout of it: each axis splits one dim or none."""
    mesh = draw(meshes)
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    dims = {axis: draw(st.none() | st.integers(0, len(shape) - 1)) for axis in AXES}
    return mesh, shape, P(*(tuple(axis for axis in AXES if dims[axis] == dim) for dim in range(len(shape))))


@no_deadline
@given(layouts())
def test_placements_and_layouts_are_each_others_inverse(case):
    mesh, shape, spec = case
    split = P(*(tuple(a for a in AXES if mesh[a] > 1 and a in (e or ())) for e in spec))
    assert partition(placements(spec, mesh), mesh, len(shape)) == split


@no_deadline
@given(layouts())
def test_a_region_is_the_chunk_of_a_chunk_and_all_of_them_cover_the_array_once(case):
    mesh, shape, spec = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = []
    for rank in range(mesh.size):
        place, part = mesh.coordinate(rank), whole
        for dim, entry in enumerate(spec):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                # torch.chunk leaves out the empty chunks that DTensor keeps.
                chunks = part.chunk(mesh[axis], dim)
                part = chunks[place[axis]] if place[axis] < len(chunks) else part.narrow(dim, 0, 0)
        slices = region(shape, spec, mesh, rank)
        held = whole[tuple(slice(start, start + size) for start, size in slices)]
        assert torch.equal(held, part)
        assert all(0 <= start and start + size <= full for (start, size), full in zip(slices, shape))
        if all(place[axis] == 0 for axis in AXES if axis not in spec.axes):
            seen += part.flatten().tolist()
    assert sorted(seen) == whole.flatten().tolist()


def test_regions_are_those_of_dtensor():
    """On a fake process group, which a process can have one of: hence in another one."""
    code = """
import sys
import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from functitan.compiler.plan import placements
from sharding_specs import MeshSpec, P, region

mesh = MeshSpec(a=2, b=4, c=3)
cases = [([3], P("b")), ([5, 7], P(("a", "b"), "c")), ([7], P(("a", "b", "c"))), ([9, 1], P("c", ("a", "b")))]
for rank in range(mesh.size):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size)
    device_mesh = torch.distributed.init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    for shape, spec in cases:
        local, offset = compute_local_shape_and_global_offset(shape, device_mesh, placements(spec, mesh))
        theirs, ours = list(zip(offset, local)), region(shape, spec, mesh, rank)
        # Where an empty shard starts is no fact.
        if [size for _, size in ours] != list(local) or (0 not in local and list(ours) != theirs):
            sys.exit(f"{rank=} {shape=} {spec=}: {theirs=} {ours=}")
    torch.distributed.destroy_process_group()
print("same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["same"], done.stderr


def test_k3_a_dim_of_3_over_4_ranks():
    params = {"w": Param((3, 2), ("mlp", "embed"), zeros)}
    plan = compile_specs(params, Rules(mlp="tp", embed=None).allow_uneven("mlp"), MeshSpec(dp=2, tp=4))
    assert [plan.local_shape("w", rank) for rank in range(4)] == [(1, 2), (1, 2), (1, 2), (0, 2)]
    assert plan.region("w", 6) == ((2, 1), (0, 2)) and plan.region("w", 7) == ((3, 0), (0, 2))
    assert plan.shard_shape("w") == (1, 2) and plan.bytes_per_rank == 8


def test_layers_over_stages_are_whole_layers_and_no_stage_is_empty():
    plan = compile_specs(declare(5), PRESETS["all"], MeshSpec(pp=4, fsdp=2))
    assert [plan.region("layers/wq", rank)[0] for rank in range(0, 8, 2)] == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert plan.local_shape("layers/wq", 0) == plan.shard_shape("layers/wq") == (2, 32, 8, 16)


def test_regions_of_ranks_and_dims_that_are_not_there_are_refused():
    plan = compile_specs(declare(), PRESETS["all"], MESH)
    with pytest.raises(ValueError, match="no rank 32 on .*legal: 0 to 31"):
        plan.region("norm", 32)
    with pytest.raises(ValueError, match=r"2 entries for the 1 dims of shape \(3,\)"):
        region((3,), P(None, "tp"), MeshSpec(tp=2), 0)
