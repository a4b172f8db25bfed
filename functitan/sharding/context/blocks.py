"""Attention of queries to a part of the keys, with the log-sum-exp by which parts are put together again.

The kernels are those behind torch's scaled_dot_product_attention. Their backward takes the whole's output and
log-sum-exp, so that a part's gradients come out right by themselves (Dao et al., 2022,
https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone.

    Args:
        q: [batch, seq, heads, head_dim]; k, v: [batch, kv_seq, kv_heads, head_dim].
        mask: bool, [1 or batch, 1, seq, kv_seq], true where the query may see the key; or None.
        causal: seq == kv_seq, and no query sees a later key; then there is no mask.

    Returns:
        ``(out, lse)``: [batch, seq, heads, head_dim] in the dtype of q, and [batch, heads, seq] in float32 (float64 of
        float64). Of a row that sees nothing neither means anything: :func:`finish` tells it by its lse.
    """
    bias = _bias(mask, q)
    if q.device.type == "cuda":
        out, lse = _cuda(_heads_first(q), _heads_first(k), _heads_first(v), bias, causal, scale)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q), _heads_first(k), _heads_first(v), 0.0, causal, attn_mask=bias, scale=scale
        )
    return out.transpose(1, 2), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v through these keys: ``grad``, ``out`` and ``lse`` are those of all keys together.

    Shapes and dtypes as of :func:`attend`; rows that see nothing have a finite lse of moderate size.
    """
    bias = _bias(mask, q)
    tensors = [_heads_first(x) for x in (grad, q, k, v, out)]
    if q.device.type == "cuda":
        grads = _cuda_backward(*tensors, lse, bias, causal, scale)
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    return tuple(x.transpose(1, 2) for x in grads)


def merge(a: tuple[Tensor, Tensor] | None, b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from what :func:`attend` gives for each; in the dtype of the log-sum-exp."""
    out, lse = b
    out = out.to(lse.dtype)
    if a is None:
        return out, lse
    total = torch.logaddexp(a[1], lse)
    return a[0] * _weight(a[1], total) + out * _weight(lse, total), total


def finish(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The merged output in its dtype with zeros where a row sees nothing, and its lse made fit for backward."""
    nothing = lse < _LOW[dtype] / 2
    out = torch.where(nothing.transpose(1, 2).unsqueeze(-1), 0.0, out)
    return out.to(dtype), torch.where(nothing, 0.0, lse)


_LOW = {dtype: torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""What is added to a score that is hidden. Not -inf, which makes NaN of a row where all are."""


def _weight(part: Tensor, total: Tensor) -> Tensor:
    return (part - total).exp().transpose(1, 2).unsqueeze(-1)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, _LOW[q.dtype])


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    return bias is None and q.dtype in (torch.float16, torch.bfloat16)


def _cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if _is_flash(q, bias):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    bias = _expanded(bias, q, k)
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # which the kernel pads


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Any, ...]:
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    if _is_flash(q, bias):
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
        )
    heads = k.shape[1]
    repeated_k, repeated_v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    pad = -lse.shape[-1] % 32
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, repeated_k, repeated_v, _expanded(bias, q, k), out, torch.nn.functional.pad(lse, (0, pad)),
        seed[0], seed[1], 0.0, [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, _summed(dk, heads), _summed(dv, heads)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: rows that start at multiples of 16 bytes."""
    if bias is None:
        return None
    columns = bias.shape[-1]
    aligned = torch.nn.functional.pad(bias, (0, -columns % 16))[..., :columns]
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
