"""Rematerialisation: intermediate results are computed again in the backward pass instead of kept until then."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.utils.checkpoint

from functitan._torch import OpOverload, inside_transform, marked

RematPolicy = Literal["none", "selective", "full"]


def remat(fun: Callable, policy: RematPolicy = "full") -> Callable:
    """``fun`` whose intermediate results are computed again in backward instead of kept, as ``jax.checkpoint``.

    Inside torch.func transforms (vmap, jvp, vjp) it is ``fun`` itself: their tensors cannot be hooked.

    Args:
        policy: "full" keeps the arguments alone; "selective" keeps the results of matrix products, of attention and of
            reductions over the mesh as well, so that only what is cheap is computed again (Korthikanti et al.,
            https://arxiv.org/abs/2205.05198, section 5); "none" keeps everything.

    Raises:
        ValueError: another policy.
    """
    if policy not in get_args(RematPolicy):
        raise ValueError(f"remat: policy={policy!r}; legal: {', '.join(map(repr, get_args(RematPolicy)))}")
    if policy == "none":
        return fun
    contexts = {}
    if policy == "selective":
        make = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, _keeps)
        contexts = {"context_fn": make}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any):
        if not torch.is_grad_enabled() or inside_transform():
            return fun(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            _marked(fun), *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs
        )

    return wrapped


_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "reduce_scatter_tensor", "all_reduce")


def _keeps(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
    name = op.overloadpacket.__name__ if isinstance(op, OpOverload) else ""
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if name in _EXPENSIVE or "attention" in name else policy.PREFER_RECOMPUTE


_remat_count = itertools.count(1)


def _marked(fun: Callable) -> Callable:
    """``fun`` that marks what it does on every run but the first, so that no graph pass merges the two again."""
    runs = itertools.count()

    def run(*args: Any, **kwargs: Any):
        if next(runs) == 0:
            return fun(*args, **kwargs)
        with marked("remat", next(_remat_count)):
            return fun(*args, **kwargs)

    return run
