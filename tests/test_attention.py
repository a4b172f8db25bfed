"""functitan.nn.attention against softmax(q k^T) v in float64, and which token sees which, by hand."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import nn

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 8, [0] * 16])  # lengths 3, 5, 8; and one of 16


def qkv(batch=2, seq=16, heads=4, kv_heads=2, head_dim=8, kv_seq=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, h, head_dim) for n, h in ((seq, heads), (kv_seq or seq, kv_heads), (kv_seq or seq, kv_heads))]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def sees(i, j, b, causal, window, documents):
    near = window is None or (i - j if causal else abs(i - j)) < window
    return near and (not causal or j <= i) and (documents is None or bool(documents[b, i] == documents[b, j]))


def reference(q, k, v, causal=False, window=None, documents=None, mask=None, scale=None):
    """One row of one head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    (B, S, H, K), group = q.shape, q.shape[2] // k.shape[2]
    rows = []
    for b in range(B):
        for i in range(S):
            for h in range(H):
                js = [
                    j
                    for j in range(k.shape[1])
                    if sees(i, j, b, causal, window, documents) and (mask is None or mask[b % mask.shape[0], 0, i, j])
                ]
                if not js:
                    rows.append(q.new_zeros(K))
                    continue
                scores = k[b, js, h // group] @ q[b, i, h] * (K**-0.5 if scale is None else scale)
                rows.append(scores.softmax(0) @ v[b, js, h // group])
    return torch.stack(rows).view(B, S, H, K)


def with_gradients(fun, q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = fun(*leaves, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return [y.detach().double(), *(g.double() for g in torch.autograd.grad((y * weights).sum(), leaves))]


CASES = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "scaled": {"causal": True, "scale": 0.3},
    "documents": {"causal": True, "documents": DOCUMENTS},
    "window": {"causal": True, "window": 3},
    "window of one": {"causal": True, "window": 1},
    "window and documents": {"causal": True, "window": 4, "documents": DOCUMENTS},
    "both ways in documents": {"causal": False, "documents": DOCUMENTS},
    "both ways in a window": {"causal": False, "window": 3},
}


@pytest.mark.parametrize("implementation", ["fused", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_definition(case, implementation):
    expected = with_gradients(reference, *qkv(), **CASES[case])
    actual = with_gradients(nn.attention, *qkv(), **CASES[case], implementation=implementation)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", ["causal", "documents"])
def test_grouped_heads(kv_heads, case):
    inputs = qkv(kv_heads=kv_heads)
    torch.testing.assert_close(
        with_gradients(nn.attention, *inputs, **CASES[case]),
        with_gradients(reference, *inputs, **CASES[case]),
        atol=2e-6,
        rtol=1e-5,
    )


def test_mask_of_another_length_and_restrictions_together():
    inputs = qkv(seq=3, kv_seq=8)
    mask = nn.attention_mask(torch.tensor([5, 6, 7]), torch.arange(8), causal=True, window=4)
    assert mask[0, 0].int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    torch.testing.assert_close(
        nn.attention(*inputs, causal=False, mask=mask).double(), reference(*inputs, mask=mask), atol=1e-6, rtol=1e-5
    )
    even = torch.arange(16).remainder(2).eq(0).expand(1, 1, 16, 16)
    torch.testing.assert_close(
        nn.attention(*qkv(), causal=True, window=5, documents=DOCUMENTS, mask=even).double(),
        reference(*qkv(), causal=True, window=5, documents=DOCUMENTS, mask=even),
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize("implementation", ["fused", "plain"])
def test_a_token_that_sees_nothing_gets_zeros_and_finite_gradients(implementation):
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(-1)  # the first token sees nothing
    y, *gradients = with_gradients(nn.attention, *qkv(), causal=False, mask=mask, implementation=implementation)
    assert y[:, 0].eq(0).all()
    expected = with_gradients(reference, *qkv(), mask=mask)
    torch.testing.assert_close([y, *gradients], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [CASES["causal"], CASES["documents"], CASES["window"]])
def test_no_token_sees_a_later_one(options):
    q, k, v = qkv()
    k2, v2 = k.clone(), v.clone()
    k2[:, 9], v2[:, 9] = 5.0, 5.0
    before, after = nn.attention(q, k, v, **options), nn.attention(q, k2, v2, **options)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_packed_documents_equal_separate_ones():
    """Case S1, on one rank."""
    q, k, v = qkv(batch=1)
    packed = nn.attention(q, k, v, causal=True, documents=DOCUMENTS[:1])
    for start, stop in ((0, 3), (3, 8), (8, 16)):
        alone = nn.attention(*(x[:, start:stop] for x in (q, k, v)), causal=True)
        torch.testing.assert_close(packed[:, start:stop], alone, atol=1e-6, rtol=1e-5)


def test_mask_by_places_within_documents_equals_that_by_places_in_the_row():
    within = torch.tensor([[*range(3), *range(5), *range(8)], [*range(16)]])
    for causal, window in ((True, None), (True, 2), (False, 3)):
        by_row = nn.attention_mask(torch.arange(16), causal=causal, window=window, documents=DOCUMENTS)
        by_document = nn.attention_mask(within, causal=causal, window=window, documents=DOCUMENTS)
        assert torch.equal(by_row, by_document)


def test_mask_shapes():
    assert nn.attention_mask(torch.arange(4), causal=True).shape == (1, 1, 4, 4)
    assert nn.attention_mask(torch.arange(4), causal=False).all()
    assert nn.attention_mask(torch.arange(16), causal=True, documents=DOCUMENTS).shape == (2, 1, 16, 16)


@pytest.mark.parametrize("case", ["causal", "documents"])
def test_capture_holds_the_flash_kernel_and_its_backward(case):
    def step(q, k, v, documents):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        y = nn.attention(*leaves, causal=True, documents=documents if case == "documents" else None)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    args = (*qkv(), DOCUMENTS)
    captured = make_fx(step, tracing_mode="fake")(*args)
    operators = [str(node.target) for node in captured.graph.nodes]
    assert operators.count("aten._scaled_dot_product_flash_attention_for_cpu.default") == 1
    assert operators.count("aten._scaled_dot_product_flash_attention_for_cpu_backward.default") == 1
    # Heads go before seq and come back by strides, so nothing is copied.
    assert not any("clone" in name or "contiguous" in name for name in operators)
    torch.testing.assert_close(captured(*args), step(*args))


def test_plain_has_forward_mode_and_second_derivatives():
    q, k, v = (x.requires_grad_() for x in qkv(batch=1, seq=3, heads=2, kv_heads=1, head_dim=2, dtype=torch.float64))

    def plain(q, k, v):
        return nn.attention(q, k, v, causal=True, window=2, implementation="plain")

    assert torch.autograd.gradcheck(plain, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(plain, (q, k, v))


def test_plain_under_vmap():
    q, k, v = qkv()
    mapped = torch.func.vmap(
        lambda q, k, v: nn.attention(q[None], k[None], v[None], causal=True, implementation="plain")[0]
    )
    torch.testing.assert_close(mapped(q, k, v), nn.attention(q, k, v, causal=True))


def test_bfloat16_stays_close():
    q, k, v = qkv(dtype=torch.bfloat16)
    for implementation in ("fused", "plain"):
        y = nn.attention(q, k, v, causal=True, documents=DOCUMENTS, implementation=implementation)
        assert y.dtype == torch.bfloat16
        expected = reference(q, k, v, causal=True, documents=DOCUMENTS)
        torch.testing.assert_close(y.double(), expected, atol=0.03, rtol=0.03)


def test_errors_say_what_where_and_what_is_legal():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"3 key/value heads do not divide 4 query heads; legal: \[1, 2, 4\]"):
        nn.attention(q, *qkv(kv_heads=3)[1:], causal=True)
    with pytest.raises(ValueError, match=r"causal with 16 queries and 5 keys: .*mask=attention_mask"):
        nn.attention(q, *qkv(kv_seq=5)[1:], causal=True)
    with pytest.raises(ValueError, match=r"q \[16, 4, 8\] must have 4 dims: \[batch, seq, heads, head_dim\]"):
        nn.attention(q[0], k, v, causal=True)
    with pytest.raises(ValueError, match=r"documents \[2, 15\] must be \[batch, seq\] = \[2, 16\]"):
        nn.attention(q, k, v, causal=True, documents=DOCUMENTS[:, 1:])
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        nn.attention(q, k, v, causal=True, window=0)
    with pytest.raises(TypeError, match="mask must be bool; it is float32"):
        nn.attention(q, k, v, causal=False, mask=torch.zeros(1, 1, 16, 16))
    with pytest.raises(ValueError, match=r"mask \[2, 16, 16\] must be broadcastable .* \[2, 4, 16, 16\]"):
        nn.attention(q, k, v, causal=False, mask=torch.ones(2, 16, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"k \[2, 16, 2, 8\] and v \[2, 16, 4, 8\] must have one shape"):
        nn.attention(q, k, q, causal=False)
    with pytest.raises(ValueError, match=r"q \[2, 16, 4, 8\] and k \[2, 16, 2, 4\] must agree in batch and head_dim"):
        nn.attention(q, *qkv(head_dim=4)[1:], causal=False)
    with pytest.raises(ValueError, match="implementation='flash'; legal: 'fused', 'plain'"):
        nn.attention(q, k, v, causal=False, implementation="flash")
    with pytest.raises(ValueError, match=r"documents \[2, 15\] and positions \[16\] must have one length"):
        nn.attention_mask(torch.arange(16), causal=True, documents=DOCUMENTS[:, 1:])
