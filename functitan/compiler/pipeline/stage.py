"""One stage of a pipeline as graphs: the loss function is traced with the stage's layers alone.

The function runs from its beginning. Where it folds over its layers, a later stage goes on with what the stage before
has sent, and all but the last one end there with what they send; what was computed for nothing is dropped from the
graph. So the first stage has what comes before the layers, the last one what follows them, and each one for itself what
its layers read beside their input (masks, angles).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.fx import GraphModule

from functitan import tree
from functitan._torch import faked, fakes_like, marked
from functitan.compiler import boundary, passes
from functitan.compiler.capture import capture
from functitan.compiler.graphs import placeholders
from functitan.compiler.pipeline.partition import Cut, cut_of
from functitan.fold import folding, run_layers
from functitan.optim.base import at_least_float32
from functitan.sharding.labels import naming
from functitan.sharding.layout import Layout, completed, in_stage, laid_out_as
from sharding_specs import Rules

_traces = itertools.count(1)


@frozen(eq=False)
class Leaf:
    """What a stage is given at one place of a tree: a tensor's local part and its layout, or a static value.

    Attributes:
        path: of the leaf.
        local: gives shape, strides, dtype and device; its values are not read. None for what is static.
        spec: how the local part is one of a DTensor on the stage's mesh; None of a plain tensor.
        static: the value, where there is no tensor.
    """

    path: str
    local: Tensor | None
    spec: boundary.Spec | None = None
    static: Any = None

    def wrap(self, local: Tensor) -> Tensor:
        return local if self.spec is None else self.spec.wrap(local)


@frozen(eq=False)
class Call:
    """A loss function, and the arguments that a stage gives it for one microbatch.

    Attributes:
        fun: ``fun(params, part, key) -> (value, aux)``.
        params, part, key: leaves of the arguments, in the order of their trees.
        treedefs: of the three.
        layout: the mesh of a stage; None where that is one device.
        rules: of the plan.
    """

    fun: Callable[..., Any]
    params: tuple[Leaf, ...]
    part: tuple[Leaf, ...]
    key: tuple[Leaf, ...]
    treedefs: tuple[tree.TreeDef, tree.TreeDef, tree.TreeDef]
    layout: Layout | None
    rules: Rules

    def __call__(self, params: Sequence[Any], part: Sequence[Any], key: Sequence[Any]) -> Any:
        """The function on the leaves of its arguments."""
        arguments = [tree.unflatten(treedef, leaves) for treedef, leaves in zip(self.treedefs, (params, part, key))]
        with in_stage(self.layout, self.rules):
            return self.fun(*arguments)


@frozen(eq=False)
class Boundary:
    """What stages hand on, and what the last one gives.

    Attributes:
        x: the leaves of what goes through the layers, as every stage receives it.
        treedef: of its tree.
        sums: the leaves of ``(value, aux)``.
        sums_def: of their tree.
    """

    x: tuple[Leaf, ...]
    treedef: tree.TreeDef
    sums: tuple[Leaf, ...]
    sums_def: tree.TreeDef


class _End(Exception):
    """Leaves the loss function where a stage ends."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x = x


def boundary_of(call: Call) -> Boundary:
    """What enters the layers, and what the loss function makes of it, by running it without its layers and values.

    Raises:
        ValueError: the function has no ``fold`` over its layers, or two.
    """
    entered: list[Any] = []

    def skip(layer: Any, x: Any, layers: Any) -> Any:
        entered.append(tree.map(completed, x))
        return entered[-1]

    groups = (call.params, call.part, call.key)
    with faked([leaf.local for group in groups for leaf in group if leaf.local is not None]) as fakes:
        rest = iter(fakes)
        arguments = [
            [leaf.static if leaf.local is None else leaf.wrap(next(rest)) for leaf in group] for group in groups
        ]
        with torch.no_grad(), folding(skip):
            sums = tree.map(completed, call(*arguments))
    if len(entered) != 1:
        raise ValueError(
            f"the plan has layers over pp, and the loss calls functitan.fold {len(entered)} times: a model that goes "
            "through a pipeline loops over its stacked layers with fold, once"
        )
    (leaves, treedef), (sum_leaves, sums_def) = tree.flatten(entered[0]), tree.flatten(sums)
    return Boundary(_as_leaves("x", leaves), treedef, _as_leaves("sum", sum_leaves), sums_def)


