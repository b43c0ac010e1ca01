"""What a caller gives to a model: tokens or vectors, masks and positions, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.nn.checks import INTEGERS, on_host
from wellposed.nn.positions import check_length


class ModelInputs(NamedTuple):
    """What a caller gave to one side of a model."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    names: tuple[str, str] = ("input_ids", "inputs_embeds")
    """What the caller knows the first two as."""


def check_inputs(given: ModelInputs, config: Any, where: str, *, note: str = "") -> Tensor:
    """Return the token ids or the vectors, whichever a caller of ``where`` gave.

    Args:
        given: what the caller gave.
        config: its `vocab_size` and `hidden_size` are what tokens and vectors must fit.
        where: class that was called.
        note: what the vectors are, for the message.

    Raises:
        ShapeError: neither or both, tokens that are not integers or (on the CPU) outside the
            vocabulary, or vectors of another shape or not floating.
    """
    input_ids, inputs_embeds = given.input_ids, given.inputs_embeds
    name, other = given.names
    if (input_ids is None) == (inputs_embeds is None):
        received = "neither" if input_ids is None else "both"
        raise ShapeError(f"{where}: received {received} of {name} and {other}; give one")
    if input_ids is not None:
        check_tokens(input_ids, config.vocab_size, name=name)
        return input_ids
    vectors = cast(Tensor, inputs_embeds)
    if vectors.dim() != 3 or vectors.shape[-1] != config.hidden_size:
        raise ShapeError(
            f"{other}: received shape {tuple(vectors.shape)}; expected (batch, tokens,"
            f" {config.hidden_size}){note}"
        )
    if not vectors.is_floating_point():
        raise ShapeError(f"{other}: received {vectors.dtype}; expected floating vectors{note}")
    return vectors


def check_tokens(input_ids: Tensor, vocab_size: int, *, name: str = "input_ids") -> None:
    """Raise `ShapeError` where ids are not integers (batch, tokens) or, on the CPU, lie outside the
    vocabulary.

    >>> check_tokens(torch.tensor([[1, 9]]), 5)
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: input_ids: received token 9 at row 0, position 1; expected tokens
    in [0, 5); use the \
tokenizer that the model was built for, or call model.resize_token_embeddings
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ShapeError(
            f"{name}: received shape {tuple(input_ids.shape)}; expected (batch, tokens), neither of"
            " them 0"
        )
    if input_ids.dtype not in INTEGERS:
        raise ShapeError(
            f"{name}: received {input_ids.dtype}; expected token ids in torch.int64 or torch.int32"
        )
    if not on_host(input_ids):
        return
    least, largest = torch.aminmax(input_ids)
    if least < 0 or largest >= vocab_size:
        row, column = ((input_ids < 0) | (input_ids >= vocab_size)).nonzero()[0].tolist()
        raise ShapeError(
            f"{name}: received token {int(input_ids[row, column])} at row {row}, position {column};"
            f" expected tokens in [0, {vocab_size}); use the tokenizer that the model was built"
            " for, or call model.resize_token_embeddings"
        )


def padding_of(attention_mask: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    """Return the key padding mask, True = padding, of an attention mask with 1 = real; None where
    all tokens are real.

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
            f"attention_mask: received shape {tuple(attention_mask.shape)}; expected"
            f" {(batch, num_keys)}: one entry per token, cached tokens included, 1 = real and 0 ="
            " padding"
        )
    if on_host(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask == 0


def positions_of(
    key_padding_mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return the positions of the last `num_queries` tokens, counted over real tokens only.

    So a sequence has the same positions whatever padding stands before, behind or between its
    tokens.

    >>> positions_of(torch.tensor([[True, False, False]]), 3, 3, torch.device("cpu")).tolist()
    [[0, 0, 1]]
    """
    if key_padding_mask is None:
        return torch.arange(num_keys - num_queries, num_keys, device=device)[None]
    counted = (~key_padding_mask).cumsum(dim=1)[:, num_keys - num_queries :]
    return (counted - 1).clamp(min=0)


def check_positions(
    positions: Tensor,
    tokens: tuple[int, int],
    num_keys: int,
    num_positions: int | None,
    *,
    given: bool,
    where: str,
) -> None:
    """Raise `ShapeError` where positions are no integers (batch | 1, tokens) or outside the table.

    The number of keys bounds every position that we counted, so values are read only where that
    bound does not settle it, or where the caller gave the positions.
    """
    batch, length = tokens
    if given and (
        positions.dtype not in INTEGERS
        or tuple(positions.shape) not in ((batch, length), (1, length))
    ):
        raise ShapeError(
            f"{where}: received position_ids in {positions.dtype} of shape"
            f" {tuple(positions.shape)}; expected torch.int64 or torch.int32, ({batch} or 1,"
            f" {length})"
        )
    if num_positions is None:
        return
    if given:
        if on_host(positions) and positions.numel() and int(positions.min()) < 0:
            raise ShapeError(
                f"{where}: received position_ids below 0; expected positions in [0,"
                f" {num_positions})"
            )
        if on_host(positions):
            check_length(int(positions.max()) + 1, num_positions, where)
    elif num_keys > num_positions:
        length = num_keys if torch.compiler.is_compiling() else int(positions.max()) + 1
        check_length(length, num_positions, where)
