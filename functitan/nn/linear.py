"""Matrix products named by what they contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functitan._torch import is_distributed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, n_in: int = 1) -> Tensor:
    """Contracts the last ``n_in`` dims of ``x`` with the first ``n_in`` dims of ``weight``.

    ``[B, S, D] x [D, F] -> [B, S, F]``; into heads, ``[B, S, D] x [D, H, K] -> [B, S, H, K]``; and out of them with
    ``n_in=2``, ``[B, S, H, K] x [H, K, D] -> [B, S, D]``. In einsum's letters: ``...i, io -> ...o``.

    Args:
        x: [..., *in], floating.
        weight: [*in, *out], where ``*in`` are ``n_in`` dims; cast to the dtype of ``x``.
        bias: [*out], added to every product.
        n_in: how many dims are contracted.

    Returns:
        [..., *out].

    Raises:
        ValueError: the contracted dims differ, or the bias is not of the shape [*out].
    """
    _check(x, weight, bias, n_in)
    (y,) = _products(x, (weight,), n_in)
    return y if bias is None else y + bias.to(y.dtype)


def linears(x: Tensor, weights: Sequence[Tensor], *, n_in: int = 1) -> list[Tensor]:
    """:func:`linear` of one ``x`` with several weights, such as those of queries, keys and values.

    The numbers are those of the single calls. Over a mesh ``x`` is brought to where the weights are once, and so is its
    gradient on the way back.
    """
    for weight in weights:
        _check(x, weight, None, n_in)
    return _products(x, weights, n_in)


def _products(x: Tensor, weights: Sequence[Tensor], n_in: int) -> list[Tensor]:
    # tensordot is the einsum of this contraction as one mm; torch.einsum makes it a bmm with a batch of one, which
    # Inductor and cuBLAS choose kernels for less well.
    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.tensordot(a, b, dims=n_in)

    if any(map(is_distributed, (x, *weights))):
        from functitan.sharding import ops

        return ops.linear(product, x, weights, n_in)
    return [product(x, weight.to(x.dtype)) for weight in weights]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, n_in: int) -> None:
    if not 1 <= n_in <= min(x.ndim, weight.ndim):
        raise ValueError(
            f"linear: n_in={n_in} dims cannot be contracted between x {list(x.shape)} and weight {list(weight.shape)}; "
            f"legal: 1 to {min(x.ndim, weight.ndim)}"
        )
    inner, outer = tuple(weight.shape[:n_in]), tuple(weight.shape[n_in:])
    if tuple(x.shape[x.ndim - n_in :]) != inner:
        raise ValueError(
            f"linear: x {list(x.shape)} ends in {list(x.shape[x.ndim - n_in :])}, but weight {list(weight.shape)} "
            f"starts with {list(inner)}; the last n_in={n_in} dims of x and the first of weight are contracted and "
            "must be equal"
        )
    if bias is not None and tuple(bias.shape) != outer:
        raise ValueError(
            f"linear: bias {list(bias.shape)} does not fit weight {list(weight.shape)}; give a bias of {list(outer)}"
        )
