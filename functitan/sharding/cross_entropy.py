"""Cross-entropy of logits whose vocabulary is split: the logits stay where they are.

Of each row only three numbers cross the mesh: the largest logit, the sum of exponentials, and the label's logit
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). The backward pass sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from functitan.sharding.move import (
    DTensor,
    Partial,
    Placements,
    Replicate,
    complete,
    from_local,
    redistribute,
    region,
    to_local,
)
from functitan.sharding.ops import mesh_of, spread

RowLosses = Callable[[Tensor, Tensor, int, float], Tensor]


def cross_entropy(
    row_losses: RowLosses, logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float
) -> tuple[DTensor, DTensor]:
    """As ``functitan.nn.cross_entropy``, of DTensors: two replicated scalars.

    Args:
        row_losses: the losses of rows whose vocabulary is whole.
    """
    mesh = mesh_of(logits, labels)
    logits, labels = spread(logits, mesh), spread(labels, mesh)
    placements = complete(logits.placements)
    last = logits.ndim - 1
    over_vocab = tuple(p.is_shard() and p.dim == last for p in placements)
    rows = tuple(Replicate() if split else p for p, split in zip(placements, over_vocab))
    local, local_labels = to_local(logits, placements), to_local(labels, rows)
    if any(over_vocab):
        columns = region(logits.shape, mesh, placements)[-1]
        split = _Split(mesh, over_vocab, rows, tuple(labels.shape), *columns, logits.shape[-1])
        losses, _ = _SplitCrossEntropy.apply(local, local_labels, split, ignore_index, z_loss)
    else:
        losses = row_losses(local, local_labels, ignore_index, z_loss)
    sums = tuple(Partial() if p.is_shard() else Replicate() for p in rows)
    everywhere = (Replicate(),) * mesh.ndim
    loss_sum = redistribute(from_local(losses.sum(), mesh, sums, ()), everywhere)
    count = redistribute(from_local((local_labels != ignore_index).sum(), mesh, sums, ()), everywhere)
    return loss_sum, count


@frozen
class _Split:
    """How the logits are split: the columns ``start … start + size`` of ``vocab`` are here."""

    mesh: DeviceMesh
    over_vocab: tuple[bool, ...]
    rows: Placements
    shape: tuple[int, ...]
    start: int
    size: int
    vocab: int

    def total(self, x: Tensor, op: str, *more: int) -> Tensor:
        """``x`` of each row, [*shape, *more], reduced over the ranks that have the other columns."""
        parts = tuple(Partial(op) if cut else p for cut, p in zip(self.over_vocab, self.rows))
        return to_local(from_local(x, self.mesh, parts, (*self.shape, *more)), self.rows)


class _SplitCrossEntropy(torch.autograd.Function):
    """The loss of each row, and the logarithm of its sum of exponentials, from this rank's columns of the logits.

    The second is an output so that second derivatives find their way to it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, split: _Split, ignore_index: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        valid = labels != ignore_index
        index = labels - split.start
        mine = valid & (index >= 0) & (index < split.size)
        index = torch.where(mine, index, 0).unsqueeze(-1)
        if split.size:
            peak = split.total(logits.amax(-1).to(dtype), "max")
            exponentials = (logits.to(dtype) - peak.unsqueeze(-1)).exp().sum(-1)
            picked = torch.where(mine, logits.gather(-1, index).squeeze(-1).to(dtype), 0.0)
        else:  # a rank without a column
            peak = split.total(torch.full_like(labels, -torch.inf, dtype=dtype), "max")
            exponentials = picked = torch.zeros_like(labels, dtype=dtype)
        sums = split.total(torch.stack((exponentials, picked), -1), "sum", 2)
        exponentials, picked = sums.unbind(-1)
        normaliser = peak + exponentials.log()
        losses = normaliser - picked
        if z_loss:
            losses = losses + z_loss * normaliser.square()
        # No rank has the column of a label outside the vocabulary: NaN, where whole logits would raise or crash.
        losses = torch.where((labels >= 0) & (labels < split.vocab), losses, torch.nan)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, normaliser, index, mine, valid)
        ctx.split, ctx.z_loss = split, z_loss
        return torch.where(valid, losses, 0.0), normaliser

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_normaliser: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, normaliser, index, mine, valid = ctx.saved_tensors
        of_normaliser = None
        if grad_normaliser is not None:  # of second derivatives: each rank has what its own columns gave
            of_normaliser = ctx.split.total(grad_normaliser, "sum")
        if grad is not None:
            grad = torch.where(valid, grad, 0.0)
            direct = grad * (1 + 2 * ctx.z_loss * normaliser) if ctx.z_loss else grad
            of_normaliser = direct if of_normaliser is None else of_normaliser + direct
        softmax = (logits.to(normaliser.dtype) - normaliser.unsqueeze(-1)).exp()
        out = softmax * of_normaliser.unsqueeze(-1)
        if grad is not None and ctx.split.size:
            out = out.scatter_add(-1, index, -torch.where(mine, grad, 0.0).unsqueeze(-1))
        return out.to(logits.dtype), None, None, None, None
