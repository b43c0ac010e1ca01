"""How many words, or characters, of a text can be changed with the answer of a classifier held
(theory note B14)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wellposed.attack import in_dtype
from wellposed.certification import certify
from wellposed.errors import ConfigError, ShapeError, shortened
from wellposed.models import input_vectors

EditKind = str
"""``words``: replaced; ``edits``: inserted, deleted or replaced words; ``characters``: the same of
characters."""
ROUNDING = 1e-9
"""Relative to what is compared, and absolute: far above what float64 rounds here."""
_ROWS = 256

Menu = Mapping[tuple[int, int], Tensor]
"""(words removed, words added) -> the largest gain of the linear part for each class, (classes,)."""


@dataclass(frozen=True)
class WordBounds:
    """What changed words can do to the logits of a classifier ``W mean_i(s x_i + r_i(X)) + b``.

    Certified (B14), for exact arithmetic with the weights as stored: k words of n, replaced by any
    words of the vocabulary, raise ``z_c - z_y`` by at most the sum of their k largest gains,
    divided by n. Exact where r is constant: for a model without blocks.
    """

    model: Any = field(repr=False)
    """A copy in float64, in eval mode."""
    vectors: Tensor = field(repr=False)
    """(words, D) float64, what every word of the vocabulary is embedded as."""
    weight: Tensor = field(repr=False)
    """(classes, D) float64, W."""
    skip: float
    """s."""
    rest: float
    """The constant of r in norm sum, for at most `tokens` tokens."""
    free_rest: float
    """The same for any number of tokens; infinite where the order of words is read, since an
    inserted word then moves all that follow."""
    tokens: int
    longest: float
    """Largest norm of a word."""
    reason: str = ""
    """Why nothing is certified, where nothing is; an attack needs no certificate."""
    shifts: ClassVar[bool] = False
    """Whether other edits than replaced words read a text once more."""
    tables: dict[int, Tensor] = field(default_factory=dict, repr=False)
    projected: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def exact(self) -> bool:
        """Whether k replaced words can do all that is allowed for."""
        return self.rest <= ROUNDING

    def directions(self, label: int) -> Tensor:
        """Return ``s (w_c - w_y)`` of every class c, (classes, D)."""
        return self.skip * (self.weight - self.weight[label])

    def sizes(self, label: int) -> Tensor:
        """Return ``|w_c - w_y|`` of every class c."""
        return (self.weight - self.weight[label]).norm(dim=-1)

    def gains(self, label: int, ids: Tensor) -> Tensor:
        """Return the most that replacing each of these words adds to ``n (z_c - z_y)``, (words,
        classes).

        ``max_w s (w_c - w_y) . (e_w - e_v) + rest |w_c - w_y| |e_w - e_v|``; computed once for
        each word and label.
        """
        if label not in self.tables:
            whole = torch.arange(len(self.vectors))
            none = torch.full_like(self.along(label), math.nan)
            self.tables[label] = self._computed(label, whole) if self.exact else none
        table = self.tables[label]
        if not self.exact:
            new = ids.unique()
            new = new[table[new, label].isnan()]
            if len(new):
                table[new] = self._computed(label, new)
        return table[ids]

    def along(self, label: int) -> Tensor:
        """Return ``s (w_c - w_y) . e_w`` of every word and class, (words, classes), made once."""
        if label not in self.projected:
            self.projected[label] = self.vectors @ self.directions(label).mT
        return self.projected[label]

    def _computed(self, label: int, ids: Tensor) -> Tensor:
        along, widen = self.along(label), self.rest * self.sizes(label)
        if self.exact:
            return along.amax(0) - along[ids] + 2 * self.longest * widen
        squares = self.vectors.square().sum(-1)
        found = []
        for rows in ids.split(_ROWS):
            products = self.vectors[rows] @ self.vectors.mT
            # What is added is above the rounding of the difference of squares.
            apart = (squares[rows, None] + squares - 2 * products).clamp_min(0)
            apart = (apart + 1e-12 * self.longest**2).sqrt()
            gains = [
                torch.add(along[:, c], apart, alpha=float(widen[c])).amax(1) - along[rows, c]
                for c in range(len(widen))
            ]
            found.append(torch.stack(gains, 1))
        return torch.cat(found)

    def held_menu(self, logits: Tensor, ids: Tensor, label: int, menu: Menu) -> bool:
        """Return whether no entry of a menu of removed and added words makes another class win.

        The sum of the linear part is known, its divisor changes with the number of words, and what
        is left moves by its constant times the share of words that are not the same (a distance of
        two distributions of words, B14).
        """
        ahead, n = ahead_of(logits, label), len(ids)
        if not bool((ahead > 0).all()) or math.isinf(self.free_rest):
            return False
        linear = self.along(label)[ids].sum(0)
        widen = 2 * self.longest * self.free_rest * self.sizes(label)
        for (removed, added), gain in menu.items():
            left = n + added - removed
            if left < 1:
                return False
            share = max(removed, added) / max(n, left)
            moved = (linear + gain) / left - linear / n + widen * share
            if not bool((rounded_up(moved) < ahead).all()):
                return False
        return True

    def read(
        self, input_ids: Tensor, attention_mask: Tensor, *, shifted: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits of a batch, and the real tokens of each text.

        Raises:
            ShapeError: a text is longer than the bounds cover.
        """
        del shifted
        real = attention_mask.bool()
        if int(real.sum(1).max()) > self.tokens:
            raise ShapeError(
                f"words: a text of {int(real.sum(1).max())} tokens, and the bounds are for at most"
                f" {self.tokens}; ask for a larger seq_len"
            )
        logits = self.model(input_ids=input_ids, attention_mask=real.long()).logits.double()
        return logits, list(input_ids[real].split(real.sum(1).tolist()))

    def held_words(
        self, logits: Tensor, texts: Sequence[Tensor], labels: Sequence[int], most: int
    ) -> list[int]:
        """Return how many replaced words, up to ``most``, hold for each text; -1 where the answer
        is not the label."""
        return held_by_sorting(self, logits, texts, labels, 0 if self.reason else most)

    def held_edits(
        self, text: tuple[Tensor, Tensor, int], kind: EditKind, most: int, characters: Any
    ) -> int:
        """Return how many edits of a kind, up to ``most``, hold for a text (logits, ids, label)."""
        logits, ids, label = text
        if not bool((ahead_of(logits, label) > 0).all()):
            return -1

        def menu(k: int) -> Menu:
            if kind == "edits":
                return self.any_words(ids, label, [(k, k, 2 * k)])
            return characters.menu(ids, label, k)

        return most_held(lambda k: self.held_menu(logits, ids, label, menu(k)), most)

    @property
    def how(self) -> str:
        """The certificate in a few words, or the reason why there is none."""
        if self.reason:
            return f"no certificate: {self.reason}"
        if self.exact:
            return "replaced words exactly"
        return (
            f"norm sum, {self.skip:.3g} of a state is its own token, the rest has bound"
            f" {self.rest:.3g}"
        )

    @property
    def unread(self) -> str:
        """The reason why inserted, deleted and mistyped words have no certificate; empty where they have one."""
        if self.reason or math.isfinite(self.free_rest):
            return ""
        return "where the order of words is read: train with --model.position none"

    def any_words(self, ids: Tensor, label: int, most: Sequence[tuple[int, int, int]]) -> Menu:
        """Return the menu of removing the d least helpful words and adding b of the best, for every
        d <= D, b <= B, d + b <= T of one of ``most = [(D, B, T), ...]``."""
        best = self.along(label).amax(0)
        along = self.along(label)[ids].sort(0).values
        lost = torch.cat([along.new_zeros(1, along.shape[1]), along.cumsum(0)])
        return {
            (removed, added): added * best - lost[removed]
            for removals, additions, total in most
            for removed, added in itertools.product(range(removals + 1), range(additions + 1))
            if removed + added <= total and removed <= len(ids)
        }


