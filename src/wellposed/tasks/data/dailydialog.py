"""DailyDialog (Li et al. 2017) as released: one dialogue a line, ``__eou__`` after every
utterance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wellposed.errors import DataError, listed

if TYPE_CHECKING:
    from wellposed.tasks.data.files import TextFile

END_OF_UTTERANCE = "__eou__"


@dataclass(frozen=True)
class Dialogue:
    """Turns of two speakers in alternation."""

    line: int
    """Of its first line in the file, from 1."""
    turns: tuple[str, ...]
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


def parse_dailydialog(file: TextFile) -> list[Dialogue]:
    """Return the dialogues of a file, one a line; malformed lines are named at once."""
    dialogues, problems = [], []
    for number, line in file.lines():
        turns = [turn.strip() for turn in line.split(END_OF_UTTERANCE)]
        rest = turns.pop()
        if not turns:
            problems.append(f"{file.path}:{number}: no {END_OF_UTTERANCE}: {line[:60]!r}")
        elif rest:
            problems.append(
                f"{file.path}:{number}: text after the last {END_OF_UTTERANCE}: {rest[:60]!r}"
            )
        elif not all(turns):
            problems.append(f"{file.path}:{number}: utterance {turns.index('') + 1} is empty")
        dialogues.append(Dialogue(number, tuple(turns)))
    if problems:
        raise DataError(
            f"lines that are no dialogue of utterances, each followed by {END_OF_UTTERANCE}:\n"
            + listed(problems)
        )
    return dialogues
