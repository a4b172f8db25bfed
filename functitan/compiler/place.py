"""From a plan to tensors: initial values, each a function of the key and the parameter's path alone.

On a mesh every leaf is a DTensor, and every rank makes the slices that it holds and nothing else: values depend on the
global index, so the whole is bit-equal on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functitan import init, random, tree
from functitan._torch import is_distributed
from functitan.compiler.agreement import check_same
from functitan.compiler.mesh import device_mesh
from functitan.compiler.plan import Plan, placements
from functitan.optim import GradientTransformation
from functitan.sharding.layout import is_plain
from functitan.state import TrainState
from sharding_specs import P, Param
from sharding_specs.context import all_runs, runs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from functitan.compiler.pipeline.stages import Pipeline


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

    if not is_plain(plan):
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


def shard_batch(plan: Plan, rows: Mapping[str, Tensor], whole: Collection[str] = ()) -> dict[str, Tensor]:
    """A batch on the plan's mesh, from what this rank has read of it.

    Where the plan splits sequences over cp, each rank keeps its part of them, in the plan's layout. All arrays are laid
    out alike; with the balanced layout their tokens are in another order than in ``rows``, which :func:`gather` with
    the plan undoes.

    Args:
        plan: says how a batch is split: ``plan.batch_spec`` and ``plan.context``.
        rows: arrays [batch, …] of this rank, such as tokens [batch, seq], labels [batch] or features
            [batch, seq, embed]: its rows of the global batch (the same on ranks that share them), with whole sequences.
            On the meta device they stand for a batch without values. The first dim is split as the batch is; the second
            over cp, if the plan does that; others are whole.
        whole: the names of arrays whose second dim is no sequence.

    Returns:
        DTensors of the global batch; on one device, ``rows`` as they are.

    Raises:
        ValueError: the arrays have not the same number of rows, or sequences have not one length, or one that does not
            divide.
    """
    counts = {name: x.shape[0] if x.ndim else None for name, x in rows.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise ValueError(
            "shard_batch: every array needs the same number of rows, its first dim, and at least one; they have "
            f"{counts}"
        )
    if is_plain(plan):
        return dict(rows)
    from functitan.sharding.move import from_local

    mesh = device_mesh(plan.mesh)
    split = {name for name, x in rows.items() if x.ndim > 1 and name not in whole} if plan.context else set()
    seq = _one_length({name: rows[name].shape[1] for name in sorted(split)}) if split else 0
    count = plan.mesh.shards(plan.batch_spec[0])
    batch = {}
    for name, x in rows.items():
        shape = (x.shape[0] * count, *x.shape[1:])
        if name in split:
            x = _own_tokens(plan, mesh, x, seq)
        over = P(plan.batch_spec[0], "cp") if name in split else P(plan.batch_spec[0])
        batch[name] = from_local(x, mesh, placements(over, plan.mesh), shape)
    return batch


def _one_length(lengths: dict[str, int]) -> int:
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"shard_batch: sequences are split over cp and need one length, the second dim; they have {lengths}. Name "
            "the arrays that have no sequence: shard_batch(plan, rows, whole=(…))"
        )
    return next(iter(lengths.values()))


def _own_tokens(plan: Plan, mesh: DeviceMesh, x: Tensor, seq_len: int) -> Tensor:
    """The tokens of this rank of cp, from whole rows."""
    from functitan.sharding.context.order import taken

    rank, size = plan.mesh.coordinate(mesh.get_rank())["cp"], plan.mesh["cp"]
    try:
        return taken(x, runs(rank, size, seq_len, plan.context.layout), dim=1)
    except ValueError as error:
        raise ValueError(f"shard_batch: {error}") from error


def replicate(plan: Plan, x: Any) -> Any:
    """A tree of tensors that are the same on every rank, as DTensors of the plan's mesh; on one device as it is."""
    if is_plain(plan):
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


def gather(x: Any, plan: Plan | None = None) -> Any:
    """A copy of a tree of tensors with every DTensor in it gathered whole on every rank.

    For tests and small models: a rank has to hold all of it. Every rank must call it.

    Args:
        plan: where sequences are split over cp, or layers over pp, the plan that they are laid out by: they come back
            in natural order.

    Raises:
        ValueError: there is no plan, and a dim is split over cp, or layers over pp: their order is not known. Or the
            layers are not in the stages of this plan.
    """
    return tree.map(lambda leaf: _gathered(leaf, plan).detach().clone(), x)


