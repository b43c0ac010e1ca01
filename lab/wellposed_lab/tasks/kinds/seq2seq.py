"""Base class of encoder-decoder tasks: pairs of token ids, token loss, scores of generated text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import CheckedOptions, Size
from wellposed_lab.tasks import batches, task
from wellposed_lab.tasks.batches import Example, Ragged
from wellposed_lab.tasks.data.files import refuse
from wellposed_lab.tasks.data.parallel import ParallelTexts
from wellposed_lab.tasks.data.splits import SPLITS, Split
from wellposed_lab.tasks.task import Kind, TokenLossTask
from wellposed_lab.tasks.text.seq2seq_tokenizers import build_pair_encoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    np = ModuleOnFirstUse("numpy")


@dataclass(frozen=True)
class Seq2SeqOptions(CheckedOptions):
    """Options of all tasks with source and target texts."""

    tokenizer: str = "bpe"
    """bpe (byte pairs of both sides of train), char, or hf:NAME_OR_PATH (encoder-decoder)."""
    vocab_size: Size = 8000
    """Ids of the byte-pair encoding, special tokens included."""
    max_tokens: Size = 128
    """Most tokens of a text on either side, end token included; the positions of the model."""
    tokens_per_batch: Size | None = None
    """Most padded tokens of a batch on either side; batch_size is then the most pairs."""
    generate_beams: Size = 4
    """Beams of the texts that are scored; 1 is greedy."""
    generate_length_penalty: float = 1.0
    """Exponent a of the length penalty, which divides log p in beam search."""
    generate_length_penalty_form: Literal["power", "gnmt"] = "power"
    """Length penalty: power is length^a, gnmt is ((5 + length) / 6)^a (Wu et al. 2016)."""
    generate_max_examples: Size | None = None
    """Generate only for the first pairs of valid and of test (default: all)."""


@dataclass(frozen=True)
class PairExamples(batches.Rows[Example]):
    """Source ids as ``input_ids`` and target ids as ``labels``, each with its end token."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    def _row(self, index: int) -> Example:
        return {"input_ids": self.source[index].tolist(), "labels": self.target[index].tolist()}


Scored: TypeAlias = tuple[dict[str, float], dict[str, str]]
"""Scores in 0..100 by name, and the signature of each."""


