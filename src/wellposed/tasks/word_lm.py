"""Task ``word_lm``: predict the next word of a text, as on the Penn Treebank; perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wellposed.errors import ConfigError
from wellposed.tasks.char_lm import CharLMOptions, CharLMTask, load_texts
from wellposed.tasks.kinds.classification import require_positive
from wellposed.tasks.task import SPLITS, TASKS, Split, TaskSpec

if TYPE_CHECKING:
    from torch import Tensor

END = "<eos>"
_PIECES = re.compile(r"\w+|[^\w\s]")
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class WordLMOptions:
    """Options of the task `word_lm`."""

    data: str = "builtin"
    """builtin (English prose that ships with Python), a text file (.gz too), a folder, or hf:name[:config]."""
    valid: str | None = None
    """Text file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """Text file of the test split; found beside the train file, or cut from it, where not given."""
    words: Literal["auto", "space", "pieces"] = "auto"
    """space: between white space, as in Penn Treebank; pieces: words and marks apart; auto: pieces for builtin."""
    eos: bool = True
    """Put the word <eos> at the end of every line that holds a word (of every paragraph, for builtin)."""
    max_words: int | None = None
    """Words in the vocabulary, the most frequent of train; all where not given (10000 for builtin)."""
    seq_len: int = 36
    """Tokens in a block, of which all but the first are predicted; 36 predicts 35 words, as in sengupta2023."""
    limit_words: int | None = None
    """Keep only the first words of the train text."""


class WordLMTask(CharLMTask):
    """Next-word prediction, each word of a split predicted once from the words before it in its block.

    ``perplexity`` is exp of the mean of -ln p over all words but the first of the split, ``<eos>`` included, as usual
    for the Penn Treebank (929589, 73760 and 82430 words). The vocabulary is that of train; a word it does not hold
    becomes the unknown token, is predicted like any other and is counted in the description. ``<unk>`` written in a
    text is a word. The context restarts at every block, so numbers are upper bounds on those of a longer context.

    Source: Mikolov et al. 2010 for the form of the text.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("word_lm", {"limit_words": 2000, "seq_len": 20})
    >>> task.headline, task.collate([task.dataset("train")[0]])["input_ids"].shape
    ('perplexity', torch.Size([1, 20]))
    """

    name: ClassVar[str] = "word_lm"
    headline: ClassVar[str] = "perplexity"

    options: WordLMOptions  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, options: WordLMOptions) -> None:
        from wellposed.tasks.batches.blocks import BlockDataset
        from wellposed.tasks.text.tokenizers import WordEncoder

        require_positive("word_lm", max_words=options.max_words)
        if options.limit_words is not None and options.limit_words < 2:
            raise ConfigError(f"limit_words = {options.limit_words}, expected at least 2")
        self.options = options  # pyright: ignore[reportIncompatibleVariableOverride]
        source = CharLMOptions(data=options.data, valid=options.valid, test=options.test, format="plain")
        texts, self._source = load_texts(source)
        builtin = options.data == "builtin"
        self._pieces = options.words == "pieces" or (options.words == "auto" and builtin)
        words: dict[Split, list[str]] = {}
        for split in SPLITS:
            words[split] = _words(texts[split], pieces=self._pieces, paragraphs=builtin, eos=options.eos)
        full = len(words["train"])
        words["train"] = words["train"][: options.limit_words]
        self._limited = full - len(words["train"])
        self._words = {split: len(words[split]) for split in SPLITS}
        size = options.max_words or (10_000 if builtin else len(set(words["train"])))
        joined = {split: " ".join(words[split]) for split in SPLITS}
        self._encoder = WordEncoder.from_texts([joined["train"]], max_words=size)
        encoded = {split: self._encoder.encode([joined[split]]) for split in SPLITS}
        self._unknown = {split: encoded[split].unknown_description() for split in SPLITS}
        self._blocks = {
            split: BlockDataset(encoded[split].ids.flat, seq_len=options.seq_len, where=f"{options.data} ({split})")
            for split in SPLITS
        }

    def metric_sums(self, logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        return {"nats_per_word": super().metric_sums(logits, batch)["nats_per_char"]}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        total, count = totals["nats_per_word"]
        return _metrics(total / count)

    def reference(self) -> dict[str, float]:
        """Return the perplexity of valid's own word frequencies: no predictor that ignores context is below it."""
        return _metrics(super().reference()["nats_per_char"])

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "tokenizer": self._encoder.description(),
            "words": self._words,
            "split_at": "white space and between words and marks" if self._pieces else "white space",
            "end_of_line": END if self.options.eos else None,
            "train_words_left_out_by_limit_words": self._limited,
            "unknown_words": self._unknown,
            "seq_len": self.options.seq_len,
            "blocks": {split: len(self._blocks[split]) for split in SPLITS},
            "predicted": "every word of a split but its first, once; context restarts at every block",
        }


def _metrics(nats: float) -> dict[str, float]:
    # above e^709 a float overflows; such a model is broken, and infinity says so
    return {"perplexity": math.exp(nats) if nats < 709 else math.inf, "nats_per_word": nats}


def _words(text: str, *, pieces: bool, paragraphs: bool, eos: bool) -> list[str]:
    """Return the words of a text, with ``<eos>`` after every line that holds one."""
    from wellposed.tasks.text.tokenizers import split_words

    lines = _BLANK_LINES.split(text) if paragraphs else text.split("\n")
    words: list[str] = []
    for line in lines:
        found = _PIECES.findall(line) if pieces else split_words(line)
        words += [*found, END] if eos and found else found
    return words


TASKS.register("word_lm")(
    TaskSpec("word_lm", WordLMOptions, WordLMTask, "predict the next word of a text (perplexity)")
)
