"""The other side of the comparison: the same Llama as an ordinary ``nn.Module``, as PyTorch's users write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functitan.nn.rope import rotary_frequencies
from models.llama import LlamaConfig


class Attention(nn.Module):
    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.resolved_head_dim
        self.q = nn.Linear(cfg.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(cfg.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(cfg.dim, self.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(self.heads * self.head_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(B, S, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(B, S, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(B, S, -1))


class Layer(nn.Module):
    def __init__(self, cfg: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attention = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.gate = nn.Linear(cfg.dim, cfg.hidden_dim, bias=False)
        self.up = nn.Linear(cfg.dim, cfg.hidden_dim, bias=False)
        self.down = nn.Linear(cfg.hidden_dim, cfg.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attn_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """tokens int64 [batch, seq] -> logits [batch, seq, vocab]."""

    def __init__(self, cfg: LlamaConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.unembed = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        if cfg.tied_embeddings:
            self.unembed.weight = self.embed.weight
        table = angles(cfg, seq_len)
        self.register_buffer("cos", torch.cat([table.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([table.sin()] * 2, dim=-1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.unembed(self.norm(x))


def from_params(params: Mapping[str, Any], cfg: LlamaConfig, seq_len: int) -> Llama:
    """The module with the values of functitan's parameters."""
    model = Llama(cfg, seq_len)
    layers = params["layers"]
    with torch.no_grad():
        model.embed.weight.copy_(params["embed"])
        model.norm.weight.copy_(params["norm"])
        if not cfg.tied_embeddings:
            model.unembed.weight.copy_(params["unembed"].t())
        for i, layer in enumerate(model.layers):
            layer.attn_norm.weight.copy_(layers["attn_norm"][i])
            layer.mlp_norm.weight.copy_(layers["mlp_norm"][i])
            for linear, name in (
                (layer.attention.q, "wq"), (layer.attention.k, "wk"), (layer.attention.v, "wv"),
                (layer.gate, "w_gate"), (layer.up, "w_up"), (layer.down, "w_down"),
            ):  # fmt: skip
                linear.weight.copy_(layers[name][i].reshape(linear.in_features, -1).t())
            layer.attention.o.weight.copy_(layers["wo"][i].reshape(-1, cfg.dim).t())
    return model


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    # The angles stay float32 whatever the model computes in, as functitan's do.
    return (x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin).to(x.dtype)


def angles(cfg: LlamaConfig, seq_len: int) -> Tensor:
    """The rotary embedding's angles [seq, head_dim / 2]."""
    frequencies = rotary_frequencies(cfg.resolved_head_dim, cfg.rope_theta, cfg.rope_scaling)
    return torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
