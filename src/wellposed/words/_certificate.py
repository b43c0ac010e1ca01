"""Certified accuracy in words: how many words of a text can be replaced without a new answer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, DataError, ShapeError, UnsoundBoundError
from wellposed.head_kind import check_single_label
from wellposed.model_checks import require_module
from wellposed.models import WindowsForSequenceClassification, text_positions
from wellposed.options import Count, Size, fits
from wellposed.text_table import aligned
from wellposed.words._attack import WordAttack
from wellposed.words._texts import require_tokenizer, split_words, window_options
from wellposed.words._windows import WindowReader
from wellposed.words._words import WordReader, ahead_of, rounded_up

Batch = Mapping[str, Tensor]
_SHOWN = 48
"""Number of texts whose changed words are listed."""


@dataclass(frozen=True)
class CertifiedText:
    """One text: its answer, and how many of its words can change."""

    label: int
    predicted: int
    words: int
    """Words of the text, or windows of words."""
    replaceable: int
    """Largest certified number of replaced words; -1 for a wrong or tied answer."""


@dataclass(frozen=True)
class TextReport:
    """One text: how many changes leave its answer, an attack on it, and the words that carry it."""

    label: int
    words: int
    """Words of the text that are read, or windows of words."""
    cut: tuple[int, int] | None
    """Pieces of a text longer than `max_length`, and how many were read."""
    replaceable: int
    """Number of replaced words that cannot change the answer."""
    needed: int | None
    """Number of replaced words with which an attack changes the answer; None if it failed."""
    swaps: list[tuple[str, str]]
    """These words and their replacements."""
    against: int
    """The class that replaced words bring nearest."""
    shares: list[tuple[str, float]]
    """Each word and the share of that margin it can remove, largest first; none if uncertified."""


@dataclass(frozen=True)
class WordAccuracy:
    """Accuracy by number k of replaced words: certified <= true <= attacked."""

    counts: list[int]
    certified: list[float]
    attacked: list[float]
    texts: int
    clean: float
    """Accuracy at k = 0."""
    method: str
    """The certificate in a few words."""
    reason: str
    """Why nothing is certified; empty if something is."""
    first_texts: list[str]
    """First texts: certified k, k of the attack, and its words."""
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Return the numbers as plain text."""
        rows = [("change", "k", "certified", "attacked"), ("none", "0", *[f"{self.clean:.4f}"] * 2)]
        for k, lower, upper in zip(self.counts, self.certified, self.attacked, strict=True):
            certified = "none" if self.reason else f"{lower:.4f}"
            rows.append(("words", str(k), certified, f"{upper:.4f}"))
        counted = f"{self.texts} texts, clean accuracy {self.clean:.4f}"
        return "\n".join([f"{counted}; {self.method}", aligned(rows, "l"), *self.notes])


