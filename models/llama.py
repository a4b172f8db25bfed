"""Llama 3 (Grattafiori et al., "The Llama 3 herd of models", 2024, https://arxiv.org/abs/2407.21783).

Logical names: vocab, embed, heads, kv_heads, head_dim, mlp, layers; and batch, seq of activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from functitan import init, nn, random
from functitan.fold import fold
from functitan.nn import RopeScaling, RotaryTable, Visibility
from functitan.precision import Precision
from functitan.remat import RematPolicy
from functitan.remat import remat as rematerialised
from functitan.transforms import constrain
from sharding_specs import Param

_INT32 = 2**31 - 1


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """The architecture of a Llama 3 model."""

    vocab_size: int = 256
    """How many different tokens there are."""
    dim: int = 192
    """Width of the residual stream ("embed")."""
    n_layers: int = 4
    """How many transformer layers."""
    n_heads: int = 6
    """Query heads of a layer."""
    n_kv_heads: int = 2
    """Key/value heads of a layer; must divide n_heads."""
    head_dim: int | None = None
    """Channels of a head, even; None is dim // n_heads."""
    hidden_dim: int = 512
    """Width of the feed-forward layer ("mlp")."""
    norm_eps: float = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's stretching of the rotary frequencies to long contexts; None is Llama 3's own."""
    tied_embeddings: bool = False
    """Whether the output projection is the transposed token embedding."""
    dropout: float = 0.0
    """Rate at which the outputs of attention and feed-forward are dropped in training; published models have 0."""

    @property
    def resolved_head_dim(self) -> int:
        """head_dim, or dim // n_heads where it is None."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    def validate(self) -> list[str]:
        """Every problem, in plain words; empty if there is none."""
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
        values = {name: getattr(self, name) for name in sizes}
        problems = [f"{name}={n} must be 1 to {_INT32}" for name, n in values.items() if not 1 <= n <= _INT32]
        if self.head_dim is not None and not 1 <= self.head_dim <= _INT32:
            problems.append(f"head_dim={self.head_dim} must be 1 to {_INT32}, or None")
        if not problems:
            problems += self._head_problems()
        if not 0 < self.norm_eps < math.inf:
            problems.append(f"norm_eps={self.norm_eps} must be a finite number above 0")
        if not 1 < self.rope_theta < math.inf:
            problems.append(f"rope_theta={self.rope_theta} must be a finite number above 1")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be at least 0 and less than 1")
        if self.rope_scaling is not None:
            problems += self.rope_scaling.validate()
        return problems

    def _head_problems(self) -> list[str]:
        problems = []
        if self.n_heads % self.n_kv_heads:
            legal = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            problems.append(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}; legal: {legal}")
        if self.head_dim is None and self.dim % self.n_heads:
            problems.append(f"dim={self.dim} is not divisible by n_heads={self.n_heads}; change one, or give head_dim")
        elif self.resolved_head_dim < 2 or self.resolved_head_dim % 2:
            source = "" if self.head_dim is not None else f" (dim={self.dim} // n_heads={self.n_heads})"
            problems.append(f"head_dim={self.resolved_head_dim}{source} must be even: rotary embedding pairs channels")
        return problems


_LLAMA_31 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
_LLAMA_32 = attrs.evolve(_LLAMA_31, factor=32.0)

SIZES: Mapping[str, LlamaConfig] = {
    # Byte-level, 1.7 million parameters, for a CPU.
    "debug": LlamaConfig(),
    # https://huggingface.co/JackFram/llama-160m
    "160M": LlamaConfig(
        vocab_size=32000, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden_dim=3072, rope_theta=10_000.0,
        norm_eps=1e-6,
    ),
    # https://huggingface.co/meta-llama/Llama-3.2-1B, -3B
    "1B": LlamaConfig(
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden_dim=8192, rope_scaling=_LLAMA_32,
        tied_embeddings=True,
    ),
    "3B": LlamaConfig(
        vocab_size=128256, dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, hidden_dim=8192, rope_scaling=_LLAMA_32,
        tied_embeddings=True,
    ),
    # https://huggingface.co/meta-llama/Llama-3.1-8B, -70B, -405B
    "8B": LlamaConfig(
        vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336, rope_scaling=_LLAMA_31
    ),
    "70B": LlamaConfig(
        vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, rope_scaling=_LLAMA_31
    ),
    "405B": LlamaConfig(
        vocab_size=128256, dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, hidden_dim=53248, rope_scaling=_LLAMA_31
    ),
}  # fmt: skip
"""The published sizes by name, with their hyperparameters, and "debug", which trains in minutes on two CPU cores."""


