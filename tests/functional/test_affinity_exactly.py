"""The estimator's mean over every possible draw of its signs, and masks of every number of
dimensions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import affinity_penalty, affinity_penalty_from_logits


def penalty(affinity: Tensor) -> float:
    return float((affinity.T @ affinity - torch.eye(len(affinity))).square().sum())


def every_draw(tokens: int, probes: int) -> Tensor:
    """All 2^(2 tokens probes) fillings of the signs by zeros and ones, one to a batch row."""
    bits = itertools.product((0, 1), repeat=2 * tokens * probes)
    return torch.tensor(list(bits)).view(-1, 1, tokens, 2 * probes)


@pytest.mark.parametrize(("tokens", "probes"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("how", ["plain", "causal", "bool", "float"])
def test_the_mean_over_every_draw_of_signs_is_the_penalty(
    tokens: int, probes: int, width: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = every_draw(tokens, probes)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: draws.clone())
    query, key = torch.randn(2, tokens, width, dtype=torch.float64)
    bias = torch.randn(tokens, tokens, dtype=torch.float64)
    seen = torch.ones(tokens, tokens).tril().bool()
    scores = 0.7 * query @ key.T + (bias if how == "float" else 0.0)
    scores = scores.masked_fill(~seen, -torch.inf) if how in ("causal", "bool") else scores
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": bias},
    }
    many = (len(draws), 1, tokens, width)
    values = affinity_penalty(
        query.expand(many),
        key.expand(many),
        estimator="probes",
        num_probes=probes,
        scale=0.7,
        **options[how],
    )
    assert values.shape == (len(draws), 1)
    assert float(values.mean()) == pytest.approx(penalty(scores.softmax(-1)), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("probes", [1, 3, 8])
@pytest.mark.parametrize("sign", [0, 1])
def test_one_token_has_no_penalty_whatever_is_drawn(
    probes: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A = 1, and signs squared are 1."""
    monkeypatch.setattr(torch, "randint", lambda _low, _high, shape, **_: torch.full(shape, sign))
    token = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    assert affinity_penalty(token, token, estimator="probes", num_probes=probes).abs().max() == 0


@pytest.mark.parametrize("probes", [1, 4, 9])
def test_for_a_permutation_the_estimate_is_known_from_the_signs(
    probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A = I: |U^T V|_F^2 / p^2 - N, U the first columns of what was drawn and V the others."""
    tokens = 6
    drawn = torch.randint(0, 2, (2, 3, tokens, 2 * probes))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: drawn.clone())
    apart = (1e3 * torch.eye(tokens, dtype=torch.float64)).expand(2, 3, tokens, tokens)
    value = affinity_penalty(apart, apart, estimator="probes", num_probes=probes)
    signs = 2.0 * drawn.double() - 1
    for row, head in itertools.product(range(2), range(3)):
        first, second = signs[row, head, :, :probes], signs[row, head, :, probes:]
        inner = sum(
            float(first[:, i] @ second[:, j]) ** 2 for i in range(probes) for j in range(probes)
        )
        assert float(value[row, head]) == pytest.approx(
            inner / probes**2 - tokens, rel=1e-12, abs=1e-9
        )


N, B, H = 4, 3, 2
SHAPES = [(N,), (1, N), (N, N), (B, N, N), (B, 1, N)]
SHAPES_OF_HEADS = [*SHAPES[:3], (H, N, N), (1, H, N, N), (B, 1, N, N), (B, H, N, N), (B, 1, 1, N)]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("lead", "shape"),
    [((), shape) for shape in SHAPES[:3]]
    + [((B,), shape) for shape in SHAPES]
    + [((B, H), shape) for shape in SHAPES_OF_HEADS],
)
def test_masks_of_fewer_dimensions_broadcast_from_the_right(
    lead: tuple[int, ...], shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence and head at a time, A formed by hand; no row and no column is closed as a
    whole."""
    query, key = torch.randn(2, *lead, N, 5, dtype=torch.float64)
    mask = (
        torch.rand(shape) > 0.3
        if kind == "bool" and shape[-2:] == (N, N)
        else torch.ones(shape).bool()
    )
    mask[..., 0] = True
    if mask.ndim > 1:
        mask[..., 0, :] = True
    given = mask if kind == "bool" else torch.randn(shape, dtype=torch.float64)
    aligned = given[:, None] if len(lead) == 1 and given.ndim == 3 else given
    full = aligned.expand(*(lead if len(lead) == 2 else (*lead, 1) if lead else (1, 1)), N, N)
    query4, key4 = (
        part.reshape(-1, lead[1] if len(lead) == 2 else 1, N, 5) for part in (query, key)
    )
    expected = []
    for row, head in itertools.product(range(query4.shape[0]), range(query4.shape[1])):
        scores = query4[row, head] @ key4[row, head].T / math.sqrt(5)
        own = full[row, head]
        expected.append(
            penalty(
                (scores.masked_fill(~own, -torch.inf) if kind == "bool" else scores + own).softmax(
                    -1
                )
            )
        )
    found = affinity_penalty(query, key, attn_mask=given)
    assert found.shape == lead
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-11)
    # The estimate of one draw is not the value, but that of the mask written out in full.
    drawn = torch.randint(0, 2, (*query4.shape[:2], N, 6))
    monkeypatch.setattr(torch, "randint", lambda *_, **__: drawn.clone())
    estimates = [
        affinity_penalty(*parts, attn_mask=mask, estimator="probes", num_probes=3)
        .flatten()
        .tolist()
        for *parts, mask in ((query, key, given), (query4, key4, full.contiguous()))
    ]
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-11)


def test_logits_of_two_dimensions_and_a_padded_column() -> None:
    logits = torch.randn(4, 4, dtype=torch.float64)
    assert affinity_penalty_from_logits(logits).item() == pytest.approx(
        penalty(logits.softmax(-1)), rel=1e-12
    )
    shut = logits.clone()
    shut[:, 3] = torch.finfo(torch.float64).min
    assert affinity_penalty_from_logits(shut).item() == pytest.approx(
        penalty(logits[:3, :3].softmax(-1)), rel=1e-12
    )
    # Half the least number is where a logit stops being open; just above it the token is real,
    # though never seen.
    least = torch.finfo(torch.float64).min / 2
    shut[:, 3] = least
    assert affinity_penalty_from_logits(shut).item() == pytest.approx(
        penalty(logits[:3, :3].softmax(-1)), rel=1e-12
    )
    shut[:, 3] = least * (1 - 1e-15)
    unseen = torch.cat([logits[:, :3].softmax(-1), torch.zeros(4, 1, dtype=torch.float64)], 1)
    assert affinity_penalty_from_logits(shut).item() == pytest.approx(penalty(unseen), rel=1e-12)


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
def test_shapes_that_have_no_square_affinity(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="no square"):
        affinity_penalty(torch.zeros(query), torch.zeros(key))


def test_half_precision_is_refused_only_where_it_overflows_and_in_the_query() -> None:
    for call in (
        lambda: torch.zeros(2, 3, dtype=torch.float16),
        lambda: torch.zeros(1, 2, 3, dtype=torch.float16),
    ):
        with pytest.raises(ConfigError, match="float16"):
            affinity_penalty(call(), call())
    assert (
        affinity_penalty(
            torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
        ).item()
        == 1
    )
    with pytest.raises(ShapeError):
        affinity_penalty_from_logits(torch.zeros(3))