def _gathered(x: Tensor, plan: Plan | None) -> Tensor:
    if not is_distributed(x):
        return x
    from functitan.sharding.context.order import axis_of, natural

    over_cp = [dim for dim in range(x.ndim) if axis_of(x, dim) is not None]
    if over_cp and plan is None:
        raise ValueError(
            f"gather: dim {over_cp[0]} of {list(x.shape)} is split over cp ({x.placements}), in an order that only its "
            "plan knows: gather(x, plan)"
        )
    axis = _stage_axis(x)
    whole = x.full_tensor() if axis is None else _all_stages(x, _stages_of(x, axis, plan, "gather(x, plan)"), axis)
    if over_cp and plan.context is not None:
        order = all_runs(plan.mesh["cp"], x.shape[over_cp[0]], plan.context.layout)
        whole = natural(whole, order, over_cp[0])
    return whole


def held_layers(x: Tensor, plan: Plan | None, remedy: str) -> tuple[tuple[int, int], ...] | None:
    """``(start, stop)`` of the layers that this rank holds of ``x``, stage by stage, as they lie along its dim 0.

    Args:
        x: any tensor: a parameter, its gradient, what the optimizer keeps of it.
        plan: what it is laid out by; needed only where layers are split over pp.
        remedy: the call that gives a plan, for the error.

    Returns:
        None where no layers are split over pp.

    Raises:
        ValueError: there is no plan, or the plan has other stages.
    """
    axis = _stage_axis(x)
    if axis is None:
        return None
    stages = _stages_of(x, axis, plan, remedy)
    layers = tuple(stages.layers[stage] for stage in stages.stages_of(x.device_mesh.get_local_rank(axis)))
    has, given = x.to_local().shape[0], sum(stop - start for start, stop in layers)
    if has != given:
        raise ValueError(
            f"this rank holds {has} layers of {list(x.shape)}, and the plan gives it {given}: give the plan that it is "
            "laid out by"
        )
    return layers


def _stage_axis(x: Tensor) -> int | None:
    """The place among the mesh's axes of pp, where ``x`` is split over it; else None."""
    names = (x.device_mesh.mesh_dim_names or ()) if is_distributed(x) else ()
    return names.index("pp") if "pp" in names and x.placements[names.index("pp")].is_shard() else None


def _stages_of(x: Tensor, axis: int, plan: Plan | None, remedy: str) -> Pipeline:
    if plan is None:
        raise ValueError(
            f"the layers of {list(x.shape)} are split over pp ({x.placements}), in an order that only their plan "
            f"knows: {remedy}"
        )
    ranks, stages = x.device_mesh.size(axis), plan.pipeline
    if stages is None or (stages.ranks, stages.n_layers) != (ranks, x.shape[0]):
        has = "no pipeline" if stages is None else f"{stages.n_layers} layers over pp={stages.ranks}"
        raise ValueError(
            f"a tensor of {x.shape[0]} layers over pp={ranks}, and the plan has {has}: give the plan that it is laid "
            "out by"
        )
    return stages


def _all_stages(x: Tensor, stages: Pipeline, axis: int) -> Tensor:
    """What is stacked over layers, whole: each rank's layers go to their places."""
    from functitan.sharding.move import Replicate, move

    whole = [p if i == axis else Replicate() for i, p in enumerate(x.placements)]
    own = move(x, whole).to_local()
    counts = [len(stages.layers_of(rank)) for rank in range(stages.ranks)]
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=x.device_mesh.get_group(axis))
    result = own.new_empty((x.shape[0], *own.shape[1:]))
    for rank, (part, count) in enumerate(zip(parts, counts)):
        result[list(stages.layers_of(rank))] = part[:count]
    return result


def _laid_out(plan: Plan, make: Callable[[str, Param, random.Region | None], Tensor]) -> Any:
    """The tree of ``make(path, param, region)`` of every parameter; region is None for all of it on one device."""
    if is_plain(plan):
        return tree.map_with_path(lambda path, param: make(path, param, None), plan.params)
    from functitan.sharding.move import from_local

    mesh = device_mesh(plan.mesh)

    def local(path: str, param: Param) -> Tensor:
        layout = placements(plan.specs[path], plan.mesh)
        stages = [make(path, param, here) for here in plan.regions(path, mesh.get_rank())]
        return from_local(stages[0] if len(stages) == 1 else torch.cat(stages), mesh, layout, param.shape)

    return tree.map_with_path(local, plan.params)
