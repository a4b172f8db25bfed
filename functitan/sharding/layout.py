"""The layout in force: the plan whose rules ``constrain`` and the operators follow, on this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor

from functitan._torch import implicit_replication, is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from functitan.compiler.plan import Plan
    from sharding_specs import Rules

_state = threading.local()


@frozen(eq=False)
class Layout:
    """A plan on its ranks.

    Attributes:
        plan: rules and mesh.
        mesh: the DeviceMesh of the plan's axes that are larger than one.
    """

    plan: Plan
    mesh: DeviceMesh

    def placements(self, names: Sequence[str | None]) -> tuple:
        """The DTensor placements of an activation whose dims have these logical names."""
        from functitan.compiler.plan import placements

        return placements(self.plan.rules.spec(names, self.plan.mesh), self.plan.mesh)

    def is_data_axis(self, axis: str) -> bool:
        """Whether an axis splits the batch or is the sequence's own: parameters split over it are only stored so."""
        if axis == "ep":  # it splits the batch outside of the experts, which stay where they are
            return False
        return axis == "cp" or axis in self.plan.rules.spec(("batch",), self.plan.mesh).axes


def current() -> Layout | None:
    """The layout in force on this thread; None where plain tensors are computed with."""
    return getattr(_state, "layout", None)


def pipelined() -> Plan | None:
    """The plan in force on this thread, if its layers go through the stages of a pipeline, and no stage is running."""
    return getattr(_state, "pipelined", None)


@contextmanager
def one_process() -> Iterator[None]:
    """Within it, on this thread, this process runs a plan whose one axis is ``pp`` alone: all stages, in turn.

    For tests and debugging: the same schedule, the same graphs and the same numbers as on ranks, on plain tensors.
    """
    before = getattr(_state, "one_process", False)
    _state.one_process = True
    try:
        yield
    finally:
        _state.one_process = before


def is_plain(plan: Plan) -> bool:
    """Whether a plan is run on plain tensors: on one device, or by :func:`one_process`.

    Raises:
        ValueError: inside ``one_process``, the mesh has another axis than pp.
    """
    if plan.mesh.size == 1 or not getattr(_state, "one_process", False):
        return plan.mesh.size == 1
    if plan.mesh.size != plan.mesh.get("pp", 1):
        raise ValueError(
            f"one_process() runs pipelines whose stages are one device each; {plan.mesh} splits them further: start "
            f"{plan.mesh.size} ranks, or give every axis but pp the size 1"
        )
    return True


def layout_of(plan: Plan | None) -> Layout | None:
    """What :func:`use_plan` puts in force: the plan on its ranks; of no plan, or one of one device, what is already.

    Raises:
        RuntimeError: there is no process group of the mesh's size.
    """
    if plan is None or is_plain(plan):
        return current()
    from functitan.compiler.mesh import device_mesh

    return Layout(plan, device_mesh(plan.mesh))


def check_names(names: Sequence[str | None]) -> None:
    """Raises ValueError where the plan of one device in force has no rule for a name, as a larger mesh would."""
    rules = getattr(_state, "rules", None)
    if rules is not None:
        rules.spec(names)


@contextmanager
def use_plan(plan: Plan | None) -> Iterator[None]:
    """Within it, on this thread, ``constrain`` and the operators lay DTensors out as the plan says.

    :func:`functitan.jit` does it by itself for the plan that it is given; this is for running a function on a mesh as
    it is written. Plain tensors inside count as replicated. With a plan of one device, ``constrain`` checks that its
    names have rules, and nothing else is done; with None nothing is.

    Raises:
        RuntimeError: there is no process group of the mesh's size.
    """
    if plan is None:
        yield
        return
    pipelined = plan if plan.pipeline is not None else None
    if is_plain(plan):
        with _holding(rules=plan.rules, pipelined=pipelined):
            yield
        return
    with use_layout(layout_of(plan)), _holding(pipelined=pipelined):
        yield


@contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """As :func:`use_plan`, of a plan on a mesh that is made already; within it no pipeline is in force."""
    from functitan.sharding.guard import Guard

    with ExitStack() as stack:
        stack.enter_context(implicit_replication())
        if current() is None:
            stack.enter_context(Guard())
        stack.enter_context(_holding(layout=layout, pipelined=None))
        yield


@contextmanager
def in_stage(layout: Layout | None, rules: Rules) -> Iterator[None]:
    """Within it one stage of a pipeline is computed: on the mesh of a stage, or, where it is None, on one device."""
    if layout is None:
        with _holding(layout=None, rules=rules, pipelined=None):
            yield
        return
    with use_layout(layout):
        yield


@contextmanager
def _holding(**values: Any) -> Iterator[None]:
    """Puts values in force on this thread, and what was in force before behind it."""
    before = {name: getattr(_state, name, None) for name in values}
    _state.__dict__.update(values)
    try:
        yield
    finally:
        _state.__dict__.update(before)


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """``x`` in the placements of ``like``, where both are DTensors."""
    if not (is_distributed(x) and is_distributed(like)) or x.placements == like.placements:
        return x
    from functitan.sharding.move import redistribute

    return redistribute(x, like.placements)


def completed(x: Any) -> Any:
    """``x`` without partial sums, which a reader would take for the whole; what has none as it is."""
    if not is_distributed(x) or not any(placement.is_partial() for placement in x.placements):
        return x
    from functitan.sharding.move import complete, redistribute

    return redistribute(x, complete(x.placements))
