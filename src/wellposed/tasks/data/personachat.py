"""PersonaChat (Zhang et al. 2018) in ParlAI's text format: numbered lines, persona lines, exchanges
with a tab.

``N your persona: ...`` and ``N partner's persona: ...`` describe the speakers; ``N
utterance<TAB>reply`` is one exchange, with a reward and candidate replies after two more tabs where
the file has them. N is 1 where a dialogue starts and counts its lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wellposed.errors import DataError, listed
from wellposed.tasks.data.dailydialog import Dialogue

if TYPE_CHECKING:
    from wellposed.tasks.data.files import TextFile

NUMBERED = re.compile(r"(\d+) ")
OWN, PARTNER = "your persona:", "partner's persona:"


@dataclass
class _Draft:
    line: int
    lines: int = 0
    turns: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    partner: list[str] = field(default_factory=list)
    candidates: int = 0

    def finished(self) -> Dialogue:
        return Dialogue(
            self.line,
            tuple(self.turns),
            tuple(self.own),
            tuple(self.partner),
            True,
            self.candidates,
        )


def parse_personachat(file: TextFile) -> list[Dialogue]:
    """Return the dialogues of a file; the second speaker is the one whose persona is given."""
    drafts: list[_Draft] = []
    problems: list[str] = []
    for number, line in file.lines():
        try:
            _read_line(line, number, drafts)
        except ValueError as error:
            problems.append(f"{file.path}:{number}: {error}")
    problems += [
        f"{file.path}:{draft.line}: the dialogue that starts here has no exchange"
        for draft in drafts
        if not draft.turns
    ]
    if problems:
        raise DataError("lines that do not follow the PersonaChat format:\n" + listed(problems))
    return [draft.finished() for draft in drafts]


def _read_line(line: str, number: int, drafts: list[_Draft]) -> None:
    match = NUMBERED.match(line)
    if match is None:
        raise ValueError(f"expected a number and a space first, received {line[:60]!r}")
    count, text = int(match.group(1)), line[match.end() :]
    expected = drafts[-1].lines + 1 if drafts else 1
    if count == 1:
        drafts.append(_Draft(number))
    elif count != expected:
        if drafts:
            drafts[-1].lines = count
        raise ValueError(f"numbered {count}, expected {expected}, or 1 where a dialogue starts")
    draft = drafts[-1] if drafts else _Draft(number)
    draft.lines = count
    for mark, lines in ((OWN, draft.own), (PARTNER, draft.partner)):
        if text.startswith(mark):
            _add_persona(text.removeprefix(mark).strip(), lines, draft)
            return
    _add_exchange(text, draft)


def _add_persona(text: str, lines: list[str], draft: _Draft) -> None:
    if not text:
        raise ValueError("the persona is empty")
    if draft.turns:
        raise ValueError("a persona after an exchange; personas come first in a dialogue")
    lines.append(text)


def _add_exchange(text: str, draft: _Draft) -> None:
    fields = [part.strip() for part in text.split("\t")]
    # An exchange is kept even where it is malformed, so that its dialogue is not reported a second
    # time.
    draft.turns += [fields[0], fields[1] if len(fields) > 1 else ""]
    if len(fields) < 2:
        raise ValueError(
            f"expected an utterance, a tab and a reply, received no tab: {text[:60]!r}"
        )
    if len(fields) > 4:
        raise ValueError(f"{len(fields)} columns, expected utterance, reply, reward and candidates")
    if not fields[0] or not fields[1]:
        raise ValueError("the utterance is empty" if not fields[0] else "the reply is empty")
    if len(fields) == 4 and fields[3]:
        candidates = [candidate.strip() for candidate in fields[3].split("|")]
        if fields[1] not in candidates:
            raise ValueError(f"the reply is not among its {len(candidates)} candidates")
        draft.candidates += len(candidates)
