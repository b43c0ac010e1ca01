"""Kim et al. (2021): is ``x + c f(x)`` invertible, and how wide are the outputs of attention f?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.nn import ATTENTIONS
from wellposed_lab.charts import Panel, Row, Series, medians, where
from wellposed_studies.kim2021.language_models import (
    HEADS,
    LABELS,
    ONE_LAYER,
    attentions_of,
    train_one_layer,
)
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import FinishedRun, judged, spanned
from wellposed_studies.verdicts import AGREED, agreed

CONSTANTS = (0.5, 0.7, 0.9)
SPREADS = (1.0, 10.0)
KINDS = ("l2_tied", "dot_product", "l2_contractive")
_SOLVED = 1e-4
_MIDDLE = 0.98
_SIMILAR = 1.5
_DRAWS = 3
_TEST = (
    f"at every N and D, for tokens in +-{SPREADS[0]:g} and in +-{SPREADS[-1]:g}, some constant"
    f" inverts tied L2 to {_SOLVED:g} of that width, and every constant inverts contractive L2 (if"
    " shown). For tokens of one of these widths, which suffices, no constant inverts dot product"
)
_NOTE = (
    "the paper draws the tokens 'uniformly at random', the first one at 0, and prints no width."
    f" The verdict uses both widths, the figure shows {SPREADS[-1]:g}"
)


@recipe("kim2021/figure-3")
def figure_3(request: Request) -> Reproduction:
    """Invertibility of x + c f(x) at random weights, N = D = 64.

    Claim: dot product is not invertible by fixed-point iteration; L2 attention is for small enough
        c.
    Quote: "DP-MHA is not invertible whereas L2-MHA is invertible for sufficiently small c" (section
        5.2).
    Test: {_TEST}.
    Note: {_NOTE}.
    Note: contractive L2 (divided by its certified bound) is proved invertible for every input. It
        is not in the paper's figure.
    """
    tokens, width, batch = request.effort("kim2021/figure-3")
    rows: list[dict[str, Any]] = []
    for seed in range(_DRAWS):
        rows += _invert(request, _random_layers(KINDS, width, tokens, seed), tokens, batch, seed)
    return _reproduction(request, rows, f"random weights, N = {tokens}, D = {width}")


@recipe("kim2021/figure-5", **ONE_LAYER)
def figure_5(request: Request) -> Reproduction:
    """Invertibility of x + c f(x) with trained weights.

    Claim: trained dot product is not invertible by fixed-point iteration.
    Quote: "numerical invertibility does not hold for trained weights" (appendix J).
    Test: {_TEST}.
    Note: {_NOTE}.
    """
    tokens, batch = request.pick(toy=(6, 2), mini=(64, 32), medium=(64, 128), paper=(64, 128))
    kinds = ("dot_product", "l2_tied")
    runs = [train_one_layer(request, kind) for kind in kinds]
    of_seeds = zip(*map(attentions_of, runs), strict=True)
    rows: list[dict[str, Any]] = []
    for seed, layers in enumerate(of_seeds):
        rows += _invert(request, dict(zip(kinds, layers, strict=True)), tokens, batch, seed)
    title = f"trained weights, N = {tokens}, D = {rows[0]['D']}"
    return _reproduction(request, rows, title, list(itertools.chain(*runs)))


@recipe("kim2021/figure-6")
def figure_6(request: Request) -> Reproduction:
    """Invertibility of x + c f(x) over N and D.

    Claim: for all N and D tried, L2 attention is invertible for small enough c and dot product is
        not.
    Quote: "for different values of N and D" (caption of Figure 6).
    Test: {_TEST}.
    Note: {_NOTE}.
    """
    lengths, widths, batch = request.effort("kim2021/figure-6")
    rows: list[dict[str, Any]] = []
    for tokens, width, seed in itertools.product(lengths, widths, range(_DRAWS)):
        layers = _random_layers(("l2_tied", "dot_product"), width, tokens, seed)
        rows += _invert(request, layers, tokens, batch, seed)
    return _reproduction(request, rows, "random weights")


def _random_layers(
    kinds: Sequence[str], width: int, tokens: int, seed: int
) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    return {kind: random_layer(kind, width, tokens) for kind in kinds}


def random_layer(kind: str, width: int, tokens: int) -> nn.Module:
    """Return attention with 8 heads and Glorot initialization."""
    sizes = {"hidden_size": width, "num_attention_heads": HEADS, "max_position_embeddings": tokens}
    options = {"attention_dropout": 0.0, "qk_norm": False, "layer_norm_eps": 1e-5}
    layer = ATTENTIONS.get(kind)(SimpleNamespace(attention=kind, **sizes, **options))
    if kind == "dot_product":
        for parameter in layer.parameters():
            nn.init.xavier_uniform_(parameter) if parameter.ndim == 2 else nn.init.zeros_(parameter)
    return layer.eval().requires_grad_(False)


def probe_inputs(batch: int, tokens: int, width: int, spread: float, seed: int) -> Tensor:
    """Return inputs with first token 0, at which the dot-product Jacobian grows with the spread."""
    generator = torch.Generator().manual_seed(1 + seed)
    x = spread * (2 * torch.rand(batch, tokens, width, generator=generator) - 1)
    x[:, 0] = 0
    return x


@torch.no_grad()
def reconstruction_errors(layer: nn.Module, x: Tensor, c: float, iterations: int) -> list[float]:
    """Return ``max |x_k - x|`` of each step ``x_(k+1) = y - c f(x_k)`` from ``y = x + c f(x)``."""
    y = x + c * layer(x)
    estimate = y
    errors = []
    for _ in range(iterations):
        estimate = y - c * layer(estimate)
        errors.append(float((estimate - x).abs().max()))
    return errors


def _invert(
    request: Request, layers: Mapping[str, nn.Module], tokens: int, batch: int, seed: int
) -> list[dict[str, Any]]:
    """Return the error after each iteration for every width of inputs, layer and constant."""
    iterations = request.pick(toy=4, mini=25, medium=25, paper=25)
    width = _width(next(iter(layers.values())))
    request.announce(f"N = {tokens}, D = {width}, seed {seed}")
    rows = []
    for spread, (kind, layer), c in itertools.product(SPREADS, layers.items(), CONSTANTS):
        inputs = probe_inputs(batch, tokens, width, spread, seed)
        errors = reconstruction_errors(layer, inputs, c, iterations)
        row = {"attention": LABELS[kind], "N": tokens, "D": width, "spread": spread, "c": c}
        rows += [
            {**row, "seed": seed, "iteration": number, "max_error": error}
            for number, error in enumerate(errors, start=1)
        ]

    return rows


def _width(attention: Any) -> int:
    return attention.o_proj.out_features


def _reproduction(
    request: Request, rows: Sequence[Row], title: str, runs: Sequence[FinishedRun] = ()
) -> Reproduction:
    last = max(row["iteration"] for row in rows)
    wide = where(rows, spread=SPREADS[-1])
    ends = where(rows, iteration=last)
    sizes = list(dict.fromkeys((row["N"], row["D"]) for row in rows))
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    names = list(dict.fromkeys(row["attention"] for row in rows))
    texts = []
    panels = []

    for by, name in itertools.product(SPREADS[::-1], names):
        mine = where(ends, attention=name, spread=by)
        inverted = f"{sum(map(_is_solved, mine))} of {len(mine)} settings inverted"
        worst = max(row["max_error"] for row in mine)
        texts.append(f"{name}, tokens in +-{by:g}: {inverted}, worst error {worst:.2g}")

    for name, (tokens, width) in itertools.product(names, sizes):
        size = f"N = {tokens}, D = {width}" if len(sizes) > 1 else title
        panels.append(_panel(f"{name}\n{size}", where(wide, attention=name, N=tokens, D=width)))

    by_seed = [
        all(judge_inverses(where(ends, seed=seed, N=tokens, D=width)) for tokens, width in sizes)
        for seed in seeds
    ]
    got = f"after {last} iterations, {'; '.join(texts)}"
    holds = agreed(by_seed)
    uncertainty = f"{AGREED}; the worst error over all inputs counts"
    return judged(
        request, rows, panels, got, holds, runs, seeds=len(seeds), uncertainty=uncertainty
    )


def _is_solved(row: Row) -> bool:
    return row["max_error"] <= _SOLVED * row["spread"]


def judge_inverses(rows: Sequence[Row]) -> bool:
    def undo(kind: str, enough: Callable[[Iterable[bool]], bool]) -> bool:
        mine = [where(rows, attention=LABELS[kind], spread=by) for by in SPREADS]
        return all(enough(map(_is_solved, rows)) for rows in mine if rows)

    return undo("l2_tied", any) and undo("l2_contractive", all) and not undo("dot_product", any)


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    # An exact inverse has no place on a log axis.
    cut = [{**row, "max_error": max(row["max_error"], 1e-9)} for row in rows]
    series = medians(cut, "iteration", "max_error", by=lambda row: f"c = {row['c']}")
    return Panel(title, "fixed point iterations", "max reconstruction error", series, y_scale="log")


@recipe("kim2021/figure-10", **ONE_LAYER)
def figure_10(request: Request) -> Reproduction:
    """Histograms of inputs and outputs of trained attention.

    Claim: outputs of L2 attention stay in a range like that of the inputs; dot-product outputs are
        much wider.
    Quote: "the range of outputs remains similar to the range of inputs for Lipschitz L2-MHA,
        whereas for DP-MHA the outputs have a much wider range" (appendix N).
    Test: in every seed outputs of tied L2 are as wide as the inputs, up to a factor {_SIMILAR:g} either
        way, and those of dot product are wider than that. Width is the standard deviation, and the
        span of the middle {_MIDDLE:0.0%} of values. The paper names no width and no factor, so the
        verdict is undecided if the two widths disagree.
    Note: tokens are in +-10; the paper prints no width.
    """
    tokens, batch, bins = request.effort("kim2021/figure-10")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    runs: list[FinishedRun] = []
    for kind in ("l2_tied", "dot_product"):
        samples = []
        runs += (mine := train_one_layer(request, kind))
        for seed, layer in enumerate(attentions_of(mine)):
            x = probe_inputs(batch, tokens, _width(layer), SPREADS[-1], seed)
            with torch.no_grad():
                samples.append((x, layer(x)))
        inputs, outputs = map(torch.stack, zip(*samples, strict=True))
        pairs[kind] = inputs, outputs

    limit = max(float(values.abs().max()) for values in itertools.chain(*pairs.values()))
    centres = torch.linspace(-limit, limit, bins, dtype=torch.float64).tolist()
    rows = []
    panels = []
    texts = []
    widths = {}
    for kind, of_kind in pairs.items():
        series = []
        name = LABELS[kind]
        for label, values in zip(("input", "output"), of_kind, strict=True):
            shares = (torch.histc(values.double(), bins, -limit, limit) / values.numel()).tolist()
            series.append(Series(label, centres, shares, "bars"))
            row = {"attention": name, "values": label}
            bars = zip(centres, shares, strict=True)
            rows += [{**row, "bin_centre": at, "share": share} for at, share in bars]
        panels.append(Panel(name, "value", "share", series))
        of_seeds = list(zip(*of_kind, strict=True))
        widths[kind] = [
            [float(width(y) / width(x)) for width in (torch.std, _span)] for x, y in of_seeds
        ]
        deviations, spans = zip(*widths[kind], strict=True)
        texts.append(
            f"{name}: standard deviation of outputs {spanned(deviations)} and span of the middle"
            f" {_MIDDLE:0.0%} {spanned(spans)} times that of inputs"
        )

    holds = judge_figure_10(*widths.values())
    got = "; ".join(texts)
    return judged(request, rows, panels, got, holds, runs, uncertainty=AGREED)


def _span(values: Tensor) -> Tensor:
    low, high = np.quantile(values, [(1 - _MIDDLE) / 2, (1 + _MIDDLE) / 2])
    return torch.as_tensor(high - low)


def judge_figure_10(
    tied: Sequence[Sequence[float]], dot_product: Sequence[Sequence[float]]
) -> Verdict:
    """Return whether only dot-product outputs are wider than the inputs, by each width and seed."""
    pairs = zip(itertools.chain(*tied), itertools.chain(*dot_product), strict=True)
    return agreed([1 / _SIMILAR <= ours <= _SIMILAR < theirs for ours, theirs in pairs])
