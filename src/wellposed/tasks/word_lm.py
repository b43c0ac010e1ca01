"""Task ``word_lm``: predict the next word of a text, as on the Penn Treebank; perplexity."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from wellposed.options import Ge, Size
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.data.texts import TextOptions, load_texts
from wellposed.tasks.kinds.language_model import LanguageModelTask
from wellposed.tasks.task import register_task
from wellposed.tasks.text.tokenizers import WordEncoder, split_words

END = "<eos>"
_PIECES = re.compile(r"\w+|[^\w\s]")
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class WordLMOptions(TextOptions):
    """Options of the task `word_lm`."""

    words: Literal["auto", "space", "pieces"] = "auto"
    """space: between white space, as in Penn Treebank; pieces: words and marks apart; auto: pieces for builtin."""
    eos: bool = True
    """Put the word <eos> at the end of every line that holds a word (of every paragraph, for builtin)."""
    max_words: Size | None = None
    """Words in the vocabulary, the most frequent of train; all where not given (10000 for builtin)."""
    seq_len: int = 36
    """Tokens in a block, of which all but the first are predicted; 36 predicts 35 words, as in sengupta2023."""
    limit_words: Annotated[int, Ge(2)] | None = None
    """Keep only the first words of the train text."""


@register_task("word_lm", WordLMOptions, "predict the next word of a text (perplexity)")
class WordLMTask(LanguageModelTask):
    """Next-word prediction, each word of a split predicted once from the words before it in its
    block.

    ``perplexity`` is exp of the mean of -ln p over all words but the first of the split, ``<eos>``
    included, as usual for the Penn Treebank (929589, 73760 and 82430 words). The vocabulary is that
    of train; a word it does not hold becomes the unknown token, is predicted like any other and is
    counted in the description. ``<unk>`` written in a text is a word. The context restarts at every
    block, so numbers are upper bounds on those of a longer context.

    Source: Mikolov et al. 2010 for the form of the text.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("word_lm", {"limit_words": 2000, "seq_len": 20})
    >>> task.headline, task.collate([task.dataset("train")[0]])["input_ids"].shape
    ('perplexity', torch.Size([1, 20]))
    """

    headline: ClassVar[str] = "perplexity"
    noun: ClassVar[str] = "word"
    nats_name: ClassVar[str] = "nats_per_word"

    def __init__(self, options: WordLMOptions) -> None:
        self.options = options
        texts, source = load_texts(options)
        builtin = options.data == "builtin"
        pieces = options.words == "pieces" or (options.words == "auto" and builtin)
        words: dict[Split, list[str]] = {}
        for split in SPLITS:
            words[split] = _words(texts[split], pieces=pieces, paragraphs=builtin, eos=options.eos)
        full = len(words["train"])
        words["train"] = words["train"][: options.limit_words]
        size = options.max_words or (10_000 if builtin else len(set(words["train"])))
        joined: dict[Split, str] = {split: " ".join(words[split]) for split in SPLITS}
        super().__init__(
            encoder=WordEncoder.from_texts([joined["train"]], max_words=size),
            texts=joined,
            seq_len=options.seq_len,
            described={
                **source,
                "words": {split: len(words[split]) for split in SPLITS},
                "split_at": "white space and between words and marks" if pieces else "white space",
                "end_of_line": END if options.eos else None,
                "train_words_left_out_by_limit_words": full - len(words["train"]),
            },
        )


def _words(text: str, *, pieces: bool, paragraphs: bool, eos: bool) -> list[str]:
    """Return the words of a text, with ``<eos>`` after every line that holds one."""
    lines = _BLANK_LINES.split(text) if paragraphs else text.split("\n")
    words: list[str] = []
    for line in lines:
        found = _PIECES.findall(line) if pieces else split_words(line)
        words += [*found, END] if eos and found else found
    return words