class Seq2SeqTask(TokenLossTask[PairExamples]):
    """A task whose answer is a text; a subclass first sets ``options``, loads pairs, scores texts.
    ``headline`` chooses the weights; a report starts with ``report_headline`` of the scores."""

    options: Any
    """A subclass of `Seq2SeqOptions` with an option ``overflow``."""

    kind: ClassVar[Kind] = "seq2seq_lm"
    headline: ClassVar[str] = "perplexity"
    nats_name: ClassVar[str] = "perplexity"
    report_headline: ClassVar[str | None] = "bleu"
    shortened: ClassVar[str]
    """The value of ``overflow`` that is no error."""
    remedy: ClassVar[str] = "raise max_tokens"
    """Advice for texts that are too long."""

    def __init__(
        self,
        *,
        pairs: Mapping[Split, ParallelTexts],
        described: Mapping[str, Any],
        vocabulary: Sequence[str] | None = None,
    ) -> None:
        options = self.options
        texts = vocabulary or [*pairs["train"].source, *pairs["train"].target]
        encoder = build_pair_encoder(options.tokenizer, texts, vocab_size=options.vocab_size)
        self._pairs: dict[Split, ParallelTexts] = {}
        examples: dict[Split, PairExamples] = {}
        unknown: dict[Split, Any] = {}
        for split in SPLITS:
            rows = pairs[split]
            sides = encoder.encode(rows.source), encoder.encode_targets(rows.target)
            named = zip(("source", "target"), sides, strict=True)
            unknown[split] = {name: side.unknown_description() for name, side in named}
            self._refuse_longer(split, rows, [side.ids.lengths for side in sides])
            self._pairs[split], ids = self._within_positions(split, rows, *(s.ids for s in sides))
            examples[split] = PairExamples(*ids)

        super().__init__(
            encoder=encoder,
            examples=examples,
            max_length=options.max_tokens,
            described={**described, "unknown_characters": unknown},
        )
        self._start_id = encoder.start_id
        self._signatures: dict[str, str] = {}
        self._sides = {
            split: (rows.source.lengths.tolist(), rows.target.lengths.tolist())
            for split, rows in examples.items()
        }
        # Refuse now, as batches of test are built only after training.
        longest = [tuple(map(max, sides)) for sides in self._sides.values()]
        batches.bucketed_batches(longest, 1, shuffle="", tokens=options.tokens_per_batch or 0)

    def _refuse_longer(
        self, split: Split, texts: ParallelTexts, sizes: Sequence[NDArray[np.int64]]
    ) -> None:
        limit = self.options.max_tokens
        longest = int(np.maximum(*sizes).max())
        if longest <= limit or self.options.overflow != "error":
            return

        refuse(
            f"{split}: texts have more tokens than the model has positions, max_tokens = {limit};"
            f" {self.remedy} (the longest has {longest}) or give overflow={self.shortened!r}",
            [
                f"{self._location(split, texts, index, side)}: {sizes[side][index]} tokens"
                for index in np.flatnonzero(np.maximum(*sizes) > limit).tolist()
                for side in (0, 1)
                if sizes[side][index] > limit
            ],
        )

    def _location(self, split: Split, texts: ParallelTexts, index: int, side: int) -> str:
        """Return the place of a text; side 0 is the source."""
        del split
        return texts.where(index, side)

    @abstractmethod
    def _within_positions(
        self, split: Split, texts: ParallelTexts, source: Ragged, target: Ragged
    ) -> tuple[ParallelTexts, tuple[Ragged, Ragged]]:
        """Return the pairs to keep and their ids, at most ``max_tokens`` on either side."""

    def model_kwargs(self) -> dict[str, Any]:
        return {**super().model_kwargs(), "decoder_start_token_id": self._start_id}

    def lengths(self, split: Split) -> Sequence[int]:
        """Return the tokens of the longer side of each pair."""
        return [max(pair) for pair in zip(*self._sides[split], strict=True)]

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        key = batches.shuffle_key(split, seed, epoch)
        lengths = list(zip(*reversed(self._sides[split]), strict=True))
        tokens = self.options.tokens_per_batch or 0
        return batches.bucketed_batches(lengths, batch_size, shuffle=key, tokens=tokens)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return both sides, padded. Position t of the decoder predicts ``labels[:, t]``."""
        moved = [[self._start_id, *example["labels"][:-1]] for example in examples]
        pairs = zip(examples, moved, strict=True)
        rows = [{**example, "decoder_input_ids": ids} for example, ids in pairs]
        return batches.pad_examples(rows, pad_id=self._encoder.pad_id)

    def _metrics(self, nats: float) -> dict[str, float]:
        return {"perplexity": task.perplexity(nats)}

    def reference(self) -> dict[str, float]:
        """Return loss and perplexity of valid's own target token frequencies, the best constant."""
        nats = task.frequency_entropy(self._examples["valid"].target.flat)
        return {"loss": nats, **self._metrics(nats)}

    def train_reference(self, split: Split) -> dict[str, float]:
        train, targets = (self._examples[name].target.flat for name in ("train", split))
        nats = task.unigram_nats(train, targets, self._encoder.vocab_size)
        return {"loss": nats, **self._metrics(nats)}

    def generate_metrics(
        self,
        model: Any,
        split: Split,
        *,
        batch_size: int,
        notify: Callable[[int, int], None] | None = None,
    ) -> dict[str, float]:
        source = self._examples[split].source
        limit = self.options.generate_max_examples or len(source)
        rows = [source[index].tolist() for index in range(min(limit, len(source)))]
        texts = [""] * len(rows)
        was_training = model.training
        model.eval()

        try:
            generated = generate_texts(
                model,
                self.tokenizer,
                rows,
                self._decoding(),
                batch_size=batch_size,
                notify=None if notify is None else lambda done: notify(done, len(rows)),
            )
            for index, text in generated:
                texts[index] = text
        finally:
            model.train(was_training)
        scores, self._signatures = self._score(texts, self._pairs[split].target[: len(rows)])

        return scores

    def describe_generation(self) -> dict[str, Any]:
        decoding = self._decoding()
        return {
            "beams": decoding.beams,
            "length_penalty": float(decoding.length_penalty),
            "length_penalty_form": self.options.generate_length_penalty_form,
            "max_examples": self.options.generate_max_examples,
            "signatures": self._signatures,
        }

    def _decoding(self) -> Decoding:
        penalty = self.options.generate_length_penalty
        if self.options.generate_length_penalty_form == "gnmt":
            from wellposed.models import GNMTLengthPenalty

            penalty = GNMTLengthPenalty(penalty)
        return Decoding(beams=self.options.generate_beams, length_penalty=penalty)

    @abstractmethod
    def _score(self, hypotheses: Sequence[str], references: Sequence[str]) -> Scored: ...

    def _describe_examples(self) -> dict[str, Any]:
        per_split: dict[str, Any] = {"pairs": {}, "tokens": {}, "longest": {}}
        for split, (sources, targets) in self._sides.items():
            per_split["pairs"][split] = len(sources)
            per_split["tokens"][split] = {"source": sum(sources), "target": sum(targets)}
            per_split["longest"][split] = {"source": max(sources), "target": max(targets)}
        return {"max_tokens": self.options.max_tokens, **per_split}


