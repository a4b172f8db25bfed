"""The state of training: one tree, and all that a checkpoint holds."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from functitan import tree


@tree.node
@attrs.frozen(eq=False)
class TrainState:
    """Everything that a training step reads and replaces.

    Attributes:
        params: tree of tensors, as declared.
        opt_state: what ``optimizer.init(params)`` made.
        step: int64 scalar, the number of steps done.
        key: uint32 [2], the base of the run's random numbers; step ``n`` draws from ``fold_in(key, n)``.
        data: ``{"position": int64 scalar}``, the index of the next global sample.
        skipped: int64 scalar, the number of steps whose gradients were not finite and that changed nothing.
    """

    params: Any
    opt_state: Any
    step: Tensor
    key: Tensor
    data: dict[str, Tensor]
    skipped: Tensor
