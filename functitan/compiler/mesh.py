"""From a MeshSpec to torch's DeviceMesh: the one place where a plan meets the process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sharding_specs import MeshSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_made: dict[tuple[MeshSpec, str], tuple[object, DeviceMesh]] = {}


def device_mesh(mesh: MeshSpec, device_type: str | None = None) -> DeviceMesh:
    """The DeviceMesh of the axes of ``mesh`` that are larger than one, under their names and in their order.

    Made once for each mesh and process group: every rank must ask for the same meshes in the same order.

    Args:
        mesh: more than one device, every size known.
        device_type: "cuda" or "cpu"; None is "cuda" where the process group has NCCL for it and there is a GPU.

    Raises:
        ValueError: the mesh is one device.
        RuntimeError: there is no process group, or it has another number of ranks than the mesh.
    """
    axes = {axis: size for axis, size in mesh.items() if size > 1}
    if not axes:
        raise ValueError(f"{mesh} is one device, which needs no DeviceMesh")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{mesh} needs {mesh.size} ranks, and there is no process group: start the program with "
            f"`torchrun --nproc-per-node {mesh.size} …` and call torch.distributed.init_process_group() first; to look "
            f"at shapes and graphs without ranks, work inside functitan.cost.fake_group({mesh.size})"
        )
    if dist.get_world_size() != mesh.size:
        raise RuntimeError(
            f"{mesh} needs {mesh.size} ranks, and the process group has {dist.get_world_size()}: start as many, "
            "or change the mesh (one of its sizes may be -1, see MeshSpec.resolve)"
        )
    if device_type is None:
        has_nccl = "cuda:nccl" in dist.get_backend_config()
        device_type = "cuda" if has_nccl and torch.cuda.is_available() else "cpu"
    group = dist.group.WORLD
    known = _made.get((mesh, device_type))
    if known is None or known[0] is not group:
        from torch.distributed.device_mesh import init_device_mesh

        with torch.device("cpu"):
            made = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        known = _made[mesh, device_type] = (group, made)
    return known[1]
