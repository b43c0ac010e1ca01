"""Where pairs of documents come from: AAN files of the Long Range Arena, and passages of CPython's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.files import find_split_files, missing_file, read_text
from wellposed.tasks.data.tables import LabelledTexts, numbered_lines
from wellposed.tasks.kinds.classification import cut_rows
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
    """Documents, each once, and pairs of them: ``documents[first[i]]`` and ``documents[second[i]]``."""

    documents: LabelledTexts
    """``labels`` are document ids where the source is a pair file; ``lines`` are those a document is first seen at."""
    first: Sequence[int]
    second: Sequence[int]
    labels: Sequence[int]

    def arrays(self) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
        """Return first, second and labels as arrays."""
        import numpy as np

        first, second, labels = (np.array(values, np.int64) for values in (self.first, self.second, self.labels))
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
    """Return whether the train file of ``data`` is a tsv whose first lines, most of 20, have five columns."""
    if data.startswith("hf:"):
        return False
    path = find_split_files(data, suffixes=(".tsv", ".csv", ".jsonl")).paths["train"]
    if not path.name.lower().removesuffix(".gz").endswith(".tsv"):
        return False
    lines = read_text(path).text.split("\n", _PROBE_LINES)[:_PROBE_LINES]
    pairs = sum(line.count("\t") == len(COLUMNS) - 1 for line in lines)
    return 2 * pairs > sum(map(bool, lines))


def read_pairs(options: Any) -> tuple[dict[Split, PairTable], dict[str, Any]]:
    """Read the pair files of ``options.data``; missing splits are cut from train.

    Raises:
        DataError: rows that are not label, id, id, text, text, all named with file:line.
    """
    valid = options.valid or _eval_file(options.data)
    found = find_split_files(options.data, valid=valid, test=options.test, suffixes=(".tsv",))
    tables: dict[Split, PairTable] = {}
    files: dict[Split, Any] = {}
    for split, path in found.paths.items():
        file = read_text(path)
        tables[split] = read_pair_file(file)
        files[split] = file.description()
    described = {"source": options.data, "files": files, "splits": found.how, "columns": ", ".join(COLUMNS)}
    missing: list[Split] = [split for split in SPLITS if split not in tables]
    if not missing:
        return tables, described
    train = tables["train"]
    rows, cut = cut_rows(len(train.labels), missing, train.documents.path)
    for split, chosen in rows.items():
        tables[split] = train.select(chosen)
    return tables, {**described, "cut_from_train": cut, "cut_note": "documents of cut pairs may recur in train"}


def _eval_file(data: str) -> str | None:
    """Return the valid file of the release, whose name says eval, beside the train file."""
    root = Path(data)
    if not root.exists():
        raise missing_file(root)
    train = find_split_files(data, suffixes=(".tsv",)).paths["train"]
    before, word, after = train.name.rpartition("train")
    candidate = train.with_name(f"{before}eval{after}")
    return str(candidate) if word and candidate.exists() else None


def read_pair_file(file: TextFile) -> PairTable:
    """Read rows of label (0, 1, 0.0 or 1.0), id, id, text and text between tabs; a document is its text."""
    numbers: dict[str, int] = {}
    ids: list[str] = []
    lines: list[int] = []
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    problems: list[str] = []
    for number, line in numbered_lines(file.text):
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
    if problems:
        raise DataError(
            f"{file.path}: {len(problems)} rows that cannot be used; correct or remove them:\n" + listed(problems)
        )
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
    """Cut the sections of the builtin prose into passages labelled by section, each section in one split."""
    from wellposed.tasks.data.prose import GENERATOR_VERSION, gather_prose

    prose = gather_prose()
    sections = [section for section in prose.text.split("\n\n\n") if len(section) >= 2 * _PASSAGE]
    found: dict[Split, tuple[list[str], list[str], list[int]]] = {split: ([], [], []) for split in SPLITS}
    for number, section in enumerate(sections):
        texts, labels, lines = found[_SPLIT_OF_TENTH.get(number % 10, "train")]
        for start in range(0, len(section) - _PASSAGE + 1, _PASSAGE):
            texts.append(section[start : start + _PASSAGE])
            labels.append(str(number))
            lines.append(number)
    described = {
        "source": "builtin: passages of CPython's documentation and docstrings; related = of the same section",
        "python": prose.python,
        "sha256": prose.sha256,
        "missing_modules": list(prose.missing_modules),
        "generator_version": GENERATOR_VERSION,
        "passage_characters": _PASSAGE,
        "sections": len(sections),
    }
    tables: dict[Split, LabelledTexts] = {}
    for split in SPLITS:
        tables[split] = LabelledTexts("builtin", *found[split], columns="section, passage")
    return tables, described
