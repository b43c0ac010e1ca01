"""Task ``dialogue``: the next utterance of a conversation; token loss, and nine scores at the end."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from wellposed.errors import DataError, listed
from wellposed.options import Size
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data.dialogues import Dialogue, load_dialogues, read_synonyms, repeated
from wellposed.tasks.data.splits import SPLITS, DataOptions, Split
from wellposed.tasks.kinds.seq2seq import Seq2SeqOptions, Seq2SeqTask
from wellposed.tasks.metrics.dialogue import SENTENCE_METRIC, VECTOR_METRICS, dialogue_scores
from wellposed.tasks.metrics.embedding import (
    SentenceEncoder,
    hf_sentence_encoder,
    read_word_vectors,
)
from wellposed.tasks.metrics.overlap import TextScores
from wellposed.tasks.task import register_task
from wellposed.tasks.text.seq2seq_tokenizers import build_pair_encoder
from wellposed.tasks.text.tokenizers import describe_unknown

LATER: tuple[Split, Split] = ("valid", "test")
DESCRIBED = ("context", "speaker_marks", "persona", "lowercase", "max_tokens")
PERSONA_MARK, SPEAKERS = "persona:", ("A:", "B:")


@dataclass(frozen=True)
class DialogueOptions(Seq2SeqOptions, DataOptions):
    """Options of the task `dialogue`."""

    data: str
    """A folder or a train file of DailyDialog or PersonaChat as released (.gz too), or hf:name[:config]."""
    format: Literal["auto", "dailydialog", "personachat"] = "auto"
    """dailydialog has __eou__ after every utterance, personachat a number before every line; auto looks."""
    context: Size = 3
    """Most utterances before the reply that the model reads, the latest ones."""
    speaker_marks: bool = True
    """Write B: before the earlier utterances of the speaker who replies, and A: before the other's."""
    persona: Literal["own", "both", "none"] = "own"
    """Whose persona lines stand before the context, where the data has them: of who replies, of both, or none."""
    drop_repeated_test: bool = False
    """Leave out test dialogues that train or valid hold too; they are counted in the report in any case."""
    overflow: Literal["cut", "error"] = "cut"
    """A longer context loses its beginning and a longer reply its end (counted in the report), or is an error."""
    limit_dialogues: Size | None = None
    """Keep only the first dialogues of the train split."""
    vectors: str | None = None
    """Word vectors as text (GloVe, word2vec): embedding average, vector extrema and greedy matching need them."""
    sentence_encoder: str | None = None
    """Folder or hub name of a Hugging Face encoder: sentence_cosine, which replaces SkipThought, needs it."""
    synonyms: str | None = None
    """File of words of equal meaning, one group a line, for METEOR; without it words match by form and stem."""
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
    `wellposed.tasks.dialogue_scores` are computed once, with these weights. Those whose file is not
    given are named in the description as not computed.

    >>> from wellposed.tasks import TASKS
    >>> TASKS.get("dialogue").summary
    'reply to the last utterances of a conversation (BLEU, METEOR, ROUGE-L, CIDEr, embedding
    cosines)'
    """

    report_headline: ClassVar[str | None] = "bleu_4"

    def __init__(self, options: DialogueOptions) -> None:
        self.options = options
        self._synonyms = read_synonyms(Path(options.synonyms)) if options.synonyms else None
        self._vectors = read_word_vectors(Path(options.vectors)) if options.vectors else None
        loaded, source = load_dialogues(options, options.format)
        train = loaded["train"][: options.limit_dialogues]
        dialogues: dict[Split, Sequence[Dialogue]] = {**loaded, "train": train}
        repetitions = _count_repetitions(dialogues)
        if options.drop_repeated_test:
            dialogues["test"] = _without_repeated(dialogues, options.data)
        pairs = {split: _pairs(dialogues[split], options, split) for split in SPLITS}
        texts = _vocabulary_texts(train, options)
        encoder = build_pair_encoder(options.tokenizer, texts, vocab_size=options.vocab_size)
        self._cut: dict[Split, dict[str, int]] = {}
        unknown: dict[Split, Any] = {}
        encoded: dict[Split, tuple[Ragged, Ragged]] = {}
        for split in SPLITS:
            contexts = encoder.encode([pair.context for pair in pairs[split]])
            replies = encoder.encode_targets([pair.reply for pair in pairs[split]])
            unknown[split] = describe_unknown(Counter(contexts.unknown) + Counter(replies.unknown))
            encoded[split] = self._within_positions(contexts.ids, replies.ids, pairs[split], split)
        super().__init__(
            encoder=encoder,
            encoded=encoded,
            references={split: [pair.reply for pair in pairs[split]] for split in LATER},
            described={
                **source,
                **_count_dialogues(dialogues),
                **repetitions,
                "repeated_test_dialogues_dropped": options.drop_repeated_test,
                "train_dialogues_left_out_by_limit_dialogues": len(loaded["train"]) - len(train),
                **{name: getattr(options, name) for name in DESCRIBED},
                "cut_to_max_tokens": self._cut,
                "unknown_characters": {split: unknown[split] for split in LATER},
                "metrics_not_computed": _not_computed(options),
            },
        )

    def _within_positions(
        self, contexts: Ragged, replies: Ragged, pairs: Sequence[_Pair], split: Split
    ) -> tuple[Ragged, Ragged]:
        """Return ids of contexts and replies within ``max_tokens``: a context keeps its end, a
        reply its beginning."""
        limit = self.options.max_tokens
        long = {"contexts": contexts.lengths > limit, "replies": replies.lengths > limit}
        self._cut[split] = {name: int(mask.sum()) for name, mask in long.items()}
        if self.options.overflow == "error" and any(self._cut[split].values()):
            longest = np.maximum(contexts.lengths, replies.lengths).tolist()
            problems = [
                f"{split}, dialogue at line {pair.line}: {size} tokens"
                for pair, size in zip(pairs, longest, strict=True)
                if size > limit
            ]
            raise DataError(
                f"contexts or replies with more than max_tokens = {limit} tokens; raise it, lower"
                " context, or give overflow='cut':\n" + listed(problems)
            )
        kept = Ragged.from_lists([row[-limit:].tolist() for row in contexts])
        return kept, replies.truncated(limit)

    @functools.cached_property
    def _sentence_encoder(self) -> SentenceEncoder | None:
        name = self.options.sentence_encoder
        return hf_sentence_encoder(name) if name else None

    def _score(self, hypotheses: Sequence[str], references: Sequence[str]) -> TextScores:
        found = dialogue_scores(
            hypotheses,
            references,
            vectors=self._vectors,
            sentence_encoder=self._sentence_encoder,
            synonyms=self._synonyms,
        )
        details = {name: str(value) for name, value in found.details.items()}
        return TextScores(dict(found.scores), details)


def _not_computed(options: DialogueOptions) -> dict[str, str]:
    missing = {} if options.sentence_encoder else {SENTENCE_METRIC: "give sentence_encoder=FOLDER"}
    return missing | ({} if options.vectors else dict.fromkeys(VECTOR_METRICS, "give vectors=FILE"))


class _Pair(NamedTuple):
    context: str
    reply: str
    line: int


def _pairs(dialogues: Sequence[Dialogue], options: DialogueOptions, split: Split) -> list[_Pair]:
    pairs = [
        _Pair(_context(each, place, options), _cased(each.turns[place], options), each.line)
        for each in dialogues
        for place in each.replies()
    ]
    if not pairs:
        raise DataError(
            f"{options.data} ({split}): no dialogue has a reply, that is two utterances or more"
        )
    return pairs


def _context(dialogue: Dialogue, position: int, options: DialogueOptions) -> str:
    """Return the text that the reply at ``position`` answers; the last utterance of it is the other
    speaker's."""
    parts = [f"{PERSONA_MARK} {line}" for line in _persona(dialogue, options)]
    for earlier in range(max(0, position - options.context), position):
        mark = f"{SPEAKERS[(position - earlier + 1) % 2]} " if options.speaker_marks else ""
        parts.append(mark + dialogue.turns[earlier])
    return _cased(" ".join(parts), options)