def declare(cfg: LlamaConfig) -> dict[str, Any]:
    """The parameters: shape, meaning and initial values of each. Layers are stacked along the dim "layers".

    Initial values: every projection is a truncated normal of standard deviation ``fan_in ** -0.5`` (0.016 for 8B, near
    the 0.02 that torchtitan takes at every width), and those that write to the residual stream are divided by
    ``sqrt(2 * n_layers)``, so that its variance does not grow with depth (GPT-2, Radford et al., 2019, section 2.3).
    Embeddings: 1 (torchtitan); ``dim ** -0.5`` if tied, since they are then the output projection.

    Raises:
        ValueError: the config has problems; the message has all of them.
    """
    problems = cfg.validate()
    if problems:
        raise ValueError("this Llama cannot be built:\n" + "\n".join(f"  - {p}" for p in problems))
    V, D, L, H, KV, F = cfg.vocab_size, cfg.dim, cfg.n_layers, cfg.n_heads, cfg.n_kv_heads, cfg.hidden_dim
    K = cfg.resolved_head_dim
    into = init.truncated_normal(D**-0.5)
    depth = (2 * L) ** -0.5
    params = {
        "embed": Param((V, D), ("vocab", "embed"), init.truncated_normal(D**-0.5 if cfg.tied_embeddings else 1.0)),
        "layers": {
            "attn_norm": Param((L, D), ("layers", "embed"), init.ones()),
            "wq": Param((L, D, H, K), ("layers", "embed", "heads", "head_dim"), into),
            "wk": Param((L, D, KV, K), ("layers", "embed", "kv_heads", "head_dim"), into),
            "wv": Param((L, D, KV, K), ("layers", "embed", "kv_heads", "head_dim"), into),
            "wo": Param(
                (L, H, K, D), ("layers", "heads", "head_dim", "embed"), init.truncated_normal((H * K) ** -0.5 * depth)
            ),
            "mlp_norm": Param((L, D), ("layers", "embed"), init.ones()),
            "w_gate": Param((L, D, F), ("layers", "embed", "mlp"), into),
            "w_up": Param((L, D, F), ("layers", "embed", "mlp"), into),
            "w_down": Param((L, F, D), ("layers", "mlp", "embed"), init.truncated_normal(F**-0.5 * depth)),
        },
        "norm": Param((D,), ("embed",), init.ones()),
    }
    if not cfg.tied_embeddings:
        params["unembed"] = Param((D, V), ("embed", "vocab"), into)
    return params


