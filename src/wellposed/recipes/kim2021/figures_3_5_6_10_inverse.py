"""Kim et al. (2021), figures 3, 5, 6 and 10: is ``x + c f(x)`` invertible, and how wide are the outputs of f."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.charts import Panel, Series
from wellposed.nn import ATTENTIONS
from wellposed.recipes.recipe import Reproduction, Request

CONSTANTS = (0.5, 0.7, 0.9)
SPREADS = (1.0, 10.0)
LABELS = {"l2_tied": "tied L2", "dot_product": "dot product", "l2_contractive": "contractive L2"}
_SOLVED = 1e-4
_NOTE = (
    "the paper draws the tokens 'uniformly at random' without saying how wide: both widths are in the table, "
    f"the figure shows {SPREADS[-1]:g}"
)
_CERTIFIED_NOTE = (
    "contractive L2 (divided by its certified bound) is invertible for every input by proof; it is not in the paper's "
    "figure"
)


def figure_3(request: Request) -> Reproduction:
    """Invertibility at random weights, N = D = 64."""
    tokens, width, batch = request.pick(toy=(6, 8, 2), mini=(64, 64, 32), paper=(64, 64, 128))
    torch.manual_seed(0)
    layers = {kind: random_layer(kind, width, tokens) for kind in LABELS}
    rows = _sweep(request, layers, [(tokens, width)], batch)
    return _reproduction(request, rows, f"random weights, N = {tokens}, D = {width}")


def figure_5(request: Request) -> Reproduction:
    """Invertibility with trained weights."""
    from wellposed.recipes.kim2021.figures_4_9_11_tables_2_3 import trained_attention

    tokens, batch = request.pick(toy=(6, 2), mini=(64, 32), paper=(64, 128))
    layers = {
        kind: trained_attention(request, name)
        for kind, name in (("dot_product", "dot_product"), ("l2_tied", "l2_tied"))
    }
    width = layers["dot_product"].o_proj.out_features
    rows = _sweep(request, layers, [(tokens, width)], batch)
    return _reproduction(request, rows, f"trained weights, N = {tokens}, D = {width}")


def figure_6(request: Request) -> Reproduction:
    """Invertibility over N and D."""
    sizes = request.pick(
        toy=[(4, 8), (8, 16)],
        mini=[(tokens, width) for tokens in (32, 64, 128) for width in (64, 128)],
        paper=[(tokens, width) for tokens in (32, 64, 128, 256) for width in (64, 128, 256, 512)],
    )
    batch = request.pick(toy=2, mini=8, paper=128)
    rows: list[dict[str, Any]] = []
    for tokens, width in sizes:
        torch.manual_seed(0)
        layers = {kind: random_layer(kind, width, tokens) for kind in ("l2_tied", "dot_product")}
        rows += _sweep(request, layers, [(tokens, width)], batch)
    return _reproduction(request, rows, "random weights")


def random_layer(kind: str, width: int, tokens: int) -> nn.Module:
    """An attention with 8 heads and Glorot's weights."""
    config = SimpleNamespace(
        hidden_size=width, num_attention_heads=8, attention_dropout=0.0, qk_norm=False, layer_norm_eps=1e-5,
        attention=kind, max_position_embeddings=tokens,
    )  # fmt: skip
    layer = ATTENTIONS.get(kind)(config)
    if kind == "dot_product":
        for parameter in layer.parameters():
            nn.init.xavier_uniform_(parameter) if parameter.ndim == 2 else nn.init.zeros_(parameter)
    return layer.eval().requires_grad_(False)


def probe_inputs(batch: int, tokens: int, width: int, spread: float) -> Tensor:
    """Inputs whose first token is 0, where the dot-product Jacobian grows with the spread of the others."""
    generator = torch.Generator().manual_seed(1)
    x = spread * (2 * torch.rand(batch, tokens, width, generator=generator) - 1)
    x[:, 0] = 0
    return x


@torch.no_grad()
def reconstruction_errors(layer: nn.Module, x: Tensor, c: float, iterations: int) -> list[float]:
    """Largest ``|x_k - x|`` of ``x_(k+1) = y - c f(x_k)`` from ``x_0 = y = x + c f(x)``, after each iteration."""
    y = x + c * layer(x)
    found, errors = y, []
    for _ in range(iterations):
        found = y - c * layer(found)
        errors.append(float((found - x).abs().max()))
    return errors


