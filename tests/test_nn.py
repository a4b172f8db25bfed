"""functitan.nn against plain formulas in float64, torch's own, and hand-worked cases."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from functitan import nn, random


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(fun, *args):
    """Gradients of a weighted sum of the output: a plain sum would hide mistakes that cancel."""
    leaves = [x.detach().requires_grad_() for x in args]
    y = fun(*leaves)
    return torch.autograd.grad((y * randn(*y.shape, seed=99, dtype=y.dtype)).sum(), leaves)


# linear


@pytest.mark.parametrize(
    ("x", "w", "n_in", "letters"),
    [
        ((2, 3, 4), (4, 5), 1, "bsd,df->bsf"),
        ((2, 3, 4), (4, 5, 6), 1, "bsd,dhk->bshk"),
        ((2, 3, 5, 6), (5, 6, 4), 2, "bshk,hkd->bsd"),
        ((4,), (4, 5), 1, "d,df->f"),
    ],
)
def test_linear_is_the_einsum(x, w, n_in, letters):
    x, w = randn(*x), randn(*w, seed=1)
    linear = functools.partial(nn.linear, n_in=n_in)
    torch.testing.assert_close(linear(x, w), torch.einsum(letters, x, w))
    torch.testing.assert_close(gradients(linear, x, w), gradients(lambda x, w: torch.einsum(letters, x, w), x, w))


def test_linear_adds_the_bias_to_heads():
    x, bias = randn(2, 3, 4), randn(5, 6)
    torch.testing.assert_close(nn.linear(x, torch.zeros(4, 5, 6).double(), bias), bias.expand(2, 3, 5, 6))


@pytest.mark.parametrize(
    ("x", "w", "bias", "n_in", "message"),
    [
        ((2, 3), (4, 5), None, 1, r"x \[2, 3\] ends in \[3\], but weight \[4, 5\] starts with \[4\]"),
        ((2, 3), (3, 5), (4,), 1, r"bias \[4\] does not fit weight \[3, 5\]; give a bias of \[5\]"),
        ((3,), (3, 5), None, 2, r"n_in=2 .*legal: 1 to 1"),
        ((3, 4), (4, 3, 5), None, 2, r"ends in \[3, 4\].*starts with \[4, 3\]"),
    ],
)
def test_linear_says_what_does_not_fit(x, w, bias, n_in, message):
    with pytest.raises(ValueError, match=message):
        nn.linear(torch.zeros(x), torch.zeros(w), None if bias is None else torch.zeros(bias), n_in=n_in)


# norms


def test_rms_norm_and_gradients_equal_torchs():
    x, w = randn(2, 3, 8), randn(8, seed=1)
    torch.testing.assert_close(nn.rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))
    torch.testing.assert_close(gradients(nn.rms_norm, x, w), gradients(lambda x, w: F.rms_norm(x, (8,), w, 1e-5), x, w))


def test_rms_norm_first_and_second_derivatives_in_both_modes():
    x, w = randn(2, 3, 4).requires_grad_(), randn(4, seed=1).requires_grad_()
    norm = functools.partial(nn.rms_norm, eps=0.1)
    assert torch.autograd.gradcheck(norm, (x, w), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, (x, w))


def test_rms_norm_under_vmap_and_per_example_gradients():
    x, w = randn(5, 3, 4), randn(4, seed=1)
    torch.testing.assert_close(torch.func.vmap(nn.rms_norm, (0, None))(x, w), nn.rms_norm(x, w))
    per_example = torch.func.vmap(torch.func.grad(lambda w, x: nn.rms_norm(x, w).square().sum()), (None, 0))(w, x)
    one = torch.func.grad(lambda w: nn.rms_norm(x[2], w).square().sum())(w)
    torch.testing.assert_close(per_example[2], one)


def test_rms_norm_of_zeros_is_zero_with_finite_gradients():
    x, w = torch.zeros(2, 4), torch.ones(4)
    assert nn.rms_norm(x, w).eq(0).all()
    assert all(g.isfinite().all() for g in gradients(nn.rms_norm, x, w))


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    # 300 ** 2 * 256 needs more than bfloat16's 8 bits, and the result is rounded once before the weight.
    x = (300 * randn(3, 256)).bfloat16()
    w = randn(256, seed=1).bfloat16()
    expected = F.rms_norm(x.float(), (256,), eps=1e-5).bfloat16() * w
    y = nn.rms_norm(x, w)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert [g.dtype for g in gradients(nn.rms_norm, x, w)] == [torch.bfloat16, torch.bfloat16]


def test_layer_norm():
    x, w, b = randn(2, 3, 8), randn(8, seed=1), randn(8, seed=2)
    centred = x - x.mean(-1, keepdim=True)
    plain = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(nn.layer_norm(x), plain)
    torch.testing.assert_close(nn.layer_norm(x, w, b), plain * w + b)
    assert nn.layer_norm(x.bfloat16(), w.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("norm", [nn.rms_norm, nn.layer_norm])
def test_norms_refuse_a_weight_of_another_width(norm):
    with pytest.raises(ValueError, match=r"weight is \[4\] and x \[2, 8\]; weight must be \[8\]"):
        norm(torch.zeros(2, 8), torch.ones(4))


# embedding, activations


def test_embedding_takes_rows_and_adds_up_gradients_of_repeated_ids():
    table, ids = randn(5, 3), torch.tensor([[0, 4], [4, 1]])
    assert torch.equal(nn.embedding(table, ids), table[ids])
    leaf = table.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.embedding(leaf, ids).sum(), leaf)
    assert gradient[:, 0].tolist() == [1, 1, 0, 0, 2]


def test_embedding_refuses_what_are_no_ids():
    with pytest.raises(TypeError, match="ids must be int32 or int64; they are float32"):
        nn.embedding(torch.zeros(5, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"table must be \[vocab, embed\]; it is \[5\]"):
        nn.embedding(torch.zeros(5), torch.zeros(2, dtype=torch.int64))


def test_activations():
    x, y = randn(3, 4), randn(3, 4, seed=1)
    torch.testing.assert_close(nn.silu(x), x / (1 + torch.exp(-x)))
    torch.testing.assert_close(nn.gelu(x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    torch.testing.assert_close(
        nn.gelu(x, "tanh"), 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    )
    torch.testing.assert_close(nn.swiglu(x, y), x / (1 + torch.exp(-x)) * y)
    with pytest.raises(ValueError, match=r"gate \[3, 4\] and up \[3, 5\] must have one shape"):
        nn.swiglu(x, randn(3, 5))


# dropout


def test_dropout_keeps_the_mean_and_depends_on_the_key_alone():
    x = torch.ones(64, 1024)
    y = nn.dropout(random.key(0), x, 0.25)
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    # 65536 draws: the fraction of zeros has a standard deviation of 0.0017.
    assert y.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(y, nn.dropout(random.key(0), x, 0.25))
    assert not torch.equal(y, nn.dropout(random.key(1), x, 0.25))


def test_dropout_gradient_is_its_own_mask():
    x = randn(8, 16)
    (gradient,) = torch.autograd.grad(nn.dropout(random.key(3), leaf := x.requires_grad_(), 0.5).sum(), leaf)
    assert torch.equal(gradient, nn.dropout(random.key(3), torch.ones_like(x), 0.5))


def test_dropout_is_off_without_a_key_or_a_rate():
    x = randn(3)
    assert nn.dropout(None, x, 0.5) is x
    assert nn.dropout(random.key(0), x, 0.0) is x
    for rate in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"rate={rate} must be at least 0 and less than 1"):
            nn.dropout(random.key(0), x, rate)


# rotary


def complex_rotary(x, positions, theta):
    """Su et al.'s definition: channel pairs as complex numbers, turned by position * frequency."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(()).double(), positions[..., None, None].double() * frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_rotary_is_a_turn_of_complex_numbers():
    x, positions = randn(2, 6, 3, 8), torch.tensor([[0, 1, 2, 0, 1, 500], [7, 6, 5, 4, 3, 2]])
    y = nn.rotary(x, nn.rotary_table(positions, 8, 10000.0))
    torch.testing.assert_close(y, complex_rotary(x, positions, 10000.0), atol=1e-4, rtol=0)  # a float32 table
    assert torch.equal(y[0, 0], x[0, 0])


