"""Sentence pairs for recipes of encoder-decoders: the user's, or a generated language that is learnt in minutes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError
from wellposed.recipes.recipe import Request

SOURCE, TARGET = "source", "target"
_LETTERS = "abcdefgh"
_NOT_LANGUAGES = {"tsv", "csv", "jsonl", "txt", "md"}
NOTE = (
    "generated corpus: walks over eight letters that mostly step by one, to be written backwards; give --data for "
    "sentences"
)


def translation_data(
    request: Request, *, wanted: tuple[str, str] = ("de", "en"), pairs: int = 2000, words: bool = False
) -> dict[str, Any]:
    """Return the options of the task `translation` that say where its data is: the user's, or generated in ``out``.

    Args:
        request: its ``data`` is a folder of aligned files; where None the corpus is generated.
        wanted: source and target language; where the folder has other ones, the first two it has, in order of name.
        pairs: generated train pairs.
        words: separate the letters of the generated language by spaces, so that BLEU has words to count.

    Raises:
        ConfigError: a folder with fewer than two languages.
    """
    if request.data is None:
        return {"data": str(_generate(request.out / "corpus", pairs, words)), "src": SOURCE, "tgt": TARGET}
    if request.data.startswith("hf:"):
        return {"data": request.data, "src": wanted[0], "tgt": wanted[1]}
    root = Path(request.data)
    names = {path.name.removesuffix(".gz").rpartition(".")[2] for path in root.glob("*train*")} - _NOT_LANGUAGES
    if not set(wanted) <= names:
        if len(names) < 2:
            raise ConfigError(
                f"{root}: no aligned train files of two languages (train.{wanted[0]}, train.{wanted[1]}); found "
                f"{', '.join(sorted(names)) or 'none'}"
            )
        first, second = sorted(names)[:2]
        wanted = (first, second)
    return {"data": request.data, "src": wanted[0], "tgt": wanted[1]}


def _generate(folder: Path, pairs: int, words: bool) -> Path:
    """Write train, valid and test of the generated language, the same in every call, and return the train file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}-{pairs}{'-words' if words else ''}.tsv" for split in ("train", "valid", "test")}
    for split, path in paths.items():
        rng = random.Random(f"{split}/{pairs}")
        lines = [f"{SOURCE}\t{TARGET}"]
        for _ in range(pairs if split == "train" else max(8, pairs // 10)):
            word = walk(rng)
            lines.append("\t".join((" " if words else "").join(side) for side in (word, word[::-1])))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths["train"]


def walk(rng: random.Random) -> str:
    """Return four to eight letters, each one or two after the one before."""
    steps = [rng.randrange(len(_LETTERS))]
    while len(steps) < rng.randint(4, 8):
        steps.append((steps[-1] + rng.choice((1, 1, 1, 2))) % len(_LETTERS))
    return "".join(_LETTERS[step] for step in steps)