def apply(
    params: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    cfg: LlamaConfig,
    *,
    key: Tensor | None = None,
    remat: RematPolicy = "none",
    precision: Precision = Precision(),  # noqa: B008 (immutable)
) -> Tensor:
    """The logits of the token after each token.

    Args:
        params: tensors in the structure of :func:`declare`.
        batch: ``tokens`` int64 [batch, seq]; optionally ``positions`` int64 [batch, seq], places within the document
            (without them: places in the row), and ``documents`` int64 [batch, seq] (without them: every token may see
            all before it).
        cfg: the architecture the parameters were declared with.
        key: for dropout; None turns dropout off.
        remat: "full" keeps only each layer's input for the backward pass and computes the rest again; "selective"
            keeps the results of products and attention as well.
        precision: the dtypes of activations and logits.

    Returns:
        [batch, seq, vocab], in the output dtype.

    Raises:
        KeyError: the batch has no ``tokens``.
        ValueError: the batch's arrays differ in shape, or a parameter is not of its declared shape.
    """
    tokens, positions, documents = _unpack(batch)
    # What all layers share is made once: the angles, and the mask where a causal kernel does not do.
    place = nn.positions(tokens) if positions is None else positions
    table = nn.rotary_table(place, cfg.resolved_head_dim, cfg.rope_theta, cfg.rope_scaling)
    mask = None if documents is None else nn.visibility(tokens, causal=True, documents=documents)

    x = nn.embedding(params["embed"], tokens, dtype=precision.compute_dtype(params["embed"].dtype))
    x = constrain(x, ("batch", "seq", "embed"))
    layer = partial(_layer, cfg=cfg)
    if remat != "none":
        layer = rematerialised(layer, policy=remat)

    def numbered(p: Mapping[str, Tensor], x: Tensor, i: int) -> Tensor:
        layer_key = random.fold_in(key, i) if key is not None and cfg.dropout else None
        return layer(p, x, table, mask, layer_key)

    x = fold(numbered, x, dict(params["layers"]))
    x = nn.rms_norm(x, params["norm"], cfg.norm_eps)
    unembed = params["embed"].t() if cfg.tied_embeddings else params["unembed"]
    logits = constrain(nn.linear(x, unembed), ("batch", "seq", "vocab"))
    return logits.to(precision.output_dtype(logits.dtype))


def _layer(
    p: Mapping[str, Tensor], x: Tensor, table: RotaryTable, mask: Visibility | None, key: Tensor | None, *,
    cfg: LlamaConfig,
) -> Tensor:
    attn_key, mlp_key = (None, None) if key is None else random.split(key)
    y = _attention(p, nn.rms_norm(x, p["attn_norm"], cfg.norm_eps), table, mask)
    x = x + nn.dropout(attn_key, y, cfg.dropout)
    y = _mlp(p, nn.rms_norm(x, p["mlp_norm"], cfg.norm_eps))
    return x + nn.dropout(mlp_key, y, cfg.dropout)


def _attention(p: Mapping[str, Tensor], x: Tensor, table: RotaryTable, mask: Visibility | None) -> Tensor:
    q, k, v = nn.linears(x, (p["wq"], p["wk"], p["wv"]))
    q = constrain(q, ("batch", "seq", "heads", "head_dim"))
    k = constrain(k, ("batch", "seq", "kv_heads", "head_dim"))
    v = constrain(v, ("batch", "seq", "kv_heads", "head_dim"))
    y = nn.attention(nn.rotary(q, table), nn.rotary(k, table), v, causal=True, mask=mask)
    return constrain(nn.linear(y, p["wo"], n_in=2), ("batch", "seq", "embed"))


def _mlp(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    h = constrain(nn.swiglu(*nn.linears(x, (p["w_gate"], p["w_up"]))), ("batch", "seq", "mlp"))
    return constrain(nn.linear(h, p["w_down"]), ("batch", "seq", "embed"))


def _unpack(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if "tokens" not in batch:
        raise KeyError(f"the batch has no 'tokens'; it has {sorted(batch)}")
    tokens = batch["tokens"]
    if tokens.ndim != 2:
        raise ValueError(f"the batch's tokens must be [batch, seq]; they are {list(tokens.shape)}")
    for name in ("positions", "documents"):
        other = batch.get(name)
        if other is not None and other.shape != tokens.shape:
            raise ValueError(
                f"the batch's {name} {list(other.shape)} must have the shape of tokens {list(tokens.shape)}"
            )
    return tokens, batch.get("positions"), batch.get("documents")


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token of a sequence, recomputation not counted.

    6 for each parameter of a matrix (the embedding is a lookup), and ``12 * layers * heads * head_dim * seq_len`` for
    attention, which counts the whole square of a causal mask as PaLM does (Chowdhery et al., 2022, appendix B).
    """
    D, K = cfg.dim, cfg.resolved_head_dim
    layer = D * K * (cfg.n_heads + 2 * cfg.n_kv_heads) + cfg.n_heads * K * D + 3 * D * cfg.hidden_dim
    matrices = cfg.n_layers * layer + cfg.vocab_size * D
    return 6.0 * matrices + 12.0 * cfg.n_layers * cfg.n_heads * K * seq_len
