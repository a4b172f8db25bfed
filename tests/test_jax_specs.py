"""Layouts to and from JAX. JAX's own partitioning says which shard each device holds, and a plan must agree."""

import subprocess
import sys
from collections import OrderedDict

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functitan import tree
from functitan.compiler.pipeline.stages import make_pipeline
from functitan.compiler.plan import compile_specs
from functitan.interop.jax import (
    from_partition_spec,
    mesh_shape,
    mesh_spec,
    param_partition_spec,
    to_partition_spec,
)
from models.llama import SIZES, declare
from sharding_specs import PRESETS, MeshSpec, P, Rules

jax = pytest.importorskip("jax")
PartitionSpec, NamedSharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding

# The first example of a test may meet a busy machine.
no_deadline = settings(deadline=None)

AXES = ("x", "y", "z")


@st.composite
def specs(draw):
    """Layouts of up to 4 dims that use no axis twice."""
    axes = list(draw(st.permutations(AXES)))
    entries = []
    for count in draw(st.lists(st.integers(0, 2), max_size=4)):
        entries.append(tuple(axes.pop() for _ in range(min(count, len(axes)))))
    return P(*entries)


@no_deadline
@given(specs(), specs())
def test_specs_survive_and_are_equal_in_jax_where_they_are_here(one, other):
    there = to_partition_spec(one)
    assert isinstance(there, PartitionSpec) and tuple(there) == tuple(one)
    assert from_partition_spec(there) == one
    assert (there == to_partition_spec(other)) == (one == other)
    assert (P(*one) == P(*one, None)) == (there == PartitionSpec(*one, None))


def test_spellings_of_jax_come_back_in_the_canonical_one():
    assert from_partition_spec(PartitionSpec(("x",), (), ["y", "z"])) == P("x", None, ("y", "z"))
    assert from_partition_spec(PartitionSpec()) == P()


def test_what_no_layout_describes_is_refused():
    with pytest.raises(ValueError, match="leaves a dim UNCONSTRAINED.*None for a whole dim"):
        from_partition_spec(PartitionSpec("x", PartitionSpec.UNCONSTRAINED))
    with pytest.raises(ValueError, match="'x' more than once"):
        from_partition_spec(PartitionSpec("x", "x"))
    with pytest.raises(ValueError, match=r"summed over \(y\)"):
        from_partition_spec(PartitionSpec("x", unreduced={"y"}))
    with pytest.raises(TypeError, match="is a P, not a jax.sharding.PartitionSpec"):
        from_partition_spec(P("x"))


@no_deadline
@given(st.dictionaries(st.sampled_from(["pp", "dp", "fsdp", "tp", "my axis"]), st.integers(1, 512)))
def test_meshes_survive(sizes):
    mesh = MeshSpec(**sizes)
    shape = mesh_shape(mesh)
    abstract = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    assert abstract.shape == shape == OrderedDict(mesh.items())
    assert not sizes or abstract.size == mesh.size  # to JAX no axis is no device
    assert mesh_spec(abstract) == mesh


def test_a_mesh_of_devices_survives():
    shape = mesh_shape(MeshSpec(dp=1, tp=1))
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:1])
    assert mesh.shape == shape and mesh_spec(mesh) == MeshSpec(dp=1, tp=1)


