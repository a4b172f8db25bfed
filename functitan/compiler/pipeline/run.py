"""``sum_and_grad`` over the stages of a pipeline: from its arguments to what this process runs, and to its results."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from functitan import random, tree
from functitan._torch import call_untraced, faked, is_distributed, is_traced, marked, untraced
from functitan.compiler import boundary
from functitan.compiler.key import leaf_key
from functitan.compiler.pipeline import options
from functitan.compiler.pipeline.executor import Inputs, PipelineCall, Place
from functitan.compiler.pipeline.program import compile_stage
from functitan.compiler.pipeline.stage import Call, Leaf, Stage, boundary_of
from functitan.microbatches import Loss
from functitan.optim.base import at_least_float32
from functitan.sharding import layout
from functitan.sharding.labels import Label, labelled
from functitan.sharding.layout import Layout
from sharding_specs import MeshSpec
from sharding_specs.partition import entry_axes

if TYPE_CHECKING:
    from functitan.compiler.plan import Plan

PP = "pp"
_made: weakref.WeakKeyDictionary[Any, dict[Any, PipelineCall]] = weakref.WeakKeyDictionary()
"""What has been compiled of each loss function, for steps that run uncaptured."""


def pipelined_sum_and_grad(
    loss: Loss, parts: int, params: Any, batch: Any, key: Tensor | None
) -> tuple[tuple[Tensor, Any], Any]:
    """As ``functitan.sum_and_grad(loss, parts)(params, batch, key)``, by the schedule of the plan in force.

    Raises:
        ValueError: the parts are no multiple of the schedule's microbatches.
    """
    job = _Job.of(loss, parts, params, batch, key, gradients=True)
    results = job.run()
    count = sum(leaf.local is not None for leaf in job.call.edge.sums)
    sums, grads = results[:count], results[count:]
    leaves = [job.whole_grad(i, g) for i, g in zip(job.call.variables, grads, strict=True)]
    _, treedef = tree.flatten(params)
    gradients = dict(zip(job.call.variables, leaves))
    filled = [gradients.get(i) for i in range(treedef.num_leaves)]
    return job.whole_sums(sums), tree.unflatten(treedef, filled)


def pipelined_sum(loss: Loss, parts: int, params: Any, batch: Any, key: Tensor | None) -> tuple[Tensor, Any]:
    """As ``functitan.sum_over(loss, parts)(params, batch, key)``: the forward half of the schedule."""
    job = _Job.of(loss, parts, params, batch, key, gradients=False)
    return job.whole_sums(job.run())


@frozen(eq=False)
class _Job:
    """One call: the compiled pipeline, the tensors that it is given, and how results become DTensors."""

    call: PipelineCall
    plan: Plan
    tensors: list[Tensor]
    params: list[tuple[str, Any]]
    mesh: Any

    @staticmethod
    def of(loss: Loss, parts: int, params: Any, batch: Any, key: Tensor | None, *, gradients: bool) -> _Job:
        plan = layout.pipelined()
        _check_parts(parts, plan)
        keys = None if key is None else random.split(key, parts)
        named = [tree.leaves_with_path(x) for x in (params, batch, keys)]
        here = layout.current()
        mesh = None if here is None else here.mesh
        arguments = [leaf for group in named for _, leaf in group]
        facts = (
            gradients, parts, options.current(), plan.pipeline, plan.rules, plan.mesh, plan.precision,
            tuple(tree.structure(x) for x in (params, batch, keys)), tuple(map(leaf_key, arguments)),
            None if mesh is None else mesh.get_group(PP).group_name,
        )  # fmt: skip
        known = _made.setdefault(loss, {})
        if facts not in known:
            with untraced():
                known[facts] = _compile(loss, parts, plan, named, (params, batch, keys), mesh, gradients)
        tensors = [boundary.local(x) for x in arguments if isinstance(x, Tensor)]
        return _Job(known[facts], plan, tensors, named[0], mesh)

    def run(self) -> list[Tensor]:
        """This process' results: its sums, and the gradients of what it holds."""
        if is_traced():
            return call_untraced(self.call, self.tensors, self.call.results)
        with torch.no_grad():
            return self.call(*self.tensors)

    def whole_sums(self, locals_: Sequence[Tensor]) -> Any:
        """``(value, aux)`` from what the last stage has, and zeros elsewhere."""
        edge, rest = self.call.edge, iter(locals_)
        leaves = [leaf.static if leaf.local is None else self._added(next(rest), leaf.spec) for leaf in edge.sums]
        return tree.unflatten(edge.sums_def, leaves)

    def whole_grad(self, i: int, local: Tensor) -> Tensor:
        """The gradient of a parameter: of stacked layers each rank has its own, of others it is added up over pp."""
        path, x = self.params[i]
        if self.mesh is None:
            return local
        with labelled(Label(path, None)), marked("phase", "backward"):
            if is_stacked(self.plan, path):
                return boundary.spec_of(x).wrap(local)
            return self._over_stages(local, x.placements, x.shape)

    def _added(self, local: Tensor, spec: boundary.Spec | None) -> Tensor:
        if self.mesh is None:
            return local
        from functitan.sharding.move import Replicate

        names = self.mesh.mesh_dim_names
        inner = iter(spec.placements if spec is not None else ())
        placements = [Replicate() if name == PP else next(inner) for name in names]
        return self._over_stages(local, placements, local.shape if spec is None else spec.shape)

    def _over_stages(self, local: Tensor, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
        """The sum over the axis pp of what is otherwise laid out as ``placements`` say."""
        from functitan.sharding.move import Partial, from_local, redistribute

        at = self.mesh.mesh_dim_names.index(PP)
        partial = [Partial() if i == at else p for i, p in enumerate(placements)]
        return redistribute(from_local(local, self.mesh, partial, shape), placements)


def is_stacked(plan: Plan, path: str) -> bool:
    """Whether the parameter at a path is stacked over layers that are split into stages."""
    spec = plan.specs.get(path)
    return spec is not None and any(PP in entry_axes(entry) for entry in spec)


def _check_parts(parts: int, plan: Plan) -> None:
    microbatches = plan.pipeline.microbatches
    if parts % microbatches:
        raise ValueError(
            f"sum_and_grad takes the batch in parts={parts}, and the plan's pipeline ({plan.pipeline.schedule}) wants "
            f"{microbatches} microbatches at a time: give parts={microbatches}, or a multiple of it"
        )


def _compile(
    loss: Loss, parts: int, plan: Plan, named: Sequence[list[tuple[str, Any]]], trees: Sequence[Any], mesh: Any,
    gradients: bool,
) -> PipelineCall:  # fmt: skip
    pipeline = plan.pipeline
    stage_mesh, stage_layout = _stage_layout(plan, mesh)
    place = Place.alone(pipeline) if mesh is None else Place.on(mesh, pipeline)
    schedule = pipeline.actions()
    reduced = [
        [_leaf(path, x, stage_mesh, divide=part) for path, x in group] for group, part in zip(named, (1, parts, 0))
    ]
    params, part_leaves, key_leaves = reduced
    treedefs = tuple(tree.structure(x) for x in trees)

    def call_of(layers: int) -> Call:
        own = tuple(
            _with_layers(leaf, layers, stage_mesh) if is_stacked(plan, leaf.path) else leaf for leaf in params
        )
        return Call(loss, own, tuple(part_leaves), tuple(key_leaves), treedefs, stage_layout, plan.rules)

    chosen = options.current()
    first = call_of(pipeline.layers[0][1] - pipeline.layers[0][0])
    edge = boundary_of(first)
    count = len(pipeline.layers)
    programs = {}
    for number in place.stages:
        start, stop = pipeline.layers[number]
        kinds = {a.kind for row in schedule.order for a in row if a is not None and a.stage == number}
        stage = Stage(number, count, start, schedule.apart(number))
        wanted = sorted(kinds) if gradients else ["F"]
        programs[number] = compile_stage(call_of(stop - start), stage, place.rows(number), edge, wanted, chosen)
    variables = _variables(params) if gradients else []
    results = [leaf.local for leaf in edge.sums if leaf.local is not None]
    for i in variables:
        local = params[i].local
        results.append(_empty(local, local.shape, at_least_float32(local.dtype)))
    tensors = [tuple(i for i, leaf in enumerate(group) if leaf.local is not None) for group in reduced]
    stacked = frozenset(i for i, leaf in enumerate(params) if is_stacked(plan, leaf.path))
    inputs = Inputs(*tensors, stacked)
    return PipelineCall(programs, edge, schedule, place, parts, inputs, tuple(variables), tuple(results))


def _variables(params: Sequence[Leaf]) -> list[int]:
    return [i for i, leaf in enumerate(params) if leaf.local is not None and leaf.local.is_floating_point()]


def _stage_layout(plan: Plan, mesh: Any) -> tuple[Any, Layout | None]:
    """The mesh of one stage, which is the plan's without pp, and its layout; None twice where that is one device."""
    axes = {axis: size for axis, size in plan.mesh.items() if axis != PP}
    names = tuple(axis for axis, size in axes.items() if size > 1)
    if mesh is None or not names:
        return None, None
    stage_mesh = mesh[names]
    return stage_mesh, Layout(attrs.evolve(plan, mesh=MeshSpec(**axes), pipeline=None), stage_mesh)


def _leaf(path: str, x: Any, stage_mesh: Any, *, divide: int) -> Leaf:
    """What a stage is given of an argument: a parameter whole, of a batch one part of its rows, of keys one."""
    if not isinstance(x, Tensor):
        return Leaf(path, None, None, x)
    local, shape = boundary.local(x), list(x.shape)
    here = list(local.shape)
    if divide == 0:
        here, shape = here[1:], shape[1:]
    elif divide > 1:
        if not here or here[0] % divide:
            raise ValueError(
                f"batch/{path}: {here[0] if here else 'no'} rows on this rank do not divide into {divide} parts"
            )
        here[0], shape[0] = here[0] // divide, shape[0] // divide
    like = _empty(local, here)
    if stage_mesh is None:
        return Leaf(path, like)
    return Leaf(path, like, _spec(x, like, shape, stage_mesh))


def _spec(x: Tensor, like: Tensor, shape: Sequence[int], stage_mesh: Any) -> boundary.Spec:
    """The layout on the mesh of a stage of what is ``x`` on the whole one."""
    from functitan.sharding.move import Replicate, stride_like

    if is_distributed(x):
        names = x.device_mesh.mesh_dim_names
        placements = tuple(p for name, p in zip(names, x.placements) if name != PP)
    else:
        placements = (Replicate(),) * stage_mesh.ndim
    return boundary.Spec(stage_mesh, placements, torch.Size(shape), stride_like(like, shape))


def _with_layers(leaf: Leaf, layers: int, stage_mesh: Any) -> Leaf:
    """A stack with another number of layers."""
    from functitan.sharding.move import stride_like

    like = _empty(leaf.local, [layers, *leaf.local.shape[1:]])
    if leaf.spec is None:
        return attrs.evolve(leaf, local=like)
    shape = torch.Size([layers, *leaf.spec.shape[1:]])
    spec = attrs.evolve(leaf.spec, shape=shape, stride=stride_like(like, shape))
    return attrs.evolve(leaf, local=like, spec=spec)


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A dense tensor without values, on the device of another, and with its dtype unless another is given."""
    with faked([]):
        return torch.empty(tuple(shape), dtype=dtype or like.dtype, device="cpu" if like.is_meta else like.device)
