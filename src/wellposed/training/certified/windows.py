"""How many words of a text can be replaced where windows of words vote (theory note B15)."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wellposed.attack import Propose, WindowSwaps, in_dtype
from wellposed.tasks.text.tokenizers import cut_windows, encode_windows
from wellposed.training.certified.characters import CharacterEdits
from wellposed.training.certified.words import EditKind, above, most_held
from wellposed.training.folder.model_card import UNKNOWN

_POOL, _STRONGEST = 2048, 12
"""Words whose votes alone are looked at for an attack, and how many of them it tries for a class."""


class WindowBounds:
    r"""What changed words can do to the mean of votes of a text's windows.

    Certified (B15), whatever the classifier is: a window may vote anything in the simplex once a
    word of it is replaced, so k words lower ``sum_j (v_jy - v_jc)`` by at most the sum of the k
    largest ``1 + v_jy - v_jc``. Where a window is one word, k inserted, deleted or replaced words
    remove and add at most k votes each; of longer windows an inserted word shifts all behind it,
    and nothing is certified.

    Args:
        model: a `wellposed.models.WindowsForSequenceClassification`; copied, in float64.
        tokenizer: its own.
        limit: most words of a text.
    """

    reason = ""

    def __init__(self, model: Any, tokenizer: Any, limit: int) -> None:
        self.model: Any = in_dtype(model, torch.float64).eval()
        self.tokenizer, self.limit = tokenizer, limit
        self.words, self.tokens = model.config.window_words, model.config.window_tokens
        self.bounds = self
        many = "any word may go, inserted and deleted ones too"
        shift = "where windows hold several words, which an inserted word shifts: train with"
        self.unread = f"{shift} --certified-windows 1" if self.words > 1 else ""
        self.how = f"votes of windows of {self.words} words" if self.words > 1 else many

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the mean votes of a batch, and the votes of each text, (windows, classes)."""
        votes = self.model.votes(input_ids, attention_mask)
        texts = [each[each.sum(1) > 0] for each in votes]
        return torch.stack([text.mean(0) for text in texts]), texts

    def gains(self, votes: Tensor, label: int) -> Tensor:
        """Return the most that a word of each window adds to another class, (windows, classes)."""
        return 1 + votes[:, label, None] - votes

    def held_edits(
        self, text: tuple[Tensor, Tensor, int], kind: EditKind, most: int, characters: Any
    ) -> int:
        """Return how many edits of a kind, up to ``most``, hold for a text of these votes."""
        del characters
        _, votes, label = text
        others = torch.arange(votes.shape[1]) != label
        margins = (votes[:, label, None] - votes)[:, others]
        ahead, count = margins.sum(0), len(votes)
        if not bool((ahead > 0).all()):
            return -1
        if kind != "words" and self.words > 1:
            return 0
        lost = torch.cat([ahead[None] * 0, margins.sort(0, descending=True).values.cumsum(0)])

        def holds(k: int) -> bool:
            # (removed, added, together): a character may split a word or join two, and move the cut
            reach = 2 * k if kind == "characters" else k
            total = (4 if count >= self.limit else 3) * k if kind == "characters" else 2 * k
            if reach > count - (kind != "words"):
                return False
            pairs = [(d, min(reach, total - d)) for d in range(reach + 1)]
            pairs = [(k, k)] if kind == "words" else pairs
            return all(
                bool((above(lost[removed] + added) < ahead).all()) for removed, added in pairs
            )

        return most_held(holds, most)

    def propose(self, kind: EditKind, ids: Tensor, label: int) -> Propose:
        """Return what an attack tries on a text: one more replaced word, an edit of every kind but
        characters."""
        if kind == "characters":
            return lambda *_: []
        return WindowSwaps(self._votes, self._swaps, ids.view(-1, self.tokens), label)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, window after window."""
        windows = cut_windows(text, self.words, self.limit)
        return torch.tensor(encode_windows(self.tokenizer, [windows], self.tokens)[0])

    def names(self, ids: Tensor) -> list[str]:
        """Return the windows as text."""
        unknown = self.tokenizer.unk_token_id
        left_out = set(self.tokenizer.all_special_ids) - {unknown}
        rows = [[n for n in row if n not in left_out] for row in ids.view(-1, self.tokens).tolist()]
        rows = [self.tokenizer.decode(row) for row in rows]
        return [row.replace(self.tokenizer.unk_token or "\n", UNKNOWN) for row in rows]

    def _votes(self, windows: Tensor) -> Tensor:
        return self.model.votes(windows)[:, 0]

    @cached_property
    def _pool(self) -> Tensor:
        """Single words as windows, for each class the strongest."""
        names = self.tokenizer.batch_decode(
            [[n] for n in range(min(len(self.tokenizer), 4 * _POOL))]
        )
        words = [name.strip() for name in names if name.strip().isalpha()][:_POOL]
        self._known = words
        rows = torch.tensor(encode_windows(self.tokenizer, [words], self.tokens)[0])
        return self._votes(rows.view(-1, self.tokens))

    def _swaps(self, window: Tensor, target: int) -> Tensor:
        """Return the window with each word replaced by the words that speak most for a class; none
        where its text is not known from its tokens."""
        (text,) = self.names(window)
        words = text.split()
        if encode_windows(self.tokenizer, [[" ".join(words)]], self.tokens) != [window.tolist()]:
            return window[:0]
        best = self._pool[:, target].topk(min(_STRONGEST, len(self._pool))).indices.tolist()
        texts = [
            " ".join([*words[:place], self._known[other], *words[place + 1 :]])
            for place in range(len(words))
            for other in best
        ]
        rows = encode_windows(self.tokenizer, [texts], self.tokens)
        return torch.tensor(rows).view(-1, self.tokens)


TextReader: TypeAlias = CharacterEdits | WindowBounds


def read_texts(model: Any, tokenizer: Any, limit: int, *, required: bool = True) -> TextReader:
    """Return what counts the words that may change: of a classifier of windows its votes, else what
    one character and one word can do to a model of words.

    Raises:
        ConfigError, NotLipschitzError: as `CharacterEdits.of`, of any other model.
    """
    if hasattr(model, "votes"):
        return WindowBounds(model, tokenizer, limit)
    return CharacterEdits.of(model, tokenizer, limit, required=required)
