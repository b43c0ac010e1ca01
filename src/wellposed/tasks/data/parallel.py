"""Sentence pairs from two aligned files, a file with one column per language, or the hub.

Rules, in full:

- In a folder, a file ``STEM.LANGUAGE`` or ``STEM.LANGUAGE.gz`` belongs to the split whose word
  stands in STEM (train; valid, validation, val, dev; test, tst, newstest), as ``train.de.gz``,
  ``val.de``, ``train.de-en.en``. Both languages of a pair have the same STEM, and line i of one is
  the translation of line i of the other.
- Where a folder holds no such file, its train file of columns and the files beside it are read. A
  header names the languages; without one ``columns`` names them in order. Objects have a key a
  language, or one key ``translation`` of objects by language.
- Line feeds end lines. A pair with an empty side, or files of different length, are refused, never
  repaired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError, listed, nearest_names
from wellposed.tasks.data.files import (
    TABLE_SUFFIXES,
    Table,
    hub_table,
    missing_file,
    objects_column,
    read_table,
    read_text,
)
from wellposed.tasks.data.splits import (
    SPLIT_WORDS,
    SPLITS,
    Split,
    cut_missing,
    load_hub_split,
    load_splits,
)

WORDS: dict[Split, tuple[str, ...]] = {
    "train": SPLIT_WORDS["train"],
    "valid": (*SPLIT_WORDS["valid"], "newsdev"),
    "test": (*SPLIT_WORDS["test"], "tst", "newstest"),
}
MIN_PAIRS_TO_CUT = 40
NO_LANGUAGES = ("tsv", "csv", "json", "jsonl", "parquet", "md")


@dataclass(frozen=True)
class Languages:
    """What a user says about the pair: languages, the test set where a folder has several, the
    columns of a file without a header."""

    src: str
    tgt: str
    test_set: str | None = None
    columns: str | None = None

    @property
    def both(self) -> tuple[str, str]:
        """Source and target."""
        return self.src, self.tgt


@dataclass(frozen=True)
class ParallelTexts:
    """Source and target sentences of one split; ``paths`` and ``lines`` say where each stands."""

    source: Sequence[str]
    target: Sequence[str]
    paths: tuple[str, str]
    lines: Sequence[int]

    def __len__(self) -> int:
        return len(self.source)

    def where(self, index: int, side: int = 0) -> str:
        """Return file:line of a sentence; side 0 is the source."""
        return f"{self.paths[side]}:{self.lines[index]}"

    def select(self, indices: Sequence[int]) -> ParallelTexts:
        """Return the pairs at ``indices``."""
        source, target = ([column[i] for i in indices] for column in (self.source, self.target))
        return ParallelTexts(source, target, self.paths, [self.lines[i] for i in indices])

    def lowercased(self) -> ParallelTexts:
        """Return both sides in lower case."""
        source, target = ([text.lower() for text in side] for side in (self.source, self.target))
        return replace(self, source=source, target=target)


def load_parallel(
    data: str, languages: Languages, *, test: str | None = None
) -> tuple[dict[Split, ParallelTexts], dict[str, Any]]:
    """Return the pairs of every split and the description of where they came from.

    A split without a file is cut from train: 5 %, rows drawn by a fixed shuffle, and described as
    such. ``test`` says where the test split is instead.
    """
    if languages.src == languages.tgt:
        raise ConfigError(f"src = tgt = {languages.src!r}; expected two languages")
    if test is not None and languages.test_set is not None:
        raise ConfigError(f"test = {test!r} and test_set = {languages.test_set!r}: give one")
    stems = {} if data.startswith("hf:") else _aligned_stems(Path(data), languages)
    if stems:
        pairs, described = _from_stems(data, stems, languages)
    else:
        pairs, described = load_splits(
            data,
            suffixes=TABLE_SUFFIXES,
            read_file=lambda path: _read_file(path, languages),
            read_hub=lambda rows, where: _pairs(hub_table(rows, where), languages),
        )
    if test is not None:
        pairs["test"], described["test"] = _load_test(test, languages)
    for texts in pairs.values():
        _refuse_empty(texts)
    where, remedy = pairs["train"].paths[0], "put files of these splits beside it"
    pairs, cut = cut_missing(pairs, where, noun="pairs", at_least=MIN_PAIRS_TO_CUT, remedy=remedy)
    return pairs, {**described, "languages": list(languages.both), **cut}


def _aligned_stems(root: Path, languages: Languages) -> dict[Split, tuple[Path, Path]]:
    """Return the two files of every split, or nothing where the place holds no file of either
    language."""
    if not root.exists():
        raise missing_file(root)
    if root.is_file():
        return _stems_of_file(root, languages)
    found: dict[Split, dict[str, dict[str, Path]]] = {split: {} for split in SPLITS}
    plain_first = sorted(root.iterdir(), key=lambda path: (path.suffix == ".gz", path.name))
    for path in plain_first:
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        split = _split_of(stem)
        if path.is_file() and stem and split and language not in NO_LANGUAGES:
            found[split].setdefault(stem, {}).setdefault(language, path)
    names = {language for stems in found.values() for files in stems.values() for language in files}
    if not names & set(languages.both):
        if names:
            raise _no_language(root, found["train"], languages)
        return {}
    chosen: dict[Split, tuple[Path, Path]] = {}
    for split, stems in found.items():
        complete = {stem: files for stem, files in stems.items() if set(languages.both) <= {*files}}
        if split == "train" and not complete:
            raise _no_language(root, stems, languages)
        stem = _one_stem(root, split, list(complete), languages.test_set)
        if stem is not None:
            chosen[split] = (complete[stem][languages.src], complete[stem][languages.tgt])
    return chosen


def _load_test(test: str, languages: Languages) -> tuple[ParallelTexts, dict[str, Any]]:
    """Return the pairs of a test set that lies elsewhere, and the description of where they came
    from."""
    if test.startswith("hf:"):
        table = hub_table(load_hub_split(test, "test"), f"{test} (test)")
        return _pairs(table, languages), {"source": test, "rows": len(table.places)}
    path = Path(test)
    if not path.is_file():
        raise missing_file(path)
    if stems := _stems_of_file(path, languages):
        pairs, described = _from_stems(test, stems, languages)
        return pairs["train"], described
    return _read_file(path, languages)


def _stems_of_file(path: Path, languages: Languages) -> dict[Split, tuple[Path, Path]]:
    """Return the pair of files that a file of one of the languages belongs to; a file of columns
    belongs to none."""
    stem, _, language = path.name.removesuffix(".gz").rpartition(".")
    if language not in languages.both:
        return {}
    pair = []
    for wanted in languages.both:
        options = [path.parent / f"{stem}.{wanted}{ending}" for ending in ("", ".gz")]
        pair.append(next((option for option in options if option.is_file()), options[0]))
        if not pair[-1].is_file():
            raise missing_file(pair[-1])
    return {"train": (pair[0], pair[1])}


def _split_of(stem: str) -> Split | None:
    """Return the split whose word comes first in a file name."""
    places: list[tuple[int, Split]] = [
        (match.start(), split)
        for split, words in WORDS.items()
        for match in re.finditer(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])", stem.lower())
    ]
    return min(places)[1] if places else None


def _one_stem(root: Path, split: Split, stems: list[str], test_set: str | None) -> str | None:
    if split == "test" and test_set is not None:
        exact = [stem for stem in stems if stem == test_set]
        matching = exact or [stem for stem in stems if test_set in stem]
        if len(matching) != 1:
            what = f"{len(matching)} test sets" if matching else "no test set"
            held = ", ".join(matching or stems) or "no test set of both languages"
            raise ConfigError(
                f"{root}: test_set = {test_set!r} matches {what}; the folder holds: {held}"
            )
        return matching[0]
    if len(stems) > 1:
        remedy = "give one of the files instead of the folder"
        raise DataError(
            f"{root}: {len(stems)} files could be the {split} split;"
            f" {'choose one with test_set' if split == 'test' else remedy}:\n"
            + listed(sorted(stems))
        )
    return stems[0] if stems else None


def _no_language(
    root: Path, train: Mapping[str, Mapping[str, Path]], languages: Languages
) -> DataError:
    """Build the error for languages without a train file; those that exist are named."""
    exist = sorted({language for files in train.values() for language in files})
    lacking = [language for language in languages.both if language not in exist]
    if not lacking:
        stems = ", ".join(f"{stem} ({', '.join(sorted(files))})" for stem, files in train.items())
        return DataError(
            f"{root}: no train file has both {languages.src} and {languages.tgt}; found: {stems}"
        )
    hints = [
        f"{language!r} (nearest: {near[0]})" if near else language
        for language in lacking
        if (near := nearest_names(language, exist, count=1)) is not None
    ]
    return DataError(
        f"{root}: no train file for language {', '.join(hints)}; languages that exist there:"
        f" {', '.join(exist) or 'none'}"
    )


def _from_stems(
    data: str, stems: Mapping[Split, tuple[Path, Path]], languages: Languages
) -> tuple[dict[Split, ParallelTexts], dict[str, Any]]:
    pairs: dict[Split, ParallelTexts] = {}
    files: dict[str, Any] = {}
    for split, paths in stems.items():
        both = [read_text(path) for path in paths]
        source, target = ([line for _, line in file.lines()] for file in both)
        _refuse_unequal(paths, source, target)
        named = (str(paths[0]), str(paths[1]))
        pairs[split] = ParallelTexts(source, target, named, range(1, len(source) + 1))
        described = [file.description() for file in both]
        files[split] = dict(zip(languages.both, described, strict=True))
    return pairs, {"source": data, "files": files}


def _refuse_unequal(paths: tuple[Path, Path], source: list[str], target: list[str]) -> None:
    if len(source) == len(target):
        return
    longer, lines = (paths[0], source) if len(source) > len(target) else (paths[1], target)
    line = min(len(source), len(target)) + 1
    raise DataError(
        f"files that should be aligned differ in length: {paths[0]} has {len(source)} lines,"
        f" {paths[1]} has {len(target)}; the first line without a partner is {longer}:{line}:"
        f" {lines[line - 1][:60]!r}; a line may be missing anywhere before it: align the files"
        " again"
    )


def _read_file(path: Path, languages: Languages) -> tuple[ParallelTexts, dict[str, Any]]:
    wanted = set(languages.both)
    table, described = read_table(path, has_header=lambda first: wanted <= {*map(_plain, first)})
    names, how = ",".join(map(_plain, table.names)), "header"
    if table.first:
        names, how = _given_names(table, languages), "given"
        table = replace(table, names=tuple(map(str.strip, names.split(","))))
    described["columns"] = f"{names} ({how})"
    return _pairs(table, languages), described


def _plain(name: str) -> str:
    return name.strip().lower()


def _given_names(table: Table, languages: Languages) -> str:
    """Return the names that the user gives to the columns of a file without a header."""
    if languages.columns is None:
        raise ConfigError(
            f"{table.where}:1: no header names {languages.src} and {languages.tgt} (the line has"
            f" {len(table.first)} columns: {' | '.join(cell[:30] for cell in table.first)}); name"
            f" the columns in order, as columns={languages.src},{languages.tgt}; a column that is"
            " not used may have any name"
        )
    names = list(map(str.strip, languages.columns.split(",")))
    lacking = [language for language in languages.both if names.count(language) != 1]
    if lacking:
        raise ConfigError(f"columns = {languages.columns!r} must hold {' and '.join(lacking)} once")
    if len(names) != len(table.first):
        raise DataError(f"{table.where}:1: {len(table.first)} columns, columns names {len(names)}")
    return languages.columns


def _pairs(table: Table, languages: Languages) -> ParallelTexts:
    """Return the columns of the languages, or those of the objects of one column
    ``translation``."""
    if "translation" in table.names:
        held = table.column(table.names.index("translation"))
        objects = [row if isinstance(row, dict) else {} for row in held]
        names = tuple(dict.fromkeys(name for row in objects for name in row))
        table = replace(table, names=names, column=objects_column(objects, names))
    else:
        plain = tuple(map(_plain, table.names))
        table = table if set(languages.both) <= {*table.names} else replace(table, names=plain)
    lacking = [language for language in languages.both if language not in table.names]
    if lacking:
        table.refuse()
        raise DataError(
            f"{table.where}: no {' and '.join(lacking)}; it has {', '.join(table.names)}"
        )
    source, target = map(table.strings, languages.both)
    return ParallelTexts(source, target, (table.where, table.where), table.places)


def _refuse_empty(pairs: ParallelTexts) -> None:
    sides = (pairs.source, pairs.target)
    problems = [
        f"{pairs.where(i, side)}: the {name} is empty"
        for i in range(len(pairs))
        for side, name in enumerate(("source", "target"))
        if not sides[side][i].strip()
    ]
    if problems:
        raise DataError(
            "pairs with an empty side cannot be used; correct or remove them:\n" + listed(problems)
        )
