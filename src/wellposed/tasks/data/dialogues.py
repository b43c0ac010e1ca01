"""Dialogues of every split, as DailyDialog and PersonaChat are released, and which occur twice.

DailyDialog (Li et al. 2017) has one dialogue a line, ``__eou__`` after every utterance. PersonaChat
(Zhang et al. 2018) in ParlAI's text format has numbered lines: ``N your persona: ...`` and
``N partner's persona: ...`` describe the speakers; ``N utterance<TAB>reply`` is one exchange, with
a reward and candidate replies after two more tabs where the file has them. N is 1 where a dialogue
starts and counts its lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from wellposed.errors import DataError
from wellposed.tasks.data import files, splits
from wellposed.tasks.data.files import TextFile
from wellposed.tasks.data.splits import DataOptions, Described, Split

Format = Literal["auto", "dailydialog", "personachat"]
END_OF_UTTERANCE = "__eou__"
NUMBERED = re.compile(r"(\d{1,9}) ")
OWN, PARTNER = "your persona:", "partner's persona:"
HUB_COLUMNS = ("dialog", "dialogue", "utterances")
# Labels of acts and emotions lie beside the dialogues of the released DailyDialog, line by line.
_LABELS = re.compile(r"(?<![A-Za-z])(act|emotion|topic)(?![A-Za-z])", re.IGNORECASE)


@dataclass
class Dialogue:
    """Turns of two speakers in alternation."""

    line: int
    """Of its first line in the file, from 1."""
    turns: tuple[str, ...] = ()
    persona: tuple[str, ...] = ()
    """What the second speaker says of himself, where the data has it."""
    partner_persona: tuple[str, ...] = ()
    """What the first speaker says of himself, where the data has it."""
    second_speaker_only: bool = False
    """Whether replies are the turns of the second speaker alone, as in PersonaChat; else every turn
    but the first."""
    candidates: int = 0
    """Candidate replies that the data lists, over all turns."""

    def replies(self) -> range:
        """Return the positions of the turns that answer one."""
        return range(1, len(self.turns), 2 if self.second_speaker_only else 1)


class Dialogues(tuple[Dialogue, ...]):
    """The dialogues of a split, in the order of the file."""

    def select(self, rows: Sequence[int], /) -> Dialogues:
        """Return the dialogues ``rows``."""
        return Dialogues(self[row] for row in rows)


def load_dialogues(
    options: DataOptions, file_format: Format = "auto"
) -> tuple[dict[Split, Dialogues], Described]:
    """Read the dialogues of the splits; a split without a file is cut from train, whole dialogues
    at a time.

    Where a split is cut, equal dialogues and dialogues linked by persona lines that they share stay
    in one split.
    """

    def read_file(path: Path) -> tuple[Dialogues, Described]:
        file = files.read_text(path)
        name = detect_format(file) if file_format == "auto" else file_format
        return Dialogues(PARSERS[name](file)), file.described | {"format": name}

    found, described = splits.load_splits(
        options, suffixes=(".txt",), read_file=read_file, read_hub=_read_hub, unlike=_LABELS
    )
    note = ", no persona line shared with train"
    found, cut = splits.cut_missing(
        found, options.data, noun="dialogues", note=note, draw=partial(_draw_groups, options.data)
    )
    return found, described | cut


def fingerprint(dialogue: Dialogue) -> tuple[str, ...]:
    """Return the turns without white space: what two dialogues share that are the same but for
    spacing."""
    return tuple("".join(turn.split()) for turn in dialogue.turns)


def repeated(dialogues: Sequence[Dialogue], earlier: Sequence[Dialogue]) -> list[int]:
    """Return the positions of the dialogues that ``earlier`` holds too, white space aside."""
    seen = set(map(fingerprint, earlier))
    return [index for index, dialogue in enumerate(dialogues) if fingerprint(dialogue) in seen]


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


def parse_dailydialog(file: TextFile) -> list[Dialogue]:
    """Return the dialogues of a file, one a line; malformed lines are named at once."""
    dialogues, problems = [], []
    for number, line in file.lines():
        *turns, rest = (turn.strip() for turn in line.split(END_OF_UTTERANCE))
        where = f"{file.path}:{number}"
        if not turns:
            problems.append(f"{where}: no {END_OF_UTTERANCE}: {line[:60]!r}")
        elif rest:
            problems.append(f"{where}: text after the last {END_OF_UTTERANCE}: {rest[:60]!r}")
        elif not all(turns):
            problems.append(f"{where}: utterance {turns.index('') + 1} is empty")
        dialogues.append(Dialogue(number, tuple(turns)))
    files.refuse(
        f"lines that are no dialogue of utterances, each followed by {END_OF_UTTERANCE}", problems
    )
    return dialogues


def parse_personachat(file: TextFile) -> list[Dialogue]:
    """Return the dialogues of a file; the second speaker is the one whose persona is given."""
    dialogues: list[Dialogue] = []
    problems: list[str] = []
    expected = 1
    for number, line in file.lines():
        match = NUMBERED.match(line)
        count = int(match[1]) if match else expected
        if match and (count == 1 or not dialogues):
            dialogues.append(Dialogue(number, second_speaker_only=True))
        problem = None
        if match is None:
            problem = f"expected a number and a space first, received {line[:60]!r}"
        elif count not in (1, expected):
            problem = f"numbered {count}, expected {expected}, or 1 where a dialogue starts"
        wrong = match and _add_line(line[match.end() :], dialogues[-1])
        problems += [f"{file.path}:{number}: {each}" for each in (problem or wrong,) if each]
        expected = count + 1
    problems += [
        f"{file.path}:{dialogue.line}: the dialogue that starts here has no exchange"
        for dialogue in dialogues
        if not dialogue.turns
    ]
    files.refuse("lines that do not follow the PersonaChat format", problems)
    return dialogues


def _add_line(text: str, dialogue: Dialogue) -> str | None:
    """Add a persona or an exchange to a dialogue; return what is wrong with it."""
    for mark, owner in ((OWN, "persona"), (PARTNER, "partner_persona")):
        if text.startswith(mark):
            persona = text.removeprefix(mark).strip()
            setattr(dialogue, owner, (*getattr(dialogue, owner), persona))
            if dialogue.turns:
                return "a persona after an exchange; personas come first in a dialogue"
            return None if persona else "the persona is empty"
    fields = [part.strip() for part in text.split("\t")]
    said, reply = fields[0], fields[1] if len(fields) > 1 else ""
    # An exchange is kept even where it is malformed, so that its dialogue is not reported a second
    # time.
    dialogue.turns += (said, reply)
    candidates = [each.strip() for each in fields[3].split("|")] if fields[3:4] > [""] else []
    dialogue.candidates += len(candidates)
    wrong = {
        f"expected an utterance, a tab and a reply, received no tab: {text[:60]!r}": not fields[1:],
        f"{len(fields)} columns, expected utterance, reply, reward and candidates": fields[4:],
        "the utterance is empty": not said,
        "the reply is empty": not reply,
        f"the reply is not among its {len(candidates)} candidates": (
            candidates and reply not in candidates
        ),
    }
    return next((what for what, holds in wrong.items() if holds), None)


PARSERS: dict[str, Callable[[TextFile], list[Dialogue]]] = {
    "dailydialog": parse_dailydialog,
    "personachat": parse_personachat,
}


def _read_hub(rows: Any, where: str) -> Dialogues:
    table = files.hub_table(rows, where)
    column = next((name for name in HUB_COLUMNS if name in table.names), None)
    if column is None:
        raise DataError(
            f"{where}: no column of utterances named {', '.join(HUB_COLUMNS)}; it has"
            f" {', '.join(table.names)}"
        )
    held = table.column(table.names.index(column))
    dialogues = [tuple(str(turn).strip() for turn in turns) for turns in held]
    problems = [
        f"{where} row {number}: an utterance is empty, or there is none"
        for number, turns in enumerate(dialogues)
        if not turns or not all(turns)
    ]
    files.refuse("dialogues that cannot be used", problems)
    return Dialogues(Dialogue(number, turns) for number, turns in enumerate(dialogues, start=1))


def _draw_groups(
    where: str, train: Dialogues, missing: Sequence[Split], wanted: int
) -> dict[Split, list[int]]:
    """Return the rows of each missing split and of train, inseparable dialogues in one split."""
    groups = splits.shuffled(_inseparable(train))
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
    names: dict[str, str] = {}
    problems = []
    for number, line in files.read_text(path).lines():
        words = line.lower().split()
        again = [word for word in words if word in names]
        if len(words) < 2 or again:
            what = f"{again[0]!r} is in a group already" if again else "expected two words or more"
            problems.append(f"{path}:{number}: {what}")
        names |= dict.fromkeys(words, words[0] if words else "")
    files.refuse("the synonyms cannot be used", problems)
    return names
