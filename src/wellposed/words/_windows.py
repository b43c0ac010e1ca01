"""How many words of a text can change if windows of words vote (theory note B15)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.attack import in_dtype
from wellposed.errors import ConfigError
from wellposed.words._attack import Propose
from wellposed.words._texts import encode_words, split_words
from wellposed.words._words import ROUNDING, most_held

_POOL, _STRONGEST, _TRIES = 2048, 12, 4
"""Words whose votes alone are looked at for an attack, how many of them it tries for a class, and in
how many windows it tries them."""


class WindowReader:
    r"""What changed words can do to the mean of votes of a text's windows.

    Certified (B15), whatever the classifier is: a window may vote anything between 0 and 1 for each
    class once a word of it is replaced, so k words lower ``sum_j (v_jy - v_jc)`` by at most the sum
    of the k largest ``1 + v_jy - v_jc``. Inserted and deleted words shift the windows behind them,
    whose votes are read too.

    Args:
        model: a `wellposed.models.WindowsForSequenceClassification`; copied, in float64.
        tokenizer: of the model.
        limit: most words of a text.

    Raises:
        ConfigError: a hook or another ``forward`` stands before or behind the votes.
    """

    reason = unread = ""

    def __init__(self, model: Any, tokenizer: Any, limit: int) -> None:
        if "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks:
            raise ConfigError(
                "a certificate in words is of the votes alone, and a hook or another forward of this"
                " model may change them; take it off (accelerate:"
                " accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
            )
        self.model: Any = in_dtype(model, torch.float64).eval()
        self.tokenizer, self.limit = tokenizer, limit
        self.tokens = model.config.word_tokens
        self.words = model.config.window_words
        self.shifts = self.words > 1
        self.how = f"votes of windows of {self.words} words, any string in the place of a word"

    def read(
        self, input_ids: Tensor, attention_mask: Tensor, *, shifted: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the mean votes of a batch, and the votes of each text, (windows, classes): of the
        windows that begin at each of its words if ``shifted``."""
        votes = self._votes(input_ids, attention_mask, every=shifted)
        texts = [each[each.sum(1) != 0] for each in votes]
        return torch.stack([text.mean(0) for text in texts]), texts

    def _votes(self, *inputs: Tensor, every: bool = False) -> Tensor:
        device = next(self.model.parameters()).device
        return self.model.votes(*(each.to(device) for each in inputs), every=every).cpu()

    def gains(self, label: int, votes: Tensor) -> Tensor:
        """Return the most that a word of each window adds to another class, (..., windows, classes)."""
        return 1 + votes[..., label, None] - votes

    def held_edits(self, logits: Tensor, votes: Tensor, label: int, most: int) -> int:
        """Return how many edits, up to ``most``, hold for a text of these votes, of
        shifted windows; -1 if the answer is not the label."""
        margins = torch.cat([logits[None], votes])
        margins = (margins[:, label, None] - margins)[:, torch.arange(votes.shape[1]) != label]
        if not bool((margins[0] > 0).all()):
            return -1
        least = self.least_sums(margins[1:].numpy(), most)
        return most_held(lambda k: bool((least[k] > ROUNDING * (1 + len(votes))).all()), most)

    def least_sums(self, margins: NDArray[np.float64], most: int) -> NDArray[np.float64]:
        r"""Return the least sum of margins over the windows of a text that k edits can leave, for every
        k up to ``most``, (most + 1, classes).

        Certified (B15). A window that an edit touches has margin -1, and each edit shifts what follows
        by at most one word either way; the least over all places of edits is found by dynamic
        programming, window by window, over edits spent and words shifted.

        A text that is as long as the limit may have been cut.

        Args:
            margins: (words, classes), of the window that begins at each word of the text.
            most: edits.

        Cost: ``windows x most`` operations on tables of ``most^2`` numbers.
        """
        count, classes = margins.shape
        words, limit = self.words, max(self.limit, count)
        cut, short = count == limit, limit % words
        windows = -(-min(limit, count + most) // words)
        nowhere = np.full((most + 1, 2 * most + 1, classes), np.inf)
        # By edits and shift: the words that are behind the windows so far, less those of these windows.
        best = nowhere.copy()
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
                before = np.minimum(best[edits], touched[edits])
                wide = np.pad(before, ((1, 1), (0, 0)), constant_values=np.inf)
                touched[edits + 1] = np.minimum(np.minimum(wide[:-2], wide[2:]), before)
            best = np.minimum(best + known, touched - 1)
            best[:, : max(0, most - (window + 1) * words)] = np.inf
        if windows * words >= limit:  # what is behind the cut is not read
            least = np.minimum(least, best.min(1))
        return np.minimum.accumulate(least, axis=0)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, word after word."""
        return self._rows([split_words(text)])[0]

    def names(self, ids: Tensor) -> list[str]:
        """Return the windows as text."""
        unknown = self.tokenizer.unk_token_id
        left_out = set(self.tokenizer.all_special_ids) - {unknown}
        rows = ids.split(self.tokens * self.words)
        kept = [[n for n in row.tolist() if n not in left_out] for row in rows]
        texts = [self.tokenizer.decode(row).strip() for row in kept]
        return [text.replace(self.tokenizer.unk_token or "\n", "\u2612") for text in texts]

    def propose(self, kind: str, ids: Tensor, label: int) -> Propose:
        """Return what an attack tries on a text: one more replaced word or edited word."""
        return partial(self._replaced if kind == "words" else self._edited, ids, label)

    def _rows(self, texts: Sequence[Sequence[str]]) -> list[Tensor]:
        rows = encode_words(self.tokenizer, texts, self.tokens)
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def _windows(self, ids: Tensor) -> Tensor:
        """Return the windows that a text is cut into, each as a text of its own."""
        size = self.tokens * self.words
        blank = self.model.config.pad_token_id
        return torch.nn.functional.pad(ids, (0, -len(ids) % size), value=blank).view(-1, size)

    def _leads(self, windows: Tensor, target: int, label: int) -> Tensor:
        """Return how far each window votes more for the target than for the label."""
        votes = self._votes(windows)[:, 0]
        return votes[:, target] - votes[:, label]

    @cached_property
    def _pool(self) -> tuple[Tensor, Tensor]:
        """Words that an attack may insert, and the vote of a window that holds only that word."""
        ids = range(min(len(self.tokenizer), 4 * _POOL))
        names = [name.strip() for name in self.tokenizer.batch_decode([[n] for n in ids])]
        letters = [name for name in names if name.isalpha()]
        words = (letters or [name for name in names if split_words(name) == [name]])[:_POOL]
        rows = torch.stack(self._rows([[word] for word in words]))
        return rows, self._votes(rows)[:, 0]

    def _strongest(self, target: int) -> Tensor:
        rows, votes = self._pool
        return rows[votes[:, target].topk(min(_STRONGEST, len(rows))).indices]

    def _replaced(self, original: Tensor, label: int, ids: Tensor, target: int) -> Sequence[Tensor]:
        """Return texts with a word replaced in one more of the windows that have most to lose.

        A window is changed once. Of every proposal the votes are known apart, so that with all
        windows and replacements tried the attack of one word a window is exact.
        """
        windows, found, new = self._windows(ids), [], self._strongest(target)
        ahead = self._leads(windows, target, label)
        ahead[(windows != self._windows(original)).any(1)] = torch.inf
        for place in ahead.topk(min(_TRIES, len(ahead)), largest=False).indices.tolist():
            words = windows[place].view(-1, self.tokens)
            filled = (words != self.model.config.pad_token_id).any(1).nonzero()[:, 0]
            if not len(filled) or ahead[place].isinf():
                continue
            others = words.repeat(len(filled), len(new), 1, 1)
            others[torch.arange(len(filled)), :, filled] = new
            others, text = others.flatten(2).flatten(0, 1), windows.clone()
            text[place] = others[self._leads(others, target, label).argmax()]
            found.append(text.flatten()[: len(ids)])
        return found

    def _weakest_words(self, ids: Tensor, target: int, label: int) -> list[int]:
        """Return where each word begins, of the windows that favour the label most over the target."""
        order = self._leads(self._windows(ids), target, label).argsort()[:_TRIES].tolist()
        size = self.tokens * self.words
        return [at for w in order for at in range(w * size, len(ids), self.tokens)[: self.words]]

    def _edited(self, original: Tensor, label: int, ids: Tensor, target: int) -> Sequence[Tensor]:
        """Return texts with a word more, less or replaced."""
        same = len(ids) == len(original)
        found = list(self._replaced(original, label, ids, target)) if same else []
        best, most = self._strongest(target)[0], self.limit * self.tokens
        weak = self._weakest_words(ids, target, label)
        found += [torch.cat([ids[:start], best, ids[start:]])[:most] for start in (0, *weak)]
        if len(ids) > self.tokens and self._may_shrink(original, ids):
            found += [torch.cat([ids[:start], ids[start + self.tokens :]]) for start in weak]
        return found

    def _may_shrink(self, original: Tensor, ids: Tensor) -> bool:
        """Whether no word was pushed out by an earlier edit, which would come back."""
        return len(ids) < self.limit * self.tokens or torch.equal(ids, original)
