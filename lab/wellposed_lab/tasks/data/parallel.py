"""Sentence pairs from two aligned files, a file with one column per language, or the hub.

A file ``STEM.LANGUAGE`` (perhaps ``.gz``), as ``train.de-en.en``, belongs to the split whose word
is in STEM (train; valid, validation, val, dev; test, tst, newstest). Line i of both is a pair.
Without such files, the train file of columns and those beside it are read. A header names the
languages. Objects have a key for each, or a key ``translation`` of such objects. Line feeds end
lines. Pairs with an empty side and files of different lengths are errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed.options import CheckedOptions
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.files import Table
from wellposed_lab.tasks.data.splits import SPLIT_WORDS, SPLITS, DataOptions, Described, Split

_WORDS = re.compile(
    rf"(?<![a-z])(?:(?P<train>train)|(?P<valid>{'|'.join(SPLIT_WORDS['valid'])}|newsdev)"
    r"|(?P<test>test|tst|newstest))(?![a-z])"
)
"""Words of the splits in a file name; the first one decides."""
MIN_PAIRS_TO_CUT = 40
NO_LANGUAGES = ("tsv", "csv", "json", "jsonl", "parquet", "md")


@dataclass(frozen=True)
class ParallelOptions(CheckedOptions):
    """Sentence pairs and their languages."""

    data: str
    """Folder of train.de, train.en (or .gz); tsv, jsonl or parquet file; or hf:name[:config]."""
    src: str
    """Source language, as named by the files."""
    tgt: str
    """Target language."""

    def problems(self) -> list[str]:
        return [f"src = tgt = {self.src!r}; expected two languages"] if self.src == self.tgt else []

    @property
    def both(self) -> tuple[str, str]:
        return self.src, self.tgt


@dataclass(frozen=True)
class ParallelTexts:
    """Source and target sentences of one split; ``paths`` and ``lines`` are their places."""

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
        source, target = ([column[i] for i in indices] for column in (self.source, self.target))
        return ParallelTexts(source, target, self.paths, [self.lines[i] for i in indices])


def load_parallel(options: ParallelOptions) -> splits.Loaded[ParallelTexts]:
    """Return the pairs of every split, and their source; missing splits are 5 % of train."""
    on_hub = options.data.startswith("hf:")
    stems = {} if on_hub else _aligned_stems(Path(options.data), options)
    if stems:
        pairs, described = _from_stems(options.data, stems, options)
    else:
        pairs, described = splits.load_splits(
            DataOptions(options.data),
            suffixes=files.TABLE_SUFFIXES,
            read_file=lambda path: _read_file(path, options),
            read_hub=lambda rows, where: _pairs(files.hub_table(rows, where), options),
        )

    problems = [
        f"{texts.where(i, side)}: the {'target' if side else 'source'} is empty"
        for texts in pairs.values()
        for side, side_texts in enumerate((texts.source, texts.target))
        for i, text in enumerate(side_texts)
        if not text.strip()
    ]
    files.refuse("pairs with an empty side cannot be used; correct or remove them", problems)

    return splits.cut_missing(
        pairs,
        pairs["train"].paths[0],
        {**described, "languages": list(options.both)},
        noun="pairs",
        at_least=MIN_PAIRS_TO_CUT,
        remedy="put files of these splits beside it",
    )


Stems = dict[Split, tuple[Path, Path]]
"""The files of source and target of every split."""


def _aligned_stems(root: Path, options: ParallelOptions) -> Stems:
    """Return the two files of every split, or nothing if there is no file of either language."""
    if not root.exists():
        raise files.missing_file(root)
    if root.is_file():
        return {}

    table = _files_by_language(root)
    names = {language for stems in table.values() for pair in stems.values() for language in pair}
    if not names & set(options.both):
        if names:
            raise _no_language(root, table["train"], options)
        return {}

    chosen: Stems = {}
    for split, stems in table.items():
        complete = {stem: pair for stem, pair in stems.items() if set(options.both) <= {*pair}}
        if split == "train" and not complete:
            raise _no_language(root, stems, options)
        if len(complete) > 1:
            what = f"{root}: {len(complete)} files could be the {split} split; leave one there"
            files.refuse(what, sorted(complete))
        for found_pair in complete.values():
            chosen[split] = (found_pair[options.src], found_pair[options.tgt])

    return chosen


def _files_by_language(root: Path) -> dict[Split, dict[str, dict[str, Path]]]:
    """Return the files of a folder by split, name without language, and language."""
    table: dict[Split, dict[str, dict[str, Path]]] = {split: {} for split in SPLITS}
    plain_first = sorted(root.iterdir(), key=lambda path: (path.suffix == ".gz", path.name))
    for path in plain_first:
        stem, _, language = path.name.removesuffix(".gz").rpartition(".")
        first = _WORDS.search(stem.lower())
        if path.is_file() and first and language not in NO_LANGUAGES:
            split: Split = next(name for name in SPLITS if first[name])
            table[split].setdefault(stem, {}).setdefault(language, path)
    return table


def _no_language(
    root: Path, train: Mapping[str, Mapping[str, Path]], options: ParallelOptions
) -> DataError:
    """Return the error for languages without a train file; it lists those that exist."""
    exist = sorted({language for files in train.values() for language in files})
    lacking = [language for language in options.both if language not in exist] or options.both
    return DataError(
        f"{root}: no train file for language {', '.join(map(repr, lacking))}; languages that exist"
        f" there: {', '.join(exist) or 'none'}"
    )


def _from_stems(data: str, stems: Stems, options: ParallelOptions) -> splits.Loaded[ParallelTexts]:
    pairs: dict[Split, ParallelTexts] = {}
    described: dict[str, Any] = {}
    for split, paths in stems.items():
        both = [files.read_text(path) for path in paths]
        source, target = ([line for _, line in file.lines()] for file in both)
        if len(source) != len(target):
            line = min(len(source), len(target))
            longer = int(len(target) > len(source))
            raise DataError(
                f"files that should be aligned differ in length: {paths[0]} has {len(source)} lines,"
                f" {paths[1]} has {len(target)}; the first line without a partner is"
                f" {paths[longer]}:{line + 1}: {(source, target)[longer][line][:60]!r}. A line may"
                " be missing anywhere before it; align the files again"
            )
        named = (str(paths[0]), str(paths[1]))
        pairs[split] = ParallelTexts(source, target, named, range(1, len(source) + 1))
        origins = [file.described for file in both]
        described[split] = dict(zip(options.both, origins, strict=True))

    return pairs, {"source": data, "files": described}


def _read_file(path: Path, options: ParallelOptions) -> tuple[ParallelTexts, Described]:
    table, described = files.read_table(
        path, has_header=lambda first: set(options.both) <= {n.strip().lower() for n in first}
    )
    if table.first:
        raise ConfigError(
            f"{table.where}:1: no header names {options.src} and {options.tgt} (the line has"
            f" {len(table.first)} columns: {' | '.join(cell[:30] for cell in table.first)}); add a"
            " first line that names the columns"
        )
    names = ",".join(name.strip().lower() for name in table.names)
    return _pairs(table, options), described | {"columns": names}


def _pairs(table: Table, options: ParallelOptions) -> ParallelTexts:
    """Return the columns of the languages, or those of the objects in the column ``translation``."""
    if "translation" in table.names:
        column = table.column(table.names.index("translation"))
        objects = [row if isinstance(row, dict) else {} for row in column]
        names = tuple(dict.fromkeys(name for row in objects for name in row))
        table = replace(table, names=names, column=files.objects_column(objects, names))
    elif not set(options.both) <= {*table.names}:
        table = replace(table, names=tuple(name.strip().lower() for name in table.names))

    lacking = [language for language in options.both if language not in table.names]
    if lacking:
        table.refuse()
        raise DataError(f"{table.where}: no {' and '.join(lacking)}, only {', '.join(table.names)}")
    source, target = map(table.strings, options.both)
    return ParallelTexts(source, target, (table.where, table.where), table.places)
