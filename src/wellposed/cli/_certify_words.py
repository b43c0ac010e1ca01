"""``wellposed certify RUN --words 1,2,3``: how many changed words or characters an answer holds
against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError
from wellposed.text_table import aligned, printable

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.training.certified.words import EditKind

_SHOWN = 8
_MOST = 1000


def counts_of(name: str, text: str | None) -> list[int]:
    """Return the numbers of ``--NAME 1,2,3``.

    >>> counts_of("words", "1,2,5"), counts_of("words", None)
    ([1, 2, 5], [])
    """
    parts = [] if text is None else text.split(",")
    found = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if found != sorted(set(found)) or any(number < 1 for number in found):
        raise ConfigError(
            f"--{name} {text}: expected whole numbers of 1 or more, increasing, with commas between"
        )
    return found


def print_accuracy(
    model: Any,
    task: Task,
    counts: Mapping[EditKind, Sequence[int]],
    batches: Sequence[Any],
    *,
    split: str,
    beam: int,
) -> None:
    """Print certified and attacked accuracy for every number of edits."""
    from wellposed.training.certified.word_accuracy import word_accuracy

    limit = text_limit(model, task.tokenizer)
    found = word_accuracy(model, task.tokenizer, batches, counts, limit=limit, beam=beam)
    print(f"{task.name}, {split}, any words by any words of the vocabulary:")
    print(found.table())


def text_limit(model: Any, tokenizer: Any) -> int:
    """Return the most tokens of a text that the model reads; what is longer is cut."""
    return min(int(tokenizer.model_max_length), int(model.config.max_position_embeddings))


def word_counter(
    model: Any, tokenizer: Any, limit: int
) -> Callable[[Mapping[str, Any]], list[int]]:
    """Return a function from a batch of texts to how many replaced words hold, for each text.

    Raises:
        NotLipschitzError, ConfigError: there is no certificate in words; the reason is named.
    """
    from wellposed.training.certified.characters import CharacterEdits
    from wellposed.training.certified.words import bound_words, hold_texts

    bounds = bound_words(model, seq_len=limit)
    CharacterEdits.of(bounds, tokenizer, limit)

    def count(batch: Mapping[str, Any]) -> list[int]:
        return [
            min(text.held["words"], text.words)
            for text in hold_texts(bounds, [batch], {"words": _MOST})
        ]

    return count


def print_text(model: Any, tokenizer: Any, text: str) -> None:
    """Print what of one text can change with its answer held, and which words carry it."""
    import torch

    from wellposed.attack import WordAttack, WordSwaps
    from wellposed.training.certified.characters import CharacterEdits
    from wellposed.training.certified.words import bound_words, hold_texts

    limit = text_limit(model, tokenizer)
    bounds = bound_words(model, seq_len=limit)
    characters = CharacterEdits.of(bounds, tokenizer, limit)
    ids = torch.tensor(tokenizer(text)["input_ids"][:limit], dtype=torch.long)
    if not len(ids):
        raise ConfigError(
            "--text: no word in it, so there is none to change; give a text of 1 word"
        )
    batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    most: dict[EditKind, int] = {"words": _MOST, "edits": 3, "characters": 3}
    (held,) = hold_texts(bounds, [batch], most, characters)
    label, names = held.predicted, dict(model.config.id2label or {})
    swaps = WordSwaps(bounds.model, bounds.vectors, ids, label)
    needed, _ = WordAttack(bounds.model, swaps).fewest_edits(ids, label, len(ids))
    print(f"{printable(text)}\nanswer: {printable(str(names.get(label, label)))}, {len(ids)} words")
    if held.held["words"] >= len(ids):
        print("no words of this vocabulary change it, however many are replaced")
    else:
        k = held.held["words"]
        ending = f"the attack needs {needed}" if needed <= len(ids) else "the attack finds none"
        print(f"no {k} replaced words change it; {ending}")
    if bounds.free_rest < float("inf"):
        print(
            f"nor do {held.held['edits']} inserted, deleted or replaced words (up to 3 tried), or"
            f" {held.held['characters']} characters (up to 3 tried)"
        )
    with torch.no_grad():
        logits = bounds.model(**batch).logits[0]
    others = [other for other in range(len(logits)) if other != label]
    gains = bounds.gains(label, ids) / len(ids)
    ahead = logits[label] - logits
    near = min(others, key=lambda c: float(ahead[c]) - float(gains[:, c].sum()))
    shares = gains[:, near] / ahead[near]
    order = shares.argsort(descending=True)[:_SHOWN].tolist()
    words = tokenizer.convert_ids_to_tokens(ids.tolist())
    print(
        f"the words that carry it against {printable(str(names.get(near, near)))}, by what replacing"
        " each can take of the margin:"
    )
    print(
        aligned(
            [("word", "share"), *((printable(words[i]), f"{float(shares[i]):.3f}") for i in order)],
            "l",
        )
    )