def test_meshes_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"resolve\(device_count\)"):
        mesh_shape(MeshSpec(dp=-1))
    with pytest.raises(TypeError, match="is a dict, not a jax.sharding.Mesh or AbstractMesh"):
        mesh_spec({"dp": 2})
    devices = np.array(jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh axis 3 of .* is no string"):
        mesh_spec(jax.sharding.Mesh(devices, (3,)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        (PRESETS["data"], MeshSpec(dp=2, fsdp=8)),
        (PRESETS["tensor"], MeshSpec(fsdp=4, cp=2, tp=2)),
        (PRESETS["all"].replace(embed=("dp", "fsdp")), MeshSpec(pp=2, dp=2, fsdp=2, ep=1, tp=2)),
        (Rules(), MeshSpec(dp=4)),
    ],
    ids=["data", "tensor", "all", "replicated"],
)
def test_shards_of_a_llama_have_the_shapes_that_jax_gives_them(size, rules, mesh):
    params = declare(SIZES[size])
    pipeline = make_pipeline(params, rules, mesh, split="equal") if mesh.get("pp", 1) > 1 else None
    plan = compile_specs(params, rules, mesh, pipeline=pipeline)
    shape = mesh_shape(plan.mesh)
    abstract = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    for path, param in tree.leaves_with_path(plan.params):
        sharding = NamedSharding(abstract, param_partition_spec(plan, path))
        assert sharding.shard_shape(param.shape) == plan.shard_shape(path) == plan.local_shape(path, mesh.size - 1)


@pytest.mark.parametrize(
    ("n_layers", "schedule", "split", "message"),
    [
        (8, "1F1B", "5,3", r'rank 0 of pp=2 holds the layers 0 to 4 of 8, .* Make the pipeline with split="equal", or'),
        (8, "1F1B", "3,5", "holds the layers 0 to 2 of 8"),
        (8, "Interleaved1F1B", "equal", r"0 to 1, 4 to 5 of 8.* one stage a rank \(GPipe, 1F1B\) and split="),
        (8, "ZBVZeroBubble", "equal", "0 to 1, 6 to 7 of 8"),
        (9, "1F1B", "equal", r"0 to 4 of 9.* Take pp=3 or 9, or take the parameters to JAX whole"),
        (9, "Interleaved1F1B", "1,3,4,1", "holds the layers 0, 4 to 7 of 9"),
    ],
)
def test_stages_that_jax_has_no_layout_for_are_refused(n_layers, schedule, split, message):
    params = declare(attrs.evolve(SIZES["debug"], n_layers=n_layers))
    rules, mesh = PRESETS["all"], MeshSpec(pp=2, fsdp=2)
    pipeline = make_pipeline(params, rules, mesh, schedule, split=split)
    plan = compile_specs(params, rules, mesh, pipeline=pipeline)
    with pytest.raises(ValueError, match=f"^layers/wq: .*{message}"):
        param_partition_spec(plan, "layers/wq")
    assert param_partition_spec(plan, "norm") == to_partition_spec(plan.spec("norm"))


def test_each_rank_holds_the_slice_that_jax_gives_to_the_device_of_that_number():
    """On 8 devices that JAX makes of one CPU, which has to be said before it starts: hence in another process."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
from functitan.interop.jax import mesh_shape, to_partition_spec
from sharding_specs import MeshSpec, P, region

mesh, shape = MeshSpec(a=2, b=2, c=2), (8, 4)
devices = np.array(jax.devices()).reshape(mesh.sizes)
there = jax.sharding.Mesh(devices, tuple(mesh_shape(mesh)))
for spec in [P("a"), P(None, "c"), P(("a", "b", "c")), P("c", ("a", "b")), P(("c", "a"), "b"), P()]:
    theirs = jax.sharding.NamedSharding(there, to_partition_spec(spec)).devices_indices_map(shape)
    for rank, device in enumerate(jax.devices()):
        slices = [index.indices(size) for index, size in zip(theirs[device], shape)]
        ours = [(start, start + size, 1) for start, size in region(shape, spec, mesh, rank)]
        assert ours == slices, (spec, rank, ours, slices)
print("same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["same"], done.stderr


def test_without_jax_the_module_imports_and_says_what_to_install():
    code = """
import sys
sys.modules["jax"] = None  # makes every import of it fail
from functitan.interop.jax import mesh_shape, mesh_spec, to_partition_spec
from sharding_specs import MeshSpec, P

assert dict(mesh_shape(MeshSpec(dp=2))) == {"dp": 2}
for call in (lambda: to_partition_spec(P("dp")), lambda: mesh_spec(None)):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    message = "functitan.interop.jax needs JAX: pip install 'functitan[jax]'"
    assert done.stdout.splitlines() == [message] * 2, done.stderr
