"""From a plan to tensors: initial values, each a function of the key and the parameter's path alone.

On a mesh every leaf is a DTensor, and every rank makes the slices that it holds and nothing else: values depend on the
global index, so the whole is bit-equal on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functitan import init, random, tree
from functitan._torch import is_distributed
from functitan.compiler.agreement import check_same
from functitan.compiler.mesh import device_mesh
from functitan.compiler.plan import Plan, placements
from functitan.optim import GradientTransformation
from functitan.state import TrainState
from sharding_specs import P, Param, region

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def init_params(plan: Plan, key: Tensor) -> Any:
    """The initial parameters of a plan: a tree of tensors, or of DTensors where its mesh is more than one device.

    A parameter's key is :func:`functitan.init.param_key` of its path, so its values depend neither on the order of
    declaration, nor on the other parameters, nor on the mesh.

    Args:
        plan: from ``compile_specs``.
        key: uint32 [2]; the parameters are made on its device.

    Raises:
        RuntimeError: the process group has not the size of the plan's mesh, or the ranks have different keys.
    """

    def make(path: str, param: Param, region: random.Region | None) -> Tensor:
        sizes = param.shape if region is None else tuple(size for _, size in region)
        where = {} if region is None else {"region": region}
        value = param.init(init.param_key(key, path), param.shape, getattr(torch, param.dtype), **where)
        if tuple(value.shape) != sizes:
            raise ValueError(
                f"the initialiser {param.init} of {path} gave shape {tuple(value.shape)}; declared is {sizes}"
            )
        return value

    if plan.mesh.size > 1:
        check_same("the key of the parameters", random.bits(key, (2,)), device_mesh(plan.mesh).device_type)
    return _laid_out(plan, make)


def init_state(plan: Plan, key: Tensor, optimizer: GradientTransformation) -> TrainState:
    """The state before the first step.

    Args:
        plan: from ``compile_specs``.
        key: uint32 [2]; one half makes the parameters, the other stays in the state for dropout.
        optimizer: gives the optimizer's state.

    Raises:
        RuntimeError: the process group has not the size of the plan's mesh.
    """
    params_key, state_key = random.split(key)
    params = init_params(plan, params_key)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    state = TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=zero,
        key=state_key.clone(),
        data={"position": zero.clone()},
        skipped=zero.clone(),
    )
    return replicate(plan, state)


def abstract_state(plan: Plan, optimizer: GradientTransformation) -> TrainState:
    """The state's structure, shapes, dtypes and layout without its values: what a checkpoint is loaded into.

    Raises:
        RuntimeError: the process group has not the size of the plan's mesh.
    """

    def make(path: str, param: Param, region: random.Region | None) -> Tensor:
        sizes = param.shape if region is None else tuple(size for _, size in region)
        return torch.empty(sizes, dtype=getattr(torch, param.dtype))

    with torch.device("meta"):
        params = _laid_out(plan, make)
        zero = torch.empty((), dtype=torch.int64)
        state = TrainState(
            params=params,
            opt_state=optimizer.init(params),
            step=zero,
            key=torch.empty(2, dtype=torch.uint32),
            data={"position": zero},
            skipped=zero,
        )
        return replicate(plan, state)


def shard_batch(plan: Plan, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the plan's mesh, from what this rank has read of it.

    Args:
        plan: says how a batch is split: ``plan.batch_spec``.
        rows: arrays [batch, …] of this rank, such as tokens [batch, seq], labels [batch] or features
            [batch, seq, embed]: its rows of the global batch (the same on ranks that share them). On the meta device
            they stand for a batch without values. The first dim is split as the batch is, others are whole.

    Returns:
        DTensors of the global batch; on one device, ``rows`` as they are.

    Raises:
        ValueError: the arrays have not the same number of rows.
    """
    counts = {name: x.shape[0] if x.ndim else None for name, x in rows.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise ValueError(
            "shard_batch: every array needs the same number of rows, its first dim, and at least one; they have "
            f"{counts}"
        )
    if plan.mesh.size == 1:
        return dict(rows)
    from functitan.sharding.move import from_local

    mesh = device_mesh(plan.mesh)
    layout = placements(P(plan.batch_spec[0]), plan.mesh)
    count = plan.mesh.shards(plan.batch_spec[0])
    return {name: from_local(x, mesh, layout, (x.shape[0] * count, *x.shape[1:])) for name, x in rows.items()}


def replicate(plan: Plan, x: Any) -> Any:
    """A tree of tensors that are the same on every rank, as DTensors of the plan's mesh; on one device as it is."""
    if plan.mesh.size == 1:
        return x
    from functitan.sharding.ops import spread

    mesh: DeviceMesh = device_mesh(plan.mesh)
    return tree.map(lambda leaf: spread(leaf, mesh), x)


def abstract_batch(plan: Plan, names: Sequence[str], batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """A batch of token arrays without values, on the meta device: int64 [batch, seq] under each name.

    Of other arrays: :func:`shard_batch` of what ``torch.empty(…, device="meta")`` makes of this rank's rows.

    Raises:
        ValueError: the batch does not divide over the ranks that split it.
    """
    _, rows = plan.batch_rows(0, batch_size)
    with torch.device("meta"):
        return shard_batch(plan, {name: torch.empty(rows, seq_len, dtype=torch.int64) for name in names})


def gather(x: Any) -> Any:
    """A copy of a tree of tensors with every DTensor in it gathered whole on every rank.

    For tests and small models: a rank has to hold all of it. Every rank must call it.
    """
    return tree.map(lambda leaf: (leaf.full_tensor() if is_distributed(leaf) else leaf).detach().clone(), x)


def _laid_out(plan: Plan, make: Callable[[str, Param, random.Region | None], Tensor]) -> Any:
    """The tree of ``make(path, param, region)`` of every parameter; region is None for all of it on one device."""
    if plan.mesh.size == 1:
        return tree.map_with_path(lambda path, param: make(path, param, None), plan.params)
    from functitan.sharding.move import from_local

    mesh = device_mesh(plan.mesh)

    def local(path: str, param: Param) -> Tensor:
        layout = placements(plan.specs[path], plan.mesh)
        here = region(param.shape, plan.specs[path], plan.mesh, mesh.get_rank())
        return from_local(make(path, param, here), mesh, layout, param.shape)

    return tree.map_with_path(local, plan.params)
