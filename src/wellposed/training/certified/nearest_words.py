"""What a radius means in words: how far the most frequent words of some examples are from their
neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.models import input_vectors


@dataclass(frozen=True)
class NearestWord:
    """A word, the word whose embedding is nearest to its own, and the 2-norm between the two."""

    word: str
    nearest: str
    distance: float
    within: int
    """Other words within the radius asked for."""


@torch.no_grad()
def nearest_words(
    model: nn.Module,
    tokenizer: Any,
    batches: Iterable[Mapping[str, Tensor]],
    radius: float,
    *,
    count: int = 6,
) -> list[NearestWord]:
    """Return the ``count`` most frequent words of the batches, most frequent first, with their
    nearest neighbours.

    Exact, float64; special tokens are neither words nor neighbours.

    Args:
        model: takes ``input_ids``.
        tokenizer: of the model.
        batches: dicts with ``input_ids`` and ``attention_mask`` (1 = real), and of pairs those of
        the second texts.
        radius: how near a word must be to count among `NearestWord.within`.
        count: of words.

    Cost: one embedding of the vocabulary, and ``count`` distances to each of its rows.
    """
    special = set(tokenizer.all_special_ids)
    known = [number for number in sorted(tokenizer.get_vocab().values()) if number not in special]
    seen: Counter[int] = Counter()
    for batch in batches:
        for name in ("", "_pair"):
            if f"input_ids{name}" in batch:
                seen.update(
                    batch[f"input_ids{name}"][batch[f"attention_mask{name}"].bool()].tolist()
                )
    frequent = [number for number, _ in seen.most_common() if number not in special][:count]
    if len(known) < 2:
        return []
    ids = torch.tensor(known)[:, None]
    vectors = input_vectors(model, ids, torch.ones_like(ids))[:, 0].double()
    found = []
    for number in frequent:
        place = known.index(number)
        distances = (vectors - vectors[place]).norm(dim=-1)
        distances[place] = torch.inf
        nearest = int(distances.argmin())
        word, other = tokenizer.convert_ids_to_tokens([number, known[nearest]])
        found.append(
            NearestWord(word, other, float(distances[nearest]), int((distances <= radius).sum()))
        )
    return found
