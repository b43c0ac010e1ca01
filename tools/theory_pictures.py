"""Draw docs/theory/pictures: every bound of one attention layer against the number of tokens, with
the best attack.

    python -m tools.theory_pictures

The layers have one head and identity weights. Bounds are those of `wellposed.certify` and
`wellposed.linalg.kim_bracket`; each attack is a Jacobian norm in float64 that
`wellposed.lipschitz_lower_bound` reached, from random inputs and from the worst input of half as
many tokens, each taken twice. The numbers lie beside each picture as JSON. A minute on one core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.gallery import for_both_pages
from torch import Tensor, nn

import wellposed as wp
from wellposed.attack import LowerBound
from wellposed.linalg import MaskKind, Norm, kim_bracket, phi_inverse
from wellposed.nn.attention import AttentionMask
from wellposed_lab import charts

TARGET = Path(__file__).parents[1] / "docs" / "theory" / "pictures"
TOKENS = (2, 4, 8, 16, 32, 64)
RESTARTS, STEPS = 8, 80
NAMED: dict[Norm, str] = {"tok": "tok", 2: "F"}
MASKS: dict[MaskKind, str] = {"any": "any mask", "causal": "causal", "full": "full"}


@dataclass(frozen=True)
class Curve:
    """A bound against the number of tokens and, if a layer was attacked, the slope it bounds."""

    label: str
    bound: Callable[[int], float]
    attack: Callable[[int, Tensor | None], LowerBound] | None = None
    """Attack for a number of tokens, from the worst input of half as many, if any."""


Panels = dict[str, tuple[Curve, ...]]
"""Curves of one norm by title."""


def measured(
    label: str,
    layer: nn.Module,
    width: int,
    norm: Norm,
    *,
    mask: MaskKind = "full",
    radius: float | None = None,
    starts: Callable[[int], Tensor] | None = None,
) -> Curve:
    """Return the certificate of ``layer`` and the attack on it."""

    def bound(tokens: int) -> float:
        return wp.certify(
            layer, seq_len=tokens, norm=norm, mask=mask, radius=radius, cross_check=False
        ).total

    def attack(tokens: int, smaller: Tensor | None) -> LowerBound:
        begin = [] if smaller is None else [smaller.repeat_interleave(2, 0)[None]]
        begin += [starts(tokens)] if starts else []
        begin.append(random_starts(tokens, width))
        return wp.lipschitz_lower_bound(
            layer, (tokens, width), norm=norm, restarts=RESTARTS, steps=STEPS, radius=radius,
            start=torch.cat(begin)[:RESTARTS],
            forward_kwargs={"key_padding_mask": star(tokens)} if mask == "any" else {"is_causal": mask == "causal"},
        )  # fmt: skip

    return Curve(label, bound, attack)


def random_starts(tokens: int, width: int) -> Tensor:
    """Normal numbers, from small to large."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = torch.logspace(-1, 1, RESTARTS, dtype=torch.float64)[:, None, None]
    return sizes * torch.randn(RESTARTS, tokens, width, dtype=torch.float64, generator=generator)


def two_sided(tokens: int) -> Tensor:
    """One token at 0, half the others at each of +-sqrt(1 + c): close to the worst input of L2
    attention (B1)."""
    signs = torch.ones(tokens, 1, dtype=torch.float64)
    signs[: (tokens + 1) // 2] = -1
    signs[0] = 0
    return (math.sqrt(1 + phi_inverse(tokens - 1.0)) * signs)[None]


def star(tokens: int) -> AttentionMask:
    """Each token sees itself and the first one, so that averaging alone can cost about sqrt(N) / 2
    in norm 2 (B3)."""
    allowed = torch.eye(tokens, dtype=torch.bool)
    allowed[:, 0] = True
    return AttentionMask(allowed[None, None], is_causal=False)


def with_identity_weights(layer: nn.Module) -> nn.Module:
    """Return ``layer`` in float64 with every matrix the identity; scales and temperatures stay."""
    for parameter in layer.double().requires_grad_(False).parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.eye(parameter.shape[-1]))
    return layer.eval()