def text_limit(model: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens that the model reads; longer texts are cut."""
    return min(int(tokenizer.model_max_length), text_positions(model.config) or sys.maxsize)


def read_in_windows(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    words: int = 1,
    *,
    frozen: bool = False,
    max_length: int | None = None,
) -> WindowsForSequenceClassification:
    """Return a classifier whose answer is the mean vote of ``model`` on windows of ``words`` words.

    It has a certificate in words for any ``model`` (theory note B15), and shares its weights. Train
    it on the ids that `WordCertificate.encode` returns.

    Args:
        model: A sequence classifier of transformers.
        tokenizer: Of the model.
        texts: Of the train split; their words decide to how many tokens a word is padded.
        words: Number of words in a window.
        frozen: Do not train the body of ``model``; two layers learn to read it.
        max_length: Number of words of a text that are read; default: all.

    Raises:
        ConfigError: the tokenizer has no padding token.
    """
    require_module("read_in_windows", model)
    require_tokenizer("read_in_windows", tokenizer)
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ConfigError(
            f"read_in_windows: model: expected a sequence classifier of transformers, received {kind};"
            " load one with AutoModelForSequenceClassification.from_pretrained"
        )
    if not fits(words, Size):
        raise ConfigError(f"read_in_windows: words = {words!r}, expected an integer >= 1")
    if not fits(max_length, Size | None):
        raise ConfigError(f"read_in_windows: max_length = {max_length!r}, expected an integer >= 1")
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "windows of words are padded, and this tokenizer has no padding token; set"
            " tokenizer.pad_token, for example to its eos_token"
        )

    options = window_options(tokenizer, texts, words, max_length=max_length)
    around = WindowsForSequenceClassification.around
    return around(model, tokenizer.pad_token_id, **options, frozen=frozen)


class WordCertificate:
    """Certified accuracy of a classifier of texts against replaced words.

    Status: certified for exact arithmetic with the weights as stored (theory notes B14, B15).
    Covers `wellposed.models.WellposedForSequenceClassification` of the variant lipschitz with a
    tokenizer of words, and `read_in_windows` of any classifier. A snapshot: it copies the model in
    float64 and eval mode, on its device.

    Args:
        model: The classifier, however it was trained.
        tokenizer: Of the model.
        max_length: Tokens of a text that are read (of windows: words). Default: as many as fit.
        required: If False, a model without a bound is accepted and only attacked.

    Raises:
        NotLipschitzError: a part of the model has no bound; all are named.
        ConfigError: unsupported model, pooling, head or tokenizer; more tokens than embedding rows.

    Cost: that of `wellposed.certify` and one embedding of the vocabulary; nothing for windows.

    Example:
        >>> import torch
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from wellposed.models import WellposedConfig, WellposedForSequenceClassification
        >>> words = {"<| pad |>": 0, "<| unk |>": 1, "good": 2, "bad": 3, "film": 4}
        >>> inner = Tokenizer(models.WordLevel(words, "<| unk |>"))
        >>> inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=inner, unk_token="<| unk |>", split_special_tokens=True)
        >>> config = WellposedConfig(vocab_size=5, hidden_size=4, num_hidden_layers=0,
        ...     num_attention_heads=1, norm="none", position="none", scale_embeddings=False)
        >>> model = WellposedForSequenceClassification(config).eval()
        >>> vectors = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0])[:, None] * torch.eye(1, 4)
        >>> model.model.embeddings.token.weight.data = vectors
        >>> model.classifier.weight.data = torch.eye(2, 4)
        >>> certificate = WordCertificate(model, tokenizer)
        >>> texts, labels = ["good film good good", "bad film"], [0, 1]
        >>> certificate.accuracy(texts, labels, replaced=(1, 2)).certified
        [0.5, 0.0]
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_length: int | None = None, required: bool = True
    ) -> None:
        require_module("WordCertificate", model)
        require_tokenizer("WordCertificate", tokenizer)
        if not hasattr(model, "config"):
            kind = type(model).__name__
            raise ConfigError(
                f"WordCertificate: model: received {kind}; expected a classifier of transformers"
            )

        check_single_label(model, "a certificate in words")
        self.max_length = text_limit(model, tokenizer) if max_length is None else max_length
        self.tokenizer = tokenizer
        self.reader: WordReader | WindowReader

        if type(model) is WindowsForSequenceClassification:
            self.reader = WindowReader(model, tokenizer, self.max_length)
        else:
            self.reader = WordReader(model, tokenizer, self.max_length, required=required)

        self.model: Any = self.reader.model
        self.reason = self.reader.reason
        """Why nothing is certified; empty if something is."""
        rows = len(self.model.get_input_embeddings().weight)
        tokens = max(tokenizer.get_vocab().values()) + 1
        if tokens > rows:
            raise ConfigError(
                f"the tokenizer has {tokens} tokens and the model's embedding {rows} rows: one of them"
                " was changed after training; use the tokenizer that was saved with the model"
            )

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text, cut to the length that the model reads.

        Ids of windows have a negative mark before each word, which no tokenizer decodes: see `decode`.

        Raises:
            ShapeError: a text without words.
        """
        encoded = [self.reader.encode(text) for text in texts]
        empty = [index for index, ids in enumerate(encoded) if not len(ids)]
        if empty:
            raise ShapeError(
                f"words: no word in text {empty[0]} of {len(encoded)}, so it has no answer; give texts"
                " of 1 word or more"
            )
        return [ids[: self.max_length * self.reader.tokens] for ids in encoded]

    def decode(self, ids: Iterable[Tensor]) -> list[str]:
        """Return the texts of the ids that `encode` returns, padded or not, with a blank between words.

        Words that windows cut have their first tokens; words unknown to the tokenizer are its unknown
        token.

        Raises:
            ConfigError: the ids were not encoded for this model's windows.
        """
        return [self.reader.decode(torch.as_tensor(row)) for row in ids]

    def accuracy(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        *,
        replaced: Sequence[int] = (1, 2, 3),
        beam: int = 1,
        batch_size: int = 32,
    ) -> WordAccuracy:
        """Return certified and attacked accuracy on ``texts``.

        Args:
            labels: Numbers of classes, or names of ``model.config.label2id``.
            replaced: Increasing numbers k >= 1 of words, replaced by any words.
            beam: Texts that the attack keeps in each round.
            batch_size: Texts of one forward pass.

        Raises:
            DataError: labels do not match the texts, or are no class of the model.
            ShapeError: a text without words.
            ConfigError: ``replaced`` is not increasing.
            UnsoundBoundError: an attack changed a certified answer.

        Cost: a float64 forward pass per text; for the attack, ``classes x k`` gradients per text.
        """
        names = dict(self.model.config.label2id or {})
        classes = self.model.config.num_labels
        numbers = [names.get(label, label) for label in labels]
        if not len(texts) or len(texts) != len(labels) or not set(numbers) <= set(range(classes)):
            raise DataError(
                f"certified accuracy in words: {len(texts)} texts with {len(labels)} labels, expected"
                f" as many labels, each a number below {classes} or a name of model.config.label2id"
            )

        ids = self.encode(texts)
        rows = range(0, len(ids), batch_size)
        batches = [_batch(ids[at : at + batch_size], numbers[at : at + batch_size]) for at in rows]
        long = sum(len(self.reader.encode(t)) > len(i) for t, i in zip(texts, ids, strict=True))
        note = f"{long} texts were cut to max_length = {self.max_length}"
        accuracy = self.accuracy_of(batches, replaced, beam=beam)
        return replace(accuracy, notes=(note,) if long else ())

    def accuracy_of(
        self, batches: Iterable[Batch], replaced: Sequence[int], *, beam: int = 1
    ) -> WordAccuracy:
        """Return `accuracy` on ``batches`` of ``input_ids``, ``attention_mask``, ``labels``."""
        batches = list(batches)
        counts = list(replaced)
        if counts != sorted({k for k in counts if isinstance(k, int) and k >= 1}):
            problem = f"{counts} words, expected increasing whole numbers of 1 or more"
            raise ConfigError(f"certified accuracy in words: {problem}")

        most = max(counts, default=0)
        results = self.hold(batches, most)
        fewest = []
        examples = []
        for text, ids in zip(results, _texts(batches), strict=True):
            needed, changed = self._attacked(most, text, ids, beam)
            fewest.append(needed)
            if most and len(examples) < _SHOWN:
                tokens = self.tokenizer.convert_ids_to_tokens
                pairs = zip(ids.tolist(), changed.tolist(), strict=False)
                swaps = [tokens([old, new]) for old, new in pairs if old != new]
                words = ", ".join(f"{old} → {new}" for old, new in swaps)
                lower = f"certified for k = {text.replaceable}" if text.replaceable > 0 else ""
                upper = f"turned by {needed}: {words}" if words else ""
                examples.append("; ".join(filter(None, (lower, upper))))

        share = lambda flags: sum(flags) / max(1, len(results))  # noqa: E731
        return WordAccuracy(
            counts=counts,
            certified=[share(text.replaceable >= k for text in results) for k in counts],
            attacked=[share(needed > k for needed in fewest) for k in counts],
            texts=len(results),
            clean=share(text.label == text.predicted for text in results),
            method=self.reader.method,
            reason=self.reason,
            first_texts=examples,
        )

    @torch.no_grad()
    @checked_arguments
    def hold(self, batches: Iterable[Batch], most: Count) -> list[CertifiedText]:
        """Return how many replaced words, up to ``most``, cannot change the answer to each text.

        Batches are those of `accuracy_of`; without ``labels``, answers are not judged. Cost: one
        float64 forward pass, and a look-up and a sort for each text.

        Raises:
            ConfigError: ``most`` is not a whole number of 0 or more.
            ShapeError: a text is longer than the certificate covers.
        """
        results = []
        for batch in batches:
            logits, texts = self.reader.read(batch["input_ids"], batch["attention_mask"])
            predicted = logits.argmax(-1)
            labels = batch.get("labels", predicted).tolist()
            counts = self._certified_words(logits, texts, labels, most)
            rows = zip(labels, predicted.tolist(), map(len, texts), counts, strict=True)
            results += [CertifiedText(*row) for row in rows]
        return results

    def _certified_words(
        self, logits: Tensor, texts: Sequence[Tensor], labels: Sequence[int], most: int
    ) -> list[int]:
        """Return `hold` of each text: the words with the largest gains are the worst case."""
        most = 0 if self.reason else most
        targets = torch.tensor(labels)
        padded = pad_sequence(list(texts), batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        gains = padded.new_zeros(*padded.shape[:2], logits.shape[1], dtype=logits.dtype)
        for label in targets.unique().tolist() if most else []:
            gains[targets == label] = self.reader.gains(label, padded[targets == label])

        behind = torch.arange(padded.shape[1]) >= lengths[:, None]
        gains.masked_fill_(behind[..., None], 0)
        count = min(most, padded.shape[1])
        moved = gains.topk(count, dim=1).values.cumsum(1) / lengths[:, None, None]
        ahead = logits.gather(1, targets[:, None]) - logits
        ahead.scatter_(1, targets[:, None], torch.inf)
        certified = (rounded_up(moved) < ahead[:, None]).all(2).long().cumprod(1).sum(1)
        # If all words of a text may be replaced, any number may.
        certified = certified.masked_fill(certified == padded.shape[1], most)

        return certified.masked_fill((ahead <= 0).any(1), -1).tolist()

    def _attacked(
        self, most: int, text: CertifiedText, ids: Tensor, beam: int
    ) -> tuple[int, Tensor]:
        """Return how many words the attack needs (``most + 1`` if it fails), and its text."""
        attack = WordAttack(self.model, self.reader.propose(ids, text.label), beam)
        needed, changed = attack.fewest_edits(ids, text.label, most)
        if max(1, needed) <= min(most, text.replaceable):
            raise UnsoundBoundError(
                f"words: replacing {needed} words changes the answer to a text of label {text.label}"
                f" that is certified for {text.replaceable}: {ids.tolist()} became {changed.tolist()};"
                " please report it with the model"
            )
        return needed, changed

    @torch.no_grad()
    @checked_arguments
    def explain(self, text: str, most: Count) -> TextReport:
        """Return how many replaced words leave the answer, an attack, and the share of each word.

        Raises:
            ShapeError: a text without words.
        """
        reader = self.reader
        (ids,) = self.encode([text])
        length = len(reader.encode(text))
        batch = _batch([ids])
        (result,) = self.hold([batch], most)
        (logits,), (parts,) = reader.read(batch["input_ids"], batch["attention_mask"])
        label = result.predicted
        names = reader.names(ids)
        split = split_words(text)
        typed = [
            " ".join(split[at : at + reader.words]) for at in range(0, len(split), reader.words)
        ]
        typed = [*typed[: len(names)], *names[len(typed) :]]
        attack = WordAttack(self.model, reader.propose(ids, label))
        needed, changed = attack.fewest_edits(ids, label, len(ids))
        pairs = zip(typed, names, reader.names(changed), strict=True)
        ahead = ahead_of(logits, label)
        shares = []
        against = label
        if not self.reason:
            gains = reader.gains(label, parts) / len(parts)
            against = int((ahead - gains.sum(0)).argmin())
            of_margin = gains[:, against] / ahead[against]
            order = of_margin.argsort(descending=True).tolist()
            shares = [(typed[index], float(of_margin[index])) for index in order]

        return TextReport(
            label=label,
            words=result.words,
            cut=(length // reader.tokens, self.max_length) if length > len(ids) else None,
            replaceable=max(0, result.replaceable),
            needed=needed if needed <= len(ids) else None,
            swaps=[(name, new) for name, old, new in pairs if old != new],
            against=against,
            shares=shares,
        )


def _batch(ids: Sequence[Tensor], labels: Sequence[int] | None = None) -> dict[str, Tensor]:
    masks = [torch.ones_like(text) for text in ids]
    inputs = {"input_ids": list(ids), "attention_mask": masks}
    batch = {name: pad_sequence(rows, batch_first=True) for name, rows in inputs.items()}
    return batch if labels is None else {**batch, "labels": torch.tensor(labels)}


def _texts(batches: Iterable[Batch]) -> Iterator[Tensor]:
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        yield from (ids[real] for ids, real in pairs)
