"""Whole optimizers, with optax's names and defaults: ``adamw``, ``adam``, ``sgd``, ``lion``; see also muon.py."""

from __future__ import annotations

import torch

from functitan.optim.base import GradientTransformation, ScalarOrSchedule, Schedule, chain, identity
from functitan.optim.masking import MaskOrFn
from functitan.optim.transforms import (
    add_decayed_weights,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    trace,
)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float | Schedule = 1e-4,
    mask: MaskOrFn | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    The decay is multiplied by the learning rate, as in PyTorch and optax: ``p ← p - lr·(adam(g) + weight_decay·p)``.

    **Norms and biases are not decayed by default**: ``mask=None`` goes by the number of dims and the names, see
    :func:`default_decay_mask`. ``mask=decay_mask(declare(cfg))`` takes what the model declares, and ``mask=True``
    decays every leaf, which is what optax does.

    See :func:`scale_by_adam`, :func:`add_decayed_weights` and :func:`scale_by_learning_rate` for the arguments.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam without weight decay; see :func:`scale_by_adam`."""
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), scale_by_learning_rate(learning_rate)
    )


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Gradient descent, with momentum if given; see :func:`trace`."""
    return chain(
        identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float | Schedule = 1e-3,
    mask: MaskOrFn | None = None,
) -> GradientTransformation:
    """Lion; see :func:`scale_by_lion`, and :func:`adamw` for the mask: norms and biases are not decayed by default."""
    return chain(
        scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )
