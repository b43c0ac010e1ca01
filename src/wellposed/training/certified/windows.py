"""How much of a text can change where windows of words vote (theory note B15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.attack import Propose, WindowSwaps, in_dtype
from wellposed.errors import ConfigError
from wellposed.head_kind import check_single_label
from wellposed.tasks.text.tokenizers import split_words
from wellposed.tasks.text.windows import encode_words
from wellposed.training.certified.characters import CharacterEdits
from wellposed.training.certified.words import (
    ROUNDING,
    EditKind,
    held_by_sorting,
    most_held,
)
from wellposed.training.folder.model_card import UNKNOWN

_POOL, _STRONGEST, _TRIES = 2048, 12, 4
"""Words whose votes alone are looked at for an attack, how many of them it tries for a class, and in
how many windows it tries them."""


class WindowBounds:
    r"""What changed words can do to the mean of votes of a text's windows.

    Certified (B15), whatever the classifier is: a window may vote anything between 0 and 1 for each
    class once a word of it is replaced, so k words lower ``sum_j (v_jy - v_jc)`` by at most the sum
    of the k largest ``1 + v_jy - v_jc``. Inserted and deleted words shift the windows behind them,
    whose votes are read too (`least_sums`).

    Args:
        model: a `wellposed.models.WindowsForSequenceClassification`; copied, in float64.
        tokenizer: its own.
        limit: most words of a text.
    """

    reason = unread = ""

    def __init__(self, model: Any, tokenizer: Any, limit: int) -> None:
        self.model: Any = in_dtype(model, torch.float64).eval()
        self.tokenizer, self.limit = tokenizer, limit
        self.tokens = model.config.word_tokens
        self.words = model.config.window_words
        self.bounds, self.shifts = self, self.words > 1
        self.how = f"votes of windows of {self.words} words, any string in the place of a word"

    def read(
        self, input_ids: Tensor, attention_mask: Tensor, *, shifted: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean votes of a batch, and the votes of each text, (windows, classes): of the
        windows that begin at each of its words where ``shifted``."""
        votes = self.model.votes(input_ids, attention_mask, every=shifted)
        texts = [each[each.sum(1) != 0] for each in votes]
        return torch.stack([text.mean(0) for text in texts]), texts

    def gains(self, label: int, votes: Tensor) -> Tensor:
        """Return the most that a word of each window adds to another class, (..., windows, classes)."""
        return 1 + votes[..., label, None] - votes

    def held_words(
        self, logits: Tensor, texts: Sequence[Tensor], labels: Sequence[int], most: int
    ) -> list[int]:
        """Return how many replaced words, up to ``most``, hold for each text; -1 where the answer
        is not the label."""
        return held_by_sorting(self, logits, texts, labels, most)

    def held_edits(
        self, text: tuple[Tensor, Tensor, int], kind: EditKind, most: int, characters: Any
    ) -> int:
        """Return how many edits of a kind, up to ``most``, hold for a text of these votes, of
        shifted windows."""
        del characters
        _, votes, label = text
        others = torch.arange(votes.shape[1]) != label
        margins = (votes[:, label, None] - votes)[:, others]
        if not bool((margins[:: self.words].sum(0) > 0).all()):
            return -1
        spills = kind == "characters"
        least = least_sums(margins.numpy(), self.words, most, self.limit, spills=spills)
        return most_held(lambda k: bool((least[k] > ROUNDING * (1 + len(votes))).all()), most)

    def propose(self, kind: EditKind, ids: Tensor, label: int) -> Propose:
        """Return what an attack tries on a text: one more replaced word, edited word or mistyped
        character."""
        swaps = WindowSwaps(self._votes, self._swaps, self._windows, ids, label, _TRIES)
        if kind == "words":
            return swaps
        return partial(self._edited if kind == "edits" else self._mistyped, swaps)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, word after word."""
        return self._rows([split_words(text)[: self.limit]])[0]

    def names(self, ids: Tensor) -> list[str]:
        """Return the windows as text."""
        unknown = self.tokenizer.unk_token_id
        left_out = set(self.tokenizer.all_special_ids) - {unknown}
        size = self.tokens * self.words
        rows = [[n for n in row.tolist() if n not in left_out] for row in ids.split(size)]
        texts = [self.tokenizer.decode(row).strip() for row in rows]
        return [text.replace(self.tokenizer.unk_token or "\n", UNKNOWN) for text in texts]

    def _rows(self, texts: Sequence[Sequence[str]]) -> list[Tensor]:
        rows = encode_words(self.tokenizer, texts, self.tokens)
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def _windows(self, ids: Tensor) -> Tensor:
        """Return the windows that a text is cut into, each as a text of its own."""
        size = self.tokens * self.words
        blank = self.model.config.pad_token_id
        whole = torch.nn.functional.pad(ids, (0, -len(ids) % size), value=blank)
        return whole.view(-1, size)

    def _votes(self, windows: Tensor) -> Tensor:
        return self.model.votes(windows)[:, 0]

    @cached_property
    def _pool(self) -> tuple[Tensor, Tensor]:
        """Words that an attack may insert, and the vote of a window that holds only that word."""
        ids = range(min(len(self.tokenizer), 4 * _POOL))
        names = [name.strip() for name in self.tokenizer.batch_decode([[n] for n in ids])]
        letters = [name for name in names if name.isalpha()]
        words = (letters or [name for name in names if split_words(name) == [name]])[:_POOL]
        rows = torch.stack(self._rows([[word] for word in words]))
        return rows, self._votes(rows)

    def _strongest(self, target: int) -> Tensor:
        rows, votes = self._pool
        return rows[votes[:, target].topk(min(_STRONGEST, len(rows))).indices]

    def _swaps(self, window: Tensor, target: int) -> Tensor:
        """Return the window with each word replaced by the words that speak most for a class."""
        words, new = window.view(-1, self.tokens), self._strongest(target)
        places = (words != self.model.config.pad_token_id).any(1).nonzero()[:, 0]
        found = words.repeat(len(places), len(new), 1, 1)
        found[torch.arange(len(places)), :, places] = new
        return found.flatten(2).flatten(0, 1)

    def _weakest_words(self, ids: Tensor, target: int, label: int) -> list[int]:
        """Return where each word begins, of the windows that favour the label most over the target."""
        votes = self._votes(self._windows(ids))
        order = (votes[:, target] - votes[:, label]).argsort()[:_TRIES].tolist()
        size = self.tokens * self.words
        return [at for w in order for at in range(w * size, len(ids), self.tokens)[: self.words]]

    def _edited(self, swaps: WindowSwaps, ids: Tensor, target: int) -> Sequence[Tensor]:
        """Return texts with a word more, less or replaced."""
        found = list(swaps(ids, target)) if len(ids) == len(swaps.original) else []
        best, most = self._strongest(target)[0], self.limit * self.tokens
        weak = self._weakest_words(ids, target, swaps.label)
        found += [torch.cat([ids[:start], best, ids[start:]])[:most] for start in (0, *weak)]
        if len(ids) > self.tokens and self._may_shrink(swaps, ids):
            found += [torch.cat([ids[:start], ids[start + self.tokens :]]) for start in weak]
        return found

    def _may_shrink(self, swaps: WindowSwaps, ids: Tensor) -> bool:
        """Whether no word was pushed out by an earlier edit, which would come back."""
        return len(ids) < self.limit * self.tokens or torch.equal(ids, swaps.original)

    def _mistyped(self, swaps: WindowSwaps, ids: Tensor, target: int) -> Sequence[Tensor]:
        """Return texts with one character of a word more, less or replaced, of words that their
        tokens spell."""
        blank, size = self.model.config.pad_token_id, self.tokens + 1
        least = 1 if self._may_shrink(swaps, ids) else len(ids)
        found = []
        for start in self._weakest_words(ids, target, swaps.label):
            word, behind = ids[start : start + self.tokens], ids[start + self.tokens :]
            name = self.tokenizer.decode(word, skip_special_tokens=True).strip()
            # A name that its tokens spell with blanks is no word: one edit would make many of it.
            if split_words(name) != [name] or not torch.equal(self._rows([[name]])[0], word):
                continue
            made = [split_words(text) for text in one_character_away(name)]
            wider = encode_words(self.tokenizer, made, size)
            for other, whole in zip(self._rows(made), wider, strict=True):
                text = torch.cat([ids[:start], other, behind])
                # A word that is cut would be mistyped again as if nothing were behind the cut.
                cut = any(blank not in whole[at : at + size] for at in range(0, len(whole), size))
                if len(text) >= least and not cut:
                    found.append(text[: self.limit * self.tokens])
        return found


def one_character_away(word: str) -> Iterator[str]:
    """Yield strings that one deleted, substituted or inserted character makes of a word, blanks
    among them.

    >>> sorted(one_character_away("a"))[:4]
    ['', ' ', ' a', 'a ']
    """
    for place in range(len(word) + 1):
        left, right = word[:place], word[place:]
        if right:
            yield left + right[1:]
        for new in (" ", "e", "x"):
            yield left + new + right[1:]
            yield left + new + right


def least_sums(
    margins: NDArray[np.float64], words: int, most: int, limit: int, *, spills: bool
) -> NDArray[np.float64]:
    r"""Return the least sum of margins over the windows of a text that k edits can leave, for every
    k up to ``most``, (most + 1, classes).

    Certified (B15). A window that an edit touches has margin -1, and each edit shifts what follows
    by at most one word either way; the least over all places of edits is found by dynamic
    programming, window by window, over edits spent and words shifted.

    Args:
        margins: (words, classes), of the window that begins at each word of the text.
        words: of a window.
        most: edits.
        limit: most words of a text; one that is as long may have been cut.
        spills: an edit may touch two windows that are neighbours, as a split word does.

    Cost: ``windows x most`` operations on tables of ``most^2`` numbers.
    """
    count, classes = margins.shape
    limit = max(limit, count)
    cut, short = count == limit, limit % words
    windows = -(-min(limit, count + most) // words)
    nowhere = np.full((most + 1, 2 * most + 1, classes), np.inf)
    # By edits and shift: the words that are behind the windows so far, less those of these windows.
    best, spilt = nowhere.copy(), nowhere.copy()
    best[0, most] = 0
    least = nowhere[:, 0].copy()
    for window in range(windows + 1):
        first = window * words - most
        for shift in range(2 * most + 1):  # the text ends here, what is left of it deleted
            left = max(0, count - first - shift)
            if left <= most:
                ends = best[: most + 1 - left, shift]
                least[left:] = np.minimum(least[left:], ends)
        if window == windows:
            break
        known = np.full((2 * most + 1, classes), np.inf)
        for shift in range(2 * most + 1):
            place = first + shift
            unsure = cut and place + words > count
            if window == windows - 1 and short and (window + 1) * words > limit:
                unsure |= cut or place + short < count
            if shift != most and unsure:
                known[shift] = -1
            elif 0 <= place < count:
                known[shift] = margins[place]
        touched = nowhere.copy()
        for edits in range(most):
            before = np.minimum(np.minimum(best[edits], spilt[edits]), touched[edits])
            wide = np.pad(before, ((1, 1), (0, 0)), constant_values=np.inf)
            touched[edits + 1] = np.minimum(np.minimum(wide[:-2], wide[2:]), before)
        best = np.minimum(best + known, np.minimum(touched, spilt) - 1)
        spilt = touched - 1 if spills else nowhere
        best[:, : max(0, most - (window + 1) * words)] = np.inf
    if windows * words >= limit:  # what is behind the cut is not read
        least = np.minimum(least, best.min(1))
    return np.minimum.accumulate(least, axis=0)


TextReader: TypeAlias = CharacterEdits | WindowBounds


def read_texts(model: Any, tokenizer: Any, limit: int, *, required: bool = True) -> TextReader:
    """Return what counts the words that may change: of a classifier of windows its votes, else what
    one character and one word can do to a model of words.

    Raises:
        ConfigError: the tokenizer has tokens that the model lacks, or its head chooses no label.
        ConfigError, NotLipschitzError: as `CharacterEdits.of`, of any other model.
    """
    check_single_label(model, "a certificate in words")
    whole = partial(CharacterEdits.of, required=required)
    found = (WindowBounds if hasattr(model, "votes") else whole)(model, tokenizer, limit)
    rows = len(found.bounds.model.get_input_embeddings().weight)
    if (tokens := max(tokenizer.get_vocab().values()) + 1) > rows:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens and the model's embedding {rows} rows: one of the two"
            " was changed after training; use the tokenizer that was saved with the model"
        )
    return found