def ahead_of(logits: Tensor, label: int) -> Tensor:
    """Return the logit of the label minus that of each class; infinity at the label itself."""
    ahead = logits[label] - logits
    ahead[label] = math.inf
    return ahead


def rounded_up(moved: Tensor) -> Tensor:
    """Return an upper bound of a sum that was computed in float64: the sum plus its rounding error."""
    return moved + ROUNDING * (1 + moved.abs())


@torch.no_grad()
def bound_words(model: Any, *, seq_len: int, required: bool = True) -> WordBounds:
    """Return what changed words can do to a classifier of texts of at most ``seq_len`` tokens.

    Certified; see `WordBounds`.

    Args:
        model: of our kind ``WellposedForSequenceClassification``, pooled by the mean; copied.
        seq_len: most tokens of a text.
        required: without, a model that has no bound is given with the reason, to be attacked.

    Raises:
        NotLipschitzError: a part has no bound in norm sum (LayerNorm, dot-product attention); all
            are named with the reason.
        ConfigError: another model, or another pooling.

    Cost: that of `certify` and of embedding the vocabulary.
    """
    exact: Any = in_dtype(model, torch.float64).eval()
    found = certify(exact, seq_len=seq_len, norm="sum")
    if required:
        found.require()
    reason = ""
    if math.isinf(found.total):
        parts = shortened(sorted({layer.module for layer in found.uncertified}))
        reason = f"no bound in norm sum of {parts}"
    elif found.head is None or found.skip is None:
        raise ConfigError(
            f"words are counted for a classifier of texts that pools by the mean; received a"
            f" {type(model).__name__} with pooling"
            f" {getattr(model.config, 'pooling', 'of its own')!r}; train with --model.pooling mean"
        )
    words = torch.arange(len(exact.get_input_embeddings().weight))[:, None]
    vectors = input_vectors(exact, words, torch.ones_like(words))[:, 0].double()
    nothing = (vectors.new_zeros(exact.config.num_labels, vectors.shape[1]), math.inf)
    weight, body = nothing if reason else found.head or nothing
    skip = math.nan if reason else found.skip or 0.0

    def rest_of(total: float) -> float:
        return math.inf if reason else max(0.0, total - skip) + 1e-12 * total

    free = math.inf
    if not reason and _is_unordered(exact):
        # As the number of tokens grows, the columns of attention grow to their limit.
        anywhere = certify(exact, seq_len=2**40, norm="sum", cross_check=False).head
        assert anywhere is not None
        free = rest_of(anywhere[1])
    return WordBounds(
        model=exact,
        vectors=vectors,
        weight=weight.double(),
        skip=skip,
        rest=rest_of(body),
        free_rest=free,
        tokens=seq_len,
        longest=float(vectors.norm(dim=-1).max()) * (1 + 1e-12),
        reason=reason,
    )


