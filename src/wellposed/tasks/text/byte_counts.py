"""How many UTF-8 bytes of a text each token of any tokenizer stands for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Ragged
from wellposed.tasks.text.tokenizers import Encoded, TextEncoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE = 1_000_000
"""Characters that are cut into tokens at once; a longer text is cut at line ends."""


def encode_with_bytes(encoder: TextEncoder, text: str) -> Encoded:
    """Return the tokens of ``text`` without special ones, and bytes per token that sum to those of
    the text.

    A token stands for what lies between the end of the tokens before it and its own end, white
    space that the tokenizer skips included; of the tokens of one character the first stands for all
    its bytes, the last token for the rest of the text.

    Raises:
        ConfigError: the tokenizer does not say where in a text its tokens are.
    """
    tokenizer: Any = encoder.tokenizer(max_length=PIECE)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer {encoder.kind!r} does not say where in a text its tokens are, so bytes"
            " cannot be counted; give a folder that holds tokenizer.json"
        )
    ids: list[NDArray[np.integer]] = []
    sizes: list[NDArray[np.integer]] = []
    for piece in cut_lines(text, PIECE):
        found = tokenizer(
            piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ends = np.fromiter(
            (end for _, end in found["offset_mapping"]), np.int64, len(found["input_ids"])
        )
        ids.append(np.array(found["input_ids"], np.int32))
        sizes.append(_bytes_up_to(piece, ends))
    tokens = np.concatenate(ids)
    counts = (
        {tokenizer.unk_token: int((tokens == tokenizer.unk_token_id).sum())}
        if _has_unknown(tokenizer)
        else {}
    )
    unknown = {piece: count for piece, count in counts.items() if count}
    return Encoded(Ragged(tokens, [len(tokens)]), [len(tokens)], unknown, np.concatenate(sizes))


def cut_lines(text: str, size: int) -> list[str]:
    """Return parts of ``text`` of about ``size`` characters, cut at line ends.

    >>> cut_lines("one\\ntwo\\nthree", 5)
    ['one\\ntwo\\n', 'three']
    """
    lines = text.splitlines(keepends=True) if len(text) > size else [text]
    starts = itertools.accumulate(map(len, lines), initial=0)
    groups = itertools.groupby(zip(starts, lines, strict=False), key=lambda pair: pair[0] // size)
    return ["".join(line for _, line in group) for _, group in groups]


def _bytes_up_to(text: str, ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return bytes per token from the character that each token ends before."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + sum((points >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    bytes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
    reached = bytes_before[np.maximum.accumulate(ends)]
    reached[-1:] = bytes_before[-1]
    return np.diff(reached, prepend=0).astype(np.int32)


def _has_unknown(tokenizer: Any) -> bool:
    return tokenizer.unk_token_id is not None and tokenizer.unk_token_id != tokenizer.eos_token_id
