"""Accuracy that changed words and characters cannot take, and what an attack leaves of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from wellposed.attack import WordAttack, WordSwaps
from wellposed.errors import UnsoundBoundError
from wellposed.text_table import aligned
from wellposed.training.certified.characters import CharacterEdits
from wellposed.training.certified.words import (
    EditKind,
    TextHeld,
    hold_texts,
)

_TRIES = 32
"""Texts with one more character changed that the attack tries in each round."""


@dataclass(frozen=True)
class WordAccuracy:
    """For each kind of edit and each k: the share of texts whose right answer no k edits can turn,
    and the share that an attack leaves right, certified <= true <= attacked."""

    kinds: list[EditKind]
    counts: list[int]
    certified: list[float]
    attacked: list[float]
    texts: int
    clean: float
    """Share of right answers, k = 0."""
    exact: bool
    """No certificate of replaced words could be better."""
    skip: float
    rest: float
    reason: str
    """Why nothing is certified, where nothing is."""
    ordered: bool
    """The model reads the order of words, so that insertions and characters have no certificate."""

    def table(self) -> str:
        """Return the numbers as plain text."""
        rows = [("change", "k", "certified", "attacked"), ("none", "0", *[f"{self.clean:.4f}"] * 2)]
        found = zip(self.kinds, self.counts, self.certified, self.attacked, strict=True)
        for kind, k, sure, seen in found:
            certified = "none" if self.reason else f"{sure:.4f}"
            rows.append((kind, str(k), certified, f"{seen:.4f}"))
        how = (
            f"norm sum, {self.skip:.3g} of a state is its own token, the rest has bound"
            f" {self.rest:.3g}"
        )
        if self.reason or self.exact:
            how = f"no certificate: {self.reason}" if self.reason else "replaced words exactly"
        lines = [f"{self.texts} texts, clean accuracy {self.clean:.4f}; {how}", aligned(rows, "l")]
        if self.ordered and not self.reason and {"edits", "characters"} & set(self.kinds):
            lines.append(
                "edits and characters have no certificate where the order of words is read: train"
                " with --model.position none"
            )
        return "\n".join(lines)


def word_accuracy(
    model: Any,
    tokenizer: Any,
    batches: Sequence[Mapping[str, Tensor]],
    counts: Mapping[EditKind, Sequence[int]],
    *,
    limit: int,
    beam: int = 1,
) -> WordAccuracy:
    """Return certified and attacked accuracy for each kind of edit and each number of them.

    Status: certified for exact arithmetic (theory note B14; `bound_words`, `CharacterEdits`); the
    attack (`WordAttack`: replacements over the whole vocabulary, characters of known words) can
    only be too weak. Replaced words are edits too, and attack these. A model without a certificate is
    attacked alone.

    Args:
        model: a classifier of texts, see `bound_words`.
        tokenizer: its own, of words between white space.
        batches: with ``input_ids``, ``attention_mask`` and ``labels``.
        counts: for each kind the numbers k, increasing.
        limit: most tokens of a text, where longer ones are cut.
        beam: texts the attack keeps in each round.

    Raises:
        ConfigError: the model is no classifier of texts that pools by the mean.
        UnsoundBoundError: an attack turned a certified text.

    Cost: a forward pass in float64 a text; the attack ``classes x k`` gradients a text.
    """
    characters = CharacterEdits.of(model, tokenizer, limit, required=False)
    bounds = characters.bounds
    most = {kind: max(some) for kind, some in counts.items() if some}
    held = hold_texts(bounds, batches, most, characters)
    fallen = [
        _attacked(characters, most, text, ids, beam)
        for text, ids in zip(held, _texts(batches), strict=True)
    ]
    rows = [(kind, k) for kind, some in counts.items() for k in some]
    share = lambda flags: sum(flags) / max(1, len(held))  # noqa: E731
    return WordAccuracy(
        kinds=[kind for kind, _ in rows],
        counts=[k for _, k in rows],
        certified=[share(text.held[kind] >= k for text in held) for kind, k in rows],
        attacked=[share(needed[kind] > k for needed in fallen) for kind, k in rows],
        texts=len(held),
        clean=share(text.label == text.predicted for text in held),
        exact=bounds.exact,
        skip=bounds.skip,
        rest=bounds.rest,
        reason=bounds.reason,
        ordered=bounds.free_rest == float("inf"),
    )


def _texts(batches: Iterable[Mapping[str, Tensor]]) -> Iterable[Tensor]:
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        yield from (ids[real] for ids, real in pairs)


def _attacked(
    characters: CharacterEdits,
    most: Mapping[EditKind, int],
    text: TextHeld,
    ids: Tensor,
    beam: int,
) -> dict[EditKind, int]:
    """Return how many edits of each kind the attack needs; one more than asked where it fails."""
    bounds = characters.bounds
    swaps = WordSwaps(bounds.model, bounds.vectors, ids, text.label)
    letters = partial(characters.proposals, label=text.label, tries=_TRIES)
    words = max((count for kind, count in most.items() if kind != "characters"), default=0)
    # Replaced words are edits too.
    swapped = WordAttack(bounds.model, swaps, beam).fewest_edits(ids, text.label, words)
    needed: dict[EditKind, int] = {}
    for kind, count in most.items():
        found = swapped
        if kind == "characters":
            found = WordAttack(bounds.model, letters, beam).fewest_edits(ids, text.label, count)
        needed[kind], turned = found
        if needed[kind] <= min(count, text.held[kind]):
            raise UnsoundBoundError(
                f"words: {needed[kind]} {kind} turn a text of label {text.label} that is certified"
                f" against {text.held[kind]}: {ids.tolist()} became {turned.tolist()}; please report"
                " it with the model"
            )
    return needed
