"""Operators of torch that DTensor gets wrong, or has no way for: put right, or refused with what to use instead."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functitan._torch import is_distributed

_CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


class Guard(TorchFunctionMode):
    """While a plan of several ranks is in force."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _CUMULATIVE:
            args, kwargs = _with_positive_dim(args, kwargs)
        elif name in _CONVOLUTIONS:
            _check_convolution(name, args)
        elif func is F.embedding and any(map(is_distributed, args)):
            if len(args) != 2 or any(kwargs.get(option) for option in _EMBEDDING_OPTIONS):
                raise NotImplementedError("torch.nn.functional.embedding with options, over a mesh: none is supported")
            from functitan import nn

            return nn.embedding(args[1], args[0])
        elif func is F.scaled_dot_product_attention and any(map(is_distributed, args)):
            raise NotImplementedError(
                "scaled_dot_product_attention has no rule for tensors over a mesh: use functitan.nn.attention, which "
                "takes [batch, seq, heads, head_dim]"
            )
        return func(*args, **kwargs)


def _with_positive_dim(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """DTensor does not see that dim -1 is the one that is split, and each rank would start anew."""
    x = args[0] if args else None
    if not is_distributed(x):
        return args, kwargs
    if isinstance(kwargs.get("dim"), int):
        return args, {**kwargs, "dim": kwargs["dim"] % max(x.ndim, 1)}
    if len(args) > 1 and isinstance(args[1], int):
        return (x, args[1] % max(x.ndim, 1), *args[2:]), kwargs
    return args, kwargs


def _check_convolution(name: str, args: tuple) -> None:
    """A split channel or place would need its neighbours, which DTensor does not fetch."""
    for x in args[:2]:
        if isinstance(x, Tensor) and is_distributed(x):
            split = [p.dim for p in x.placements if p.is_shard()]
            if any(dim != 0 for dim in split) or (x is args[1] and split):
                raise NotImplementedError(
                    f"{name} over a mesh: an operand is split along dim {split[-1]} ({x.placements}), and only a batch "
                    "may be; lay it out whole with functitan.constrain and names whose rule is None"
                )