def test_rotary_scores_depend_on_distance_alone():
    q, k = randn(1, 1, 1, 16), randn(1, 1, 1, 16, seed=1)

    def score(i, j):
        turned = [nn.rotary(x, nn.rotary_table(torch.tensor([p]), 16)) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-2


def test_llama3_scaling_by_hand():
    # Wavelengths above 100 are stretched by 8, those below 25 kept, those between interpolated.
    scaling = nn.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=100)
    plain = nn.rotary_frequencies(8, 10000.0).double()
    assert plain.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    wavelengths = (2 * torch.pi / plain).tolist()  # 6.3, 62.8, 628, 6283
    smooth = (100 / wavelengths[1] - 1) / 3
    expected = [1.0, 0.1 * (smooth + (1 - smooth) / 8), 0.01 / 8, 0.001 / 8]
    assert nn.rotary_frequencies(8, 10000.0, scaling).tolist() == pytest.approx(expected)


def test_rotary_keeps_the_dtype_and_names_a_wrong_table():
    table = nn.rotary_table(torch.arange(4), 8)
    assert nn.rotary(randn(2, 4, 3, 8).bfloat16(), table).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="table .* is for head_dim 8 and 4 positions"):
        nn.rotary(randn(2, 5, 3, 8), table)
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        nn.rotary_table(torch.arange(4), 7)


