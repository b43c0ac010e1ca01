"""Contractive L2 attention divided by the bound of Kim et al. (2021): the certificate holds, and is
smaller."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch

from wellposed.certification import certify, lipschitz_lower_bound
from wellposed.errors import ConfigError
from wellposed.models import build_model
from wellposed.nn import L2SelfAttention

NORMS: list[Literal["inf", 2]] = ["inf", 2]
TOKENS, WIDTH, HEADS, C = 6, 8, 2, 0.9


def pair(norm: Literal["inf", 2], **options: Any) -> tuple[L2SelfAttention, L2SelfAttention]:
    """Return layers of the same weights, without division and divided by the paper's bound."""
    torch.manual_seed(0)
    plain = L2SelfAttention(WIDTH, HEADS, norm=norm, **options).double()
    divided = L2SelfAttention(
        WIDTH, HEADS, norm=norm, contractive=C, bound="kim2021", **options
    ).double()
    divided.load_state_dict(plain.state_dict())
    return plain, divided


def paper_bound(layer: L2SelfAttention, norm: Literal["inf", 2]) -> float:
    """Theorem 3.2 with every norm from its definition, in float64."""
    assert layer.v_proj is not None
    w, v = (
        p.weight.T.reshape(WIDTH, HEADS, -1).movedim(1, 0) for p in (layer.q_proj, layer.v_proj)
    )
    out = layer.o_proj.weight.T
    c = next(x / 1e6 for x in range(10**7) if (x / 1e6) * math.exp(x / 1e6 + 1) >= TOKENS - 1)
    d = WIDTH // HEADS
    order = math.inf if norm == "inf" else 2
    size = lambda m: float(torch.linalg.matrix_norm(m, order))  # noqa: E731
    if norm == "inf":
        heads = max(size(a) * size(a.T) for a in w) * max(size(a.T) for a in v)
        return (4 * c + 1 / math.sqrt(d)) * heads * size(out.T)
    heads = math.sqrt(sum(size(a) ** 4 * size(b) ** 2 for a, b in zip(w, v, strict=True)))
    return math.sqrt(TOKENS / d) * (4 * c + 1) * heads * size(out)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("max_tokens", [TOKENS, None])
@torch.no_grad()
def test_the_output_is_divided_by_the_printed_bound(
    norm: Literal["inf", 2], max_tokens: int | None
) -> None:
    plain, divided = pair(norm, max_tokens=max_tokens, bias=False)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    expected = plain(x) * C / paper_bound(plain, norm)
    # c is found to 1e-6; spectral norms are bounded from above by the Gram iteration.
    assert torch.allclose(divided(x), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@torch.no_grad()
def test_the_certificate_is_sound_and_below_the_constant(
    norm: Literal["inf", 2], scale: float
) -> None:
    _, divided = pair(norm, max_tokens=TOKENS, bias=False)
    for parameter in divided.parameters():
        parameter.mul_(scale)
    bound = certify(divided, seq_len=TOKENS, norm=norm).total
    assert bound == pytest.approx(float(divided.lipschitz_bound(TOKENS, norm=norm)))
    assert 0 < bound < C / 2
    if scale == 1:
        attack = lipschitz_lower_bound(divided, (TOKENS, WIDTH), norm=norm, restarts=4, steps=60)
        assert 0 < attack.value <= bound


def test_the_gradient_goes_through_the_printed_bound() -> None:
    _, divided = pair(2, max_tokens=TOKENS)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    weight = divided.v_proj.weight if divided.v_proj is not None else torch.empty(0)
    direction = torch.randn_like(weight)
    divided(x).square().sum().backward()
    assert weight.grad is not None
    slope, step = float((weight.grad * direction).sum()), 1e-6
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight.add_(sign * step * direction)
            values.append(float(divided(x).square().sum()))
            weight.sub_(sign * step * direction)
    # The Gram iteration's bound is smooth to its own tolerance only.
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "tok"},
        {"norm": "inf", "values": "free"},
        {"norm": "inf", "query_width": 2},
        {"norm": "inf", "contractive": None},
    ],
)
def test_what_the_paper_does_not_bound_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bound='sharp'"):
        L2SelfAttention(WIDTH, HEADS, bound="kim2021", **{"contractive": C, **options})


def test_a_model_takes_the_bound_as_an_option_and_saves_it(tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "lipschitz_norm": "inf",
    }
    model = build_model(
        "wellposed",
        "causal_lm",
        vocab_size=5,
        attention="l2_contractive",
        contractive_bound="kim2021",
        **options,
    )
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert {m.bound for m in again.modules() if isinstance(m, L2SelfAttention)} == {"kim2021"}
    assert "bound='kim2021'" in repr(again)