def _is_unordered(model: Any) -> bool:
    """Whether the model reads a text as the set of its words, counted."""
    body = model.model
    codes = body.embeddings.position(torch.arange(model.config.max_position_embeddings))
    return not body.is_causal and bool((codes == codes[:1]).all())


@dataclass(frozen=True)
class TextHeld:
    """One text: its answer, and how much of it can change."""

    label: int
    predicted: int
    words: int
    """Words of the text, or windows of words."""
    held: dict[EditKind, int]
    """For each kind, the largest number of edits, of those asked for, that is certified; -1 where
    the answer is not the label, or level with another class."""


def hold_texts(
    bounds: Any,
    batches: Iterable[Mapping[str, Tensor]],
    asked: Mapping[EditKind, int],
    characters: Any = None,
) -> list[TextHeld]:
    """Return how many edits of each kind hold for every text, up to those ``asked`` for.

    Args:
        bounds: of the model, `WordBounds` or `wellposed.training.certified.windows.WindowBounds`.
        batches: with ``input_ids``, ``attention_mask`` and, where the answer is judged, ``labels``.
        asked: the largest number for each kind.
        characters: what one character can do, `wellposed.training.certified.characters`; needed
            where characters are asked for.

    Raises:
        ShapeError: a text is longer than the bounds cover.

    Cost: one forward pass in float64, and a look-up and a sort for each text.
    """
    found = []
    others = [kind for kind in asked if kind != "words"]
    for batch in batches:
        with torch.no_grad():
            given = (batch["input_ids"], batch["attention_mask"])
            logits, texts = bounds.read(*given)
            predicted = logits.argmax(-1)
            labels = batch.get("labels", predicted).tolist()
            held: list[dict[EditKind, int]] = [{} for _ in texts]
            if "words" in asked:
                words = bounds.held_words(logits, texts, labels, asked["words"])
                held = [{"words": k} for k in words]
            read = bounds.read(*given, shifted=True)[1] if others and bounds.shifts else texts
        for numbers, *text in zip(held, logits, read, labels, strict=True):
            for kind in others:
                numbers[kind] = bounds.held_edits(tuple(text), kind, asked[kind], characters)
        rows = zip(labels, predicted.tolist(), map(len, texts), held, strict=True)
        found += [TextHeld(*row) for row in rows]
    return found


def held_by_sorting(
    bounds: Any, logits: Tensor, texts: Sequence[Tensor], labels: Sequence[int], most: int
) -> list[int]:
    """Return how many changed words, up to ``most``, hold for each text, where the worst are those of
    the largest ``bounds.gains``; -1 where the answer is not the label.

    Cost: a look-up and a sort for all texts at once.
    """
    of, padded = torch.tensor(labels), nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    gains = padded.new_zeros(*padded.shape[:2], logits.shape[1], dtype=logits.dtype)
    for label in of.unique().tolist() if most else []:
        gains[of == label] = bounds.gains(label, padded[of == label])
    behind = torch.arange(padded.shape[1]) >= lengths[:, None]
    gains.masked_fill_(behind[..., None], 0)
    kept = min(most, padded.shape[1])
    moved = gains.topk(kept, dim=1).values.cumsum(1) / lengths[:, None, None]
    ahead = logits.gather(1, of[:, None]) - logits
    ahead.scatter_(1, of[:, None], math.inf)
    held = (rounded_up(moved) < ahead[:, None]).all(2).long().cumprod(1).sum(1)
    # Where every word of a text may go, so may any number.
    held = held.masked_fill(held == padded.shape[1], most)
    return held.masked_fill((ahead <= 0).any(1), -1).tolist()


def most_held(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest k up to ``most`` such that ``holds`` of every number up to k."""
    return next((k - 1 for k in range(1, most + 1) if not holds(k)), most)
