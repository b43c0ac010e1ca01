"""Sentence pairs for studies of translation: the user's, or words of a generated language."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError
from wellposed_studies.recipe import Request

SOURCE = "source"
TARGET = "target"
_LETTERS = "abcdefgh"
_NOT_LANGUAGES = {"tsv", "csv", "jsonl", "txt", "md"}
READS: dict[str, Any] = {
    "folders": ("multi30k", "iwslt14_de_en"),
    "takes": ("data", "languages"),
    "builtin": "walks over eight letters that mostly step by one, to be written backwards",
}
"""Recipe options for data of sentence pairs."""


def translation_data(
    request: Request,
    *,
    wanted: tuple[str, str] = ("de", "en"),
    pairs: int = 2000,
    words: bool = False,
) -> dict[str, Any]:
    """Return the data options of the task `translation`: the user's data, or a generated corpus.

    Args:
        request: `data` is a folder of aligned files, or any data of the task with `languages`. If
            it is None, the corpus is generated in `out`.
        wanted: source and target. If others are there, the folder's first two by name.
        pairs: generated train pairs.
        words: separate the generated letters by spaces, so that BLEU counts words.

    Raises:
        ConfigError: fewer than two languages, or ``languages`` malformed or without data.
    """
    if request.languages is not None:
        return _named_languages(request.data, request.languages)
    if request.data is None:
        generated = str(_generate(request.out / "corpus", pairs, words))
        return {"data": generated, "src": SOURCE, "tgt": TARGET}

    if not request.data.startswith("hf:"):
        root = Path(request.data)
        files = [path.name.removesuffix(".gz") for path in root.glob("*train*")]
        names = sorted({name.rpartition(".")[2] for name in files} - _NOT_LANGUAGES)
        if not set(wanted) <= set(names):
            if len(names) < 2:
                raise ConfigError(
                    f"{root}: no aligned train files of two languages (train.{wanted[0]},"
                    f" train.{wanted[1]}); found {', '.join(names) or 'none'}; if one file"
                    " has both languages, give --languages SRC,TGT"
                )
            wanted = (names[0], names[1])

    return {"data": request.data, "src": wanted[0], "tgt": wanted[1]}


def _named_languages(data: str | None, languages: str) -> dict[str, Any]:
    names = [name.strip() for name in languages.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise ConfigError(
            f"languages = {languages!r}: expected source and target, two names as en,fr"
        )
    if data is None:
        raise ConfigError(
            f"languages = {languages!r} without data: the generated corpus has none; give --data"
        )
    return {"data": data, "src": names[0], "tgt": names[1]}


def _generate(folder: Path, pairs: int, words: bool) -> Path:
    """Write train, valid and test of the generated language and return the train file."""
    folder.mkdir(parents=True, exist_ok=True)
    ending = f"{pairs}{'-words' if words else ''}.tsv"
    for split, rng, rows in splits("", pairs):
        lines = [f"{SOURCE}\t{TARGET}"]
        for _ in range(rows):
            word = random_walk(rng)
            sides = ((" " if words else "").join(side) for side in (word, word[::-1]))
            lines.append("\t".join(sides))
        path = folder / f"{split}-{ending}"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / f"train-{ending}"


def splits(valid: str, rows: int) -> Iterator[tuple[str, random.Random, int]]:
    """Yield each split with its random numbers and its number of rows (a tenth outside train)."""
    for split in ("train", valid or "valid", "test"):
        count = rows if split == "train" else max(8, rows // 10)
        yield split, random.Random(f"{split}/{rows}"), count


def random_walk(rng: random.Random) -> str:
    """Return four to eight letters, each one or two after the one before."""
    steps = [rng.randrange(len(_LETTERS))]
    while len(steps) < rng.randint(4, 8):
        steps.append((steps[-1] + rng.choice((1, 1, 1, 2))) % len(_LETTERS))
    return "".join(_LETTERS[step] for step in steps)
