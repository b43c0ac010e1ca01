"""`l2_attention` against the slow, obvious float64 computation with an N x N distance matrix."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import l2_attention

UNIT = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-11,
    torch.float64: 2.0**-53,
}


def reference(
    query, key, value, *, attn_mask=None, is_causal=False, scale=None, key_padding_mask=None
):
    """softmax_j(-scale |q_i - k_j|^2) v in float64, differences formed one pair at a time."""
    q = query.double()
    k = key.double()
    v = value.double()
    logits = -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    logits = logits * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(later, -math.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype is torch.bool
        logits = logits.masked_fill(~attn_mask, -math.inf) if is_bool else logits + attn_mask
    if key_padding_mask is not None:
        lead = key_padding_mask.shape[:-1]
        keys = key_padding_mask.shape[-1]
        shape = (*lead, *(1,) * (q.dim() - 1 - len(lead)), keys)
        logits = logits.masked_fill(key_padding_mask.reshape(shape), -math.inf)
    return logits.softmax(-1) @ v


def logit_tolerance(query, key, scale, unit):
    """Rounding of float32 dot products over d + 3 terms, and of the norm: at most (d + 8) u |.| |.|
    each."""
    size = float(query.double().norm(dim=-1).max()), float(key.double().norm(dim=-1).max())
    return 2 * scale * (query.shape[-1] + 8) * unit * (size[0] * size[1] + size[1] ** 2)


def draw(*shape, dtype=torch.float64, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (tokens * size / math.sqrt(shape[-1])).to(dtype)


@pytest.mark.parametrize("widths", [(4, 4), (4, 1), (3, 12), (8, 8), (16, 5)])
def test_query_and_value_widths_are_free(widths):
    shapes = ((5, widths[0]), (7, widths[0]), (7, widths[1]))
    q, k, v = (draw(2, 2, *shape, seed=seed) for seed, shape in enumerate(shapes, 1))
    out = l2_attention(q, k, v, scale=0.7)
    assert out.shape == (2, 2, 5, widths[1])
    torch.testing.assert_close(out, reference(q, k, v, scale=0.7), atol=1e-12, rtol=0)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("masking", ["all", "causal", "padding", "both", "mask", "bias"])
def test_any_number_of_leading_dimensions(lead, tied, masking):
    query = torch.randn(*lead, 4, 3, dtype=torch.float64)
    key = query if tied else torch.randn(*lead, 4, 3, dtype=torch.float64)
    value = key if tied else torch.randn(*lead, 4, 6, dtype=torch.float64)
    options = {"scale": 0.4, "is_causal": masking in ("causal", "both")}
    if masking in ("padding", "both"):
        options["key_padding_mask"] = (torch.arange(4) == 3).expand(*lead[:1], 4)
    if masking in ("mask", "bias"):
        allowed = (torch.rand(*lead[-1:], 4, 4) > 0.4) | torch.eye(4).bool()
        bias = torch.where(allowed, 0.3, -2.0).double()
        options["attn_mask"] = allowed if masking == "mask" else bias
    actual = l2_attention(query, key, value, **options)
    assert actual.shape == (*lead, 4, value.shape[-1])
    expected = reference(query, key, value, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_far_key_that_only_its_own_token_sees_costs_no_digits(dtype):
    x = draw(1, 2, 6, 4).to(dtype)
    mask = torch.ones(6, 6).tril().bool()
    x[:, :, 0], mask[1:, 0] = 1e4, False
    alone = l2_attention(x[:, :, 1:], x[:, :, 1:], x[:, :, 1:], is_causal=True)
    actual = l2_attention(x, x, x, attn_mask=mask)[:, :, 1:]
    torch.testing.assert_close(actual, alone)


def test_a_row_without_any_key_returns_zero():
    q = draw(1, 1, 4, 4).float()
    mask = torch.eye(4).bool()
    mask[2] = False
    out = l2_attention(q, q, q, attn_mask=mask)
    assert torch.equal(out[0, 0, 2], torch.zeros(4))
    torch.testing.assert_close(out[0, 0, 3], q[0, 0, 3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_keys_are_ignored(dtype, is_causal):
    q, k, v = (draw(2, 2, 6, 4, seed=s, dtype=dtype) for s in range(3))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    out = l2_attention(q, k, v, key_padding_mask=padding, is_causal=is_causal)
    expected = reference(q, k, v, key_padding_mask=padding, is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected, atol=20 * UNIT[dtype], rtol=0)
    changed = k.clone()
    changed[0, :, 4:] = 50.0
    # The mean is taken over real keys and padded ones weigh exactly nothing: not one bit changes.
    actual = l2_attention(q, changed, v, key_padding_mask=padding, is_causal=is_causal)
    assert torch.equal(actual, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_fully_padded_row_stays_finite_forward_and_backward(dtype, is_causal):
    q = draw(2, 1, 5, 4, dtype=dtype).requires_grad_()
    padding = torch.tensor([[True] * 5, [True, True, False, False, False]])
    out = l2_attention(q, q, q, key_padding_mask=padding, is_causal=is_causal)
    out.float().square().sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()


def weights_are_within(error, query, key, is_causal):
    """The weights, read off with one-hot values, are those of logits that err by so much at most."""
    one_hot = torch.eye(key.shape[-2], dtype=query.dtype).expand(*key.shape[:-2], -1, -1)
    actual = l2_attention(query, key, one_hot, is_causal=is_causal).double()
    expected = reference(query, key, one_hot, is_causal=is_causal)
    # |dp| <= 2 p |dlogit|; the weights are then rounded once in the input's precision.
    slack = expected * (math.expm1(2 * error) + 4 * UNIT[query.dtype]) + 1e-7
    assert ((actual - expected).abs() <= slack).all()


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e1, 1e2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("family", ["neighbours", "sphere"])
def test_logits_keep_float32_accuracy_at_every_norm(size, dtype, is_causal, family):
    d = 32
    n = 24
    k = draw(1, 2, n, d, seed=1, dtype=dtype, size=size)
    if family == "neighbours":
        q = (k.double() + draw(1, 2, n, d, seed=2, size=min(1.0, size))).to(dtype)
    else:  # a query near the centre: every key is equally far, up to rounding of the keys themselves
        k = (k.double() * size / k.double().norm(dim=-1, keepdim=True)).to(dtype)
        q = draw(1, 2, n, d, seed=2, dtype=dtype, size=1 / size)
    error = logit_tolerance(q, k, 1 / math.sqrt(d), UNIT[torch.float32])
    weights_are_within(error, q, k, is_causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_common_offset_of_a_hundred_costs_nothing(dtype, is_causal):
    d = 16
    n = 12
    offset = torch.linspace(80, 120, d).double() * torch.tensor([1.0, -1.0]).repeat(d // 2)
    k = (draw(1, 1, n, d, seed=1, size=4.0) + offset).to(dtype)
    q = (draw(1, 1, n, d, seed=2, size=4.0) + offset).to(dtype)
    centred = q.double() - offset, k.double() - offset
    error = 2 * logit_tolerance(*centred, 1 / math.sqrt(d), UNIT[torch.float32])
    weights_are_within(error, q, k, is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_match_the_reference(is_causal):
    q, k, v = (draw(2, 2, 5, 4, seed=s, size=2.0).requires_grad_() for s in range(3))
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    options = {"is_causal": is_causal, "key_padding_mask": padding, "scale": 0.8}
    weight = draw(2, 2, 5, 4, seed=9)
    got = torch.autograd.grad((l2_attention(q, k, v, **options) * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((reference(q, k, v, **options) * weight).sum(), (q, k, v))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_tied_gradients_in_low_precision(dtype, offset):
    z = (draw(1, 2, 16, 8, seed=1, size=2.0) + offset).to(dtype).requires_grad_()
    exact = z.detach().double().requires_grad_()
    weight = draw(1, 2, 16, 8, seed=9)
    (got,) = torch.autograd.grad((l2_attention(z, z, z).double() * weight).sum(), z)
    (expected,) = torch.autograd.grad((reference(exact, exact, exact) * weight).sum(), exact)
    # The same mathematics with a plain softmax in that precision errs by tens of units; an
    # uncentred one by `offset`.
    assert (got.double() - expected).abs().max() <= 40 * UNIT[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", ["is_causal", "attn_mask"])
def test_causality_of_values_and_gradients(dtype, masked):
    n = 8
    mask = torch.ones(n, n).tril().bool()
    options = {"is_causal": True} if masked == "is_causal" else {"attn_mask": mask}
    z = draw(1, 2, n, 4, dtype=dtype).requires_grad_()
    out = l2_attention(z, z, z, **options)
    (gradient,) = torch.autograd.grad(out[:, :, :4].float().sum(), z)
    assert torch.equal(gradient[:, :, 4:], torch.zeros_like(gradient[:, :, 4:]))
    changed = z.detach().clone()
    changed[:, :, 4:] = draw(1, 2, n - 4, 4, seed=5, size=1e4).to(dtype)
    again = l2_attention(changed, changed, changed, **options)
    # The shift comes from the first token (or is exact), so even rounding does not carry the future
    # back.
    assert torch.equal(again[:, :, :4], out[:, :, :4])


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_autocast(inputs):
    d = 16
    n = 12
    k = draw(1, 2, n, d, seed=1, size=60.0, dtype=inputs)
    q = (k.double() + draw(1, 2, n, d, seed=2)).to(inputs)
    v = draw(1, 2, n, d, seed=3, dtype=inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = l2_attention(q, k, v)
    assert out.dtype is torch.bfloat16
    if inputs is torch.float32:
        # Points are rounded to bfloat16 after centring; nothing else is lost.
        mean = k.mean(-2, keepdim=True)
        q = (q - mean).bfloat16()
        k = (k - mean).bfloat16()
        v = v.bfloat16()
    error = (out.double() - reference(q, k, v)).abs().max()
    assert error <= 8 * UNIT[torch.bfloat16]


def test_uses_the_fused_kernel_and_keeps_memory_linear():
    saved = []

    def record(tensor):
        saved.append(tensor.numel())
        return tensor

    n = 512
    for shape in ((1, 2, n, 8), (2, n, 8), (n, 8)):
        z = draw(*shape, dtype=torch.float32).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t):
            l2_attention(z, z, z, is_causal=True)
    assert max(saved) <= 2 * n * 16


def test_forward_and_second_derivatives_under_the_math_kernel():
    z = draw(1, 1, 4, 3).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda z: l2_attention(z, z, z), (z,))
        assert torch.autograd.gradcheck(
            lambda z: l2_attention(z, z, z, is_causal=True), (z,), check_forward_ad=True
        )


def test_dropout_is_applied_and_unbiased():
    q, k, v = (draw(1, 1, 6, 4, seed=s, dtype=torch.float32) for s in range(3))
    torch.manual_seed(0)
    draws = torch.stack([l2_attention(q, k, v, dropout_p=0.3) for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    spread = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - l2_attention(q, k, v)).abs() <= 5 * spread).all()


def test_nan_stays_visible():
    z = draw(1, 1, 4, 4, dtype=torch.float32)
    z[0, 0, 1, 2] = math.nan
    assert l2_attention(z, z, z).isnan().any()


def test_misfits_are_named_together():
    q = torch.zeros(2, 1, 3, 4)
    k = torch.zeros(2, 1, 5, 6)
    v = torch.zeros(2, 1, 7, 4)
    message = r"query width 4 and key width 6[\s\S]*5 keys and 7 values[\s\S]*padding"
    with pytest.raises(ShapeError, match=message):
        l2_attention(q, k, v, key_padding_mask=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="tokens, head_dim"):
        l2_attention(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="positive"):
            l2_attention(q, q, q, scale=scale)
    with pytest.raises(ConfigError, match="is_causal"):
        l2_attention(q, q, q, attn_mask=torch.ones(3, 3).bool(), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-19, 1e-5, 1e5, 1e12, 1e17])
def test_float32_follows_float64_at_every_size_of_tokens(size, is_causal):
    tokens = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0)) * size
    expected = reference(tokens, tokens, tokens, is_causal=is_causal)
    actual = l2_attention(tokens, tokens, tokens, is_causal=is_causal).double()
    # Logits of order one or far from it: then their rounding moves no weight, and values are
    # averaged in float32.
    assert (actual - expected).abs().max() <= 64 * 2.0**-24 * size * 4