def _as_leaves(what: str, values: Sequence[Any]) -> tuple[Leaf, ...]:
    """Leaves of what is handed on, which is dense wherever it arrives."""
    with faked([boundary.local(x) for x in values if isinstance(x, Tensor)]) as fakes:
        rest = iter(fakes)
        return tuple(
            Leaf(f"{what}/{i}", torch.empty_like(next(rest), memory_format=torch.contiguous_format),
                 boundary.spec_of(x)) if isinstance(x, Tensor) else Leaf(f"{what}/{i}", None, None, x)
            for i, x in enumerate(values)
        )  # fmt: skip


@frozen(eq=False)
class Stage:
    """Which stage of how many, and the number of its first layer.

    ``apart``: whether its rank does other things between the forward and the backward pass of a microbatch.
    """

    number: int
    count: int
    first_layer: int
    apart: bool

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1


def forward_graph(call: Call, stage: Stage, edge: Boundary, names: Sequence[str]) -> tuple[GraphModule, Cut]:
    """The graph of a stage without gradients; inputs and outputs are named as by :func:`joint_graph`."""
    inputs = _Inputs(call, edge, stage, gradients=False)

    def run(*flat: Tensor) -> list[Tensor]:
        given = inputs.fill(flat)
        with torch.no_grad():
            out = _run_stage(call, stage, edge, given)
        return [boundary.local(x) for x in out if isinstance(x, Tensor)]

    module = _traced(run, inputs, names, stage)
    gives = inputs.result_names
    return module, cut_of(module, inputs.names, [{name: i for i, name in enumerate(gives)}, {}, {}])


def joint_graph(call: Call, stage: Stage, edge: Boundary, names: Sequence[str]) -> tuple[GraphModule, Cut]:
    """The graph of a stage's forward and backward pass for one microbatch, after the passes that change both.

    Inputs are named ``param:i``, ``part:i``, ``key:i``, ``x:i`` and ``grad:i`` (the gradient of what the stage hands
    on), by the number of the leaf; outputs ``out:i`` or, of the last stage, ``sum:i``, and the gradients ``dx:i`` and
    ``dparam:i``, the latter in at least float32 and only of parameters that the stage uses.

    Args:
        names: of the passes.
    """
    inputs = _Inputs(call, edge, stage, gradients=True)
    used: list[int] = []

    def run(*flat: Tensor) -> list[Tensor]:
        given = inputs.fill(flat)
        with torch.enable_grad(), marked("pass", f"stage{next(_traces)}"):
            params = [_as_variable(x) for x in given.params]
            x = [_as_variable(leaf) for leaf in given.x]
            out = _run_stage(call, stage, edge, _Given(params, given.part, given.key, x, given.grads))
            sources, seeds = _roots(stage, edge, out, given.grads)
            wanted_x = [] if stage.is_first else [i for i, leaf in enumerate(x) if _is_variable(leaf)]
            wanted_params = [i for i, leaf in enumerate(params) if _is_variable(leaf)]
            variables = [*(x[i] for i in wanted_x), *(params[i] for i in wanted_params)]
            with marked("phase", "backward"), in_stage(call.layout, call.rules):  # where remat computes again
                grads = torch.autograd.grad(sources, variables, seeds, allow_unused=True)
                dx = [_like(x[i], g) for i, g in zip(wanted_x, grads)]
                dparams = [
                    (i, laid_out_as(params[i].detach(), g.detach()))
                    for i, g in zip(wanted_params, grads[len(wanted_x) :])
                    if g is not None
                ]
                dparams = [(i, g.to(at_least_float32(g.dtype))) for i, g in dparams]
        used[:] = [i for i, _ in dparams]
        results = [y.detach() for y in out if isinstance(y, Tensor)] + dx + [g for _, g in dparams]
        return [boundary.local(y) for y in results]

    module = _traced(run, inputs, names, stage)
    gives = [*inputs.result_names]
    dx_names = [] if stage.is_first else [f"dx:{i}" for i in edge_variables(edge)]
    dparam_names = [f"dparam:{i}" for i in used]
    places = {name: i for i, name in enumerate([*gives, *dx_names, *dparam_names])}
    return module, cut_of(
        module, inputs.names, [{name: places[name] for name in part} for part in (gives, dx_names, dparam_names)]
    )


