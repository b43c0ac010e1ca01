"""Affinity penalties against A^T A - I spelled out in float64; the estimator against its exact
mean."""

import itertools
import math

import pytest
import torch

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import affinity_penalty, affinity_penalty_from_logits

BATCH = 3
HEADS = 4
TOKENS = 7
WIDTH = 5
CLOSED = torch.finfo(torch.float64).min
LENGTHS = (7, 4, 1)
FULL = (TOKENS,) * BATCH


def tensors(key_heads=HEADS, dtype=torch.float64):
    query = torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return query, torch.randn(BATCH, key_heads, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


def padding():
    return torch.arange(TOKENS) >= torch.tensor(LENGTHS)[:, None]


def slow(query, key, *, lengths=FULL, starts=(0,) * BATCH, causal=False, scale=None, bias=None):
    """|A^T A - I|_F^2 of every sequence and head, padded tokens cut away before the softmax."""
    values = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            part = slice(starts[b], starts[b] + lengths[b])
            q = query[b, h, part]
            k = key[b, h * key.shape[1] // query.shape[1], part]
            scores = q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)
            scores = scores if bias is None else scores + bias[h, part, part]
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            affinity = scores.softmax(-1)
            values.append(((affinity.T @ affinity - torch.eye(lengths[b])) ** 2).sum())
    return torch.stack(values).view(query.shape[0], query.shape[1])


def agree(fast, expected, leaves, tolerance=1e-11):
    """Values, and gradients under a random weighting of the heads."""
    torch.testing.assert_close(fast, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((fast * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_exact_is_the_formula(causal, padded, key_heads):
    query, key = tensors(key_heads)
    masks = {"is_causal": causal, "key_padding_mask": padding() if padded else None}
    fast = affinity_penalty(query, key, scale=0.7, **masks)
    lengths = LENGTHS if padded else FULL
    agree(fast, slow(query, key, lengths=lengths, causal=causal, scale=0.7), (query, key))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [False, True], ids=["right padding", "left padding"])
def test_padding_is_read_off_a_full_mask(kind, causal, left):
    """As Hugging Face makes it: padded columns closed, padded rows open or (left padding, causal)
    empty."""
    query, key = tensors()
    real = ~padding().flip(-1) if left else ~padding()
    mask = real[:, None, None, :].expand(BATCH, 1, TOKENS, TOKENS)
    mask = mask & torch.ones(TOKENS, TOKENS).tril().bool() if causal else mask
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, CLOSED)
    starts = tuple(TOKENS - length for length in LENGTHS) if left else (0,) * BATCH
    expected = slow(query, key, lengths=LENGTHS, starts=starts, causal=causal)
    agree(affinity_penalty(query, key, attn_mask=mask), expected, (query, key))


def test_own_convention_where_padded_queries_attend_to_themselves():
    query, key = tensors()
    real = ~padding()
    mask = (real[:, None, :] & real[:, :, None] | torch.eye(TOKENS).bool())[:, None]
    actual = affinity_penalty(query, key, attn_mask=mask)
    agree(actual, slow(query, key, lengths=LENGTHS), (query, key))


def test_a_query_that_sees_no_key_has_a_row_of_zeros():
    query, key = tensors()
    mask = torch.ones(TOKENS, TOKENS).tril(-1).bool()
    affinity = (query @ key.mT / math.sqrt(WIDTH)).masked_fill(~mask, -1e30).softmax(-1)
    affinity = affinity.where(mask, 0.0)[..., :-1, :-1]  # no query sees the last token
    expected = ((affinity.mT @ affinity - torch.eye(TOKENS - 1)) ** 2).sum((-2, -1))
    agree(affinity_penalty(query, key, attn_mask=mask), expected, (query, key))
    guess = affinity_penalty(query, key, attn_mask=mask, estimator="probes", num_probes=4096)
    torch.testing.assert_close(guess, expected, rtol=0.1, atol=0.1)


def test_a_bias_receives_its_gradient():
    query, key = tensors()
    bias = torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    fast = affinity_penalty(query, key, attn_mask=bias[None], scale=1.0)
    agree(fast, slow(query, key, scale=1.0, bias=bias), (query, key, bias))


def test_chunks_of_the_batch_make_no_difference(monkeypatch):
    query, key = tensors()
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr("wellposed.functional._affinity._CHUNK", 1)
    mask = {"attn_mask": bias, "key_padding_mask": padding()}
    expected = slow(query, key, lengths=LENGTHS, bias=bias[0])
    agree(affinity_penalty(query, key, **mask), expected, (query, key, bias))


def masks():
    padded = {"key_padding_mask": padding()}
    causal = {"is_causal": True}
    bools = {"attn_mask": (~padding())[:, None, None, :].expand(BATCH, 1, TOKENS, TOKENS)}
    floats = {"attn_mask": torch.randn(1, HEADS, TOKENS, TOKENS).double()}
    return {
        "none": {},
        "causal": causal,
        "padding": padded,
        "causal and padding": causal | padded,
        "bool": bools,
        "bool, causal and padding": bools | causal | padded,
        "float": floats | padded,
        "float and causal": floats | causal,
    }


@pytest.mark.parametrize("name", list(masks()))
def test_probes_are_unbiased_in_value_and_gradient(name):
    """With as many draws as give a standard error, the mean is within five of them, coordinate by
    coordinate."""
    options = masks()[name]
    query, key = tensors(key_heads=2)
    exact = affinity_penalty(query, key, **options)
    expected = (exact, *torch.autograd.grad(exact.sum(), (query, key)))
    wanted = torch.cat([part.flatten() for part in expected])
    draws = []
    for _ in range(300):
        value = affinity_penalty(query, key, estimator="probes", num_probes=8, **options)
        gradients = torch.autograd.grad(value.sum(), (query, key))
        draws.append(torch.cat([value.detach().flatten(), *(g.flatten() for g in gradients)]))
    sample = torch.stack(draws)
    error = sample.std(dim=0) / len(draws) ** 0.5
    assert ((sample.mean(dim=0) - wanted).abs() <= 5 * error + 1e-10).all()


def test_probes_repeat_with_a_generator():
    query, key = tensors()
    seeded = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    draws = [affinity_penalty(query, key, estimator="probes", generator=draw) for draw in seeded]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("estimator", ["exact", "probes"])
def test_bf16_tensors_under_autocast(estimator):
    query, key = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = affinity_penalty(query, key, estimator=estimator, num_probes=512)
    assert value.dtype == torch.float32
    exact = affinity_penalty(query.double(), key.double())
    rtol, atol = (1e-6, 1e-6) if estimator == "exact" else (0.08, 0.05)
    torch.testing.assert_close(value.double(), exact, rtol=rtol, atol=atol)
    value.sum().backward()
    assert query.grad.isfinite().all()


def test_errors():
    query, key = tensors()
    shapes = {
        "cross-attention": lambda: affinity_penalty(query, key[..., :-1, :]),
        "do not divide": lambda: affinity_penalty(query, key[:, :3]),
        "square": lambda: affinity_penalty_from_logits(torch.zeros(2, 3)),
    }
    for message, call in shapes.items():
        with pytest.raises(ShapeError, match=message):
            call()
    options = {
        "estimator": lambda: affinity_penalty(query, key, estimator="probe"),
        "num_probes": lambda: affinity_penalty(query, key, estimator="probes", num_probes=0),
        "float16": lambda: affinity_penalty(query.half(), key.half()),
    }
    for message, call in options.items():
        with pytest.raises(ConfigError, match=message):
            call()


def penalty(affinity):
    return float((affinity.T @ affinity - torch.eye(len(affinity))).square().sum())


N = 4
B = 3
H = 2
SHAPES = [(N,), (1, N), (N, N), (B, N, N), (B, 1, N)]
SHAPES_OF_HEADS = [*SHAPES[:3], (H, N, N), (1, H, N, N), (B, 1, N, N), (B, H, N, N), (B, 1, 1, N)]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("lead", "shape"),
    [((), shape) for shape in SHAPES[:3]]
    + [((B,), shape) for shape in SHAPES]
    + [((B, H), shape) for shape in SHAPES_OF_HEADS],
)
def test_masks_of_fewer_dimensions_broadcast_from_the_right(lead, shape, kind):
    """One sequence and head at a time, A formed by hand; no row and no column is closed as a
    whole."""
    query, key = torch.randn(2, *lead, N, 5, dtype=torch.float64)
    mask = torch.ones(shape).bool()
    if shape[-2:] == (N, N):
        mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    if mask.ndim > 1:
        mask[..., 0, :] = True
    attn_mask = mask if kind == "bool" else torch.randn(shape, dtype=torch.float64)
    aligned = attn_mask[:, None] if len(lead) == 1 and attn_mask.ndim == 3 else attn_mask
    full = aligned.expand(*(lead if len(lead) == 2 else (*lead, 1) if lead else (1, 1)), N, N)
    heads = lead[1] if len(lead) == 2 else 1
    query4, key4 = (part.reshape(-1, heads, N, 5) for part in (query, key))
    expected = []
    for row, head in itertools.product(range(query4.shape[0]), range(query4.shape[1])):
        scores = query4[row, head] @ key4[row, head].T / math.sqrt(5)
        row_mask = full[row, head]
        scores = scores.masked_fill(~row_mask, -torch.inf) if kind == "bool" else scores + row_mask
        expected.append(penalty(scores.softmax(-1)))
    actual = affinity_penalty(query, key, attn_mask=attn_mask)
    assert actual.shape == lead
    assert actual.flatten().tolist() == pytest.approx(expected, rel=1e-11)
    without = affinity_penalty(query4, key4).view(lead)
    torch.testing.assert_close(affinity_penalty(query, key), without, rtol=1e-12, atol=1e-12)


def test_logits_of_two_dimensions_and_a_padded_column():
    def check(logits, affinity):
        actual = affinity_penalty_from_logits(logits).item()
        assert actual == pytest.approx(penalty(affinity), rel=1e-12)

    logits = torch.randn(4, 4, dtype=torch.float64)
    check(logits, logits.softmax(-1))
    # A column that float64 gives no weight is masked; one that it gives some is real.
    lowest = torch.finfo(torch.float64).min
    shut = logits.clone()
    for closed in (-torch.inf, lowest, lowest / 8, -1e9, -1e4, -800.0):
        shut[:, 3] = closed
        check(shut, logits[:3, :3].softmax(-1))
    shut[:, 3] = -700.0
    check(shut, torch.cat([logits[:, :3].softmax(-1), torch.zeros(4, 1).double()], 1))


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((4,), (4,)),
        ((2, 2, 2, 3, 4), (2, 2, 2, 3, 4)),
        ((3, 4), (1, 3, 4)),
        ((3, 4), (3, 5)),
        ((3, 4), (2, 4)),
    ],
)
def test_shapes_that_have_no_square_affinity(query, key):
    with pytest.raises(ShapeError, match="no square"):
        affinity_penalty(torch.zeros(query), torch.zeros(key))
