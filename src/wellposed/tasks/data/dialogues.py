"""Dialogues of every split: which files hold them, in which format, and which dialogues occur
twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import DataError, listed
from wellposed.tasks.data.dailydialog import END_OF_UTTERANCE, Dialogue, parse_dailydialog
from wellposed.tasks.data.files import TextFile, missing_file, read_text
from wellposed.tasks.data.labelled import no_builtin_data
from wellposed.tasks.data.personachat import NUMBERED, parse_personachat
from wellposed.tasks.data.splits import cut_missing, load_splits, shuffled, train_position
from wellposed.tasks.task import Split

Format = Literal["auto", "dailydialog", "personachat"]
PARSERS: dict[str, Callable[[TextFile], list[Dialogue]]] = {
    "dailydialog": parse_dailydialog,
    "personachat": parse_personachat,
}
HUB_COLUMNS = ("dialog", "dialogue", "utterances")
# Labels of acts and emotions lie beside the dialogues of the released DailyDialog, line by line.
_LABELS = re.compile(r"(?<![A-Za-z])(act|emotion|topic)(?![A-Za-z])", re.IGNORECASE)


class Dialogues(tuple[Dialogue, ...]):
    """The dialogues of a split, in the order of the file."""

    def select(self, rows: Sequence[int], /) -> Dialogues:
        """Return the dialogues ``rows``."""
        return Dialogues(self[row] for row in rows)


def load_dialogues(
    data: str, *, valid: str | None = None, test: str | None = None, file_format: Format = "auto"
) -> tuple[dict[Split, Dialogues], dict[str, Any]]:
    """Read the dialogues of the splits; a split without a file is cut from train, whole dialogues
    at a time.

    Where a split is cut, equal dialogues and dialogues linked by persona lines that they share stay
    in one split.
    """
    if data == "builtin":
        raise no_builtin_data()

    def read_file(path: Path) -> tuple[Dialogues, dict[str, Any]]:
        file = read_text(path)
        name = detect_format(file) if file_format == "auto" else file_format
        return Dialogues(PARSERS[name](file)), file.description() | {"format": name}

    train = data if data.startswith("hf:") else str(_train_file(Path(data)))
    splits, described = load_splits(
        train, valid=valid, test=test, suffixes=(".txt",), read_file=read_file, read_hub=_read_hub
    )
    splits, cut = cut_missing(
        splits,
        data,
        noun="dialogues",
        note=", no persona line shared with train",
        draw=lambda missing, wanted: _draw_groups(splits["train"], missing, wanted, data),
    )
    return splits, {**described, "source": data, **cut}


def fingerprint(dialogue: Dialogue) -> tuple[str, ...]:
    """Return the turns without white space: what two dialogues share that are the same but for
    spacing."""
    return tuple("".join(turn.split()) for turn in dialogue.turns)


def repeated(dialogues: Sequence[Dialogue], earlier: Sequence[Dialogue]) -> list[int]:
    """Return the positions of the dialogues that ``earlier`` holds too, white space aside."""
    seen = set(map(fingerprint, earlier))
    return [index for index, dialogue in enumerate(dialogues) if fingerprint(dialogue) in seen]


def _train_file(root: Path) -> Path:
    """Return the train file of a folder, the label files of DailyDialog left aside; a file is
    itself."""
    if not root.is_dir():
        return root
    names = sorted(path.name for path in root.iterdir() if path.is_file())
    texts = [
        name
        for name in names
        if name.lower().removesuffix(".gz").endswith(".txt") and not _LABELS.search(name)
    ]
    trains = [name for name in texts if train_position(name)]
    if len(trains) != 1:
        what = f"{len(trains)} train files" if trains else "no train file"
        raise DataError(
            f"{root}: {what}, expected one named like dialogues_train.txt or train.txt (.gz too);"
            f" the folder holds: {', '.join(names[:10]) or 'nothing'}; give the file itself"
        )
    return root / trains[0]


def detect_format(file: TextFile) -> str:
    """Return the format of a file by its first line, or raise `DataError`."""
    first = file.text.lstrip().partition("\n")[0]
    if END_OF_UTTERANCE in first:
        return "dailydialog"
    if NUMBERED.match(first):
        return "personachat"
    raise DataError(
        f"{file.path}:1: neither format is recognised: DailyDialog has {END_OF_UTTERANCE} after"
        f" every utterance, PersonaChat a number before every line; received {first[:60]!r}"
    )


def _read_hub(rows: Any, where: str) -> Dialogues:
    column = next((name for name in HUB_COLUMNS if name in rows.column_names), None)
    if column is None:
        held = ", ".join(rows.column_names)
        raise DataError(
            f"{where}: no column of utterances named {', '.join(HUB_COLUMNS)}; it has {held}"
        )
    dialogues = [tuple(str(turn).strip() for turn in turns) for turns in rows[column]]
    problems = [
        f"{where} row {number}: an utterance is empty, or there is none"
        for number, turns in enumerate(dialogues)
        if not turns or not all(turns)
    ]
    if problems:
        raise DataError("dialogues that cannot be used:\n" + listed(problems))
    return Dialogues(Dialogue(number, turns) for number, turns in enumerate(dialogues, start=1))


def _draw_groups(
    train: Dialogues, missing: Sequence[Split], wanted: int, where: str
) -> dict[Split, list[int]]:
    """Return the rows of each missing split and of train, inseparable dialogues in one split."""
    groups = shuffled(_inseparable(train))
    rows: dict[Split, list[int]] = {}
    for split in missing:
        rows[split] = []
        while len(rows[split]) < wanted and len(groups) > 1:
            rows[split] += groups.pop()
        if not rows[split]:
            raise DataError(
                f"{where}: all dialogues are linked by persona lines that they share, so no {split}"
                f" split can be cut; give it with the option {split}"
            )
    return {**rows, "train": [row for group in groups for row in group]}


def _inseparable(dialogues: Sequence[Dialogue]) -> list[list[int]]:
    """Return the positions of the dialogues in groups of which no two share a persona line or a
    whole dialogue."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        parents.setdefault(name, name)
        while parents[name] != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for dialogue in dialogues:
        names = [*dialogue.persona, " ".join(fingerprint(dialogue))]
        for name in names[1:]:
            parents[root(name)] = root(names[0])
    groups: dict[str, list[int]] = {}
    for position, dialogue in enumerate(dialogues):
        groups.setdefault(root(" ".join(fingerprint(dialogue))), []).append(position)
    return list(groups.values())


def read_synonyms(path: Path) -> dict[str, str]:
    """Read words of equal meaning, one group a line, separated by spaces: the first word names its
    group."""
    if not path.exists():
        raise missing_file(path)
    names: dict[str, str] = {}
    problems = []
    for number, line in read_text(path).lines():
        words = line.lower().split()
        again = [word for word in words if word in names]
        if len(words) < 2 or again:
            what = f"{again[0]!r} is in a group already" if again else "expected two words or more"
            problems.append(f"{path}:{number}: {what}")
        names |= dict.fromkeys(words, words[0] if words else "")
    if problems:
        raise DataError("the synonyms cannot be used:\n" + listed(problems))
    return names
