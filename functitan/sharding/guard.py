"""Operators of torch that DTensor gets wrong, cannot do or takes long for: put right, refused, or done at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functitan import tree
from functitan._torch import distributed_like, is_distributed

_CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_ELEMENTWISE = frozenset("""
    abs add addcdiv addcmul clamp div exp lerp log maximum minimum mul neg pow radd rmul rsqrt rsub rtruediv sign sqrt
    square sub to truediv true_divide where
""".split())
"""Of what optimizers compute: without the underscores of Python's operators."""
_EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


class Guard(TorchFunctionMode):
    """While a plan of several ranks is in force."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _operator(name) in _ELEMENTWISE and (like := _layout_of_all(args, kwargs)) is not None:
            return _on_parts(func, args, kwargs, like)
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


def _operator(name: str) -> str:
    """``add`` of ``__add__``; what writes in place keeps the underscore at its end."""
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _layout_of_all(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """An operand whose layout all others have, scalars aside; None where DTensor has to find one, or a gradient flows.

    DTensor looks for the layout of an operator's result among all mixtures of its operands' layouts over all axes of
    the mesh: of an addition over four axes that takes over a second, and an optimizer is some dozens of them.
    """
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if {"out", "memory_format"} & set(kwargs) or (len(args) == 1 and getattr(args[0], "dtype", None) is torch.bool):
        return None  # the latter may be where(condition), which gives places
    like = max(filter(is_distributed, operands), key=lambda x: x.ndim, default=None)
    if like is None or any(p.is_partial() for p in like.placements):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return None
    return like if all(_fits(x, like) for x in operands) else None


def _fits(x: Tensor, like: Tensor) -> bool:
    if not is_distributed(x):
        return x.ndim == 0
    if x.device_mesh != like.device_mesh:
        return False
    if x.ndim == 0:
        return all(p.is_replicate() for p in x.placements)
    return x.shape == like.shape and x.placements == like.placements and x.stride() == like.stride()


def _on_parts(func: Any, args: tuple, kwargs: dict[str, Any], like: Tensor) -> Tensor:
    """The function of what this rank holds of its operands."""
    with torch.no_grad():
        parts = tree.map(lambda x: x.to_local() if is_distributed(x) else x, (args, kwargs))
        return distributed_like(func(*parts[0], **parts[1]), like)


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
