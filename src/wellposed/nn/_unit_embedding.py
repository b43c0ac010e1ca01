"""Token vectors of norm 1, whatever the optimizer does to the table."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map token ids (...) to (..., D)."""
        rows = super().forward(input)
        return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)
