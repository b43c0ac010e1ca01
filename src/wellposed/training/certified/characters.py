"""What one changed character can make of words between white space (theory note B14)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed.attack import Propose, WordSwaps
from wellposed.errors import ConfigError, shortened
from wellposed.training.certified.words import EditKind, Menu, WordBounds, bound_words

_TRIES = 32
"""Texts with one more character changed that an attack tries in each round."""
Shape = tuple[int, int]
"""How many words an edit removes, and how many it adds."""


class CharacterEdits:
    """Which words one inserted, deleted or substituted character can make of the words of a text.

    For tokenizers by words between white space. A character inside a word leaves one word, a blank
    makes two of it, and a lost blank makes one of two; a word that the vocabulary lacks is the
    unknown word. What an unknown word was is not known: one character may make any words of it.

    Args:
        bounds: of the model that reads the words.
        vocabulary: ids by word, without the unknown token.
        tokenizer: that of the model.
        limit: most tokens of a text. One that is as long may have been cut, and its cut moves; one
            that edits can make longer is cut then.
    """

    def __init__(
        self, bounds: WordBounds, vocabulary: Mapping[str, int], tokenizer: Any, limit: int
    ) -> None:
        self.bounds, self.vocabulary = bounds, vocabulary
        self.tokenizer, self.limit = tokenizer, limit
        self.unknown: int = tokenizer.unk_token_id
        self.words = {number: word for word, number in vocabulary.items()}
        self._gaps: dict[tuple[int, str], list[int]] = defaultdict(list)
        for word, number in vocabulary.items():
            for place in range(len(word)):
                self._gaps[place, word[:place] + word[place + 1 :]].append(number)
        self._edits: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._known: dict[tuple[int, tuple[int, ...]], dict[Shape, Tensor]] = {}

    @classmethod
    def of(cls, model: Any, tokenizer: Any, limit: int, *, required: bool = True) -> CharacterEdits:
        """Read a tokenizer of words between white space, and bound the model (`bound_words`).

        Raises:
            ConfigError: it cuts text in another way, so that what one character can change is not
                known, or adds tokens that are no words.
            NotLipschitzError: as `bound_words`, which takes ``required`` too.
        """
        import json

        inner = getattr(tokenizer, "backend_tokenizer", None)
        form = {} if inner is None else json.loads(inner.to_str())
        kinds = [(form.get(part) or {}).get("type") for part in ("model", "pre_tokenizer")]
        around = tokenizer.num_special_tokens_to_add()
        added, cut = form.get("added_tokens", ()), tokenizer.split_special_tokens
        inside = [token["content"] for token in added if not (cut and token["special"])]
        by_words = kinds == ["WordLevel", "WhitespaceSplit"] and form["normalizer"] is None
        if not by_words or around or inside:
            raise ConfigError(
                "words and characters are counted for words between white space, and this tokenizer"
                f" is {kinds[0] or type(tokenizer).__name__} with {kinds[1] or 'no'} pre-tokenizer"
                f" and {around} special tokens around a text, and finds"
                f" {shortened(inside) or 'none'} inside words. Train with --tokenizer word, or keep"
                " the model of --from and let it read windows of words: --certified-windows 1"
            )
        bounds = bound_words(model, seq_len=limit, required=required)
        unknown = tokenizer.unk_token_id
        words = {word: n for word, n in tokenizer.get_vocab().items() if n != unknown}
        return cls(bounds, words, tokenizer, limit)

    def menu(self, ids: Tensor, label: int, count: int) -> Menu:
        """Return the most that ``count`` edits can gain, for each number of words they remove and
        add.

        Edits that touch words of their own are looked up one by one; those that meet are any words.
        """
        if len(ids) + count > self.limit:
            return self.bounds.any_words(ids, label, [(2 * count, 2 * count, 4 * count)])
        found: dict[Shape, list[Tensor]] = defaultdict(list)
        words = ids.tolist()
        touched = [tuple(words[start : start + n]) for start in range(len(words)) for n in (1, 2)]
        for some in touched + [()] * count:
            for shape, gain in self._gains(some, label).items():
                found[shape].append(gain)
        sums = {
            shape: torch.stack(gains).sort(0, descending=True).values[:count].cumsum(0)
            for shape, gains in found.items()
        }
        menu: dict[Shape, Tensor] = {}
        for together in (0, *range(2, count + 1)):
            reach, total = together + together // 2, together + together // 2 * 2
            met = self.bounds.any_words(ids, label, [(reach, reach, total)])
            for (shape, gain), (more, other) in itertools.product(
                self._alone(sums, count - together).items(), met.items()
            ):
                key = (shape[0] + more[0], shape[1] + more[1])
                both = gain + other
                menu[key] = torch.maximum(menu[key], both) if key in menu else both
        return menu

    def _gains(self, words: tuple[int, ...], label: int) -> dict[Shape, Tensor]:
        """Return the most that one edit of exactly these neighbouring words gains for each class,
        by how many words it removes and adds."""
        key = (label, words)
        if key not in self._known:
            along = self.bounds.along(label)
            best, lost = along.amax(0), along[list(words)].sum(0)
            if set(words) <= self.words.keys():
                by_size: dict[int, list[tuple[int, ...]]] = defaultdict(list)
                for added in self._made(words):
                    by_size[len(added)].append(added)
                gains = {
                    size: along[torch.tensor(some, dtype=torch.long)].sum(1).amax(0)
                    for size, some in by_size.items()
                }
            else:
                gains = {size: size * best for size in ((0, 1, 2) if len(words) == 1 else (1,))}
            self._known[key] = {(len(words), size): gain - lost for size, gain in gains.items()}
        return self._known[key]

    def _alone(self, sums: Mapping[Shape, Tensor], count: int) -> dict[Shape, Tensor]:
        """Return the most that up to ``count`` edits of words of their own gain, for each number of
        words they remove and add."""
        menu: dict[Shape, Tensor] = {(0, 0): next(iter(sums.values()))[0] * 0.0}
        for chosen in range(1, count + 1):
            for shapes in itertools.combinations_with_replacement(sums, chosen):
                if any(shapes.count(shape) > len(sums[shape]) for shape in shapes):
                    continue
                gain = menu[0, 0]
                for shape in set(shapes):
                    gain = gain + sums[shape][shapes.count(shape) - 1]
                key = (sum(shape[0] for shape in shapes), sum(shape[1] for shape in shapes))
                menu[key] = torch.maximum(menu[key], gain) if key in menu else gain
        return menu

    def _made(self, words: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """Return the word sequences that one edit can turn these neighbouring words into, where it
        touches each of them; given no words, those that it can insert."""
        if words not in self._edits:
            look = self.vocabulary.get
            made: set[tuple[int, ...]] = {(self.unknown,)}
            if not words:
                made |= {(number,) for word, number in self.vocabulary.items() if len(word) == 1}
            elif len(words) == 2:
                first, second = (self.words[number] for number in words)
                made.add((look(first + second, self.unknown),))
                made |= {(n,) for n in self._gaps.get((len(first), first + second), ())}
            else:
                word = self.words[words[0]]
                for place in range(len(word) + 1):
                    left, right = word[:place], word[place:]
                    made |= {(n,) for n in self._gaps.get((place, word), ())}
                    for parts in ((left, right), (left, right[1:]), (left + right[1:],)):
                        made.add(tuple(look(part, self.unknown) for part in parts if part))
                    made |= {(n,) for n in self._gaps.get((place, left + right[1:]), ())}
            self._edits[words] = sorted(made - {words})
        return self._edits[words]

    def propose(self, kind: EditKind, ids: Tensor, label: int) -> Propose:
        """Return what an attack tries on a text: one more edit of this kind."""
        if kind == "characters":
            return partial(self.proposals, label=label, tries=_TRIES)
        model, vectors = self.bounds.model, self.bounds.vectors
        limit = self.limit if kind == "edits" else None
        return WordSwaps(model, vectors, ids, label, edits_within=limit)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, cut as the model reads it."""
        return torch.tensor(self.tokenizer(text)["input_ids"][: self.limit], dtype=torch.long)

    def names(self, ids: Tensor) -> list[str]:
        """Return words as text; a row of the table without a word by its number."""
        words = zip(self.tokenizer.convert_ids_to_tokens(ids.tolist()), ids.tolist(), strict=True)
        return [f"row {number}" if word is None else word for word, number in words]

    def proposals(
        self, ids: Tensor, target: int, *, label: int, tries: int | None = None
    ) -> Sequence[Tensor]:
        """Return texts that one character makes of the known words of a text, for an attack: the
        ``tries`` on which the linear part of ``target`` is furthest ahead of ``label``, all where
        not given."""
        words = tuple(ids.tolist())
        texts = {
            (*words[:start], *added, *words[start + size :])
            for size in (1, 2)
            for start in range(len(words) + 1 - size)
            if set(words[start : start + size]) <= self.words.keys()
            for added in self._made(words[start : start + size])
        }
        found = [torch.tensor(text) for text in sorted(texts) if 0 < len(text) <= self.limit]
        if tries is None:
            return found
        ahead = self.bounds.along(label)[:, target].tolist()
        found.sort(key=lambda text: -sum(ahead[word] for word in text.tolist()) / len(text))
        return found[:tries]
