"""Token and position vectors."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.initialize import t_fixup_decoder_factor, t_fixup_factor
from wellposed.nn import POSITIONS, SinusoidalPositions, UnitEmbedding


class Embeddings(nn.Module):
    """`x_i = s (E[token_i] + P[position_i])` with `s = sqrt(D)` or 1, then dropout; E of norm 1
    with `unit_embeddings`.

    Exact. Vaswani et al. (2017), sec. 3.4 and 3.5: sines are added with entries of size one after
    the factor, as there. `position_scale` is a further factor on sines; see `WellposedConfig`.

    Args:
        config: what the model is made of.
        own_tokens: whether it holds a table of tokens; otherwise one is handed to every call.
        position_scale: the factor on sines.

    >>> from wellposed.models import WellposedConfig
    >>> embeddings = Embeddings(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> embeddings(torch.tensor([[5, 6]]), torch.tensor([[0, 1]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self, config: Any, *, own_tokens: bool = True, position_scale: float = 1.0
    ) -> None:
        super().__init__()
        table = UnitEmbedding if config.unit_embeddings else nn.Embedding
        self.token = table(config.vocab_size, config.hidden_size) if own_tokens else None
        self.position = POSITIONS.get(config.position)(config)
        if isinstance(self.position, SinusoidalPositions):
            self.position.rescale(position_scale)
        self.scale = (
            math.sqrt(config.hidden_size)
            if config.scale_embeddings and not config.unit_embeddings
            else 1.0
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        *,
        table: nn.Module | None = None,
    ) -> Tensor:
        """Map token ids (batch, tokens), or their vectors (batch, tokens, D), to the input of the
        first block."""
        tokens = (
            cast(nn.Module, table or self.token)(input_ids)
            if inputs_embeds is None
            else inputs_embeds
        )
        return self.dropout(
            torch.add(self.scale * self.position(positions), tokens, alpha=self.scale)
        )


def position_scale(config: Any, stack: str) -> float:
    """Return the factor on sinusoidal positions; under T-Fixup, unless given, that of the stack's
    token embeddings."""
    if config.position_scale is not None:
        return float(config.position_scale)
    if config.init != "t_fixup":
        return 1.0
    if not config.is_encoder_decoder:
        return t_fixup_factor(2 * config.num_hidden_layers)
    # one table of tokens for both sides is scaled once, by the depth of the encoder
    own = stack == "decoder" and not config.share_embeddings
    return t_fixup_decoder_factor(config.decoder_depth if own else config.num_hidden_layers)
