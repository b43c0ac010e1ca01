"""Token and position vectors, and the checks on what comes in."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from wellposed.errors import ShapeError
from wellposed.initialize import t_fixup_decoder_factor, t_fixup_factor
from wellposed.nn import POSITIONS, SinusoidalPositions, check_length
from wellposed.nn.plain import on_host


class Embeddings(nn.Module):
    """`x_i = s (E[token_i] + P[position_i])` with `s = sqrt(D)` or 1, then dropout.

    Exact. Vaswani et al. (2017), sec. 3.4 and 3.5: sines are added with entries of size one after the factor, as there.
    `position_scale` is a further factor on sines; see `WellposedConfig`.

    Args:
        config: what the model is made of.
        own_tokens: whether it holds a table of tokens; otherwise one is handed to every call.
        position_scale: the factor on sines.

    >>> from wellposed.models import WellposedConfig
    >>> embeddings = Embeddings(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> embeddings(torch.tensor([[5, 6]]), torch.tensor([[0, 1]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(self, config: Any, *, own_tokens: bool = True, position_scale: float = 1.0) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size) if own_tokens else None
        self.position = POSITIONS.get(config.position)(config)
        if isinstance(self.position, SinusoidalPositions):
            self.position.rescale(position_scale)
        self.scale = math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        *,
        table: nn.Module | None = None,
    ) -> Tensor:
        """Map token ids (batch, tokens), or their vectors (batch, tokens, D), to the input of the first block."""
        tokens = cast(nn.Module, table or self.token)(input_ids) if inputs_embeds is None else inputs_embeds
        return self.dropout(torch.add(self.scale * self.position(positions), tokens, alpha=self.scale))


class Given(NamedTuple):
    """What a caller gave to one side of a model."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    names: tuple[str, str] = ("input_ids", "inputs_embeds")
    """What the caller knows the first two as."""


def position_scale(config: Any, stack: str) -> float:
    """Return the factor on sinusoidal positions; under T-Fixup, unless given, that of the stack's token embeddings."""
    if config.position_scale is not None:
        return float(config.position_scale)
    if config.init != "t_fixup":
        return 1.0
    if not config.is_encoder_decoder:
        return t_fixup_factor(2 * config.num_hidden_layers)
    # one table of tokens for both sides is scaled once, by the depth of the encoder
    own = stack == "decoder" and not config.share_embeddings
    return t_fixup_decoder_factor(config.decoder_depth if own else config.num_hidden_layers)


def check_tokens(input_ids: Tensor, vocab_size: int, *, name: str = "input_ids") -> None:
    """Raise `ShapeError` where ids are not integers (batch, tokens) or, on the CPU, lie outside the vocabulary.

    >>> check_tokens(torch.tensor([[1, 9]]), 5)
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: input_ids: received token 9 at row 0, position 1; expected tokens in [0, 5); use the \
tokenizer that the model was built for, or call model.resize_token_embeddings
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ShapeError(
            f"{name}: received shape {tuple(input_ids.shape)}; expected (batch, tokens), neither of them 0"
        )
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"{name}: received {input_ids.dtype}; expected token ids in torch.int64 or torch.int32")
    if not on_host(input_ids):
        return
    least, largest = torch.aminmax(input_ids)
    if least < 0 or largest >= vocab_size:
        row, column = ((input_ids < 0) | (input_ids >= vocab_size)).nonzero()[0].tolist()
        raise ShapeError(
            f"{name}: received token {int(input_ids[row, column])} at row {row}, position {column}; expected tokens "
            f"in [0, {vocab_size}); use the tokenizer that the model was built for, or call "
            "model.resize_token_embeddings"
        )


def padding_of(attention_mask: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    """Return the key padding mask, True = padding, of an attention mask with 1 = real; None where all tokens are real.

    On an accelerator a mask is always made, since looking for padding would make it wait.

    >>> padding_of(torch.tensor([[1, 1, 0]]), 1, 3)
    tensor([[False, False,  True]])
    >>> padding_of(torch.ones(1, 3), 1, 3) is None
    True
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, num_keys):
        raise ShapeError(
            f"attention_mask: received shape {tuple(attention_mask.shape)}; expected {(batch, num_keys)}: one entry "
            "per token, cached tokens included, 1 = real and 0 = padding"
        )
    if on_host(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask == 0


def positions_of(key_padding_mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return the positions of the last `num_queries` tokens, counted over real tokens only.

    So a sequence has the same positions whatever padding stands before, behind or between its tokens.

    >>> positions_of(torch.tensor([[True, False, False]]), 3, 3, torch.device("cpu")).tolist()
    [[0, 0, 1]]
    """
    if key_padding_mask is None:
        return torch.arange(num_keys - num_queries, num_keys, device=device)[None]
    counted = (~key_padding_mask).cumsum(dim=1)[:, num_keys - num_queries :]
    return (counted - 1).clamp(min=0)


def check_positions(positions: Tensor, num_keys: int, num_positions: int, *, given: bool, where: str) -> None:
    """Raise `ShapeError` where a position is outside the table.

    The number of keys bounds every position that we counted, so values are read only where that bound does not settle
    it, or where the caller gave the positions.
    """
    if given:
        if on_host(positions) and positions.numel() and int(positions.min()) < 0:
            raise ShapeError(f"{where}: received position_ids below 0; expected positions in [0, {num_positions})")
        if on_host(positions):
            check_length(int(positions.max()) + 1, num_positions, where)
    elif num_keys > num_positions:
        length = num_keys if torch.compiler.is_compiling() else int(positions.max()) + 1
        check_length(length, num_positions, where)
