"""The training step: a pure function ``(state, batch) -> (state, metrics)``, the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

from functitan import nn, optim, random, tree
from functitan.microbatches import sum_and_grad, sum_over
from functitan.state import TrainState

Batch = Mapping[str, Tensor]
Model = Callable[..., Tensor]
"""``model(params, batch, key=None) -> logits [batch, seq, vocab]``."""


def make_train_step(
    model: Model,
    optimizer: optim.GradientTransformation,
    schedule: Callable[[Tensor], Tensor | float],
    parts: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Tensor]]]:
    """The step that trains ``model``.

    Args:
        model: pure; see :data:`Model`.
        optimizer: its clipping, if any, included.
        schedule: the optimizer's learning rate, for the metrics.
        parts: how many parts the batch is taken in, one by one or through the stages of a pipeline.

    Returns:
        ``train_step(state, batch)``; ``batch`` has int64 ``tokens`` and ``labels`` [batch, seq], and what else the
        model reads. Metrics are scalars: ``loss`` (nats a token: the sum over all valid labels, divided once),
        ``grad_norm`` before clipping, ``learning_rate``, ``tokens`` (valid labels), ``skipped`` (1 if the gradients
        were not finite, or no label was valid, and nothing changed).
    """

    def loss_fn(params, part: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        return nn.cross_entropy(model(params, part, key=key), part["labels"])  # a sum and a count, never a mean

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Tensor]]:
        key = random.fold_in(state.key, state.step)
        (loss_sum, count), grads = sum_and_grad(loss_fn, parts)(state.params, batch, key)
        grads = optim.mean_gradients(optim.AccumulatedGradients(grads, count))

        grad_norm = optim.global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)

        good = torch.isfinite(grad_norm) & (count > 0)
        params, opt_state = tree.map(
            lambda new, old: torch.where(good, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            "loss": loss_sum / count,
            "grad_norm": grad_norm,
            "learning_rate": torch.as_tensor(schedule(state.step - state.skipped), dtype=torch.float32),
            "tokens": count,
            "skipped": (~good).to(torch.int64),
        }
        state = attrs.evolve(
            state,
            params=params,
            opt_state=opt_state,
            step=state.step + 1,
            data={"position": state.data["position"] + batch["tokens"].shape[0]},
            skipped=state.skipped + metrics["skipped"],
        )
        return state, metrics

    return train_step


def make_eval_step(model: Model, parts: int = 1) -> Callable[[object, Batch], dict[str, Tensor]]:
    """``eval_step(params, batch) -> {"loss_sum", "tokens"}``: sums over the batch's valid labels, without dropout.

    ``parts`` as of :func:`make_train_step`.
    """

    def loss_fn(params, part: Batch, key: None) -> tuple[Tensor, Tensor]:
        return nn.cross_entropy(model(params, part, key=key), part["labels"])

    def eval_step(params, batch: Batch) -> dict[str, Tensor]:
        loss_sum, tokens = sum_over(loss_fn, parts)(params, batch)
        return {"loss_sum": loss_sum, "tokens": tokens}

    return eval_step
