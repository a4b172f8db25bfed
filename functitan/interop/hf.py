"""Hugging Face checkpoints to functitan's parameters and back; pure functions of state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from einops import rearrange
from torch import Tensor


class LlamaShape(Protocol):
    """What is read of a Llama's config (``models.llama.LlamaConfig`` has it)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    tied_embeddings: bool

    @property
    def resolved_head_dim(self) -> int: ...


# Name in a layer -> (name in Hugging Face's layer, functitan's dims from Hugging Face's [out, in]). Hugging Face keeps
# the rows of q_proj and k_proj in the rotate-half order that functitan.nn.rotary uses, so no rows are permuted.
_LAYER = {
    "attn_norm": ("input_layernorm", "embed -> embed"),
    "wq": ("self_attn.q_proj", "(heads head_dim) embed -> embed heads head_dim"),
    "wk": ("self_attn.k_proj", "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
    "wv": ("self_attn.v_proj", "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
    "wo": ("self_attn.o_proj", "embed (heads head_dim) -> heads head_dim embed"),
    "mlp_norm": ("post_attention_layernorm", "embed -> embed"),
    "w_gate": ("mlp.gate_proj", "mlp embed -> embed mlp"),
    "w_up": ("mlp.up_proj", "mlp embed -> embed mlp"),
    "w_down": ("mlp.down_proj", "embed mlp -> mlp embed"),
}
_EMBED, _NORM, _UNEMBED = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def llama_from_hf(state_dict: Mapping[str, Tensor], cfg: LlamaShape) -> dict[str, Any]:
    """The parameters of ``models.llama`` from those of transformers' ``LlamaForCausalLM``.

    Args:
        state_dict: name to tensor, as ``model.state_dict()`` or the safetensors files of a checkpoint give it. With
            tied embeddings ``lm_head.weight`` may be there or not.
        cfg: the architecture; see :class:`LlamaShape`.

    Returns:
        A tree in the structure of ``models.llama.declare(cfg)``, layers stacked, dtypes kept. Projections are copies;
        the token embedding and the last norm share the memory of ``state_dict``.

    Raises:
        ValueError: names are missing or unknown, shapes differ from the config's, or the config ties embeddings that
            the checkpoint does not. The message has all of them.
    """
    expected = _hf_shapes(cfg)
    found = dict(state_dict)
    problems = []
    if cfg.tied_embeddings and _UNEMBED in found:
        unembed = found.pop(_UNEMBED)
        if _EMBED in found and not torch.equal(unembed, found[_EMBED]):
            problems.append(f"{_UNEMBED} differs from {_EMBED}, but the config says tied_embeddings=True")
    problems += [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not a parameter of this architecture" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name].shape)}; the config needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if problems:
        raise ValueError(_report("this checkpoint does not fit the Llama config", problems))
    sizes = _sizes(cfg)
    layers = {
        name: torch.stack([
            rearrange(found[_layer_name(i, theirs)], pattern, **_used(pattern, sizes)) for i in range(cfg.n_layers)
        ])
        for name, (theirs, pattern) in _LAYER.items()
    }  # fmt: skip
    params = {"embed": found[_EMBED], "layers": layers, "norm": found[_NORM]}
    if not cfg.tied_embeddings:
        params["unembed"] = found[_UNEMBED].t().contiguous()
    return params


def llama_to_hf(params: Mapping[str, Any], cfg: LlamaShape) -> dict[str, Tensor]:
    """The state dict of transformers' ``LlamaForCausalLM`` from the parameters of ``models.llama``.

    The inverse of :func:`llama_from_hf`, exactly. Tied embeddings are stored once: without ``lm_head.weight``, which
    ``load_state_dict`` then calls missing and ``from_pretrained`` fills in from the embeddings.

    Args:
        params: a tree in the structure of ``models.llama.declare(cfg)``.
        cfg: the architecture the parameters were declared with.

    Returns:
        Name to contiguous tensor, dtypes kept; what needs no reordering shares the memory of ``params``.

    Raises:
        ValueError: the parameters are not those of the config.
    """
    top = {"embed", "layers", "norm"} | (set() if cfg.tied_embeddings else {"unembed"})
    problems = _name_problems("", params, top) + _name_problems("layers/", params.get("layers", {}), set(_LAYER))
    if problems:
        raise ValueError(_report("these parameters do not fit the Llama config", problems))
    _sizes(cfg)
    state = {_EMBED: params["embed"], _NORM: params["norm"]}
    for name, (theirs, pattern) in _LAYER.items():
        ours, back = params["layers"][name].unbind(0), _reversed(pattern)
        if len(ours) != cfg.n_layers:
            problems.append(f"layers/{name} has {len(ours)} layers; the config has {cfg.n_layers}")
            continue
        state |= {_layer_name(i, theirs): rearrange(w, back) for i, w in enumerate(ours)}
    if not cfg.tied_embeddings:
        state[_UNEMBED] = params["unembed"].t()
    problems += [
        f"{name} would be {list(state[name].shape)}; the config needs {list(shape)}"
        for name, shape in _hf_shapes(cfg).items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if problems:
        raise ValueError(_report("these parameters do not fit the Llama config", problems))
    return {name: tensor.contiguous() for name, tensor in state.items()}


def _hf_shapes(cfg: LlamaShape) -> dict[str, tuple[int, ...]]:
    sizes = _sizes(cfg)
    shapes = {_EMBED: (cfg.vocab_size, cfg.dim), _NORM: (cfg.dim,)}
    for i in range(cfg.n_layers):
        for theirs, pattern in _LAYER.values():
            shapes[_layer_name(i, theirs)] = _left_shape(pattern, sizes)
    if not cfg.tied_embeddings:
        shapes[_UNEMBED] = (cfg.vocab_size, cfg.dim)
    return shapes


def _left_shape(pattern: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape, product = [], None
    for word in pattern.split("->")[0].replace("(", "( ").replace(")", " )").split():
        if word == "(":
            product = 1
        elif word == ")":
            shape.append(product)
            product = None
        elif product is not None:
            product *= sizes[word]
        else:
            shape.append(sizes[word])
    return tuple(shape)


def _sizes(cfg: LlamaShape) -> dict[str, int]:
    return {
        "embed": cfg.dim,
        "heads": cfg.n_heads,
        "kv_heads": cfg.n_kv_heads,
        "head_dim": cfg.resolved_head_dim,
        "mlp": cfg.hidden_dim,
    }


def _used(pattern: str, sizes: Mapping[str, int]) -> dict[str, int]:
    words = pattern.replace("(", " ").replace(")", " ").split()
    return {name: size for name, size in sizes.items() if name in words}


def _reversed(pattern: str) -> str:
    left, right = pattern.split("->")
    return f"{right} -> {left}"


def _layer_name(i: int, theirs: str) -> str:
    return f"model.layers.{i}.{theirs}.weight"


def _name_problems(prefix: str, params: Mapping[str, Any], names: set[str]) -> list[str]:
    return [f"{prefix}{name} is missing" for name in sorted(names - set(params))] + [
        f"{prefix}{name} is unknown" for name in sorted(set(params) - names)
    ]


def _report(what: str, problems: list[str]) -> str:
    shown = problems[:20] + ([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])
    return f"{what}:\n" + "\n".join(f"  - {p}" for p in shown)