def _sweep(
    request: Request, layers: Mapping[str, nn.Module], sizes: Sequence[tuple[int, int]], batch: int
) -> list[dict[str, Any]]:
    iterations = request.pick(toy=4, mini=25, paper=25)
    rows = []
    for tokens, width in sizes:
        request.announce(f"N = {tokens}, D = {width}")
        for spread in SPREADS:
            x = probe_inputs(batch, tokens, width, spread)
            for kind, layer in layers.items():
                for c in CONSTANTS:
                    errors = reconstruction_errors(layer, x, c, iterations)
                    rows += [
                        {
                            "attention": LABELS[kind], "N": tokens, "D": width, "spread": spread, "c": c,
                            "iteration": number, "max_error": error,
                        }
                        for number, error in enumerate(errors, start=1)
                    ]  # fmt: skip
    return rows


def _reproduction(request: Request, rows: list[dict[str, Any]], title: str) -> Reproduction:
    last = max(row["iteration"] for row in rows)
    ends = [row for row in rows if row["iteration"] == last]
    wide = [row for row in ends if row["spread"] == SPREADS[-1]]
    solved = {
        name: [row["max_error"] <= _SOLVED * row["spread"] for row in wide if row["attention"] == name]
        for name in LABELS.values()
    }
    worst = {name: max((row["max_error"] for row in wide if row["attention"] == name), default=0.0) for name in solved}
    narrow = max(row["max_error"] for row in ends if row["spread"] == SPREADS[0] and row["attention"] == "dot product")
    got = "; ".join(
        f"{name}: {sum(flags)} of {len(flags)} settings inverted, worst error {worst[name]:.2g}"
        for name, flags in solved.items()
        if flags
    )
    names = [name for name in LABELS.values() if solved[name]]
    sizes = list(dict.fromkeys((row["N"], row["D"]) for row in rows))
    panels = [
        Panel(
            f"{name}\nN = {tokens}, D = {width}" if len(sizes) > 1 else f"{name}\n{title}",
            "fixed point iterations",
            "max reconstruction error",
            [_curve(rows, name, tokens, width, c) for c in CONSTANTS],
            y_scale="log",
        )
        for name in names
        for tokens, width in sizes
    ]
    return Reproduction(
        rows,
        panels,
        got=f"after {last} iterations, tokens in +-{SPREADS[-1]:g}: {got}; "
        f"tokens in +-{SPREADS[0]:g}: dot product {narrow:.2g}",
        holds=None
        if request.scale == "toy"
        else any(solved["tied L2"]) and not any(solved["dot product"]) and all(solved["contractive L2"]),
        notes=(_NOTE, *([_CERTIFIED_NOTE] if solved["contractive L2"] else [])),
    )


def _curve(rows: Sequence[Mapping[str, Any]], name: str, tokens: int, width: int, c: float) -> Series:
    mine = [
        row
        for row in rows
        if (row["attention"], row["N"], row["D"], row["c"], row["spread"]) == (name, tokens, width, c, SPREADS[-1])
    ]
    # An exact inverse has no place on a log axis.
    return Series(f"c = {c}", [row["iteration"] for row in mine], [max(row["max_error"], 1e-9) for row in mine])


def figure_10(request: Request) -> Reproduction:
    """Histograms of inputs and outputs of trained attention."""
    from wellposed.recipes.kim2021.figures_4_9_11_tables_2_3 import trained_attention

    tokens, batch, bins = request.pick(toy=(6, 2, 11), mini=(64, 32, 61), paper=(64, 128, 101))
    rows, panels, ratios = [], [], {}
    for name, kind in (("tied L2", "l2_tied"), ("dot product", "dot_product")):
        layer = trained_attention(request, kind)
        x = probe_inputs(batch, tokens, layer.o_proj.out_features, SPREADS[-1])
        with torch.no_grad():
            y = layer(x)
        ratios[name] = float(y.std() / x.std()), float(y.abs().max() / x.abs().max())
        limit = float(max(x.abs().max(), y.abs().max()))
        centres = torch.linspace(-limit, limit, bins, dtype=torch.float64)
        series = []
        for label, values in (("input", x), ("output", y)):
            counts = torch.histc(values.double(), bins, -limit, limit) / values.numel()
            series.append(Series(label, centres.tolist(), counts.tolist(), "bars"))
            rows += [
                {"attention": name, "values": label, "bin_centre": centre, "share": share}
                for centre, share in zip(centres.tolist(), counts.tolist(), strict=True)
            ]
        panels.append(Panel(name, "value", "share", series))
    got = "; ".join(
        f"{name}: standard deviation of outputs {deviation:.2f} and range {reach:.2f} times that of inputs"
        for name, (deviation, reach) in ratios.items()
    )
    holds = ratios["dot product"][1] > 2 * ratios["tied L2"][1] and ratios["tied L2"][1] <= 2
    return Reproduction(rows, panels, got=got, holds=None if request.scale == "toy" else holds, notes=(_NOTE,))