def l2_layer(width: int) -> nn.Module:
    """Tied L2 attention with values as in the paper, so that ``R = I / sqrt d``."""
    return with_identity_weights(wp.nn.L2SelfAttention(width, 1, bias=False))


def pictures() -> dict[str, Panels]:
    """Return the panels of every picture by its name."""
    narrow, wide = l2_layer(1), l2_layer(4)
    dot = with_identity_weights(wp.nn.DotProductAttention(2, 1, bias=False))

    def cosine(tau: float, norm: Norm) -> Curve:
        layer = wp.nn.CosineSelfAttention(2, 1, eps=0.1, tau=tau, bias=False)
        return measured(f"B6, tau = {tau:g}", with_identity_weights(layer), 2, norm)

    def ball(t: float, norm: Norm) -> Curve:
        layer = wp.nn.BallAttention(2, 1, temperature=t, unit_lipschitz=False)
        return measured(f"B21, t = {t:g}", with_identity_weights(layer), 2, norm)

    def bounded(radius: float, norm: Norm) -> Curve:
        return measured(f"B21, R = {radius:g}", dot, 2, norm, radius=radius)

    def in_both_norms(title: str, curve: Callable[[float, Norm], Curve], *at: float) -> Panels:
        return {
            f"{title}, norm {symbol}, d = 2": tuple(curve(value, norm) for value in at)
            for norm, symbol in NAMED.items()
        }

    in_inf = Curve("Kim et al. (2021)", lambda n: kim_bracket(n, norm="inf", head_dim=4))
    in_f = Curve("Kim et al. (2021)", lambda n: kim_bracket(n, norm=2, head_dim=1))
    masked = (
        measured(f"B3, {name}", narrow, 1, 2, mask=mask, starts=two_sided)
        for mask, name in MASKS.items()
    )
    tok = measured("B24", narrow, 1, "tok", starts=two_sided)
    inf = measured("B1", wide, 4, "inf")
    return {
        "l2-inf": {"L2 attention, norm inf, d = 4": (in_inf, inf)},
        "l2-tok": {"L2 attention, norm tok, d = 1": (tok,)},
        "l2-f": {"L2 attention, norm F, d = 1": (in_f, *masked)},
        "dot-product": in_both_norms("Dot product, |x| <= R", bounded, 2.0, 1.0),
        "cosine": in_both_norms("Cosine, eps = 0.1", cosine, 10.0, 1.0),
        "ball": in_both_norms("Ball attention", ball, 3.0, 1.0),
    }


def numbers(title: str, curves: tuple[Curve, ...]) -> dict[str, Any]:
    """Return what a panel shows, computed now: each bound, and the best slope that was found."""
    rows = []
    for curve in curves:
        bounds: list[LowerBound] = []
        for tokens in TOKENS if curve.attack else ():
            bounds.append(curve.attack(tokens, bounds[-1].input if bounds else None))
        values = {
            "bound": list(map(curve.bound, TOKENS)),
            "attack": [bound.value for bound in bounds] or None,
        }
        rows.append({"label": curve.label, **values})
    return {"title": title, "tokens": list(TOKENS), "curves": rows}


def draw(panels: list[dict[str, Any]], path: Path) -> None:
    """Write ``panels`` as SVG, read on any page: bounds as lines, attacks dotted."""
    drawn = []
    for panel in panels:
        series = [
            charts.Series(f"{kind}: {curve['label']}", panel["tokens"], curve[kind], style, colour)
            for colour, curve in enumerate(panel["curves"])
            for kind, style in (("bound", "solid"), ("attack", "dotted"))
            if curve[kind] is not None
        ]
        drawn.append(charts.Panel(panel["title"], "tokens N", "", series, "log", "log"))
    charts.draw(drawn, path)
    path.write_text(for_both_pages(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    for name, panels in pictures().items():
        drawn = [numbers(*panel) for panel in panels.items()]
        draw(drawn, TARGET / f"{name}.svg")
        (TARGET / f"{name}.json").write_text(json.dumps(drawn, indent=1) + "\n", "utf-8")
