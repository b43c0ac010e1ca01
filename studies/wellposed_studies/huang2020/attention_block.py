"""Huang et al. (2020): steps of one attention block (Theorem 3.1) and of scalar models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wellposed_lab.charts import Row, where
from wellposed_studies.huang2020.step_change import step_change
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import exponent, log_panel, mean_se, proved, sweep
from wellposed_studies.verdicts import UNCERTAINTY, decided, every, within

TOKENS = 16
Sizes = tuple[float, float, float]
"""Exponents of L in |v|, |w| and |m|."""
SETTINGS: Mapping[str, Sizes] = {
    "v = w = m = L^-1/4": (-0.25, -0.25, -0.25),
    "v = 1, w = m = L^-1/2": (0.0, -0.5, -0.5),
    "m = 1/L, v = w = L^-1/4": (-0.25, -0.25, -1.0),
    "v = w = m = L^-1/8": (-0.125, -0.125, -0.125),
}
*MEETING, MISSING = SETTINGS
"""The settings that meet the theorem's condition, and the one that does not."""
_NEAR = 0.1
_GROWS = 0.5
_PRODUCTS = ("encoder", "decoder", "memory")
_SIZES = {"N^-1/2": (1.0, -0.5), "0.67 N^-1/4": (0.67, -0.25)}
_BLOCKS = (60, 180, 600, 1800, 6000)


@recipe("huang2020/theorem-3.1")
def theorem_3_1(request: Request) -> Reproduction:
    """|change of G| / rate of one attention block by the number of blocks L and the sizes v, w, m.

    Claim: |change of G| is Theta(rate / L) when |v|^2 |w|^2 + |w|^2 |m_i|^2 + |v|^2 |m_i|^2 is
        Theta(1 / L).
    Quote: "Since we are only considering the magnitude of the update" (appendix A).
    Test: the exponent of L is within {_NEAR:g} of -1 in every setting that meets the condition, and
        within {_NEAR:g} of -1/2 in the setting whose sum is of order L^-1/2.
    Note: one query, {TOKENS} memory tokens; sizes are those of a row. The gradient of the loss in G
        has norm 1 and a random direction. In float64, in the limit of small rates; m is stepped and
        y is not, as in the theorem.
    Note: at d = 1 all numbers are positive (assumption 1 of the paper); at larger d they are
        normal.
    """
    blocks: tuple[int, ...] = request.pick(
        toy=(60, 600), mini=_BLOCKS, medium=_BLOCKS, paper=(*_BLOCKS, 18000)
    )
    widths: tuple[int, ...] = request.pick(
        toy=(1, 8), mini=(1, 64), medium=(1, 64, 256), paper=(1, 64, 512)
    )
    seeds: int = request.pick(toy=2, mini=5, medium=20, paper=20)
    axes = {"setting": SETTINGS, "width": widths, "L": blocks, "seed": range(seeds)}
    rows = sweep(measure_block, **axes)
    powers = {
        (setting, width): [
            exponent(where(rows, setting=setting, width=width, seed=seed), "L", "change_over_rate")
            for seed in range(seeds)
        ]
        for setting, width in itertools.product(SETTINGS, widths)
    }
    scalar = where(rows, width=1)
    exact, printed = (
        max(abs(row[column] / row["change_over_rate"] - 1) for row in scalar)
        for column in ("closed_form", "closed_form_as_printed")
    )
    texts = [
        f"{setting}: {', '.join(f'{mean_se(powers[setting, d])} at d = {d}' for d in widths)}"
        for setting in SETTINGS
    ]
    panels = [
        log_panel(f"d = {width}", where(rows, width=width), "L", "change_over_rate", by="setting")
        for width in widths
    ]
    got = (
        f"exponent of L in |change of G| / rate, {'; '.join(texts)}; at d = 1 the closed form of the proof"
        f" is within {exact:.1g} of what is measured with 2 in its mixed term and within"
        f" {printed:.1g} with the 1 that is printed"
    )
    meeting = [powers[point] for point in itertools.product(MEETING, widths)]
    holds = judge_theorem_3_1(meeting, [powers[MISSING, width] for width in widths])

    return proved(rows, got, holds, *panels, seeds=seeds, sure=UNCERTAINTY)


