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


def layout_of(plan: Plan | None) -> Layout | None:
    """What :func:`use_plan` puts in force: the plan on its ranks; of no plan, or one of one device, what is already.

    Raises:
        RuntimeError: there is no process group of the mesh's size.
    """
    if plan is None or plan.mesh.size == 1:
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
    if plan.mesh.size == 1:
        rules, _state.rules = getattr(_state, "rules", None), plan.rules
        try:
            yield
        finally:
            _state.rules = rules
        return
    from functitan.sharding.guard import Guard

    before, layout = current(), layout_of(plan)
    with ExitStack() as stack:
        stack.enter_context(implicit_replication())
        if before is None:
            stack.enter_context(Guard())
        _state.layout = layout
        try:
            yield
        finally:
            _state.layout = before


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
