"""Tokens in a ball: the projection onto it, and token vectors of norm 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.nn.checks import Part, check_tokens, checked_arguments, read_table
from wellposed.options import Positive, Size


def project_to_ball(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return ``pi(x) = x / max(1, |x| / radius)`` of each token, the nearest point of the ball.

    Computed in float32 at least; rounded to the dtype of ``x`` it may lie outside by a unit in the
    last place. A token whose square overflows (longer than 1e19 in float32) goes to zero.

    Args:
        x: (..., D).
        radius: > 0.

    >>> project_to_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    return (x * (radius / length.clamp_min(radius))).to(x.dtype)


class BallProjection(Part):
    r"""`pi(x) = x / max(1, |x| / R)` of each token: `|pi(x) - pi(y)| <= |x - y|` and
    `|pi(x)| <= R`.

    Exact up to rounding: the projection onto a closed convex set. 1-Lipschitz in norms tok and 2;
    in norm inf the constant is `(1 + sqrt D) / 2`, which is attained (theory note B12).

    Args:
        embed_dim: width D of a token.
        radius: R, finite and > 0.

    Raises:
        ConfigError: another width or radius. In `forward`, ShapeError: tokens of another width.

    Cost: one norm and one product for each token.
    When not to use: behind tokens that are inside the ball already; and it keeps directions only of
    those outside.

    >>> BallProjection(2)(torch.tensor([[0.0, 2.0]])).tolist()
    [[0.0, 1.0]]
    """

    shown = ("embed_dim", "radius")

    def __init__(self, embed_dim: Size, *, radius: Positive = 1.0) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.radius = float(radius)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape."""
        check_tokens(self, x, self.embed_dim)
        return project_to_ball(x, self.radius)


class BallEmbedding(nn.Embedding):
    r"""`v -> E_v / sqrt(1 + |E_v|^2)`: every token vector lies in the open unit ball, and words
    that say nothing may be short.

    Exact up to rounding, at the call: the table `weight` stays a plain parameter, whose rows may
    have any length, with a gradient along it everywhere. Exchanging one word for another moves one
    token by less than 2, and a short one by less than 1 plus its length (theory note B14).

    Args:
        num_embeddings: number of tokens.
        embedding_dim: width D.
        padding_idx, ...: everything that `torch.nn.Embedding` takes.

    Cost: a lookup and one norm for each token.
    When not to use: where every word should weigh the same: `UnitEmbedding`.

    >>> embedding = BallEmbedding(10, 4)
    >>> bool((embedding(torch.tensor([3, 7])).norm(dim=-1) < 1).all())
    True
    """

    __init__ = checked_arguments(nn.Embedding.__init__, num_embeddings=Size, embedding_dim=Size)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map token ids (...) to (..., D)."""
        rows = read_table(self, input, self.num_embeddings, super().forward)
        return rows * (1 + rows.square().sum(-1, keepdim=True)).rsqrt()


class UnitEmbedding(nn.Embedding):
    r"""`v -> E_v / |E_v|`: every token vector has norm 1, so no word is far from, or close to,
    zero.

    Exact up to rounding, at the call: the table `weight` stays a plain parameter, and a step along
    a row changes nothing. A certificate speaks of the embedded tokens, which lie in a ball of
    radius 1; exchanging one word for another moves one token by 2 at most (theory note B12). A row
    of zeros, as that of `padding_idx`, stays zero.

    Args:
        num_embeddings: number of tokens.
        embedding_dim: width D.
        padding_idx, ...: everything that `torch.nn.Embedding` takes.

    Cost: a lookup and one norm for each token.
    When not to use: where the length of a word vector should carry its importance.

    >>> embedding = UnitEmbedding(10, 4)
    >>> bool(torch.allclose(embedding(torch.tensor([3, 7])).norm(dim=-1), torch.ones(2)))
    True
    """

    __init__ = checked_arguments(nn.Embedding.__init__, num_embeddings=Size, embedding_dim=Size)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map token ids (...) to (..., D)."""
        rows = read_table(self, input, self.num_embeddings, super().forward)
        return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)
