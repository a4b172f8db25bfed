"""The same Llama in JAX with optax, as its users write it: for the comparison, and only where jax is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.llama import LlamaConfig


def make_step(cfg: LlamaConfig, angles: np.ndarray, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, opt_state, tokens, labels) -> (params, opt_state, loss)``, jitted, donating the state.

    Args:
        angles: [seq, head_dim / 2], of the rotary embedding.
    """
    cos = jnp.concatenate([np.cos(angles)] * 2, axis=-1)[:, None]
    sin = jnp.concatenate([-np.sin(angles), np.sin(angles)], axis=-1)[:, None]

    def norm(x, weight):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * weight

    def rotated(x):
        first, second = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([second, first], axis=-1) * sin

    def layer(x, p):
        y = norm(x, p["attn_norm"])
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in ("wq", "wk", "wv"))
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + jnp.einsum("bshk,hkd->bsd", y, p["wo"])
        y = norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(y @ p["w_gate"]) * (y @ p["w_up"])) @ p["w_down"], None

    def loss_fn(params, tokens, labels):
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        unembed = params["embed"].T if cfg.tied_embeddings else params["unembed"]
        logits = norm(x, params["norm"]) @ unembed
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, opt_state, tokens, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def as_jax(tree: Any) -> Any:
    """A tree of torch tensors as one of jax arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x.numpy()), tree)
