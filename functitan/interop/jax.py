"""Layouts to and from JAX: PartitionSpec and the shape of a mesh. JAX is imported when a function needs it.

    shape = mesh_shape(plan.mesh)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))
    sharding = jax.sharding.NamedSharding(mesh, param_partition_spec(plan, "layers/wq"))
"""

from __future__ import annotations

from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING

from sharding_specs import MeshSpec, P

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec

    from functitan.compiler.plan import Plan


def param_partition_spec(plan: Plan, path: str) -> PartitionSpec:
    """The layout of one of a plan's parameters as JAX's: each device of JAX's mesh holds what that rank does.

    Raises:
      ImportError: JAX is not installed.
      ValueError: the plan has no such parameter, or its layers are in stages of which JAX has none: it gives equal,
        consecutive parts to the devices, in their order.
    """
    spec, stages = plan.spec(path), plan.pipeline
    if stages is not None and "pp" in spec.axes:
        each, left = divmod(stages.n_layers, stages.ranks)
        for rank in range(stages.ranks):
            held = stages.layers_of(rank)
            if left or held != tuple(range(rank * each, (rank + 1) * each)):
                raise ValueError(
                    f"{path}: no PartitionSpec says that rank {rank} of pp={stages.ranks} holds the layers "
                    f"{_spans(held)} of {stages.n_layers}, since JAX splits them into equal parts, one after another. "
                    f"{_remedy(stages.n_layers, stages.ranks, stages.stages_per_rank)}, or take the parameters to JAX "
                    "whole (functitan.gather)"
                )
    return to_partition_spec(spec)


def to_partition_spec(spec: P) -> PartitionSpec:
    """The same layout as JAX's: equal specs stay equal, and unequal ones unequal.

    Raises:
      ImportError: JAX is not installed.
    """
    return _sharding().PartitionSpec(*spec)


def from_partition_spec(spec: PartitionSpec) -> P:
    """The inverse of :func:`to_partition_spec`.

    Raises:
      ImportError: JAX is not installed.
      TypeError: it is no PartitionSpec.
      ValueError: an entry is UNCONSTRAINED, an axis is used twice, or the spec has unreduced or reduced axes: a plan
        fixes every dim, and its arrays are whole sums.
    """
    sharding = _sharding()
    if not isinstance(spec, sharding.PartitionSpec):
        raise TypeError(f"{spec!r} is a {type(spec).__qualname__}, not a jax.sharding.PartitionSpec")
    # Not every JAX has the two.
    partial = {*getattr(spec, "unreduced", ()), *getattr(spec, "reduced", ())}
    if partial:
        raise ValueError(f"{spec} has axes that are summed over ({', '.join(sorted(partial))}), which no P describes")
    if sharding.PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(f"{spec} leaves a dim UNCONSTRAINED, which no P does; give an axis, or None for a whole dim")
    return P(*spec)


def mesh_shape(mesh: MeshSpec) -> OrderedDict[str, int]:
    """The mesh in the form of ``jax.sharding.Mesh.shape``: axis -> size, outermost first, axes of one device as well.

    Raises:
      ValueError: a size is still -1.
    """
    if -1 in mesh.sizes:
        raise ValueError(f"{mesh} has no shape before resolve(device_count) has replaced the -1")
    return OrderedDict(mesh.items())


def mesh_spec(mesh: Mesh | AbstractMesh) -> MeshSpec:
    """The inverse of :func:`mesh_shape`, of a ``jax.sharding.Mesh`` or ``AbstractMesh``. Its devices are left behind.

    Raises:
      ImportError: JAX is not installed.
      TypeError: it is neither.
      ValueError: the name of an axis is no string.
    """
    sharding = _sharding()
    if not isinstance(mesh, (sharding.Mesh, sharding.AbstractMesh)):
        raise TypeError(f"{mesh!r} is a {type(mesh).__qualname__}, not a jax.sharding.Mesh or AbstractMesh")
    unnamed = [axis for axis in mesh.axis_names if not isinstance(axis, str)]
    if unnamed:
        raise ValueError(f"the mesh axis {unnamed[0]!r} of {mesh} is no string; name it with one")
    return MeshSpec(**{axis: int(size) for axis, size in mesh.shape.items()})


def _spans(layers: tuple[int, ...]) -> str:
    """``0 to 3, 8 to 11``."""
    starts = [layer for i, layer in enumerate(layers) if not i or layers[i - 1] != layer - 1]
    stops = [layer for i, layer in enumerate(layers) if layer == layers[-1] or layers[i + 1] != layer + 1]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, stops))


def _remedy(n_layers: int, ranks: int, stages_per_rank: int) -> str:
    if n_layers % ranks:
        legal = [count for count in range(2, n_layers + 1) if n_layers % count == 0]
        return f"Take pp={' or '.join(map(str, legal))}"
    one = "" if stages_per_rank == 1 else " a schedule of one stage a rank (GPipe, 1F1B) and"
    return f'Make the pipeline with{one} split="equal"'


def _sharding() -> ModuleType:
    try:
        import jax.sharding
    except ImportError as error:
        raise ImportError("functitan.interop.jax needs JAX: pip install 'functitan[jax]'") from error
    return jax.sharding
