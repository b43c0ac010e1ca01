"""Sentence pairs: two aligned files by language ending, a file with one column per language, or
``hf:name[:config]``.

Rules, in full:

- In a folder, a file ``STEM.LANGUAGE`` or ``STEM.LANGUAGE.gz`` belongs to the split whose word
stands in STEM (train;
  valid, validation, val, dev; test, tst, newstest), as ``train.de.gz``, ``val.de``,
  ``train.de-en.en``. Both languages of a pair have the same STEM, and line i of one is the
  translation of line i of the other.
- Where a folder holds no such file, its ``train.tsv`` and the files beside it are read. A header
names the languages;
  without one ``columns`` names them in order. A ``.jsonl``, ``.json`` or ``.parquet`` file has a
  column a language, or one column ``translation`` of objects by language.
- Line feeds end lines. A pair with an empty side, or files of different length, are refused, never
  repaired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError, listed, nearest_names
from wellposed.tasks.data import column_files
from wellposed.tasks.data.files import TextFile, missing_file, read_text
from wellposed.tasks.data.splits import SPLIT_WORDS, cut_missing, load_hub_split, load_splits
from wellposed.tasks.task import SPLITS, Split

WORDS: dict[Split, tuple[str, ...]] = {
    "train": SPLIT_WORDS["train"],
    "valid": (*SPLIT_WORDS["valid"], "newsdev"),
    "test": (*SPLIT_WORDS["test"], "tst", "newstest"),
}
MIN_PAIRS_TO_CUT = 40


@dataclass(frozen=True)
class Languages:
    """What a user says about the pair: languages, the test set where a folder has several, the
    columns of a TSV."""

    src: str
    tgt: str
    test_set: str | None = None
    columns: str | None = None


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
        picked = [[column[i] for i in indices] for column in (self.source, self.target)]
        return ParallelTexts(picked[0], picked[1], self.paths, [self.lines[i] for i in indices])

    def lowercased(self) -> ParallelTexts:
        """Return both sides in lower case."""
        lowered = [[text.lower() for text in column] for column in (self.source, self.target)]
        return ParallelTexts(lowered[0], lowered[1], self.paths, self.lines)


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
            suffixes=(".tsv", *column_files.SUFFIXES),
            read_file=lambda path: _read_file(path, languages),
            read_hub=lambda rows, where: _read_hub(rows, where, languages),
        )
    if test is not None:
        pairs["test"], described["test"] = _load_test(test, languages)
    for texts in pairs.values():
        _refuse_empty(texts)
    where, remedy = pairs["train"].paths[0], "put files of these splits beside it"
    pairs, cut = cut_missing(pairs, where, noun="pairs", at_least=MIN_PAIRS_TO_CUT, remedy=remedy)
    return pairs, {**described, "languages": [languages.src, languages.tgt], **cut}


def _aligned_stems(root: Path, languages: Languages) -> dict[Split, tuple[Path, Path]]:
    """Return the two files of every split, or nothing where the place holds no file of either
    language."""
    if not root.exists():
        raise missing_file(root)
    if root.is_file():
        return _stems_of_file(root, languages)
    found: dict[Split, dict[str, dict[str, Path]]] = {split: {} for split in SPLITS}
    for path in sorted(root.iterdir(), key=lambda path: (path.suffix == ".gz", path.name)):
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        split = _split_of(stem)
        if (
            path.is_file()
            and stem
            and split
            and language not in ("tsv", "csv", "json", "jsonl", "parquet", "md")
        ):
            found[split].setdefault(stem, {}).setdefault(
                language, path
            )  # a plain file before its .gz
    names = {language for stems in found.values() for files in stems.values() for language in files}
    if not names & {languages.src, languages.tgt}:
        if names:
            raise _no_language(root, found["train"], languages)
        return {}
    chosen: dict[Split, tuple[Path, Path]] = {}
    for split, stems in found.items():
        complete = {
            s: files for s, files in stems.items() if {languages.src, languages.tgt} <= set(files)
        }
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
        rows = load_hub_split(test, "test")
        return _read_hub(rows, f"{test} (test)", languages), {"source": test, "rows": len(rows)}
    path = Path(test)
    if not path.is_file():
        raise missing_file(path)
    if stems := _stems_of_file(path, languages):
        pairs, described = _from_stems(test, stems, languages)
        return pairs["train"], described
    return _read_file(path, languages)


def _stems_of_file(path: Path, languages: Languages) -> dict[Split, tuple[Path, Path]]:
    """Return the pair of files that a file of one of the languages belongs to; a TSV belongs to
    none."""
    plain = path.name.removesuffix(".gz")
    stem, _, language = plain.rpartition(".")
    if language not in (languages.src, languages.tgt):
        return {}
    pair = []
    for wanted in (languages.src, languages.tgt):
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
        matching = [stem for stem in stems if stem == test_set] or [
            stem for stem in stems if test_set in stem
        ]
        if len(matching) != 1:
            what = "no test set" if not matching else f"{len(matching)} test sets"
            held = ", ".join(matching or stems) or "no test set of both languages"
            raise ConfigError(
                f"{root}: test_set = {test_set!r} matches {what}; the folder holds: {held}"
            )
        return matching[0]
    if len(stems) > 1:
        remedy = (
            "choose one with test_set"
            if split == "test"
            else "give one of the files instead of the folder"
        )
        raise DataError(
            f"{root}: {len(stems)} files could be the {split} split; {remedy}:\n"
            + listed(sorted(stems))
        )
    return stems[0] if stems else None


def _no_language(
    root: Path, train: Mapping[str, Mapping[str, Path]], languages: Languages
) -> DataError:
    """Build the error for languages without a train file; those that exist are named."""
    exist = sorted({language for files in train.values() for language in files})
    lacking = [language for language in (languages.src, languages.tgt) if language not in exist]
    if not lacking:
        stems = ", ".join(f"{stem} ({', '.join(sorted(files))})" for stem, files in train.items())
        return DataError(
            f"{root}: no train file has both {languages.src} and {languages.tgt}; found: {stems}"
        )
    near = {language: nearest_names(language, exist, count=1) for language in lacking}
    hints = ", ".join(
        f"{language!r} (nearest: {near[language][0]})" if near[language] else language
        for language in near
    )
    return DataError(
        f"{root}: no train file for language {hints}; languages that exist there:"
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
        pairs[split] = ParallelTexts(
            source, target, (str(paths[0]), str(paths[1])), range(1, len(source) + 1)
        )
        named = zip((languages.src, languages.tgt), both, strict=True)
        files[split] = {language: file.description() for language, file in named}
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
    if not column_files.has_columns(path):
        return _read_tsv(read_text(path), languages)
    rows, described = column_files.read_columns(path)
    return _read_hub(rows, str(path), languages), described | {
        "columns": f"{languages.src},{languages.tgt}"
    }


def _read_tsv(file: TextFile, languages: Languages) -> tuple[ParallelTexts, dict[str, Any]]:
    rows = [(number, line.split("\t")) for number, line in file.lines()]
    names, how = _column_names(file, rows[0][1], languages)
    if how == "header":
        rows = rows[1:]
    bad = [
        f"{file.path}:{number}: {len(row)} columns"
        for number, row in rows
        if len(row) != len(names)
    ]
    if bad:
        raise DataError(
            f"rows with another number of columns than the {len(names)} of"
            f" {','.join(names)}:\n{listed(bad)}"
        )
    source, target = (names.index(language) for language in (languages.src, languages.tgt))
    path = str(file.path)
    texts = ParallelTexts(
        [row[source] for _, row in rows],
        [row[target] for _, row in rows],
        (path, path),
        [number for number, _ in rows],
    )
    return texts, file.description() | {"columns": f"{','.join(names)} ({how})"}


def _column_names(file: TextFile, first: list[str], languages: Languages) -> tuple[list[str], str]:
    header = [cell.strip().lower() for cell in first]
    if {languages.src, languages.tgt} <= set(header):
        return header, "header"
    if languages.columns is None:
        raise ConfigError(
            f"{file.path}:1: no header names {languages.src} and {languages.tgt} (the line has"
            f" {len(first)} columns: {' | '.join(cell[:30] for cell in first)}); name the columns"
            f" in order, as columns={languages.src},{languages.tgt}; a column that is not used may"
            " have any name"
        )
    names = [name.strip() for name in languages.columns.split(",")]
    lacking = [
        language for language in (languages.src, languages.tgt) if names.count(language) != 1
    ]
    if lacking:
        raise ConfigError(f"columns = {languages.columns!r} must hold {' and '.join(lacking)} once")
    return names, "given"


def _read_hub(rows: Any, where: str, languages: Languages) -> ParallelTexts:
    """Read a column of dictionaries by language, or one column a language."""
    wanted = (languages.src, languages.tgt)
    nested = "translation" in rows.column_names
    dictionaries = rows["translation"] if nested else []
    held = sorted(dictionaries[0]) if len(dictionaries) else list(rows.column_names)
    lacking = " and ".join(language for language in wanted if language not in held)
    if lacking and (len(dictionaries) or not nested):
        expected = lacking if nested else f"column 'translation', and no {lacking}"
        raise DataError(f"{where}: no {expected}; it has {', '.join(held)}")
    values = {
        name: [row[name] for row in dictionaries] if nested else rows[name] for name in wanted
    }
    columns = [column_files.strings(where, name, column) for name, column in values.items()]
    return ParallelTexts(columns[0], columns[1], (where, where), range(1, len(columns[0]) + 1))


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
