"""The training step: a pure function ``(state, batch) -> (state, metrics)``, the same on every mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import attrs
import torch
from einops import rearrange
from torch import Tensor

from functitan import nn, optim, random, tree
from functitan._torch import is_distributed
from functitan.state import TrainState
from functitan.transforms import value_and_grad

Batch = Mapping[str, Tensor]
Model = Callable[..., Tensor]
"""``model(params, batch, key=None) -> logits [batch, seq, vocab]``."""


def make_train_step(
    model: Model,
    optimizer: optim.GradientTransformation,
    schedule: Callable[[Tensor], Tensor | float],
    accumulation: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Tensor]]]:
    """The step that trains ``model``.

    Args:
        model: pure; see :data:`Model`.
        optimizer: its clipping, if any, included.
        schedule: the optimizer's learning rate, for the metrics.
        accumulation: how many parts the batch is taken in, one by one.

    Returns:
        ``train_step(state, batch)``; ``batch`` has int64 ``tokens`` and ``labels`` [batch, seq], and what else the
        model reads. Metrics are scalars: ``loss`` (nats a token: the sum over all valid labels, divided once),
        ``grad_norm`` before clipping, ``learning_rate``, ``tokens`` (valid labels), ``skipped`` (1 if the gradients
        were not finite, or no label was valid, and nothing changed).
    """

    def loss_fn(params, part: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        return nn.cross_entropy(model(params, part, key=key), part["labels"])  # a sum and a count, never a mean

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Tensor]]:
        keys = random.split(random.fold_in(state.key, state.step), accumulation)
        parts = {name: _microbatches(x, accumulation) for name, x in batch.items()}
        losses, accumulated = [], None
        for i in range(accumulation):
            part = {name: x[i] for name, x in parts.items()}
            (loss, count), grads = value_and_grad(loss_fn, has_aux=True)(state.params, part, keys[i])
            losses.append(loss)
            if accumulated is None:
                accumulated = optim.first_gradients(grads, count)
            else:
                accumulated = optim.accumulate(accumulated, grads, count)
        count, grads = accumulated.weight, optim.mean_gradients(accumulated)

        grad_norm = optim.global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)

        good = torch.isfinite(grad_norm) & (count > 0)
        params, opt_state = tree.map(
            lambda new, old: torch.where(good, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        metrics = {
            "loss": functools.reduce(torch.add, losses) / count,
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


def _microbatches(x: Tensor, count: int) -> Tensor:
    """[batch, seq] -> [count, batch / count, seq]: part ``i`` has the rows ``i, i + count, …``.

    So a rank's rows of each part are among its rows of the batch.
    """
    here = x.to_local() if is_distributed(x) else x
    if here.shape[0] % count:
        whose = f" ({here.shape[0]} on this rank)" if is_distributed(x) else ""
        raise ValueError(f"a batch of {x.shape[0]} rows{whose} does not divide into accumulation={count} parts")
    return rearrange(x, "(b parts) s -> parts b s", parts=count)


def make_eval_step(model: Model) -> Callable[[object, Batch], dict[str, Tensor]]:
    """``eval_step(params, batch) -> {"loss_sum", "tokens"}``: sums over the batch's valid labels, without dropout."""

    def eval_step(params, batch: Batch) -> dict[str, Tensor]:
        loss_sum, tokens = nn.cross_entropy(model(params, batch, key=None), batch["labels"])
        return {"loss_sum": loss_sum, "tokens": tokens}

    return eval_step
