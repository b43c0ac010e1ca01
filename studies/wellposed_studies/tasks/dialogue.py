"""Task ``dialogue``: the next utterance of a conversation; token loss, and nine scores at the end.

DailyDialog (Li et al. 2017): one dialogue a line, ``__eou__`` after every utterance. PersonaChat
(Zhang et al. 2018), in ParlAI's format: ``N your persona: ...``, ``N partner's persona: ...`` and
``N utterance<TAB>reply`` (two more tabs may follow). N counts the lines of a dialogue from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wellposed.errors import DataError
from wellposed.lazy import ModuleOnFirstUse
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

if TYPE_CHECKING:
    import numpy as np
else:
    np = ModuleOnFirstUse("numpy")

END_OF_UTTERANCE = "__eou__"
NUMBERED = re.compile(r"(\d{1,9}) ")
OWN = "your persona:"
PARTNER = "partner's persona:"
# The released DailyDialog has files of acts and emotions next to the dialogues.
_LABELS = re.compile(r"(?<![A-Za-z])(act|emotion|topic)(?![A-Za-z])", re.IGNORECASE)


@dataclass
class Dialogue:
    """Alternating turns of two speakers."""

    line: int
    """Number of its first line in the file, from 1."""
    turns: tuple[str, ...] = ()
    persona: tuple[str, ...] = ()
    """Persona lines of the second speaker, if the data has them."""
    partner_persona: tuple[str, ...] = ()
    """Persona lines of the first speaker, if the data has them."""
    second_speaker_only: bool = False
    """Whether only turns of the second speaker are replies (PersonaChat); else all but the first."""
    candidates: int = 0
    """Number of candidate replies in the data, over all turns."""

    def replies(self) -> range:
        return range(1, len(self.turns), 2 if self.second_speaker_only else 1)


class Dialogues(tuple[Dialogue, ...]):
    """The dialogues of a split, in the order of the file."""

    def select(self, rows: Sequence[int], /) -> Dialogues:
        return Dialogues(self[row] for row in rows)


def load_dialogues(options: DataOptions) -> splits.Loaded[Dialogues]:
    """Read the splits; missing ones are cut from train, dialogues that share a persona together."""

    def read_file(path: Path) -> tuple[Dialogues, Described]:
        file = files.read_text(path)
        name = detect_format(file)
        return Dialogues(PARSERS[name](file)), file.described | {"format": name}

    loaded, described = splits.load_splits(
        options, suffixes=(".txt",), read_file=read_file, unlike=_LABELS
    )
    where = options.data
    noun = "dialogues, no persona line shared with train"
    draw = partial(_draw_groups, where)
    return splits.cut_missing(loaded, where, described, noun=noun, draw=draw)


def fingerprint(dialogue: Dialogue) -> tuple[str, ...]:
    """Return the turns without white space, to compare dialogues."""
    return tuple("".join(turn.split()) for turn in dialogue.turns)


def repeated(dialogues: Sequence[Dialogue], earlier: Sequence[Dialogue]) -> list[int]:
    """Return the positions of dialogues that also occur in ``earlier``, ignoring white space."""
    fingerprints = set(map(fingerprint, earlier))
    return [
        index for index, dialogue in enumerate(dialogues) if fingerprint(dialogue) in fingerprints
    ]


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
    """Return the dialogues of a file, one a line; list all malformed lines in one error."""
    dialogues = []
    problems = []
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
    """Return the dialogues of a file; the persona is that of the second speaker."""
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
            problem = f"expected {expected} and a space first, or 1 at the start of a dialogue"
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
    """Add a persona or an exchange to a dialogue; return the problem of the line, if any."""
    for mark, owner in ((OWN, "persona"), (PARTNER, "partner_persona")):
        if text.startswith(mark):
            persona = text.removeprefix(mark).strip()
            setattr(dialogue, owner, (*getattr(dialogue, owner), persona))
            if dialogue.turns:
                return "a persona after an exchange; personas come first in a dialogue"
            return None if persona else "the persona is empty"

    fields = [part.strip() for part in text.split("\t")]
    utterance = fields[0]
    reply = "".join(fields[1:2])
    # Malformed exchanges are kept too, so that their dialogue is not reported a second time.
    dialogue.turns += (utterance, reply)
    candidates = [item.strip() for item in fields[3].split("|")] if fields[3:4] > [""] else []
    dialogue.candidates += len(candidates)
    wrong = {
        "expected an utterance, a tab and a reply, received no tab": not fields[1:],
        f"{len(fields)} columns, expected utterance, reply, reward and candidates": fields[4:],
        "the utterance is empty": not utterance,
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
    """Return the rows of each missing split and of train, with linked dialogues in one split."""
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
    """Return groups of positions of dialogues that share persona lines or are equal."""
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
"""Options that a measure needs."""
PERSONA_MARK = "persona:"
SPEAKERS = ("A:", "B:")


@dataclass(frozen=True)
class DialogueOptions(Seq2SeqOptions, DataOptions):
    """Options of the task `dialogue`."""

    data: str
    """A folder or a train file of DailyDialog or PersonaChat as released (.gz too)."""
    context: Size = 3
    """Number of utterances before the reply that the model reads."""
    overflow: Literal["cut", "error"] = "cut"
    """cut: shorten long contexts at the beginning and long replies at the end (counted in the report)."""
    limit_dialogues: Size | None = None
    """Use only the first dialogues of the train split."""
    vectors: str | None = None
    """Word vectors as text (GloVe, word2vec), for embedding average, vector extrema and greedy matching."""
    sentence_encoder: str | None = None
    """Folder or hub name of a Hugging Face encoder, for sentence_cosine (in place of SkipThought)."""
    generate_length_penalty: float = 0.6
    """Exponent of the length penalty in beam search."""


@register_task(
    "dialogue",
    DialogueOptions,
    "reply to the last utterances of a conversation (BLEU, METEOR, ROUGE-L, CIDEr, embedding"
    " cosines)",
)
class DialogueTask(Seq2SeqTask):
    """Replies to a conversation: perplexity per token, and nine measures by generation.

    In DailyDialog every utterance after the first is a reply; in PersonaChat the turns of the
    speaker with the persona are. A context reads ``persona: LINE ... A: UTTERANCE B: UTTERANCE A:
    UTTERANCE``, oldest first; the reply has no mark. `dialogue_scores` is computed once, with the
    weights of the best perplexity on valid; the description names measures whose file is missing.
    """

    report_headline: ClassVar[str | None] = "bleu_4"
    shortened: ClassVar[str] = "cut"
    remedy: ClassVar[str] = "raise max_tokens, lower context"

    def __init__(self, options: DialogueOptions) -> None:
        self.options = options
        # Read now, so that a missing file fails before training.
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
        # Saved with the tokenizer, so that `predict` cuts contexts at the beginning.
        self.tokenizer.truncation_side = self.tokenizer.init_kwargs["truncation_side"] = "left"
        del self._pairs["train"]  # which may be large

    def _within_positions(
        self, split: Split, texts: ParallelTexts, source: Ragged, target: Ragged
    ) -> tuple[ParallelTexts, tuple[Ragged, Ragged]]:
        """Return ids cut to ``max_tokens``: contexts lose their beginning, replies their end."""
        limit = self.options.max_tokens
        long = {"contexts": source.lengths > limit, "replies": target.lengths > limit}
        self._cut[split] = {name: int(mask.sum()) for name, mask in long.items()}
        contexts = Ragged.from_lists([row[-limit:].tolist() for row in source])
        return texts, (contexts, target.truncated(limit))

    def _location(self, split: Split, texts: ParallelTexts, index: int, side: int) -> str:
        return f"{split}, dialogue at line {texts.lines[index]}, {('context', 'reply')[side]}"

    def _score(self, hypotheses: Sequence[str], references: Sequence[str]) -> Scored:
        result = dialogue_scores(hypotheses, references, **self._files)
        return dict(result.scores), {name: str(value) for name, value in result.details.items()}


def _pairs(dialogues: Sequence[Dialogue], options: DialogueOptions, split: Split) -> ParallelTexts:
    where = f"{options.data} ({split})"
    pairs = [
        (_context(dialogue, index, options), dialogue.turns[index], dialogue.line)
        for dialogue in dialogues
        for index in dialogue.replies()
    ]
    if not pairs:
        raise DataError(f"{where}: no dialogue has a reply: a second utterance")
    contexts, replies, lines = zip(*pairs, strict=True)
    return ParallelTexts(contexts, replies, (where, where), lines)


def _context(dialogue: Dialogue, position: int, options: DialogueOptions) -> str:
    """Return the text before the reply at ``position``, ending with the other speaker."""
    parts = [f"{PERSONA_MARK} {line}" for line in dialogue.persona]
    for earlier in range(max(0, position - options.context), position):
        parts.append(f"{SPEAKERS[(position - earlier + 1) % 2]} {dialogue.turns[earlier]}")
    return " ".join(parts)


def _vocabulary_texts(train: Sequence[Dialogue]) -> list[str]:
    """Return each train utterance and persona line once, with its mark."""
    texts = [f"{SPEAKERS[i % 2]} {turn}" for talk in train for i, turn in enumerate(talk.turns)]
    return texts + [f"{PERSONA_MARK} {line}" for talk in train for line in talk.persona]


def _count_dialogues(dialogues: Mapping[Split, Sequence[Dialogue]]) -> dict[str, dict[Split, int]]:
    """Return the number of dialogues, utterances and candidates in each split."""
    counts: dict[str, Callable[[Dialogue], int]] = {
        "dialogues": lambda _: 1,
        "utterances": lambda dialogue: len(dialogue.turns),
        "dialogues_without_a_reply": lambda dialogue: not dialogue.replies(),
        "candidate_replies_not_used": lambda dialogue: dialogue.candidates,
    }
    return {
        name: {split: sum(map(count, part)) for split, part in dialogues.items()}
        for name, count in counts.items()
    }


def _count_repetitions(dialogues: Mapping[Split, Sequence[Dialogue]]) -> dict[str, Any]:
    """Return how many dialogues and personas of valid and test also occur in other splits."""
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
