"""Isomap of tokens, layer by layer: the data of sengupta2023's Figure 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ShapeError, missing_extra
from wellposed.measurement._measurement import write_csv
from wellposed.measurement._states import States, checked_mask, read_states, refuse_non_finite
from wellposed.options import Size

COLUMNS: tuple[str, ...] = ("layer", "position", "token", "chosen", "x", "y")


@dataclass(frozen=True)
class IsomapPoints:
    """One row per layer and token: ``layer``, ``position``, ``token``, ``chosen``, ``x``, ``y``."""

    rows: list[dict[str, Any]]
    residual_variance: list[float]
    """For each layer, 1 - r^2 between geodesic and drawn distances: what the plane could not show.
    NaN where all geodesic distances are equal (an equilateral triangle), which correlate with
    nothing."""

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows as CSV."""
        return write_csv(Path(path), COLUMNS, self.rows)


@checked_arguments
def isomap(
    states: States, tokens: Sequence[str], *, chosen: Sequence[str] = (), neighbors: Size = 5
) -> IsomapPoints:
    """Place the tokens of one sequence in a plane so that distances along their neighbourhood graph
    are kept.

    Status: empirical, a picture. Each layer is fitted alone, then turned (and mirrored, never
    scaled) onto the layer before it, so that what moves between two pictures moved in the model.
    Source: Tenenbaum, de Silva and Langford (2000), by scikit-learn; Sengupta et al. (2023, Figure
    4).

    Args:
        states: ``(x_0, ..., x_L)``, each (1, tokens, width), or a model output with
            ``hidden_states``.
        tokens: the text of every token, without padding: as many as the states hold.
        chosen: texts of the tokens to mark, each of which must occur.
        neighbors: edges of the graph from each token.

    Returns:
        `IsomapPoints`.

    Raises:
        ConfigError: scikit-learn is not installed; ``neighbors`` does not fit; a chosen token that
            does not occur; a state in which all tokens are equal. ShapeError: more than one
            sequence,
        fewer than three tokens, or another number of names. ConvergenceError: NaN or infinity.

    Cost: ``tokens^3`` for each layer. When not to use: for numbers; `activation_factor` and
    `token_distances` are.

    >>> x = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0))
    >>> len(isomap([x, 2 * x], list("abcdefgh"), chosen=["a"], neighbors=4).rows)
    16
    """
    try:
        from sklearn.manifold import Isomap
    except ImportError as error:
        raise missing_extra("scikit-learn", "train", "Isomap plots") from error
    found = read_states(states)
    if found[0].shape[:2] != (1, len(tokens)) or len(tokens) < 3:
        raise ShapeError(
            f"isomap: the states hold {found[0].shape[0]} sequences of {found[0].shape[1]} tokens"
            f" and {len(tokens)} names were given; expected one sequence of at least three tokens,"
            " without padding, and a name for each"
        )
    if neighbors >= len(tokens):
        expected = f"expected at most {len(tokens) - 1} with {len(tokens)} tokens"
        raise ConfigError(f"isomap: neighbors = {neighbors}, {expected}")
    absent = [token for token in chosen if token not in tokens]
    if absent:
        problem = f"isomap: chosen tokens {absent} do not occur"
        raise ConfigError(f"{problem}; the tokens are {list(tokens)}")
    refuse_non_finite(found, checked_mask(None, found[0]), "isomap")
    collapsed = [index for index, state in enumerate(found) if bool((state == state[:, :1]).all())]
    if collapsed:
        problem = f"isomap: all tokens are equal in states {collapsed}, so there is nothing to draw"
        raise ConfigError(f"{problem}; leave these states out")
    rows: list[dict[str, Any]] = []
    residual: list[float] = []
    before: Tensor | None = None
    for layer, state in enumerate(found):
        fitted = Isomap(n_neighbors=neighbors, n_components=2)
        plane = torch.as_tensor(fitted.fit_transform(state[0].double().cpu().numpy()))
        plane = plane - plane.mean(0)
        if before is not None:  # Procrustes: the orthogonal map that brings it nearest to the last
            left, _, right = torch.linalg.svd(plane.mT @ before)
            plane = plane @ left @ right
        residual.append(_residual(torch.as_tensor(fitted.dist_matrix_), plane))
        rows += [
            dict(zip(COLUMNS, (layer, index, token, token in chosen, x, y), strict=True))
            for index, (token, (x, y)) in enumerate(zip(tokens, plane.tolist(), strict=True))
        ]
        before = plane
    return IsomapPoints(rows, residual)


def _residual(geodesic: Tensor, plane: Tensor) -> float:
    drawn = torch.cdist(plane, plane)
    rows, columns = torch.triu_indices(*drawn.shape, offset=1)
    pair = torch.stack([geodesic[rows, columns].double(), drawn[rows, columns]])
    if bool((pair[0] == pair[0, 0]).all()):
        return math.nan
    return 1.0 - torch.corrcoef(pair)[0, 1].item() ** 2
