"""``wellposed certify RUN --words 1,2,3``: how many changed words or characters an answer holds
against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError
from wellposed.text_table import aligned, printable

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.tasks.data.splits import Split
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
    split: Split,
    beam: int,
    folder: Path,
) -> None:
    """Print certified and attacked accuracy for every number of edits, and keep those of replaced
    words in the folder of the run."""
    from wellposed.training.certified.run import keep_words, text_limit
    from wellposed.training.certified.word_accuracy import word_accuracy

    limit = text_limit(model, task.tokenizer)
    found = word_accuracy(model, task.tokenizer, batches, counts, limit=limit, beam=beam)
    print(f"{task.name}, {split}, any words by any words of the vocabulary:")
    print(found.table())
    keep_words(folder, found, split)


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
    from wellposed.training.certified.run import text_limit
    from wellposed.training.certified.words import bound_words, hold_texts

    limit = text_limit(model, tokenizer)
    bounds = bound_words(model, seq_len=limit, required=False)
    ids = torch.tensor(tokenizer(text)["input_ids"][:limit], dtype=torch.long)
    if not len(ids):
        raise ConfigError(
            "--text: no word in it, so there is none to change; give a text of 1 word"
        )
    batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    with torch.no_grad():
        logits = bounds.model(**batch).logits[0]
    label = int(logits.argmax())
    swaps = WordSwaps(bounds.model, bounds.vectors, ids, label)
    needed, turned = WordAttack(bounds.model, swaps).fewest_edits(ids, label, len(ids))
    words, others = (tokenizer.convert_ids_to_tokens(some.tolist()) for some in (ids, turned))
    swapped = [
        f"{printable(old)} -> {printable(new)}"
        for old, new in zip(words, others, strict=True)
        if old != new
    ]
    attack = f"the attack needs {needed}: {', '.join(swapped)}"
    if needed > len(ids):
        attack = "the attack finds none"
    names = dict(model.config.id2label or {})
    answer = printable(str(names.get(label, label)))
    print(f"{printable(text)}\nanswer: {answer}, {len(ids)} words")
    if bounds.reason:
        print(f"no certificate: {bounds.reason}; {attack}")
        return
    most: dict[EditKind, int] = {"words": _MOST, "edits": 3, "characters": 3}
    characters = CharacterEdits.of(bounds, tokenizer, limit)
    (held,) = hold_texts(bounds, [batch], most, characters)
    if held.held["words"] >= len(ids):
        print("no words of this vocabulary change it, however many are replaced")
    else:
        print(f"no {held.held['words']} replaced words change it; {attack}")
    if bounds.free_rest < float("inf"):
        print(
            f"nor do {held.held['edits']} inserted, deleted or replaced words (up to 3 tried), or"
            f" {held.held['characters']} characters (up to 3 tried)"
        )
    gains = bounds.gains(label, ids) / len(ids)
    ahead = logits[label] - logits
    near = min(
        (other for other in range(len(logits)) if other != label),
        key=lambda c: float(ahead[c]) - float(gains[:, c].sum()),
    )
    shares = gains[:, near] / ahead[near]
    rows = [
        (printable(words[i]), f"{float(shares[i]):.3f}")
        for i in shares.argsort(descending=True)[:_SHOWN].tolist()
    ]
    print(
        f"the words that carry it against {printable(str(names.get(near, near)))}, by what replacing"
        " each can take of the margin:"
    )
    print(aligned([("word", "share"), *rows], "l"))
