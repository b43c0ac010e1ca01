"""Every token but the first is predicted exactly once, for any length, block size and offset."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.refusal import bad_config, bad_data

from wellposed.tasks.kinds.language_model import BlockDataset, BlockLengths, LineDataset


@settings(max_examples=150, deadline=None)
@given(total=st.integers(2, 80), seq_len=st.integers(2, 20), data=st.data())
def test_each_token_is_predicted_once_after_its_own_predecessor(
    total: int, seq_len: int, data: st.DataObject
) -> None:
    blocks = BlockDataset(np.arange(total), seq_len=seq_len, where="text")
    offset = data.draw(st.integers(0, blocks.num_offsets - 1))
    predicted: list[int] = []
    for index in blocks.indices(offset):
        tokens = blocks[index]["input_ids"]
        assert 2 <= len(tokens) <= seq_len
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        predicted += tokens[1:]
    assert predicted == list(range(1, total))


@settings(max_examples=50, deadline=None)
@given(total=st.integers(2, 60), seq_len=st.integers(2, 12))
def test_indices_of_different_offsets_are_different_and_outsiders_are_refused(
    total: int, seq_len: int
) -> None:
    blocks = BlockDataset(np.arange(total), seq_len=seq_len, where="text")
    assert blocks.indices(0) == list(range(len(blocks)))
    every = [index for offset in range(blocks.num_offsets) for index in blocks.indices(offset)]
    assert len(every) == len(set(every))
    for index in set(range(max(every) + 2 * seq_len)) - set(every):
        with pytest.raises(IndexError):
            blocks[index]


def test_sequence_behaviour() -> None:
    blocks = BlockDataset(np.arange(10), seq_len=4, where="text")
    assert len(blocks) == 3
    assert blocks[-1] == blocks[2]
    assert blocks[1:] == [blocks[1], blocks[2]]
    assert list(BlockLengths(blocks)) == [len(block["input_ids"]) for block in blocks]
    assert BlockLengths(blocks)[1:] == [4, 4]
    assert BlockLengths(blocks)[-1] == 4


def test_too_short_text_and_block_are_refused() -> None:
    with bad_data(match=r"valid\.txt: 1 tokens, expected at least 2"):
        BlockDataset(np.arange(1), seq_len=4, where="valid.txt")
    with bad_config(match="seq_len = 1"):
        BlockDataset(np.arange(9), seq_len=1, where="valid.txt")


@pytest.mark.parametrize("text", ["ab\ncde\n\nf", "\n\n", "abcdefgh", "\na\nbcdefghi\n", "ab"])
@pytest.mark.parametrize("seq_len", [2, 3, 5, 50])
def test_every_token_but_the_first_is_predicted_once_within_its_line(
    text: str, seq_len: int
) -> None:
    tokens = np.array([ord(character) for character in text])
    lines = LineDataset(tokens, line_feed=ord("\n"), seq_len=seq_len, where="text")
    rows = [line["input_ids"] for line in lines]
    assert all(2 <= len(row) <= seq_len for row in rows)
    assert [token for row in rows for token in row[1:]] == tokens[1:].tolist()
    assert all(ord("\n") not in row[1:-1] for row in rows), "no line reaches into the next"
    if seq_len == 50:
        assert len(rows) == sum(
            len(line) > (number == 0) for number, line in enumerate(text.splitlines(keepends=True))
        )
    assert list(BlockLengths(lines)) == list(map(len, rows))
    assert (lines.num_offsets, lines.indices(0)) == (1, list(range(len(rows))))