def _persona(dialogue: Dialogue, options: DialogueOptions) -> Sequence[str]:
    both = (*dialogue.persona, *dialogue.partner_persona)
    return {"none": (), "own": dialogue.persona, "both": both}[options.persona]


def _cased(text: str, options: DialogueOptions) -> str:
    return text.lower() if options.lowercase else text


def _vocabulary_texts(train: Sequence[Dialogue], options: DialogueOptions) -> list[str]:
    """Return each train utterance and persona line once, with the marks they are read with."""
    marks = SPEAKERS if options.speaker_marks else ("", "")
    texts = [f"{marks[i % 2]} {turn}" for each in train for i, turn in enumerate(each.turns)]
    texts += [f"{PERSONA_MARK} {line}" for each in train for line in _persona(each, options)]
    return [_cased(text, options) for text in texts]


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
            split: len(repeated(dialogues[split], train)) for split in LATER
        },
        "test_dialogues_also_in_valid": len(repeated(test, valid)),
        "dialogues_with_a_persona_line_of_train": {
            split: sum(not personas.isdisjoint(dialogue.persona) for dialogue in dialogues[split])
            for split in LATER
        },
    }


def _without_repeated(dialogues: Mapping[Split, Sequence[Dialogue]], where: str) -> list[Dialogue]:
    test = dialogues["test"]
    known = set(repeated(test, [*dialogues["train"], *dialogues["valid"]]))
    kept = [dialogue for index, dialogue in enumerate(test) if index not in known]
    if not kept:
        raise DataError(
            f"{where}: every test dialogue is in train or valid too, so drop_repeated_test leaves"
            " none"
        )
    return kept
