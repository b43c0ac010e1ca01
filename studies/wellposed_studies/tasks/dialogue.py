"""Task ``dialogue``: the next utterance of a conversation; token loss, and nine scores at the end.

DailyDialog (Li et al. 2017) has one dialogue a line, ``__eou__`` after every utterance. PersonaChat
(Zhang et al. 2018) in ParlAI's text format has numbered lines: ``N your persona: ...`` and
``N partner's persona: ...`` describe the speakers; ``N utterance<TAB>reply`` is one exchange, with
a reward and candidate replies after two more tabs where the file has them. N is 1 where a dialogue
starts and counts its lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from wellposed.errors import DataError
from wellposed.options import Size
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.files import TextFile
from wellposed_lab.tasks.data.parallel import ParallelTexts
from wellposed_lab.tasks.data.splits import SPLITS, DataOptions, Described, Split
from wellposed_lab.tasks.kinds.seq2seq import Scored, Seq2SeqOptions, Seq2SeqTask
from wellposed_lab.tasks.task import register_task
from wellposed_studies.tasks.dialogue_scores import SENTENCE_METRIC, VECTOR_METRICS, dialogue_scores
from wellposed_studies.tasks.vectors import hf_sentence_encoder, read_word_vectors

END_OF_UTTERANCE = "__eou__"
NUMBERED = re.compile(r"(\d{1,9}) ")
OWN, PARTNER = "your persona:", "partner's persona:"
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


def load_dialogues(options: DataOptions) -> splits.Loaded[Dialogues]:
    """Read the dialogues of the splits; a split without a file is cut from train, whole dialogues
    at a time.

    Where a split is cut, equal dialogues and dialogues linked by persona lines that they share stay
    in one split.
    """

    def read_file(path: Path) -> tuple[Dialogues, Described]:
        file = files.read_text(path)
        name = detect_format(file)
        return Dialogues(PARSERS[name](file)), file.described | {"format": name}

    found, described = splits.load_splits(
        options, suffixes=(".txt",), read_file=read_file, unlike=_LABELS
    )
    where, noun = options.data, "dialogues, no persona line shared with train"
    draw = partial(_draw_groups, where)
    return splits.cut_missing(found, where, described, noun=noun, draw=draw)


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
        dialogues.append(Dialogue(number, tuple(turns)))
        if rest or not turns or not all(turns):
            problems.append(f"{file.path}:{number}: {line[:60]!r}")
    files.refuse(
        f"lines that are not utterances, each followed by {END_OF_UTTERANCE}, none empty", problems
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
        problem = _add_line(line[match.end() :], dialogues[-1]) if match else None
        if match is None or count not in (1, expected):
            problem = f"expected {expected} and a space first, or 1 where a dialogue starts"
        problems += [f"{file.path}:{number}: {problem}: {line[:60]!r}"] if problem else []
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
    said, reply = fields[0], "".join(fields[1:2])
    # An exchange is kept even where it is malformed, so that its dialogue is not reported a second
    # time.
    dialogue.turns += (said, reply)
    candidates = [each.strip() for each in fields[3].split("|")] if fields[3:4] > [""] else []
    dialogue.candidates += len(candidates)
    wrong = {
        "expected an utterance, a tab and a reply, received no tab": not fields[1:],
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
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    numbers: dict[str, int] = {}
    links = [
        (position, len(dialogues) + numbers.setdefault(name, len(numbers)))
        for position, dialogue in enumerate(dialogues)
        for name in (*dialogue.persona, " ".join(fingerprint(dialogue)))
    ]
    size = len(dialogues) + len(numbers)
    graph = coo_array((np.ones(len(links)), np.transpose(links)), shape=(size, size))
    groups: dict[int, list[int]] = {}
    _, group_of = connected_components(graph, directed=False)
    for position, group in enumerate(group_of[: len(dialogues)].tolist()):
        groups.setdefault(group, []).append(position)
    return list(groups.values())


NEEDED = {
    SENTENCE_METRIC: ("sentence_encoder", "FOLDER"),
    **dict.fromkeys(VECTOR_METRICS, ("vectors", "FILE")),
}
"""Options without which a measure is not computed."""
PERSONA_MARK, SPEAKERS = "persona:", ("A:", "B:")


@dataclass(frozen=True)
class DialogueOptions(Seq2SeqOptions, DataOptions):
    """Options of the task `dialogue`."""

    data: str
    """A folder or a train file of DailyDialog or PersonaChat as released (.gz too)."""
    context: Size = 3
    """Most utterances before the reply that the model reads, the latest ones."""
    overflow: Literal["cut", "error"] = "cut"
    """A longer context loses its beginning and a longer reply its end (counted in the report), or is an error."""
    limit_dialogues: Size | None = None
    """Keep only the first dialogues of the train split."""
    vectors: str | None = None
    """Word vectors as text (GloVe, word2vec): embedding average, vector extrema and greedy matching need them."""
    sentence_encoder: str | None = None
    """Folder or hub name of a Hugging Face encoder: sentence_cosine, which replaces SkipThought, needs it."""
    generate_length_penalty: float = 0.6
    """Exponent a of what log p is divided by in beam search."""


@register_task(
    "dialogue",
    DialogueOptions,
    "reply to the last utterances of a conversation (BLEU, METEOR, ROUGE-L, CIDEr, embedding"
    " cosines)",
)
class DialogueTask(Seq2SeqTask):
    """Replies to the last utterances of a conversation: perplexity per token, and nine measures by
    generation.

    In DailyDialog every utterance but the first is a reply to those before it; in PersonaChat the
    replies are the turns of the speaker whose persona is given. A dialogue lies in one split. A
    context reads ``persona: LINE ... A: UTTERANCE B: UTTERANCE A: UTTERANCE``, oldest first; the
    reply carries no mark. Weights are chosen by perplexity on valid; the measures of
    `dialogue_scores` are computed once, with these weights. Those whose file is not
    given are named in the description as not computed.

    >>> from wellposed_lab.tasks.task import TASKS
    >>> TASKS.get("dialogue").summary
    'reply to the last utterances of a conversation (BLEU, METEOR, ROUGE-L, CIDEr, embedding
    cosines)'
    """

    report_headline: ClassVar[str | None] = "bleu_4"
    shortened: ClassVar[str] = "cut"
    remedy: ClassVar[str] = "raise max_tokens, lower context"

    def __init__(self, options: DialogueOptions) -> None:
        self.options = options
        # Read now, so that none is found missing when a training has ended.
        self._files: dict[str, Any] = {}
        if options.vectors:
            self._files["vectors"] = read_word_vectors(Path(options.vectors))
        if options.sentence_encoder:
            self._files["sentence_encoder"] = hf_sentence_encoder(options.sentence_encoder)
        loaded, source = load_dialogues(options)
        train = loaded["train"][: options.limit_dialogues]
        dialogues: dict[Split, Sequence[Dialogue]] = {**loaded, "train": train}
        self._cut: dict[Split, dict[str, int]] = {}
        super().__init__(
            pairs={split: _pairs(dialogues[split], options, split) for split in SPLITS},
            vocabulary=_vocabulary_texts(train),
            described={
                **source,
                **_count_dialogues(dialogues),
                **_count_repetitions(dialogues),
                "train_dialogues_left_out_by_limit_dialogues": len(loaded["train"]) - len(train),
                "context": options.context,
                "cut_to_max_tokens": self._cut,
                "metrics_not_computed": {
                    name: f"give {option}={form}"
                    for name, (option, form) in NEEDED.items()
                    if not getattr(options, option)
                },
            },
        )
        # A saved tokenizer tells `predict` that the end of a context is kept.
        self.tokenizer.truncation_side = self.tokenizer.init_kwargs["truncation_side"] = "left"
        del self._pairs["train"]  # which may be large

    def _within_positions(
        self, split: Split, texts: ParallelTexts, source: Ragged, target: Ragged
    ) -> tuple[ParallelTexts, tuple[Ragged, Ragged]]:
        """Return ids of contexts and replies within ``max_tokens``: a context keeps its end, a
        reply its beginning."""
        limit = self.options.max_tokens
        long = {"contexts": source.lengths > limit, "replies": target.lengths > limit}
        self._cut[split] = {name: int(mask.sum()) for name, mask in long.items()}
        kept = Ragged.from_lists([row[-limit:].tolist() for row in source])
        return texts, (kept, target.truncated(limit))

    def _place(self, split: Split, texts: ParallelTexts, index: int, side: int) -> str:
        return f"{split}, dialogue at line {texts.lines[index]}, {('context', 'reply')[side]}"

    def _score(self, hypotheses: Sequence[str], references: Sequence[str]) -> Scored:
        found = dialogue_scores(hypotheses, references, **self._files)
        return dict(found.scores), {name: str(value) for name, value in found.details.items()}


def _pairs(dialogues: Sequence[Dialogue], options: DialogueOptions, split: Split) -> ParallelTexts:
    """Return the context and the text of every reply."""
    where = f"{options.data} ({split})"
    pairs = [
        (_context(each, place, options), each.turns[place], each.line)
        for each in dialogues
        for place in each.replies()
    ]
    if not pairs:
        raise DataError(f"{where}: no dialogue has a reply: a second utterance")
    contexts, replies, lines = zip(*pairs, strict=True)
    return ParallelTexts(contexts, replies, (where, where), lines)


def _context(dialogue: Dialogue, position: int, options: DialogueOptions) -> str:
    """Return the text that the reply at ``position`` answers; the last utterance of it is the other
    speaker's."""
    parts = [f"{PERSONA_MARK} {line}" for line in dialogue.persona]
    for earlier in range(max(0, position - options.context), position):
        parts.append(f"{SPEAKERS[(position - earlier + 1) % 2]} {dialogue.turns[earlier]}")
    return " ".join(parts)


