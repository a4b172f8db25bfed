"""Where a captured graph begins and ends: DTensors are taken apart, so that the graph holds local tensors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from functitan._torch import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@frozen
class Spec:
    """What a DTensor is beside its local tensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, local: Tensor) -> Tensor:
        """The DTensor with this local tensor."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def spec_of(x: Tensor) -> Spec | None:
    """The Spec of a DTensor; None of a plain tensor."""
    return Spec(x.device_mesh, x.placements, x.shape, x.stride()) if is_distributed(x) else None


def local(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, itself and not a view; a plain tensor as it is."""
    if not is_distributed(x):
        return x
    with torch.no_grad():
        return x.to_local()


def wrap_all(locals_: Sequence[Tensor], specs: Sequence[Spec | None]) -> list[Tensor]:
    """The inverse of taking apart: DTensors where there is a Spec."""
    return [x if spec is None else spec.wrap(x) for x, spec in zip(locals_, specs)]