def edge_variables(edge: Boundary) -> list[int]:
    """The numbers of the leaves of what stages hand on that have gradients."""
    return [i for i, leaf in enumerate(edge.x) if leaf.local is not None and leaf.local.is_floating_point()]


@frozen(eq=False)
class _Given:
    params: list[Any]
    part: list[Any]
    key: list[Any]
    x: list[Any]
    grads: list[Tensor]


class _Inputs:
    """The tensors that a stage's graph reads, in order, under their names."""

    def __init__(self, call: Call, edge: Boundary, stage: Stage, *, gradients: bool) -> None:
        self.groups: list[tuple[str, Sequence[Leaf]]] = [
            ("param", call.params), ("part", call.part), ("key", call.key), ("x", () if stage.is_first else edge.x),
        ]  # fmt: skip
        grads = [edge.x[i] for i in edge_variables(edge)] if gradients and not stage.is_last else []
        self.groups.append(("grad", grads))
        grad_numbers = edge_variables(edge)
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.paths: list[str] = []
        for kind, leaves in self.groups:
            for i, leaf in enumerate(leaves):
                if leaf.local is not None:
                    self.names.append(f"{kind}:{grad_numbers[i] if kind == 'grad' else i}")
                    self.tensors.append(leaf.local)
                    self.paths.append(f"params/{leaf.path}" if kind == "param" else f"{kind}/{leaf.path}")
        results = edge.sums if stage.is_last else edge.x
        kind = "sum" if stage.is_last else "out"
        self.result_names = [f"{kind}:{i}" for i, leaf in enumerate(results) if leaf.local is not None]

    def fill(self, flat: Sequence[Tensor]) -> _Given:
        """Arguments from the traced inputs."""
        rest = iter(flat)
        return _Given(*(
            [leaf.static if leaf.local is None else leaf.wrap(next(rest)) for leaf in leaves]
            for _, leaves in self.groups
        ))  # fmt: skip


def _run_stage(call: Call, stage: Stage, edge: Boundary, given: _Given) -> list[Any]:
    """The leaves of what the stage hands on, or, of the last one, of ``(value, aux)``."""

    def on_fold(layer: Any, x: Any, layers: Any) -> Any:
        if not stage.is_first:
            x = tree.unflatten(edge.treedef, given.x)
        leaves, treedef = tree.flatten(run_layers(layer, x, layers, stage.first_layer))
        leaves = [completed(y) if leaf.local is None else _brought(leaf, y) for leaf, y in zip(edge.x, leaves)]
        x = tree.unflatten(treedef, leaves)
        if stage.is_last:
            return x
        raise _End(x)

    with folding(on_fold):
        try:
            result = call(given.params, given.part, given.key)
        except _End as end:
            return tree.leaves(end.x)
    return [completed(x) for x in tree.leaves(result)]


def _brought(leaf: Leaf, x: Tensor) -> Tensor:
    """``x`` in the layout in which every stage receives it."""
    if leaf.spec is None or x.placements == leaf.spec.placements:
        return x
    from functitan.sharding.move import redistribute

    return redistribute(x, leaf.spec.placements)


def _roots(stage: Stage, edge: Boundary, out: list[Any], grads: list[Tensor]) -> tuple[list[Tensor], Any]:
    """What the backward pass begins with, and the gradients of that."""
    if stage.is_last:
        return [out[0]], None
    return [out[i] for i in edge_variables(edge)], grads


def _traced(run: Callable, inputs: _Inputs, names: Sequence[str], stage: Stage) -> GraphModule:
    def named(*flat: Tensor) -> list[Tensor]:
        with naming(dict(zip(inputs.paths, flat))):
            return run(*flat)

    module = capture(named, fakes_like(inputs.tensors), f"stage {stage.number}")
    for node, path in zip(placeholders(module.graph), inputs.paths):
        node.meta["path"] = path
    passes.run_functional(module.graph, (), names, passes.APART if stage.apart else {})
    return module


def _is_variable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _as_variable(x: Any) -> Any:
    return x.detach().requires_grad_() if _is_variable(x) else x


def _like(x: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(x.detach()) if grad is None else laid_out_as(x.detach(), grad.detach())
