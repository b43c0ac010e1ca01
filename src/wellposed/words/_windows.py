"""Certified replaced words if windows of words vote (theory note B15)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import in_dtype
from wellposed.certification import uncertifiable_reason
from wellposed.errors import ConfigError, listed
from wellposed.hooks import changing_hooks
from wellposed.words._attack import Propose
from wellposed.words._texts import encode_words, split_words

_POOL = 2048
_STRONGEST = 12
_TRIES = 4
"""Words whose votes an attack reads; how many of them it tries per class; in how many windows."""


class WindowReader:
    """Bounds what replaced words do to the mean vote of a text's windows, for any classifier.

    Status: certified (theory note B15). The model is copied, in float64; a hook or another
    ``forward`` of the model or a part, which may change the votes, raises `ConfigError`.
    """

    reason = ""

    def __init__(self, model: Any, tokenizer: Any, limit: int) -> None:
        _refuse_changed_calls(model, lambda part: ", ".join(changing_hooks(part)))
        self.model: Any = in_dtype(model, torch.float64).eval()
        _refuse_changed_calls(self.model, uncertifiable_reason)
        self.tokenizer = tokenizer
        self.limit = limit
        self.mark = model.config.word_mark
        self.tokens = model.config.word_tokens + (self.mark is not None)
        self.words = model.config.window_words
        self.method = f"votes of windows of {self.words} words, any string in the place of a word"

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return mean votes of a batch, and the votes of each text, (windows, classes)."""
        votes = self._votes(input_ids, attention_mask)
        texts = [text[text.sum(1) != 0] for text in votes]
        return torch.stack([text.mean(0) for text in texts]), texts

    def _votes(self, *inputs: Tensor) -> Tensor:
        device = next(self.model.parameters()).device
        return self.model.votes(*(value.to(device) for value in inputs)).cpu()

    def gains(self, label: int, votes: Tensor) -> Tensor:
        """Return the most that a word of each window adds to each class, ``1 + v_y - v_c``."""
        return 1 + votes[..., label, None] - votes

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, word after word."""
        return self._rows([split_words(text)])[0]

    def decode(self, ids: Tensor) -> str:
        """Return the words of a text as the model reads them: of a long one, the first tokens.

        Raises:
            ConfigError: the ids were not encoded for these windows.
        """
        blank = self.model.config.pad_token_id
        words: list[str] = []
        for row in ids.split(self.tokens):
            tokens = row.tolist()
            if set(tokens) == {blank}:
                continue
            if self.mark is not None and tokens[0] != self.mark:
                raise ConfigError(
                    f"decode: word {len(words)} begins with {tokens[0]}, expected the mark {self.mark}:"
                    " these ids were not encoded for this model's windows; use tokenizer.decode(ids)"
                )
            plain = [token for token in tokens if token not in (self.mark, blank)]
            words.append(self.tokenizer.decode(plain).strip())

        return " ".join(words)

    def names(self, ids: Tensor) -> list[str]:
        """Return the windows as text."""
        unknown = self.tokenizer.unk_token_id
        left_out = set(self.tokenizer.all_special_ids) - {unknown} | {self.mark}
        rows = ids.split(self.tokens * self.words)
        plain = [[n for n in row.tolist() if n not in left_out] for row in rows]
        texts = [self.tokenizer.decode(row).strip() for row in plain]
        return [text.replace(self.tokenizer.unk_token or "\n", "\u2612") for text in texts]

    def propose(self, ids: Tensor, label: int) -> Propose:
        """Return the edits of an attack on a text: one more replaced word."""
        return partial(self._replaced, ids, label)

    def _rows(self, texts: Sequence[Sequence[str]]) -> list[Tensor]:
        rows = encode_words(self.tokenizer, texts, self.model.config.word_tokens, self.mark)
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def _windows(self, ids: Tensor) -> Tensor:
        """Return the windows of a text, each as a text."""
        size = self.tokens * self.words
        blank = self.model.config.pad_token_id
        # (tokens,) -> (windows, size)
        return torch.nn.functional.pad(ids, (0, -len(ids) % size), value=blank).view(-1, size)

    def _leads(self, windows: Tensor, target: int, label: int) -> Tensor:
        """Return how far each window votes more for the target than for the label."""
        votes = self._votes(windows)[:, 0]
        return votes[:, target] - votes[:, label]

    @cached_property
    def _pool(self) -> tuple[Tensor, Tensor]:
        """Words that an attack may insert, and the vote of a window with only that word."""
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
        """Return texts with a word replaced in one more of the windows that have most to lose. It
        is exact for one word a window if all windows and words are tried; a window changes once."""
        windows = self._windows(ids)
        texts = []
        new = self._strongest(target)
        ahead = self._leads(windows, target, label)
        ahead[(windows != self._windows(original)).any(1)] = torch.inf

        for index in ahead.topk(min(_TRIES, len(ahead)), largest=False).indices.tolist():
            # (size,) -> (words, tokens of a word)
            words = windows[index].view(-1, self.tokens)
            ids_of_words = words[:, self.tokens - self.model.config.word_tokens :]
            filled = (ids_of_words != self.model.config.pad_token_id).any(1).nonzero()[:, 0]
            if not len(filled) or ahead[index].isinf():
                continue
            others = words.repeat(len(filled), len(new), 1, 1)
            others[torch.arange(len(filled)), :, filled] = new
            others = others.flatten(2).flatten(0, 1)
            text = windows.clone()
            text[index] = others[self._leads(others, target, label).argmax()]
            texts.append(text.flatten()[: len(ids)])

        return texts


def _refuse_changed_calls(model: nn.Module, reason_of: Callable[[nn.Module], str | None]) -> None:
    """Raise `ConfigError` for each part whose call may differ from its class's ``forward``."""
    reasons = ((path, reason_of(part)) for path, part in model.named_modules())
    changed = [f"{path or 'the model'}: {reason}" for path, reason in reasons if reason]
    if changed:
        raise ConfigError(
            "a certificate in words is of the votes, which a hook or another forward of the model or"
            f" of a part may change:\n{listed(changed)}\nremove it (accelerate:"
            " accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