def judge_theorem_3_1(
    meeting: Sequence[Sequence[float]], missing: Sequence[Sequence[float]]
) -> Verdict:
    """Return whether the update has order 1 / L if the condition is met, else that of the sum."""
    wanted = [*((-1, exponents) for exponents in meeting), *((-0.5, powers) for powers in missing)]
    return every(within(exponents, to - _NEAR, to + _NEAR) for to, exponents in wanted)


def measure_block(setting: str, width: int, L: int) -> Row:
    """Return |change of G| / rate of one of L blocks, and the sum in the theorem's condition."""
    v, w, m = sizes = [L**power for power in SETTINGS[setting]]
    block = AttentionBlock(width, sizes)
    y = draw_numbers(1, width)
    return {
        "condition": (v * w) ** 2 + (w * m) ** 2 + (v * m) ** 2,
        "change_over_rate": step_change(block, y),
        **(_closed_forms(block, y) if width == 1 else {}),
    }


def _closed_forms(block: AttentionBlock, y: Tensor) -> dict[str, float]:
    """Return |change of G| / rate in one dimension; the proof lacks the mixed term's factor 2."""
    m = block.memory.detach()[:, 0]
    k, q, v, w, t = (
        float(weight.detach()) for weight in (block.key, block.query, block.value, block.output, y)
    )
    s = (t * q * k * m).softmax(-1)
    mean = (s * m).sum()
    away = m - mean
    spread = (s * m * away).sum()
    weights = (v * w * spread) ** 2 * ((q * t) ** 2 + (t * k) ** 2) + mean**2 * (w**2 + v**2)
    forms = {}
    for name, mixed in (("closed_form", 2), ("closed_form_as_printed", 1)):
        memory = s**2 * (1 + (k * q * t * away) ** 2 + mixed * k * q * t * away)
        forms[name] = float(weights + (v * w) ** 2 * memory.sum())

    return forms


class AttentionBlock(nn.Module):
    """`G(m, y) = softmax(y q (m k)^T / sqrt d) m v w`, m a parameter; ``sizes`` of v, w and m."""

    def __init__(self, width: int, sizes: Sequence[float]) -> None:
        super().__init__()
        value, output, memory = sizes
        self.query, self.key, self.value, self.output = (
            nn.Parameter(size * draw_numbers(width, width)) for size in (1.0, 1.0, value, output)
        )
        self.memory = nn.Parameter(memory * draw_numbers(TOKENS, width))

    def forward(self, y: Tensor) -> Tensor:
        """Return one output token for each of y, (tokens, width)."""
        scores = y @ self.query @ (self.memory @ self.key).mT / math.sqrt(y.shape[-1])
        return scores.softmax(-1) @ self.memory @ self.value @ self.output


def draw_numbers(rows: int, width: int) -> Tensor:
    """Return rows of norm about 1: uniform in (0.5, 1) in one dimension, normal in more."""
    if width == 1:
        return 0.5 + torch.rand(rows, 1, dtype=torch.float64) / 2
    return torch.randn(rows, width, dtype=torch.float64) / math.sqrt(width)


