"""Certified accuracy in words: how many words of a text can be replaced with its answer unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, DataError, ShapeError, UnsoundBoundError
from wellposed.head_kind import check_single_label
from wellposed.models import WindowsForSequenceClassification, text_positions
from wellposed.options import Count
from wellposed.text_table import aligned
from wellposed.words._attack import WordAttack
from wellposed.words._texts import split_words, window_options
from wellposed.words._windows import WindowReader
from wellposed.words._words import WordReader, ahead_of, rounded_up

Batch = Mapping[str, Tensor]
_SHOWN = 48
"""Texts whose changed words are kept."""


@dataclass(frozen=True)
class CertifiedText:
    """One text: its answer, and how many of its words can change."""

    label: int
    predicted: int
    words: int
    """Words of the text, or windows of words."""
    held: int
    """The largest number of replaced words, of those asked for, that is certified; -1 if the answer
    is not the label, or level with another class."""


@dataclass(frozen=True)
class TextReport:
    """One text: how many changes leave its answer, an attack on it, and which words carry it."""

    label: int
    words: int
    """Words of the text that are read, or windows of words."""
    cut: tuple[int, int] | None
    """Pieces of a text that was longer than `max_length`, and how many were read."""
    held: int
    """Replaced words, of those asked for, that cannot change the answer."""
    needed: int | None
    """Replaced words with which an attack changes the answer; None if it failed."""
    swaps: list[tuple[str, str]]
    """These words, and what replaces them."""
    against: int
    """The class that replaced words bring nearest."""
    shares: list[tuple[str, float]]
    """What replacing each word can take of the margin to it, largest first; empty without a
    certificate."""


@dataclass(frozen=True)
class WordAccuracy:
    """For each k: the share of texts whose right answer no k replaced words can turn, and the share
    that an attack leaves right, certified <= true <= attacked."""

    counts: list[int]
    certified: list[float]
    attacked: list[float]
    texts: int
    clean: float
    """Share of right answers, k = 0."""
    how: str
    """What the certificate is, in words."""
    reason: str
    """Why nothing is certified; empty if something is."""
    shown: list[str]
    """Of the first texts: how many replaced words cannot turn it, how many do, and which."""
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Return the numbers as plain text."""
        rows = [("change", "k", "certified", "attacked"), ("none", "0", *[f"{self.clean:.4f}"] * 2)]
        for k, sure, seen in zip(self.counts, self.certified, self.attacked, strict=True):
            certified = "none" if self.reason else f"{sure:.4f}"
            rows.append(("words", str(k), certified, f"{seen:.4f}"))
        counted = f"{self.texts} texts, clean accuracy {self.clean:.4f}"
        return "\n".join([f"{counted}; {self.how}", aligned(rows, "l"), *self.notes])