def test_rope_scaling_reports_every_problem():
    problems = nn.RopeScaling(factor=0.5, low_freq_factor=4.0, high_freq_factor=1.0, original_context=0).validate()
    assert len(problems) == 3
    assert nn.RopeScaling().validate() == []


# cross-entropy


@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_cross_entropy_and_gradients_equal_torchs(shape):
    logits, labels = 3 * randn(*shape, 11), torch.randint(11, shape, generator=torch.Generator().manual_seed(1))
    labels.flatten()[::3] = -100

    def ours(logits):
        return nn.cross_entropy(logits, labels)[0]

    def theirs(logits):
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    torch.testing.assert_close(ours(logits), theirs(logits))
    torch.testing.assert_close(gradients(ours, logits), gradients(theirs, logits))
    assert nn.cross_entropy(logits, labels)[1].item() == labels.ne(-100).sum().item()


def test_cross_entropy_is_a_sum_over_ranks_then_one_division():
    """Case L3: 1 valid label with loss 2 beside 9 with loss 10; the mean is 9.2, not 6."""

    def logits_of_loss(loss, rows):  # two classes; label 0 has log-probability -loss
        other = torch.log(torch.expm1(torch.tensor(loss, dtype=torch.float64)))
        return torch.stack((torch.zeros(rows).double(), other.expand(rows)), dim=-1)

    one = nn.cross_entropy(logits_of_loss(2.0, 10), torch.tensor([0] + [-100] * 9))
    nine = nn.cross_entropy(logits_of_loss(10.0, 10), torch.tensor([0] * 9 + [-100]))
    assert (one[0].item(), one[1].item()) == (pytest.approx(2.0), 1.0)
    assert (nine[0].item(), nine[1].item()) == (pytest.approx(90.0), 9.0)
    assert ((one[0] + nine[0]) / (one[1] + nine[1])).item() == pytest.approx(9.2)


def test_cross_entropy_without_valid_labels_is_zero_with_zero_gradients():
    logits = randn(3, 4, dtype=torch.float32).requires_grad_()
    loss, count = nn.cross_entropy(logits, torch.full((3,), -100), z_loss=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (loss.item(), count.item()) == (0.0, 0.0)
    assert gradient.eq(0).all()


def test_z_loss_is_the_squared_log_normaliser_of_valid_rows():
    logits, labels = randn(5, 7), torch.tensor([1, -100, 3, 0, -100])

    def plain(logits):
        rows = labels != -100
        return F.cross_entropy(logits, labels, reduction="sum") + 0.1 * logits.logsumexp(-1)[rows].square().sum()

    def ours(logits):
        return nn.cross_entropy(logits, labels, z_loss=0.1)[0]

    torch.testing.assert_close(ours(logits), plain(logits))
    torch.testing.assert_close(gradients(ours, logits), gradients(plain, logits))


def test_cross_entropy_of_bfloat16_is_summed_in_float32():
    logits, labels = randn(400, 5).bfloat16(), torch.arange(400) % 5
    loss, count = nn.cross_entropy(logits, labels)
    assert (loss.dtype, count.dtype) == (torch.float32, torch.int64)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), labels, reduction="sum").item(), rel=1e-5)


def test_cross_entropy_takes_another_ignored_label():
    logits = randn(3, 4)
    torch.testing.assert_close(
        nn.cross_entropy(logits, torch.tensor([2, 0, 1]), ignore_index=0)[0],
        nn.cross_entropy(logits, torch.tensor([2, -100, 1]))[0],
    )


def test_cross_entropy_says_what_does_not_fit():
    with pytest.raises(ValueError, match=r"logits \[2, 3, 4\].*labels are \[2\]"):
        nn.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="labels must be int64; they are float32"):
        nn.cross_entropy(torch.zeros(2, 4), torch.zeros(2))


# capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_captured_with_its_backward_pass(dtype):
    x = randn(2, 6, 8, dtype=dtype)
    norm, into, out = randn(8, dtype=dtype), randn(8, 2, 4, seed=1, dtype=dtype), randn(2, 4, 8, seed=2, dtype=dtype)
    labels = torch.tensor([[0, 1, -100, 3, 4, 5]] * 2)

    def step(x, key, labels, n, p, o):
        leaves = [t.detach().requires_grad_() for t in (x, n, p, o)]
        x, n, p, o = leaves
        h = nn.rotary(nn.linear(nn.rms_norm(x, n), p), nn.rotary_table(torch.arange(6), 4))
        y = nn.dropout(key, nn.swiglu(nn.linear(h, o, n_in=2), nn.layer_norm(x, n)), 0.5)
        loss, _ = nn.cross_entropy(y, labels, z_loss=1e-4)
        return loss, *torch.autograd.grad(loss, leaves)

    args = (x, random.key(0), labels, norm, into, out)
    captured = make_fx(step, tracing_mode="fake")(*args)
    torch.testing.assert_close(captured(*args), step(*args))
