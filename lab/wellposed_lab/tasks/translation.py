"""Task ``translation``: translate sentences; token loss while training, BLEU and chrF at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wellposed.errors import DataError, require_extras
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import Size
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.data.parallel import ParallelOptions, ParallelTexts, load_parallel
from wellposed_lab.tasks.data.splits import SPLITS, Split
from wellposed_lab.tasks.kinds.seq2seq import Scored, Seq2SeqOptions, Seq2SeqTask
from wellposed_lab.tasks.metrics import score_texts
from wellposed_lab.tasks.task import register_task

if TYPE_CHECKING:
    import numpy as np
else:
    np = ModuleOnFirstUse("numpy")


@dataclass(frozen=True)
class TranslationOptions(Seq2SeqOptions, ParallelOptions):
    """Options of the task `translation`."""

    max_tokens: Size = 256
    """Most tokens of a sentence, end token included; the positions of the model."""
    overflow: Literal["error", "drop"] = "error"
    """error for longer pairs; drop: leave them out of train and cut them in valid and test (counted
    in the report; BLEU and chrF compare with whole sentences)."""
    limit_pairs: Size | None = None
    """Keep only the first pairs of the train split."""
    bleu_tokens: Literal["13a", "none", "intl", "char", "zh"] = "13a"
    """BLEU's tokenizer: 13a (running text), none (tokenised), intl, char, or zh (Chinese)."""


@register_task(
    "translation",
    TranslationOptions,
    "translate sentences between two languages (BLEU, chrF, perplexity)",
)
class TranslationTask(Seq2SeqTask):
    """Translation: ``loss``, ``perplexity`` per target token; ``bleu``, ``chrf`` by generation.

    Perplexity on valid chooses the weights; valid and test are scored once, with them. The
    reference is the perplexity of valid's own target token frequencies. Characters that train lacks
    become the unknown token and are listed in the description.

    >>> from wellposed_lab.tasks.task import TASKS
    >>> TASKS.get("translation").summary
    'translate sentences between two languages (BLEU, chrF, perplexity)'
    """

    shortened: ClassVar[str] = "drop"

    def __init__(self, options: TranslationOptions) -> None:
        require_extras(("translation",), "BLEU and chrF of a translation")
        self.options = options
        pairs, source = load_parallel(options)
        full = len(pairs["train"])
        pairs["train"] = pairs["train"].select(range(min(options.limit_pairs or full, full)))
        left_out = {"train_pairs_left_out_by_limit_pairs": full - len(pairs["train"])}
        self._dropped = {"pairs": 0, "longest": 0}
        self._cut = dict.fromkeys(SPLITS[1:], 0)
        super().__init__(pairs=pairs, described={**source, **left_out})
        rows = {
            s: list(zip(both.source, both.target, strict=True)) for s, both in self._pairs.items()
        }
        train_pairs = set(rows["train"])
        self._repeated = {s: sum(pair in train_pairs for pair in rows[s]) for s in SPLITS[1:]}
        del self._pairs["train"]  # it may be large

    def _describe_examples(self) -> dict[str, Any]:
        return {
            **super()._describe_examples(),
            "train_pairs_dropped_as_too_long": self._dropped,
            "pairs_cut_as_too_long": self._cut,
            "pairs_also_in_train": self._repeated,
        }

    def _within_positions(
        self, split: Split, texts: ParallelTexts, source: Ragged, target: Ragged
    ) -> tuple[ParallelTexts, tuple[Ragged, Ragged]]:
        """Return the pairs within ``max_tokens``: longer ones of train are dropped, others cut."""
        limit = self.options.max_tokens
        sizes = np.maximum(source.lengths, target.lengths)
        longer = sizes > limit
        if not longer.any():
            return texts, (source, target)

        rows = [[ids.tolist() for ids in side] for side in (source, target)]
        if split == "train":
            self._dropped = {"pairs": int(longer.sum()), "longest": int(sizes.max())}
            places = np.flatnonzero(~longer).tolist()
            if not places:
                raise DataError(f"{texts.paths[0]}: max_tokens = {limit} leaves no pair; raise it")
            texts = texts.select(places)
            rows = [[side[i] for i in places] for side in rows]
        else:
            self._cut[split] = int(longer.sum())
            rows = [[ids[: limit - 1] + ids[limit - 1 :][-1:] for ids in side] for side in rows]
        source, target = map(Ragged.from_lists, rows)

        return texts, (source, target)

    def _score(self, hypotheses: Sequence[str], references: Sequence[str]) -> Scored:
        return score_texts(hypotheses, references, bleu_tokens=self.options.bleu_tokens)
