"""Isomap of tokens, layer by layer: the data of Figure 4."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from wellposed_lab.charts import Row


def isomap(
    states: Sequence[Tensor], tokens: Sequence[str], *, chosen: Sequence[str], neighbors: int = 5
) -> list[Row]:
    """Place the tokens of one sequence in a plane, by the distances along their neighbour graph.

    Status: empirical, a picture (Figure 4). Each layer is fitted alone, then turned and mirrored,
    never scaled, onto the one before, so that moves between pictures are moves in the model.
    Source: Tenenbaum, de Silva and Langford (2000), by scikit-learn.

    Args:
        states: ``(x_0, ..., x_L)``, each (1, tokens, width).
        tokens: the text of every token; those in ``chosen`` are marked.
        neighbors: edges of the graph from each token.

    Raises:
        ValueError: from scikit-learn, if a state is not finite or ``neighbors`` does not fit.
    """
    from scipy.linalg import orthogonal_procrustes
    from sklearn.manifold import Isomap

    rows: list[Row] = []
    before = None
    for layer, state in enumerate(states):
        fitted = Isomap(n_neighbors=neighbors, n_components=2)
        plane = fitted.fit_transform(state[0].double().numpy())
        plane = plane - plane.mean(0)
        if before is not None:
            plane = plane @ orthogonal_procrustes(plane, before)[0]
        rows += [
            {
                "layer": layer,
                "position": at,
                "token": token,
                "chosen": token in chosen,
                "x": x,
                "y": y,
            }
            for at, (token, (x, y)) in enumerate(zip(tokens, plane.tolist(), strict=True))
        ]
        before = plane
    return rows
