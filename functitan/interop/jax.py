"""Layouts to and from JAX: PartitionSpec and the shape of a mesh. JAX is imported when a function needs it.

    shape = mesh_shape(plan.mesh)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape))
    sharding = jax.sharding.NamedSharding(mesh, to_partition_spec(plan.spec("layers/wq")))
"""

from __future__ import annotations

from collections import OrderedDict
from types import ModuleType
from typing import TYPE_CHECKING

from sharding_specs import MeshSpec, P

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec


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


def _sharding() -> ModuleType:
    try:
        import jax.sharding
    except ImportError as error:
        raise ImportError("functitan.interop.jax needs JAX: pip install 'functitan[jax]'") from error
    return jax.sharding
