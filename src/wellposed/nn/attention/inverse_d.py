"""Attention whose logits are divided by the width of a head, and its output by three."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn._registry import ATTENTIONS
from wellposed.nn.attention.heads import SelfAttention
from wellposed.nn.positions import rotate_by_position


class InverseDAttention(SelfAttention):
    r"""Per head, `softmax(q k^T / d) v / 3`, q and k rotated by position; the heads are joined by
    `W_o`. No bias.

    On tokens of root mean square 1 and with one head it is 1-Lipschitz in the largest root mean
    square of a token, where `W_q, W_k, W_v, W_o` are; with H heads it is not: the constant may
    reach `(1 + H)/3` (theory note B7). `wellposed.certify` measures the weights and counts the
    heads (B5, certified, on a ball). Large et al. (2024), "Scalable optimization in the modular
    norm"; Newhouse et al. (2025), "Training Transformers with Enforced Lipschitz Constants", sec.
    4.

    Args:
        embed_dim: width D of a token.
        num_heads: number of heads; divides D. Each head has dimension d = D / num_heads, which is
        even.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`, or the width of a head is odd.

    Cost: as `DotProductAttention`.
    When not to use: where a constant is wanted on all inputs; take `BallAttention`.

    >>> import torch
    >>> attention = InverseDAttention(8, 2)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads, bias=False)
        if self.head_dim % 2:
            raise ShapeError(
                f"InverseDAttention: heads of width {self.head_dim}; expected an even width, whose"
                " entries make pairs to rotate; change embed_dim or num_heads"
            )

    def _weighted(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        seen = key.shape[-2] - query.shape[-2]
        query, key, value = rotate_by_position(query, seen), rotate_by_position(key), value / 3
        scale = 1 / self.head_dim
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale
        )

    def extra_repr(self) -> str:
        """Everything that is not seen from the projections."""
        return f"num_heads={self.num_heads}"


@ATTENTIONS.register("inverse_d")
def build_inverse_d(config: Any) -> InverseDAttention:
    """Build attention with logits over d."""
    if config.attention_dropout or config.qk_norm:
        raise ConfigError(
            f"attention 'inverse_d' with attention_dropout={config.attention_dropout} and"
            f" qk_norm={config.qk_norm}: it drops no weights and normalises nothing; leave them 0"
            " and False"
        )
    return InverseDAttention(config.hidden_size, config.num_attention_heads)
