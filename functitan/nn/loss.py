"""Losses, as sums: the caller divides once, after adding over microbatches and ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functitan._torch import is_distributed


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum of ``-log softmax(logits)[label]`` over the labels that count, and how many count.

    Never a mean: a mean of means is wrong as soon as two microbatches or ranks have different numbers of valid
    labels. The mean is ``loss_sum / count`` of the sums; with no valid label both are 0.

    Args:
        logits: [..., vocab].
        labels: int64, [...]; each in [0, vocab) or ``ignore_index``.
        ignore_index: the label of positions that do not count.
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` for each valid label, which keeps the logits from drifting
            (PaLM, Chowdhery et al., 2022, section 5, with 1e-4).

    Returns:
        ``(loss_sum, count)``, 0-dim: float32 (float64 for float64 logits) and int64.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: the labels are not int64.
    """
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"cross_entropy: logits {list(logits.shape)} must be labels' dims and vocab, but labels are "
            f"{list(labels.shape)}; give one label for each row of logits"
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"cross_entropy: labels must be int64; they are {str(labels.dtype).removeprefix('torch.')}")
    if is_distributed(logits) or is_distributed(labels):
        from functitan.sharding.cross_entropy import cross_entropy as over_mesh

        return over_mesh(row_losses, logits, labels, ignore_index, z_loss)
    return row_losses(logits, labels, ignore_index, z_loss).sum(), (labels != ignore_index).sum()


def row_losses(logits: Tensor, labels: Tensor, ignore_index: int, z_loss: float) -> Tensor:
    """What :func:`cross_entropy` adds up: [...], zeros where the label does not count."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    valid = labels != ignore_index
    # Validity is data, not shape: ignored rows look up label 0 and are then left out.
    index = torch.where(valid, labels, 0).unsqueeze(-1)
    log_probs = F.log_softmax(logits, dim=-1, dtype=None if logits.dtype == dtype else dtype)
    log_prob = log_probs.gather(-1, index).squeeze(-1)
    losses = -log_prob
    if z_loss:
        # logsumexp = logit - log_softmax at any one label: no second pass over the vocabulary.
        normaliser = logits.gather(-1, index).squeeze(-1).to(dtype) - log_prob
        losses = losses + z_loss * normaliser.square()
    return torch.where(valid, losses, 0.0)
