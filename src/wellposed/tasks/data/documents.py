"""Where pairs of documents come from: AAN files of the Long Range Arena, and passages of CPython's
documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.tasks.data.column_files import refuse_rows
from wellposed.tasks.data.files import read_text
from wellposed.tasks.data.splits import cut_missing, find_split_files, load_splits, train_position
from wellposed.tasks.data.tables import SUFFIXES, LabelledTexts
from wellposed.tasks.data.text_folders import has_class_folders
from wellposed.tasks.task import SPLITS, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wellposed.tasks.data.files import TextFile

COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABEL_VALUES = {"0": 0, "1": 1, "0.0": 0, "1.0": 1}
BUILTIN_SIZES: dict[Split, int] = {"train": 2000, "valid": 200, "test": 200}
_PASSAGE = 600
_PROBE_LINES = 20
_SPLIT_OF_TENTH: dict[int, Split] = {8: "valid", 9: "test"}


@dataclass(frozen=True)
class PairTable:
    """Documents, each once, and pairs of them: ``documents[first[i]]`` and
    ``documents[second[i]]``."""

    documents: LabelledTexts
    """``labels`` are document ids where the source is a pair file; ``places`` are the lines they
    are first seen at."""
    first: Sequence[int]
    second: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def arrays(self) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
        """Return first, second and labels as arrays."""
        import numpy as np

        first, second, labels = (
            np.array(values, np.int64) for values in (self.first, self.second, self.labels)
        )
        return first, second, labels

    def select(self, rows: Sequence[int]) -> PairTable:
        """Return the pairs ``rows`` and the documents they use."""
        used = sorted({index for row in rows for index in (self.first[row], self.second[row])})
        position = {index: number for number, index in enumerate(used)}
        return PairTable(
            self.documents.select(used),
            [position[self.first[row]] for row in rows],
            [position[self.second[row]] for row in rows],
            [self.labels[row] for row in rows],
        )


def is_pair_file(data: str) -> bool:
    """Return whether the train file of ``data`` is a tsv whose first lines, most of 20, have five
    columns."""
    if data.startswith("hf:") or has_class_folders(data):
        return False
    path = find_split_files(data, suffixes=SUFFIXES).paths["train"]
    if not path.name.lower().removesuffix(".gz").endswith(".tsv"):
        return False
    lines = read_text(path).text.split("\n", _PROBE_LINES)[:_PROBE_LINES]
    pairs = sum(line.count("\t") == len(COLUMNS) - 1 for line in lines)
    return 2 * pairs > sum(map(bool, lines))


def read_pairs(
    data: str, *, valid: str | None, test: str | None
) -> tuple[dict[Split, PairTable], dict[str, Any]]:
    """Read the pair files of ``data``, of which the valid one may be named eval; missing splits are
    cut from train."""

    def read_file(path: Path) -> tuple[PairTable, dict[str, Any]]:
        file = read_text(path)
        return read_pair_file(file), file.description()

    tables, described = load_splits(
        data, valid=valid or _eval_file(data), test=test, suffixes=(".tsv",), read_file=read_file
    )
    tables, cut = cut_missing(tables, tables["train"].documents.path)
    note = {"cut_note": "documents of cut pairs may recur in train"} if cut else {}
    return tables, {**described, "columns": ", ".join(COLUMNS), **cut, **note}


def _eval_file(data: str) -> str | None:
    """Return the valid file of the release, whose name says eval, beside the train file."""
    train = find_split_files(data, suffixes=(".tsv",)).paths["train"]
    start, end = train_position(train.name) or (0, 0)
    candidate = train.with_name(f"{train.name[:start]}eval{train.name[end:]}")
    return str(candidate) if end and candidate.exists() else None


def read_pair_file(file: TextFile) -> PairTable:
    """Read rows of label (0, 1, 0.0 or 1.0), id, id, text and text between tabs; a document is its
    text."""
    numbers: dict[str, int] = {}
    ids: list[str] = []
    lines: list[int] = []
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    problems: list[str] = []
    for number, line in file.lines():
        fields = line.split("\t")
        problem = _problem(fields)
        if problem:
            problems.append(f"{file.path}:{number}: {problem}")
            continue
        for side in (0, 1):
            text = fields[3 + side]
            if text not in numbers:
                numbers[text] = len(ids)
                ids.append(fields[1 + side])
                lines.append(number)
            rows[side].append(numbers[text])
        rows[2].append(LABEL_VALUES[fields[0]])
    refuse_rows(file.path, problems)
    documents = LabelledTexts(str(file.path), list(numbers), ids, lines, ", ".join(COLUMNS))
    return PairTable(documents, *rows)


def _problem(fields: Sequence[str]) -> str | None:
    if len(fields) != len(COLUMNS):
        found = f"{len(fields)} columns" if fields != [""] else "an empty line"
        return f"{found}, expected {len(COLUMNS)}: {', '.join(COLUMNS)}"
    if fields[0] not in LABEL_VALUES:
        return f"label {fields[0]!r}, expected one of {', '.join(LABEL_VALUES)}"
    empty = [name for name, field in zip(COLUMNS[3:], fields[3:], strict=True) if not field]
    return f"{' and '.join(empty)} is empty" if empty else None


def builtin_passages() -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    """Cut the sections of the builtin prose into passages labelled by section, each section in one
    split."""
    from wellposed.tasks.data.prose import gather_prose

    prose = gather_prose()
    sections = [section for section in prose.text.split("\n\n\n") if len(section) >= 2 * _PASSAGE]
    found: dict[Split, tuple[list[str], list[str], list[int]]] = {
        split: ([], [], []) for split in SPLITS
    }
    for number, section in enumerate(sections):
        texts, labels, lines = found[_SPLIT_OF_TENTH.get(number % 10, "train")]
        for start in range(0, len(section) - _PASSAGE + 1, _PASSAGE):
            texts.append(section[start : start + _PASSAGE])
            labels.append(str(number))
            lines.append(number)
    described = {
        "source": (
            "builtin: passages of CPython's documentation and docstrings; related = of the same"
            " section"
        ),
        **prose.description(),
        "passage_characters": _PASSAGE,
        "sections": len(sections),
    }
    tables: dict[Split, LabelledTexts] = {}
    for split in SPLITS:
        tables[split] = LabelledTexts("builtin", *found[split], columns="section, passage")
    return tables, described