def text_limit(model: Any, tokenizer: Any) -> int:
    """Return the most tokens of a text that the model reads; what is longer is cut."""
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
    """Return a classifier that reads windows of ``words`` words by ``model`` and gives the mean of
    their votes, so that it has a certificate in words whatever ``model`` is (B15).

    It has the weights of ``model`` and is trained like any classifier, on the ids that
    `WordCertificate.encode` gives.

    Args:
        model: a classifier of sequences of transformers.
        tokenizer: of the model.
        texts: of train; their words say to how many tokens a word is padded.
        words: of a window.
        frozen: leave the body of ``model`` as it is; two layers learn to read it.
        max_length: words of a text that are read; all if None.

    Raises:
        ConfigError: the tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "windows of words are padded, and this tokenizer has no padding token; set"
            " tokenizer.pad_token, for instance to its eos_token"
        )
    options = window_options(tokenizer, texts, words, max_length=max_length)
    around = WindowsForSequenceClassification.around
    return around(model, tokenizer.pad_token_id, **options, frozen=frozen)


class WordCertificate:
    r"""Certified accuracy of a classifier of texts against replaced words.

    Status: certified for exact arithmetic with the weights as stored (theory notes B14, B15). It
    covers `wellposed.models.WellposedForSequenceClassification` of the variant lipschitz with a
    tokenizer of words, and, whatever reads a window, `read_in_windows` of any classifier. It is a
    snapshot: a copy in float64, in eval mode, on the device of the model.

    Args:
        model: the classifier, however it was trained.
        tokenizer: of the model.
        max_length: tokens of a text that are read, of windows words; what the model and the
            tokenizer take if None.
        required: if False, a model without a bound is accepted and attacked alone.

    Raises:
        NotLipschitzError: a part of the model has no bound; all are named.
        ConfigError: another model, pooling or tokenizer; more tokens than the model has rows; a
            head that does not choose one label.

    Cost: that of `wellposed.certify` and of embedding the vocabulary; of windows none.

    Example:
        >>> import torch
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from wellposed.models import WellposedConfig, WellposedForSequenceClassification
        >>> words = {"<| pad |>": 0, "<| unk |>": 1, "good": 2, "bad": 3, "film": 4}
        >>> inner = Tokenizer(models.WordLevel(words, "<| unk |>"))
        >>> inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=inner, unk_token="<| unk |>", split_special_tokens=True
        ... )
        >>> model = WellposedForSequenceClassification(
        ...     WellposedConfig(vocab_size=5, hidden_size=4, num_hidden_layers=0, num_labels=2,
        ...         num_attention_heads=1, norm="none", position="none", scale_embeddings=False)
        ... ).eval()
        >>> _ = torch.nn.init.zeros_(model.model.embeddings.token.weight)
        >>> model.model.embeddings.token.weight.data[2:4, 0] = torch.tensor([1.0, -1.0])
        >>> model.classifier.weight.data = torch.eye(2, 4)
        >>> model.classifier.bias.data = torch.tensor([0.0, 0.1])
        >>> certificate = WordCertificate(model, tokenizer)
        >>> texts, labels = ["good film good good", "bad film"], [0, 1]
        >>> print(certificate.accuracy(texts, labels, replaced=(1, 2)).table())
        2 texts, clean accuracy 1.0000; replaced words exactly
        change  k  certified  attacked
        none    0     1.0000    1.0000
        words   1     0.5000    0.5000
        words   2     0.0000    0.0000
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_length: int | None = None, required: bool = True
    ) -> None:
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
        if (tokens := max(tokenizer.get_vocab().values()) + 1) > rows:
            raise ConfigError(
                f"the tokenizer has {tokens} tokens and the model's embedding {rows} rows: one of the"
                " two was changed after training; use the tokenizer that was saved with the model"
            )

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the token ids of each text, cut as the model reads it.

        Raises:
            ShapeError: a text without a word.
        """
        found = [self.reader.encode(text) for text in texts]
        if empty := [place for place, ids in enumerate(found) if not len(ids)]:
            raise ShapeError(
                f"words: no word in text {empty[0]} of {len(found)}, so that it has no answer; give"
                " texts of 1 word or more"
            )
        return [ids[: self.max_length * self.reader.tokens] for ids in found]

    def accuracy(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        *,
        replaced: Sequence[int] = (1, 2, 3),
        beam: int = 1,
        batch_size: int = 32,
    ) -> WordAccuracy:
        """Return certified and attacked accuracy on texts.

        Args:
            texts: to be classified.
            labels: their classes: numbers, or names of ``model.config.label2id``.
            replaced: numbers k of words, increasing, replaced by any words.
            beam: texts the attack keeps in each round.
            batch_size: texts of one forward pass.

        Raises:
            DataError: as many labels as texts are needed, each a class of the model.
            ShapeError: a text without a word.
            ConfigError: numbers that do not increase from 1 or more.
            UnsoundBoundError: an attack turned a certified text.

        Cost: a forward pass in float64 a text; the attack ``classes x k`` gradients a text.
        """
        names, classes = dict(self.model.config.label2id or {}), self.model.config.num_labels
        numbers = [names.get(each, each) for each in labels]
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
        found = self.accuracy_of(batches, replaced, beam=beam)
        return replace(found, notes=(note,) if long else ())

    def accuracy_of(
        self, batches: Iterable[Batch], replaced: Sequence[int], *, beam: int = 1
    ) -> WordAccuracy:
        """Return the `accuracy` on texts that are encoded already.

        Args:
            batches: with ``input_ids``, ``attention_mask`` and ``labels``.
            replaced: numbers k of words, increasing.
            beam: texts the attack keeps in each round.
        """
        batches, counts = list(batches), list(replaced)
        if counts != sorted({k for k in counts if isinstance(k, int) and k >= 1}):
            problem = f"{counts} words, expected increasing whole numbers of 1 or more"
            raise ConfigError(f"certified accuracy in words: {problem}")
        most = max(counts, default=0)
        held = self.hold(batches, most)
        fallen, shown = [], []
        for text, ids in zip(held, _texts(batches), strict=True):
            needed, turned = self._attacked(most, text, ids, beam)
            fallen.append(needed)
            if most and len(shown) < _SHOWN:
                tokens = self.tokenizer.convert_ids_to_tokens
                pairs = zip(tokens(ids.tolist()), tokens(turned.tolist()), strict=False)
                words = ", ".join(f"{a} → {b}" for a, b in pairs if a != b)
                sure = f"certified for k = {text.held}" if text.held > 0 else ""
                fell = f"turned by {needed}: {words}" if words else ""
                shown.append("; ".join(filter(None, (sure, fell))))
        share = lambda flags: sum(flags) / max(1, len(held))  # noqa: E731
        return WordAccuracy(
            counts=counts,
            certified=[share(text.held >= k for text in held) for k in counts],
            attacked=[share(needed > k for needed in fallen) for k in counts],
            texts=len(held),
            clean=share(text.label == text.predicted for text in held),
            how=self.reader.how,
            reason=self.reason,
            shown=shown,
        )

    @torch.no_grad()
    @checked_arguments
    def hold(self, batches: Iterable[Batch], most: Count) -> list[CertifiedText]:
        """Return how many replaced words, up to ``most``, hold for every text.

        Args:
            batches: with ``input_ids``, ``attention_mask`` and, if the answer is judged, ``labels``.
            most: the largest number of words.

        Raises:
            ConfigError: ``most`` is not a whole number of 0 or more.
            ShapeError: a text is longer than the certificate covers.

        Cost: one forward pass in float64, and a look-up and a sort for each text.
        """
        found = []
        for batch in batches:
            logits, texts = self.reader.read(batch["input_ids"], batch["attention_mask"])
            predicted = logits.argmax(-1)
            labels = batch.get("labels", predicted).tolist()
            held = self._held_words(logits, texts, labels, most)
            rows = zip(labels, predicted.tolist(), map(len, texts), held, strict=True)
            found += [CertifiedText(*row) for row in rows]
        return found

    def _held_words(
        self, logits: Tensor, texts: Sequence[Tensor], labels: Sequence[int], most: int
    ) -> list[int]:
        """Return how many replaced words, up to ``most``, hold for each text: the worst are those of
        the largest gains. -1 if the answer is not the label."""
        most = 0 if self.reason else most
        of, padded = torch.tensor(labels), pad_sequence(list(texts), batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        gains = padded.new_zeros(*padded.shape[:2], logits.shape[1], dtype=logits.dtype)
        for label in of.unique().tolist() if most else []:
            gains[of == label] = self.reader.gains(label, padded[of == label])
        behind = torch.arange(padded.shape[1]) >= lengths[:, None]
        gains.masked_fill_(behind[..., None], 0)
        kept = min(most, padded.shape[1])
        moved = gains.topk(kept, dim=1).values.cumsum(1) / lengths[:, None, None]
        ahead = logits.gather(1, of[:, None]) - logits
        ahead.scatter_(1, of[:, None], torch.inf)
        held = (rounded_up(moved) < ahead[:, None]).all(2).long().cumprod(1).sum(1)
        # If every word of a text may go, so may any number.
        held = held.masked_fill(held == padded.shape[1], most)
        return held.masked_fill((ahead <= 0).any(1), -1).tolist()

    def _attacked(
        self, most: int, text: CertifiedText, ids: Tensor, beam: int
    ) -> tuple[int, Tensor]:
        """Return how many replaced words the attack needs, one more than asked if it fails, and the
        text that it makes."""
        attack = WordAttack(self.model, self.reader.propose(ids, text.label), beam)
        needed, turned = attack.fewest_edits(ids, text.label, most)
        if max(1, needed) <= min(most, text.held):
            raise UnsoundBoundError(
                f"words: {needed} words turn a text of label {text.label} that is certified against"
                f" {text.held}: {ids.tolist()} became {turned.tolist()}; please report it with the"
                " model"
            )
        return needed, turned

    @torch.no_grad()
    @checked_arguments
    def explain(self, text: str, most: Count) -> TextReport:
        """Return how many replaced words, up to ``most``, leave the answer to a text, what an attack
        needs, and which words carry the answer.

        Raises:
            ShapeError: no word in the text.
        """
        reader, (ids,) = self.reader, self.encode([text])
        whole, batch = len(reader.encode(text)), _batch([ids])
        (found,) = self.hold([batch], most)
        (logits,), (parts,) = reader.read(batch["input_ids"], batch["attention_mask"])
        label, names, split = found.predicted, reader.names(ids), split_words(text)
        typed = [
            " ".join(split[at : at + reader.words]) for at in range(0, len(split), reader.words)
        ]
        typed = [*typed[: len(names)], *names[len(typed) :]]
        attack = WordAttack(self.model, reader.propose(ids, label))
        needed, turned = attack.fewest_edits(ids, label, len(ids))
        pairs = zip(typed, names, reader.names(turned), strict=True)
        ahead, shares, against = ahead_of(logits, label), [], label
        if not self.reason:
            gains = reader.gains(label, parts) / len(parts)
            against = int((ahead - gains.sum(0)).argmin())
            of_margin = gains[:, against] / ahead[against]
            order = of_margin.argsort(descending=True).tolist()
            shares = [(typed[place], float(of_margin[place])) for place in order]
        return TextReport(
            label=label,
            words=found.words,
            cut=(whole // reader.tokens, self.max_length) if whole > len(ids) else None,
            held=max(0, found.held),
            needed=needed if needed <= len(ids) else None,
            swaps=[(name, new) for name, old, new in pairs if old != new],
            against=against,
            shares=shares,
        )


def _batch(ids: Sequence[Tensor], labels: Sequence[int] | None = None) -> dict[str, Tensor]:
    masks = [torch.ones_like(each) for each in ids]
    inputs = {"input_ids": list(ids), "attention_mask": masks}
    batch = {name: pad_sequence(some, batch_first=True) for name, some in inputs.items()}
    return batch if labels is None else {**batch, "labels": torch.tensor(labels)}


def _texts(batches: Iterable[Batch]) -> Iterator[Tensor]:
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
        yield from (ids[real] for ids, real in pairs)
