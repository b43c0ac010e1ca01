"""McGrath (2024), equation 3: what err_orth measures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.functional import orthogonality_error
from wellposed.linalg import nearest_orthogonal
from wellposed_lab.charts import where
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.study import log_panel, proved, spanned, sweep
from wellposed_studies.verdicts import decided

_WAYS = ("to orthogonal", "to 0")


@recipe("mcgrath2024/equation-3")
def equation_3(request: Request) -> Reproduction:
    """Err_orth beside the distance from the orthogonal matrices, on the way to the nearest one and
    while a matrix shrinks.

    Claim: err_orth measures the orthogonality of any matrix, so that a fall over training, as in
        figure 3, shows a matrix on its way to orthogonal ones.
    Quote: "This measure then allows for us to measure the orthogonality of any input matrix"
        (section 4.3).
    Test: on two ways, straight to the nearest orthogonal matrix and straight to 0, err_orth falls
        or rises with the distance from the nearest orthogonal matrix at every step of every draw.
        Against the claim if on one of them it moves the other way at every draw.
    Note: 30 % of noise on an orthogonal matrix. Err_orth is of second order in the scale, so decay
        of weights alone lowers it. Figure 3 cannot distinguish this from a rotation, so our figure
        3 has the scale-free form too.
    """
    widths, seeds = request.effort("mcgrath2024/equation-3")

    def measure(way: str, width: int) -> dict[str, float]:
        noise = torch.randn(2, width, width, dtype=torch.float64)
        a = nearest_orthogonal(noise[0]) + 0.3 / math.sqrt(width) * noise[1]
        end = nearest_orthogonal(a) if way == "to orthogonal" else torch.zeros_like(a)
        passed = [torch.lerp(a, end, share) for share in (0.0, 0.2, 0.4, 0.6, 0.8)]
        errors, away = (
            torch.tensor([float(measure(matrix)) for matrix in passed])
            for measure in (orthogonality_error, _away)
        )
        steps = errors.diff() * away.diff()
        ends = {
            "error_ratio": float(errors[-1] / errors[0]),
            "away_ratio": float(away[-1] / away[0]),
        }

        return {**ends, "with": float((steps > 0).double().mean())}

    rows = sweep(measure, way=_WAYS, width=widths, seed=range(seeds))
    of_ways = {way: where(rows, way=way) for way in _WAYS}
    texts = []
    for way, mine in of_ways.items():
        away, error = (
            spanned([row[column] for row in mine]) for column in ("away_ratio", "error_ratio")
        )
        texts.append(f"{way}: distance times {away}, err_orth times {error}")
    panels = [
        log_panel(way, rows, "width", "error_ratio", by="seed") for way, rows in of_ways.items()
    ]
    holds = judge_equation_3([[row["with"] for row in mine] for mine in of_ways.values()])
    return proved(rows, "; ".join(texts), holds, *panels, seeds=seeds)


def judge_equation_3(moved: list[list[float]]) -> bool | None:
    with_it = all(min(shares) == 1 for shares in moved)
    against = any(max(shares) == 0 for shares in moved)
    return decided(holds=with_it, against=against)


def _away(a: Tensor) -> float:
    """Return the root mean square of singular values minus 1."""
    return float((torch.linalg.svdvals(a) - 1).square().mean().sqrt())
