"""Grouped-query attention."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from functitan._torch import is_distributed
from functitan.nn.visibility import Visibility, attention_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    documents: Tensor | None = None,
    mask: Tensor | Visibility | None = None,
    scale: float | None = None,
    implementation: Literal["fused", "plain"] = "fused",
) -> Tensor:
    """``softmax(scale * q k^T) v`` for each head (Vaswani et al., 2017), with grouped heads (Ainslie et al., 2023).

    Query head ``h`` uses key/value head ``h // (heads / kv_heads)``. All given restrictions hold at once; a token that
    sees nothing gets zeros. Only causal attention runs without a mask in memory; the others build one of
    ``B * S * S`` elements, so make it once with :func:`visibility` where several layers share it.

    Over a mesh each rank has its part of the batch and of the heads. Where the sequence is split over the axis cp it
    stays so, by the method of the plan in force (see ``sharding_specs.ContextParallel``), and masks are made in parts.

    Args:
        q: [batch, seq, heads, head_dim].
        k: [batch, kv_seq, kv_heads, head_dim], where kv_heads divides heads.
        v: [batch, kv_seq, kv_heads, head_dim].
        causal: no token sees a later one. Needs seq == kv_seq; otherwise say who sees whom with ``mask``.
        window: a token sees at most this many tokens backwards, itself included (and forwards, if not causal).
        documents: int, [batch, seq]; a token sees only those of its own document.
        mask: from :func:`visibility`; or bool, broadcastable to [batch, heads, seq, kv_seq], true where the query may
            see the key, from :func:`attention_mask` or any other.
        scale: None for ``head_dim ** -0.5``.
        implementation: "fused" is torch's scaled_dot_product_attention (a flash kernel on CPUs and GPUs); "plain" is
            four operators with all scores in memory, for what the kernels lack: forward mode (jvp) and second
            derivatives.

    Returns:
        [batch, seq, heads, head_dim].

    Raises:
        ValueError: shapes that do not fit, or causal, window or documents with seq != kv_seq.
        TypeError: the mask is not bool.
    """
    _check_heads(q, k, v)
    sees = Visibility(causal, window, documents)
    if isinstance(mask, Visibility):
        sees, mask = _joined(sees, mask), None
    _check_same_length(q, k, sees)
    if mask is not None:
        _check_mask(mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if sees.documents is not None and tuple(sees.documents.shape) != tuple(q.shape[:2]):
        raise ValueError(
            f"attention: documents {list(sees.documents.shape)} must be [batch, seq] = {list(q.shape[:2])}"
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if implementation not in ("fused", "plain"):
        raise ValueError(f"attention: implementation={implementation!r}; legal: 'fused', 'plain'")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        if implementation == "fused":
            return _fused(q, k, v, mask, scale, causal)
        if causal:
            mask = attention_mask(torch.arange(q.shape[1], device=q.device), causal=True)
        return _plain(q, k, v, mask, scale)

    if any(map(is_distributed, (q, k, v, mask, sees.documents))):
        from functitan.sharding import ops

        return ops.attention(attend, q, k, v, sees, mask, scale=scale, blockwise=implementation == "fused")
    return attend(q, k, v, *sees.combined(mask, q.shape[1], q.device))


def _joined(a: Visibility, b: Visibility) -> Visibility:
    """Both restrictions at once; the mask of ``b`` serves where ``a`` adds nothing."""
    if a.documents is not None and b.documents is not None and a.documents is not b.documents:
        raise ValueError("attention: documents are given, and other ones in the mask from visibility; give them once")
    windows = [window for window in (a.window, b.window) if window is not None]
    window = min(windows) if windows else None
    documents = b.documents if a.documents is None else a.documents
    causal = a.causal or b.causal
    same = (causal, window) == (b.causal, b.window) and documents is b.documents
    return b if same else Visibility(causal, window, documents)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    if grouped and mask is not None and q.device.type == "cuda":
        # CUDA's masked kernels take no grouped heads; the fallback would keep the scores of all heads in memory.
        k, v, grouped = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2]), False
    # On CPUs grouped heads inside the kernel are faster than repeated ones (24 ms against 28 ms at [16, 256, 8|4, 32]),
    # and heads before seq is a matter of strides: nothing is copied on the way in or out.
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return y.transpose(1, 2)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    k, v = _repeat_heads(k, q.shape[2]), _repeat_heads(v, q.shape[2])
    scores = torch.einsum("bshk,bthk->bhst", q * scale, k).to(torch.promote_types(q.dtype, torch.float32))
    if mask is None:
        return torch.einsum("bhst,bthk->bshk", scores.softmax(-1).to(v.dtype), v)
    # The lowest finite score instead of -inf, whose softmax over a row that sees nothing, and its gradient, is NaN.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bhst,bthk->bshk", weights.masked_fill(~mask, 0.0).to(v.dtype), v)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"attention: {name} {list(x.shape)} must have 4 dims: [batch, seq, heads, head_dim]")
    if k.shape != v.shape:
        raise ValueError(f"attention: k {list(k.shape)} and v {list(v.shape)} must have one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q {list(q.shape)} and k {list(k.shape)} must agree in batch and head_dim")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        legal = [n for n in range(1, q.shape[2] + 1) if q.shape[2] % n == 0]
        raise ValueError(
            f"attention: {k.shape[2]} key/value heads do not divide {q.shape[2]} query heads; legal: {legal}"
        )


def _check_same_length(q: Tensor, k: Tensor, sees: Visibility) -> None:
    if q.shape[1] == k.shape[1]:
        return
    given = {"causal": sees.causal, "window": sees.window is not None, "documents": sees.documents is not None}
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise ValueError(
            f"attention: {', '.join(named)} with {q.shape[1]} queries and {k.shape[1]} keys: where they stand is not "
            "known; leave it out and pass mask=attention_mask(positions, kv_positions, ...)"
        )


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"attention: mask must be bool; it is {str(mask.dtype).removeprefix('torch.')}")
    if mask.ndim != 4 or any(m not in (1, n) for m, n in zip(mask.shape, shape)):
        raise ValueError(
            f"attention: mask {list(mask.shape)} must be broadcastable to [batch, heads, seq, kv_seq] = {list(shape)}"
        )
