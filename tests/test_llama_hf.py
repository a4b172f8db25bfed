"""Llama against transformers' on the same weights, and the way there and back (cases F1 and F2)."""

import attrs
import pytest
import torch

from functitan import nn, tree
from functitan.interop.hf import llama_from_hf, llama_to_hf
from models import llama
from models.llama import LlamaConfig

transformers = pytest.importorskip("transformers")

SCALING = nn.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
BASE = LlamaConfig(vocab_size=97, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=48, rope_theta=10_000.0)
CONFIGS = {
    "untied": BASE,
    "tied": attrs.evolve(BASE, tied_embeddings=True),
    "scaled": attrs.evolve(BASE, rope_scaling=SCALING, head_dim=16),
    "tied and scaled": attrs.evolve(BASE, tied_embeddings=True, rope_scaling=SCALING),
    "one kv head": attrs.evolve(BASE, n_kv_heads=1),
}


@pytest.fixture(params=CONFIGS)
def cfg(request):
    return CONFIGS[request.param]


def hf_model(cfg):
    rope = {"rope_type": "default"}
    if cfg.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": cfg.rope_scaling.factor,
            "low_freq_factor": cfg.rope_scaling.low_freq_factor,
            "high_freq_factor": cfg.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": cfg.rope_scaling.original_context,
        }
    # transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters.
    old = {"rope_theta": cfg.rope_theta, "rope_scaling": rope if cfg.rope_scaling is not None else None}
    new = {"rope_parameters": {"rope_theta": cfg.rope_theta, **rope}}
    config = transformers.LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.dim,
        intermediate_size=cfg.hidden_dim,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        head_dim=cfg.resolved_head_dim,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied_embeddings,
        max_position_embeddings=256,
        attn_implementation="eager",
        **(old if transformers.__version__.startswith("4.") else new),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        for parameter in model.parameters():  # norms too, and larger than the default: mistakes should show
            parameter.data = torch.randn_like(parameter) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0)
        model.tie_weights()
    return model


def ids(cfg):
    return torch.randint(cfg.vocab_size, (2, 60), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_equal_transformers(cfg):
    model = hf_model(cfg)
    params = llama_from_hf(model.state_dict(), cfg)
    ours = llama.apply(params, {"tokens": ids(cfg)}, cfg)
    torch.testing.assert_close(ours, model(ids(cfg)).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_transformers_computes_the_same_from_our_export(cfg):
    params = llama_from_hf(hf_model(cfg).state_dict(), cfg)
    params = tree.map(lambda x: x * 1.01, params)
    model = hf_model(cfg)
    missing, unexpected = model.load_state_dict(llama_to_hf(params, cfg), strict=False)
    model.tie_weights()
    assert (missing, unexpected) == (["lm_head.weight"] if cfg.tied_embeddings else [], [])
    ours = llama.apply(params, {"tokens": ids(cfg)}, cfg)
    torch.testing.assert_close(model(ids(cfg)).logits, ours, atol=1e-5, rtol=1e-5)


def test_import_export_import_is_the_identity(cfg):
    params = llama_from_hf(hf_model(cfg).state_dict(), cfg)
    exported = llama_to_hf(params, cfg)
    again = llama_from_hf(exported, cfg)
    assert tree.structure(params) == tree.structure(again) == tree.structure(llama.declare(cfg))
    for (path, a), b, declared in zip(
        tree.leaves_with_path(params), tree.leaves(again), tree.leaves(llama.declare(cfg))
    ):
        assert torch.equal(a, b), path
        assert tuple(a.shape) == declared.shape, path
    assert ("lm_head.weight" in exported) == (not cfg.tied_embeddings)
    for name, tensor in hf_model(cfg).state_dict().items():
        assert name not in exported or torch.equal(exported[name], tensor), name


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_reason():
    cfg = CONFIGS["untied"]
    state = hf_model(cfg).state_dict()
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    del state["model.norm.weight"]
    with pytest.raises(ValueError) as error:
        llama_from_hf(state, attrs.evolve(cfg, n_kv_heads=4))
    message = str(error.value)
    assert "model.norm.weight is missing" in message
    assert "model.layers.0.self_attn.q_proj.bias is not a parameter of this architecture" in message
    assert "model.layers.2.self_attn.k_proj.weight is [16, 32]; the config needs [32, 32]" in message


def test_an_untied_checkpoint_is_not_taken_for_a_tied_one():
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        llama_from_hf(hf_model(CONFIGS["untied"]).state_dict(), CONFIGS["tied"])


def test_parameters_that_do_not_fit_are_refused():
    cfg = CONFIGS["untied"]
    params = llama_from_hf(hf_model(cfg).state_dict(), cfg)
    with pytest.raises(ValueError, match="layers/wq has 3 layers; the config has 2"):
        llama_to_hf(params, attrs.evolve(cfg, n_layers=2))
    with pytest.raises(ValueError, match=r"lm_head.weight would be \[97, 32\]; the config needs \[98, 32\]"):
        llama_to_hf(params, attrs.evolve(cfg, vocab_size=98))
    with pytest.raises(ValueError, match="unembed is unknown"):
        llama_to_hf(params, CONFIGS["tied"])