def _vocabulary_texts(train: Sequence[Dialogue]) -> list[str]:
    """Return each train utterance and persona line once, with the marks they are read with."""
    texts = [f"{SPEAKERS[i % 2]} {turn}" for each in train for i, turn in enumerate(each.turns)]
    return texts + [f"{PERSONA_MARK} {line}" for each in train for line in each.persona]


def _count_dialogues(dialogues: Mapping[Split, Sequence[Dialogue]]) -> dict[str, dict[Split, int]]:
    """Return how many dialogues, utterances and candidates each split holds."""
    counts: dict[str, Callable[[Dialogue], int]] = {
        "dialogues": lambda _: 1,
        "utterances": lambda dialogue: len(dialogue.turns),
        "dialogues_without_a_reply": lambda dialogue: not dialogue.replies(),
        "candidate_replies_not_used": lambda dialogue: dialogue.candidates,
    }
    return {
        name: {split: sum(map(count, held)) for split, held in dialogues.items()}
        for name, count in counts.items()
    }


def _count_repetitions(dialogues: Mapping[Split, Sequence[Dialogue]]) -> dict[str, Any]:
    """Return how many dialogues of valid and test other splits hold too, white space aside, and
    shared personas."""
    train, valid, test = (dialogues[split] for split in SPLITS)
    personas = {line for dialogue in train for line in dialogue.persona}
    return {
        "dialogues_also_in_train": {
            split: len(repeated(dialogues[split], train)) for split in SPLITS[1:]
        },
        "test_dialogues_also_in_valid": len(repeated(test, valid)),
        "dialogues_with_a_persona_line_of_train": {
            split: sum(not personas.isdisjoint(dialogue.persona) for dialogue in dialogues[split])
            for split in SPLITS[1:]
        },
    }
