"""``wellposed certify RUN --words 1,2,3``: how many changed words or characters an answer holds
against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError
from wellposed.text_table import aligned, printable

if TYPE_CHECKING:
    from torch import Tensor

    from wellposed.tasks import Task
    from wellposed.tasks.data.splits import Split
    from wellposed.training.certified.windows import TextReader
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
    from wellposed.training.certified.windows import read_texts
    from wellposed.training.certified.words import hold_texts

    bounds = read_texts(model, tokenizer, limit).bounds

    def count(batch: Mapping[str, Any]) -> list[int]:
        return [
            min(text.held["words"], text.words)
            for text in hold_texts(bounds, [batch], {"words": _MOST})
        ]

    return count


def print_text(model: Any, tokenizer: Any, text: str) -> None:
    """Print what of one text can change with its answer held, and which words carry it."""
    import torch

    from wellposed.training.certified.run import text_limit
    from wellposed.training.certified.windows import read_texts
    from wellposed.training.certified.words import hold_texts

    reader = read_texts(model, tokenizer, text_limit(model, tokenizer), required=False)
    bounds, ids = reader.bounds, reader.encode(text)
    if not len(ids):
        raise ConfigError(
            "--text: no word in it, so there is none to change; give a text of 1 word"
        )
    batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    with torch.no_grad():
        logits, (parts,) = bounds.read(**batch)
    logits = logits[0]
    label = int(logits.argmax())
    attack = _attack(reader, ids, label)
    print(f"{printable(text)}\nanswer: {_class_name(model, label)}, {len(text.split())} words")
    if bounds.reason:
        print(f"no certificate: {bounds.reason}; {attack}")
        return
    most: dict[EditKind, int] = {"words": _MOST, "edits": 3, "characters": 3}
    (held,) = hold_texts(bounds, [batch], most, reader)
    if held.held["words"] >= len(parts):
        print("no words of this vocabulary change it, however many are replaced")
    else:
        print(f"no {held.held['words']} replaced words change it; {attack}")
    if not bounds.unread:
        print(
            f"nor do {held.held['edits']} inserted, deleted or replaced words (up to 3 tried), or"
            f" {held.held['characters']} characters (up to 3 tried)"
        )
    gains = reader.gains(parts, label) / len(parts)
    ahead = logits[label] - logits
    left = ahead - gains.sum(0)
    left[label] = float("inf")
    near = int(left.argmin())
    shares, words = gains[:, near] / ahead[near], list(map(printable, reader.names(ids)))
    order = shares.argsort(descending=True)[:_SHOWN].tolist()
    rows = [(words[i], f"{float(shares[i]):.3f}") for i in order]
    print(
        f"the words that carry it against {_class_name(model, near)}, by what replacing each can"
        " take of the margin:"
    )
    print(aligned([("word", "share"), *rows], "l"))


def _attack(reader: TextReader, ids: Tensor, label: int) -> str:
    """Say which words an attack puts in place of which."""
    from wellposed.attack import WordAttack

    propose = reader.propose("words", ids, label)
    needed, turned = WordAttack(reader.bounds.model, propose).fewest_edits(ids, label, len(ids))
    if needed > len(ids):
        return "the attack finds none"
    pairs = zip(reader.names(ids), reader.names(turned), strict=True)
    swapped = ", ".join(printable(f"{old} -> {new}") for old, new in pairs if old != new)
    return f"the attack needs {needed}: {swapped}"


def _class_name(model: Any, label: int) -> str:
    return printable(str(dict(model.config.id2label or {}).get(label, label)))
