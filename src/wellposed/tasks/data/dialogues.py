"""Dialogues of every split: which files hold them, in which format, and which dialogues occur twice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.dailydialog import END_OF_UTTERANCE, Dialogue, parse_dailydialog
from wellposed.tasks.data.files import TextFile, find_split_files, load_hub_dataset, missing_file, read_text
from wellposed.tasks.data.personachat import NUMBERED, parse_personachat
from wellposed.tasks.task import SPLITS, Split

Format = Literal["auto", "dailydialog", "personachat"]
PARSERS: dict[str, Callable[[TextFile], list[Dialogue]]] = {
    "dailydialog": parse_dailydialog,
    "personachat": parse_personachat,
}
HUB_COLUMNS = ("dialog", "dialogue", "utterances")
MIN_DIALOGUES_TO_CUT, CUT_SHARE = 20, 0.05
# Labels of acts and emotions lie beside the dialogues of the released DailyDialog, line by line.
_LABELS = re.compile(r"(?<![A-Za-z])(act|emotion|topic)(?![A-Za-z])", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedDialogues:
    """What was read, and where it came from."""

    splits: Mapping[Split, Sequence[Dialogue]]
    description: Mapping[str, Any]


def load_dialogues(
    data: str, *, valid: str | None = None, test: str | None = None, file_format: Format = "auto"
) -> LoadedDialogues:
    """Read the dialogues of the splits; a split without a file is cut from train, whole dialogues at a time.

    Where a split is cut, equal dialogues and dialogues linked by persona lines that they share stay in one split.

    Raises:
        DataError: files that are missing or malformed (``file:line``), or too few dialogues to cut a split from.
    """
    if data == "builtin":
        raise ConfigError("data = 'builtin': this task has no built-in data; give a file, a folder or hf:name[:config]")
    if data.startswith("hf:"):
        if valid is not None or test is not None:
            raise ConfigError("options valid and test need data=FILE; hf: data sets bring their own splits")
        splits, described = _from_hub(data)
    else:
        splits, described = _from_files(data, valid, test, file_format)
    splits, cut = _cut_missing(splits, data)
    return LoadedDialogues(splits, described | ({"cut_from_train": cut} if cut else {}))


def fingerprint(dialogue: Dialogue) -> tuple[str, ...]:
    """Return the turns without white space: what two dialogues share that are the same but for spacing."""
    return tuple("".join(turn.split()) for turn in dialogue.turns)


def repeated(dialogues: Sequence[Dialogue], earlier: Sequence[Dialogue]) -> list[int]:
    """Return the positions of the dialogues that ``earlier`` holds too, white space aside."""
    seen = set(map(fingerprint, earlier))
    return [index for index, dialogue in enumerate(dialogues) if fingerprint(dialogue) in seen]


def _from_files(
    data: str, valid: str | None, test: str | None, file_format: Format
) -> tuple[dict[Split, Sequence[Dialogue]], dict[str, Any]]:
    found = find_split_files(str(_train_file(Path(data))), valid=valid, test=test, suffixes=(".txt",))
    files: dict[Split, TextFile] = {split: read_text(path) for split, path in found.paths.items()}
    formats = {split: detect_format(file) if file_format == "auto" else file_format for split, file in files.items()}
    splits: dict[Split, Sequence[Dialogue]] = {}
    for split, file in files.items():
        splits[split] = PARSERS[formats[split]](file)
    described = {
        "source": data,
        "files": {split: file.description() | {"format": formats[split]} for split, file in files.items()},
        "splits": found.how,
    }
    return splits, described


def _train_file(root: Path) -> Path:
    """Return the train file of a folder, the label files of DailyDialog left aside; a file is itself."""
    if not root.is_dir():
        return root
    names = sorted(path.name for path in root.iterdir() if path.is_file())
    texts = [name for name in names if name.lower().removesuffix(".gz").endswith(".txt") and not _LABELS.search(name)]
    trains = [name for name in texts if re.search(r"(?<![A-Za-z])train(?![A-Za-z])", name, re.IGNORECASE)]
    if len(trains) != 1:
        what = f"{len(trains)} train files" if trains else "no train file"
        raise DataError(
            f"{root}: {what}, expected one named like dialogues_train.txt or train.txt (.gz too); the folder holds: "
            f"{', '.join(names[:10]) or 'nothing'}; give the file itself"
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
        f"{file.path}:1: neither format is recognised: DailyDialog has {END_OF_UTTERANCE} after every utterance, "
        f"PersonaChat a number before every line; received {first[:60]!r}"
    )


def _from_hub(data: str) -> tuple[dict[Split, Sequence[Dialogue]], dict[str, Any]]:
    splits: dict[Split, Sequence[Dialogue]] = {}
    files: dict[str, Any] = {}
    for split, rows in load_hub_dataset(data).items():
        column = next((name for name in HUB_COLUMNS if name in rows.column_names), None)
        if column is None:
            raise DataError(
                f"{data} ({split}): no column of utterances named {', '.join(HUB_COLUMNS)}; it has "
                f"{', '.join(rows.column_names)}"
            )
        dialogues = [tuple(str(turn).strip() for turn in turns) for turns in rows[column]]
        problems = [
            f"{data} ({split}) row {number}: an utterance is empty, or there is none"
            for number, turns in enumerate(dialogues)
            if not turns or not all(turns)
        ]
        if problems:
            raise DataError("dialogues that cannot be used:\n" + listed(problems))
        splits[split] = [Dialogue(number, turns) for number, turns in enumerate(dialogues, start=1)]
        files[split] = {"rows": len(rows), "fingerprint": getattr(rows, "_fingerprint", None)}
    return splits, {"source": data, "files": files, "splits": "published"}


def _cut_missing(
    splits: Mapping[Split, Sequence[Dialogue]], where: str
) -> tuple[dict[Split, Sequence[Dialogue]], dict[str, str]]:
    missing: list[Split] = [split for split in SPLITS if split not in splits]
    if not missing:
        return dict(splits), {}
    train = splits["train"]
    if len(train) < MIN_DIALOGUES_TO_CUT:
        raise DataError(
            f"{where}: {len(train)} dialogues are too few to cut {' and '.join(missing)} from, expected at least "
            f"{MIN_DIALOGUES_TO_CUT}; give them with the options {' and '.join(missing)}"
        )
    order = _inseparable(train)
    random.Random("cut").shuffle(order)
    wanted = max(1, round(len(train) * CUT_SHARE))
    cut = dict(splits)
    described: dict[str, str] = {}
    for split in missing:
        taken: list[Dialogue] = []
        while len(taken) < wanted and len(order) > 1:
            taken += order.pop()
        if not taken:
            raise DataError(
                f"{where}: all dialogues are linked by persona lines that they share, so no {split} split can be cut; "
                f"give it with the option {split}"
            )
        cut[split] = sorted(taken, key=lambda dialogue: dialogue.line)
        described[split] = (
            f"{len(taken)} of {len(train)} dialogues, no persona line shared with train, by a fixed shuffle"
        )
    cut["train"] = sorted((dialogue for group in order for dialogue in group), key=lambda dialogue: dialogue.line)
    return {split: cut[split] for split in SPLITS}, described


def _inseparable(dialogues: Sequence[Dialogue]) -> list[list[Dialogue]]:
    """Return the dialogues in groups of which no two share a persona line or a whole dialogue."""
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
    groups: dict[str, list[Dialogue]] = {}
    for dialogue in dialogues:
        groups.setdefault(root(" ".join(fingerprint(dialogue))), []).append(dialogue)
    return list(groups.values())


def read_synonyms(path: Path) -> dict[str, str]:
    """Read groups of words of equal meaning, one group a line, separated by spaces: the first word names its group.

    Raises:
        DataError: no such file, a line of one word, or a word in two groups (``file:line``).
    """
    if not path.exists():
        raise missing_file(path)
    names: dict[str, str] = {}
    problems = []
    for number, line in enumerate(read_text(path).text.removesuffix("\n").split("\n"), start=1):
        words = line.lower().split()
        again = [word for word in words if word in names]
        if len(words) < 2 or again:
            what = f"{again[0]!r} is in a group already" if again else "expected two words or more"
            problems.append(f"{path}:{number}: {what}")
        names |= dict.fromkeys(words, words[0] if words else "")
    if problems:
        raise DataError("the synonyms cannot be used:\n" + listed(problems))
    return names