@recipe("huang2020/gradients")
def gradients(request: Request) -> Reproduction:
    """The products of gradients of appendix C by the number of layers N, in scalars.

    Claim: with |v_e| = |w_e| = 0.67 N^-1/4 and |v_d| = |w_d| = |x| = |y| = (9 N)^-1/4 the products
        of gradients of encoder, decoder and memory are of order 1 at any depth.
    Quote: "which by design gives" (appendix C).
    Test: in one dimension with positive weights, as appendix B assumes, the exponent of N in each
        product is within {_NEAR:g} of 0, by {UNCERTAINTY}. The claim is contradicted if one is
        above {_GROWS:g}.
    Note: for |v_e| = |w_e| = N^-1/2, which meets the condition |v_e||w_e| < 1/N of the appendix,
        |m| / |x| keeps its order; 0.67 N^-1/4 does not meet it.
    Note: {TOKENS} tokens; weights are between half the stated size and that size. The derivation
        keeps 1 + sum v w of prod (1 + v w), which are of the same order up to v w = 1/N. Its own v
        w is of order N^-1/2.
    Note: `huang2020/updates` and `huang2020/signal`, which are confirmed, treat models of any width
        with weights of both signs, whose sums grow as roots. The initialization thus does what is
        claimed, for another reason than the printed one.
    """
    depths = request.pick(toy=(2, 8), mini=(6, 20, 60), medium=(6, 20, 60, 200), paper=(6, 60, 600))
    seeds = request.pick(toy=2, mini=5, medium=10, paper=10)
    rows = sweep(measure_scalars, N=depths, size=_SIZES, seed=range(seeds))
    powers = {
        (size, column): [
            exponent(where(rows, size=size, seed=seed), "N", column) for seed in range(seeds)
        ]
        for size, column in itertools.product(_SIZES, (*_PRODUCTS, "m_over_x"))
    }
    got = "exponent of N: " + ", ".join(
        f"{column.replace('_', ' ')} {mean_se(values)} ({size})"
        for (size, column), values in powers.items()
    )
    panels = [
        log_panel(column, rows, "N", column, by="size") for column in (*_PRODUCTS, "m_over_x")
    ]
    holds = judge_gradients([powers["0.67 N^-1/4", column] for column in _PRODUCTS])

    return proved(rows, got, holds, *panels, seeds=seeds, sure=UNCERTAINTY)


def judge_gradients(powers: Sequence[Sequence[float]]) -> Verdict:
    """Return whether every product keeps its order; False if one grows."""
    grows = any(within(column, high=_GROWS) is False for column in powers)
    return decided(holds=all(within(column, -_NEAR, _NEAR) for column in powers), against=grows)


def measure_scalars(N: int, size: str) -> Row:
    """Return squared gradients of one output of N scalar layers on each side, and |m| / |x|."""
    (factor, power) = _SIZES[size]
    decoded = (9 * N) ** -0.25
    of_encoder, of_decoder = (
        [
            torch.cat([draw_numbers(2, 1), weights * draw_numbers(2, 1)]).requires_grad_()
            for _ in range(kinds * N)
        ]
        for weights, kinds in ((factor * N**power, 2), (decoded, 3))
    )
    x, y = ((decoded * draw_numbers(TOKENS, 1)).requires_grad_() for _ in range(2))
    encoded = x
    for index, weights in enumerate(of_encoder):
        encoded = encoded + _block(encoded, weights, encoded if index % 2 == 0 else None)

    memory = encoded.detach().requires_grad_()
    out = y
    for index, weights in enumerate(of_decoder):
        attended = (out, memory, None)[index % 3]
        out = out + _block(out, weights, attended)

    by_part = {
        "encoder": torch.autograd.grad(encoded[0, 0], of_encoder),
        "decoder": torch.autograd.grad(out[0, 0], of_decoder, retain_graph=True),
        "memory": torch.autograd.grad(out[0, 0], [memory]),
    }
    products = {
        part: float(sum(grad.square().sum() for grad in grads)) for part, grads in by_part.items()
    }

    return {**products, "m_over_x": float(memory.detach().norm() / x.detach().norm())}


def _block(x: Tensor, weights: Tensor, attended: Tensor | None) -> Tensor:
    """Return v w x, of the attended tokens if there are any; k and q are of order 1."""
    key, query, value, output = weights
    if attended is None:
        return value * output * x
    return (x * query @ (attended * key).mT).softmax(-1) @ attended * value * output