LENGTH_FACTOR = 2
LENGTH_MARGIN = 10


@dataclass(frozen=True)
class Decoding:
    """Settings of generation: at most 2 x source + 10 tokens, and at most the model's positions."""

    beams: int = 4
    """Beams; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent a of the score: log p / length^a, or as in `GNMTLengthPenalty`."""
    max_new_tokens: int | None = None
    """Most tokens of an output, instead of 2 x source + 10."""


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    batch_size: int,
    notify: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield ``(index, text)`` for every row of source ids (with end token), longest first.

    The search is transformers' ``generate``, without padding, unknown, or a start token that no
    target has. The ``model`` is an encoder-decoder in evaluation mode. After every token ``notify``
    is called with the number of finished rows; an exception from it ends the search.
    """
    import torch

    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        sources: list[Example] = [{"input_ids": list(rows[member])} for member in members]
        padded = batches.pad_examples(sources, pad_id=cast(int, tokenizer.pad_token_id))
        inputs = {name: value.to(model.device) for name, value in padded.items()}
        longest = inputs["input_ids"].shape[1]
        keywords = generate_keywords(model, tokenizer, longest=longest, decoding=decoding)
        if notify is not None:
            keywords["stopping_criteria"] = [_never_stop(partial(notify, start))]
        with torch.inference_mode():
            out: Any = model.generate(**inputs, **keywords)  # type: ignore[operator]
        yield from zip(members, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True)


def _never_stop(each_token: Callable[[], None]) -> Callable[..., Tensor]:
    """Return a stopping criterion that never stops and calls ``each_token``."""

    def criterion(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        each_token()
        return input_ids.new_zeros(input_ids.shape[0]).bool()

    return criterion


def generate_keywords(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, longest: int, decoding: Decoding
) -> dict[str, Any]:
    """Return the keywords of ``generate`` for sources of at most ``longest`` tokens."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    wanted = decoding.max_new_tokens or LENGTH_FACTOR * longest + LENGTH_MARGIN
    end = tokenizer.eos_token_id
    special: list[Any] = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    if tokenizer.bos_token_id not in tokenizer(text_target="")["input_ids"]:
        special.append(tokenizer.bos_token_id)

    beams = {"length_penalty": decoding.length_penalty, "early_stopping": False}
    return {
        "max_new_tokens": min(wanted, positions) if positions else wanted,
        "num_beams": decoding.beams,
        "do_sample": False,
        "suppress_tokens": [number for number in special if number not in (None, end)],
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
        **(beams if decoding.beams > 1 else {}),
    }
