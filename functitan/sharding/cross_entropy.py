"""Cross-entropy of logits whose vocabulary is split: the logits stay where they are.

Of each row only three numbers cross the mesh: the largest logit, the sum of exponentials, and the label's logit
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). The backward pass sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch
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


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float) -> tuple[DTensor, DTensor]:
    """As ``functitan.nn.cross_entropy``, of DTensors: two replicated scalars."""
    mesh = mesh_of(logits, labels)
    logits, labels = spread(logits, mesh), spread(labels, mesh)
    placements = complete(logits.placements)
    last = logits.ndim - 1
    over_vocab = tuple(p.is_shard() and p.dim == last for p in placements)
    rows = tuple(Replicate() if split else p for p, split in zip(placements, over_vocab))
    local, local_labels = to_local(logits, placements), to_local(labels, rows)
    (start, size) = region(logits.shape, mesh, placements)[-1]
    losses = _SplitCrossEntropy.apply(
        local, local_labels, start, size, (mesh, over_vocab), rows, tuple(labels.shape), ignore_index, z_loss
    )
    sums = tuple(Partial() if p.is_shard() else Replicate() for p in rows)
    everywhere = (Replicate(),) * mesh.ndim
    loss_sum = redistribute(from_local(losses.sum(), mesh, sums, ()), everywhere)
    count = redistribute(from_local((local_labels != ignore_index).sum(), mesh, sums, ()), everywhere)
    return loss_sum, count


class _SplitCrossEntropy(torch.autograd.Function):
    """The loss of each row, from this rank's columns ``start … start + size`` of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, size: int, split: tuple[DeviceMesh, tuple[bool, ...]],
        rows: Placements, shape: tuple[int, ...], ignore_index: int, z_loss: float,
    ) -> Tensor:  # fmt: skip
        dtype = torch.promote_types(logits.dtype, torch.float32)
        valid = labels != ignore_index
        index = labels - start
        mine = valid & (index >= 0) & (index < size)
        index = torch.where(mine, index, 0).unsqueeze(-1)

        def total(x: Tensor, op: str, *, more: int = 0) -> Tensor:
            mesh, over_vocab = split
            if not any(over_vocab):
                return x
            parts = tuple(Partial(op) if cut else p for cut, p in zip(over_vocab, rows))
            return redistribute(from_local(x, mesh, parts, (*shape, more) if more else shape), rows).to_local()

        if size:
            peak = total(logits.amax(-1).to(dtype), "max")
            exponentials = (logits.to(dtype) - peak.unsqueeze(-1)).exp().sum(-1)
            picked = torch.where(mine, logits.gather(-1, index).squeeze(-1).to(dtype), 0.0)
        else:  # a rank without a column
            peak = total(torch.full_like(labels, -torch.inf, dtype=dtype), "max")
            exponentials = picked = torch.zeros_like(labels, dtype=dtype)
        exponentials, picked = total(torch.stack((exponentials, picked), -1), "sum", more=2).unbind(-1)
        normaliser = peak + exponentials.log()
        losses = normaliser - picked
        if z_loss:
            losses = losses + z_loss * normaliser.square()
        ctx.save_for_backward(logits, normaliser, index, mine, valid)
        ctx.z_loss = z_loss
        return torch.where(valid, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, index, mine, valid = ctx.saved_tensors
        grad = torch.where(valid, grad, 0.0)
        of_normaliser = grad * (1 + 2 * ctx.z_loss * normaliser) if ctx.z_loss else grad
        softmax = (logits.to(normaliser.dtype) - normaliser.unsqueeze(-1)).exp()
        out = softmax * of_normaliser.unsqueeze(-1)
        if logits.shape[-1]:
            out = out.scatter_add(-1, index, -torch.where(mine, grad, 0.0).unsqueeze(-1))
        return out.to(logits.dtype), *(None,) * 8
