"""Accuracy that changed words and characters cannot take, and what an attack leaves of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wellposed.attack import WordAttack
from wellposed.errors import UnsoundBoundError
from wellposed.text_table import aligned
from wellposed.training.certified.windows import TextReader, read_texts
from wellposed.training.certified.words import EditKind, TextHeld, hold_texts

_SHOWN = 48
"""Texts whose changed words are kept."""


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
    how: str
    """What the certificate is, in words."""
    reason: str
    """Why nothing is certified, where nothing is."""
    unread: str
    """Why edits and characters have no certificate, where they have none."""
    shown: list[str]
    """Of the first texts: how many replaced words cannot turn it, how many do, and which."""

    def table(self) -> str:
        """Return the numbers as plain text."""
        rows = [("change", "k", "certified", "attacked"), ("none", "0", *[f"{self.clean:.4f}"] * 2)]
        found = zip(self.kinds, self.counts, self.certified, self.attacked, strict=True)
        for kind, k, sure, seen in found:
            certified = "none" if self.reason else f"{sure:.4f}"
            rows.append((kind, str(k), certified, f"{seen:.4f}"))
        counted = f"{self.texts} texts, clean accuracy {self.clean:.4f}"
        lines = [f"{counted}; {self.how}", aligned(rows, "l")]
        if self.unread and {"edits", "characters"} & set(self.kinds):
            lines.append(f"edits and characters have no certificate {self.unread}")
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

    Status: certified for exact arithmetic (theory notes B14, B15; `read_texts`); the attack
    (`WordAttack`: words over the whole vocabulary, characters of known words) can only be too weak.
    A model without a certificate is attacked alone.

    Args:
        model: a classifier of texts, see `read_texts`.
        tokenizer: its own.
        batches: with ``input_ids``, ``attention_mask`` and ``labels``.
        counts: for each kind the numbers k, increasing.
        limit: most tokens of a text, where longer ones are cut.
        beam: texts the attack keeps in each round.

    Raises:
        ConfigError: as `read_texts`.
        UnsoundBoundError: an attack turned a certified text.

    Cost: a forward pass in float64 a text; the attack ``classes x k`` gradients a text.
    """
    reader = read_texts(model, tokenizer, limit, required=False)
    bounds = reader.bounds
    most = {kind: max(some) for kind, some in counts.items() if some}
    held = hold_texts(bounds, batches, most, reader)
    fallen, shown = [], []
    for text, ids in zip(held, _texts(batches), strict=True):
        needed, turned = _attacked(reader, most, text, ids, beam)
        fallen.append(needed)
        if "words" in most and len(shown) < _SHOWN:
            old, new = (tokenizer.convert_ids_to_tokens(each.tolist()) for each in (ids, turned))
            words = ", ".join(f"{a} → {b}" for a, b in zip(old, new, strict=False) if a != b)
            sure = f"certified for k = {text.held['words']}" if text.held["words"] > 0 else ""
            fell = f"turned by {needed['words']}: {words}" if words else ""
            shown.append("; ".join(filter(None, (sure, fell))))
    rows = [(kind, k) for kind, some in counts.items() for k in some]
    share = lambda flags: sum(flags) / max(1, len(held))  # noqa: E731
    return WordAccuracy(
        kinds=[kind for kind, _ in rows],
        counts=[k for _, k in rows],
        certified=[share(text.held[kind] >= k for text in held) for kind, k in rows],
        attacked=[share(needed[kind] > k for needed in fallen) for kind, k in rows],
        texts=len(held),
        clean=share(text.label == text.predicted for text in held),
        how=bounds.how,
        reason=bounds.reason,
        unread=bounds.unread,
        shown=shown,
    )


def _texts(batches: Iterable[Mapping[str, Tensor]]) -> Iterable[Tensor]:
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        yield from (ids[real] for ids, real in pairs)


def _attacked(
    reader: TextReader, most: Mapping[EditKind, int], text: TextHeld, ids: Tensor, beam: int
) -> tuple[dict[EditKind, int], Tensor]:
    """Return how many edits of each kind the attack needs, one more than asked where it fails, and
    the text with words replaced."""
    needed: dict[EditKind, int] = {}
    swapped = ids
    for kind, count in most.items():
        attack = WordAttack(reader.bounds.model, reader.propose(kind, ids, text.label), beam)
        needed[kind], turned = attack.fewest_edits(ids, text.label, count)
        if max(1, needed[kind]) <= min(count, text.held[kind]):
            raise UnsoundBoundError(
                f"words: {needed[kind]} {kind} turn a text of label {text.label} that is certified"
                f" against {text.held[kind]}: {ids.tolist()} became {turned.tolist()}; please report"
                " it with the model"
            )
        swapped = turned if kind == "words" else swapped
    return needed, swapped
