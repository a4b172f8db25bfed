"""models.llama: published sizes, causality, packing, dropout, recomputation and capture."""

from pathlib import Path

import attrs
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import init, nn, random, tree
from models import llama
from models.llama import SIZES, LlamaConfig
from sharding_specs.param import param_count, param_leaves
from sharding_specs.rules import STANDARD_NAMES

TINY = LlamaConfig(vocab_size=19, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24)


def init_params(cfg, seed=0):
    def value(path, param):
        return param.init(init.param_key(random.key(seed), path), param.shape, torch.float32)

    return tree.map_with_path(value, llama.declare(cfg))


def tokens(batch=2, seq=16, seed=0):
    return torch.randint(19, (batch, seq), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(params, batch, cfg, **options):
    leaves, treedef = tree.flatten(params)
    leaves = [x.detach().requires_grad_() for x in leaves]
    logits = llama.apply(tree.unflatten(treedef, leaves), batch, cfg, **options)
    loss, _ = nn.cross_entropy(logits, batch["tokens"].roll(-1, 1))
    return loss, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("160M", 162_417_408),
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_counts_are_the_published_ones(size, count):
    assert param_count(llama.declare(SIZES[size])) == count


def test_every_size_is_valid_and_names_its_dims():
    for cfg in SIZES.values():
        assert cfg.validate() == []
        for path, param in param_leaves(llama.declare(cfg)):
            assert set(param.names) <= set(STANDARD_NAMES), path
            assert param.decays == ("norm" not in path), path


def test_initial_values_have_the_declared_scale():
    cfg = LlamaConfig(vocab_size=256, dim=128, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=256)
    params = init_params(cfg)
    depth = (2 * 8) ** -0.5
    # A normal cut at two standard deviations has 0.88 of its standard deviation.
    for name, std in {"wq": 128**-0.5, "w_up": 128**-0.5, "wo": 128**-0.5 * depth, "w_down": 256**-0.5 * depth}.items():
        assert params["layers"][name].std().item() == pytest.approx(std, rel=0.15), name
    x = llama.apply(params, {"tokens": torch.arange(64)[None]}, cfg)
    assert 0.3 < x.std().item() < 2.0


def test_problems_are_reported_together_in_plain_words():
    cfg = LlamaConfig(dim=100, n_heads=6, n_kv_heads=4, dropout=1.5, norm_eps=0.0, rope_theta=0.5,
                      rope_scaling=nn.RopeScaling(factor=0.1))  # fmt: skip
    assert cfg.validate() == [
        "n_kv_heads=4 must divide n_heads=6; legal: 1, 2, 3, 6",
        "dim=100 is not divisible by n_heads=6; change one, or give head_dim",
        "norm_eps=0.0 must be a finite number above 0",
        "rope_theta=0.5 must be a finite number above 1",
        "dropout=1.5 must be at least 0 and less than 1",
        "rope scaling: factor=0.1 must be at least 1",
    ]
    with pytest.raises(ValueError, match="cannot be built:\n  - n_kv_heads=4.*\n  - dim=100"):
        llama.declare(cfg)
    assert LlamaConfig(n_layers=0).validate() == ["n_layers=0 must be 1 to 2147483647"]
    assert LlamaConfig(dim=18, n_heads=6).validate() == [
        "head_dim=3 (dim=18 // n_heads=6) must be even: rotary embedding pairs channels"
    ]
    assert LlamaConfig(head_dim=5).validate() == ["head_dim=5 must be even: rotary embedding pairs channels"]


def test_every_field_documents_itself():
    source = Path(llama.__file__).read_text()
    for field in attrs.fields(LlamaConfig):
        assert f"\n    {field.name}: " in source
    helps = source.split("class LlamaConfig")[1].split("@property")[0]
    assert helps.count('"""') == 2 * (1 + len(attrs.fields(LlamaConfig)))


def test_head_dim_may_differ_from_dim_over_heads():
    cfg = attrs.evolve(TINY, head_dim=6)
    params = init_params(cfg)
    assert params["layers"]["wq"].shape == (2, 16, 4, 6)
    assert llama.apply(params, {"tokens": tokens()}, cfg).shape == (2, 16, 19)


@pytest.mark.parametrize("packed", [False, True])
def test_no_logit_depends_on_a_later_token(packed):
    params, ids = init_params(TINY), tokens()
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % 19
    extra = {"documents": torch.zeros_like(ids)} if packed else {}
    before, after = (llama.apply(params, {"tokens": t, **extra}, TINY) for t in (ids, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_packed_documents_equal_separate_ones():
    """Case S1, on one rank: documents of 3, 5 and 8 tokens in a row of 16."""
    params, ids = init_params(TINY), tokens(batch=1)
    spans = [(0, 3), (3, 8), (8, 16)]
    packed = {
        "tokens": ids,
        "positions": torch.cat([torch.arange(b - a) for a, b in spans])[None],
        "documents": torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])[None],
    }
    logits = llama.apply(params, packed, TINY)
    for a, b in spans:
        alone = llama.apply(params, {"tokens": ids[:, a:b]}, TINY)
        torch.testing.assert_close(logits[:, a:b], alone, atol=1e-5, rtol=1e-5)


def test_one_document_equals_none():
    params, ids = init_params(TINY), tokens()
    one = {"tokens": ids, "documents": torch.zeros_like(ids), "positions": torch.arange(16).expand(2, 16)}
    torch.testing.assert_close(
        llama.apply(params, one, TINY), llama.apply(params, {"tokens": ids}, TINY), atol=1e-5, rtol=1e-5
    )


def test_dropout_needs_a_key_and_differs_between_layers():
    cfg = attrs.evolve(TINY, dropout=0.5)
    params, batch = init_params(cfg), {"tokens": tokens()}
    without = llama.apply(params, batch, cfg)
    torch.testing.assert_close(without, llama.apply(params, batch, TINY), atol=0, rtol=0)
    dropped = llama.apply(params, batch, cfg, key=random.key(1))
    assert not torch.equal(dropped, without)
    assert torch.equal(dropped, llama.apply(params, batch, cfg, key=random.key(1)))
    assert not torch.equal(dropped, llama.apply(params, batch, cfg, key=random.key(2)))


def test_recomputation_keeps_the_numbers_dropout_included():
    cfg = attrs.evolve(TINY, dropout=0.3)
    params, batch = init_params(cfg), {"tokens": tokens()}
    kept = loss_and_gradients(params, batch, cfg, key=random.key(1))
    again = loss_and_gradients(params, batch, cfg, key=random.key(1), remat="full")
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    with pytest.raises(ValueError, match="policy='some'; legal: 'none', 'selective', 'full'"):
        llama.apply(params, batch, cfg, remat="some")


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True])
def test_capture_equals_the_plain_function(tied, remat):
    cfg = attrs.evolve(TINY, dropout=0.1, tied_embeddings=tied)
    params, ids = init_params(cfg), tokens()
    batch = {"tokens": ids, "documents": ids.ge(0).cumsum(1) // 5, "positions": torch.arange(16).expand(2, 16)}
    leaves, treedef = tree.flatten((params, batch, random.key(0)))

    def step(*leaves):
        params, batch, key = tree.unflatten(treedef, leaves)
        return loss_and_gradients(params, batch, cfg, key=key, remat=remat)

    captured = make_fx(step, tracing_mode="fake")(*leaves)
    torch.testing.assert_close(captured(*leaves), step(*leaves))


def test_a_bad_batch_is_named():
    params, ids = init_params(TINY), tokens()
    with pytest.raises(KeyError, match=r"the batch has no 'tokens'; it has \['ids'\]"):
        llama.apply(params, {"ids": ids}, TINY)
    with pytest.raises(ValueError, match=r"tokens must be \[batch, seq\]; they are \[16\]"):
        llama.apply(params, {"tokens": ids[0]}, TINY)
    with pytest.raises(ValueError, match=r"documents \[2, 15\] must have the shape of tokens \[2, 16\]"):
        llama.apply(params, {"tokens": ids, "documents": ids[:, 1:]}, TINY)
