"""How many words of a text can change for a classifier that reads words between white space, its
logits linear up to a Lipschitz part (theory note B14)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wellposed.attack import in_dtype
from wellposed.certification import certify
from wellposed.errors import ConfigError, ShapeError, shortened
from wellposed.models import input_vectors
from wellposed.words._attack import Propose, WordSwaps, logits_of

ROUNDING = 1e-9
"""Relative to what is compared, and absolute: far above what float64 rounds here."""
_ROWS = 256

Shape: TypeAlias = tuple[int, int]
"""How many words an edit removes, and how many it adds."""
Menu: TypeAlias = Mapping[Shape, Tensor]
"""The largest gain of the linear part for each class, (classes,), by words removed and added."""


def ahead_of(logits: Tensor, label: int) -> Tensor:
    """Return the logit of the label minus that of each class; infinity at the label itself."""
    ahead = logits[label] - logits
    ahead[label] = math.inf
    return ahead


def rounded_up(moved: Tensor) -> Tensor:
    """Return an upper bound of a sum that was computed in float64: the sum plus its rounding error."""
    return moved + ROUNDING * (1 + moved.abs())


def most_held(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest k up to ``most`` such that ``holds`` of every number up to k."""
    return next((k - 1 for k in range(1, most + 1) if not holds(k)), most)


class WordReader:
    r"""What changed words do to the logits of ``W mean_i(s x_i + r_i(X)) + b``.

    Certified (B14), for exact arithmetic with the weights as stored: k words of n, replaced by any
    words of the vocabulary, raise ``z_c - z_y`` by at most the sum of their k largest gains, divided
    by n. Exact if r is constant: for a model without blocks.

    Args:
        model: of our kind ``WellposedForSequenceClassification``, pooled by the mean; copied.
        tokenizer: of words between white space.
        limit: most tokens of a text. One that is as long may have been cut, and its cut moves; one
            that edits can make longer is cut then.
        required: if False, a model without a bound is accepted with the `reason`, to be attacked.

    Raises:
        NotLipschitzError: a part has no bound in norm sum (LayerNorm, dot-product attention); all
            are named with the reason.
        ConfigError: another model or pooling; a tokenizer that cuts text in another way, so that
            what one word can change is not known, or that adds tokens which are no words.

    Cost: that of `certify` and of embedding the vocabulary.
    """

    shifts = False
    """Whether other edits than replaced words read a text once more."""
    tokens = words = 1
    """Tokens of a word, and words of what a replaced word can move."""

    @torch.no_grad()
    def __init__(self, model: Any, tokenizer: Any, limit: int, *, required: bool) -> None:
        _check_tokenizer(tokenizer)
        self.model: Any = in_dtype(model, torch.float64).eval()
        self.tokenizer, self.limit = tokenizer, limit
        bound = certify(self.model, seq_len=limit, norm="sum")
        if required:
            bound.require()
        self.reason = ""
        """Why nothing is certified; empty if something is."""
        self.skip, self.rest, self.free_rest = math.nan, math.inf, math.inf
        """s; the constant of r in norm sum for at most `limit` tokens, and for any number of them,
        infinite if the order of words is read: an inserted word then moves all that follow."""
        words = torch.arange(len(self.model.get_input_embeddings().weight))[:, None]
        words = words.to(next(self.model.parameters()).device)
        vectors = input_vectors(self.model, words, torch.ones_like(words))[:, 0]
        self.vectors = vectors.double().cpu()
        self.longest = float(self.vectors.norm(dim=-1).max()) * (1 + 1e-12)
        self.weight = self.vectors.new_zeros(self.model.config.num_labels, vectors.shape[1])
        if math.isinf(bound.total):
            parts = shortened(sorted({layer.module for layer in bound.uncertified}))
            self.reason = f"no bound in norm sum of {parts}"
        elif bound.head is None or bound.skip is None:
            raise ConfigError(
                f"words are counted for a classifier of texts that pools by the mean; received a"
                f" {type(model).__name__} with pooling"
                f" {getattr(model.config, 'pooling', 'of its own')!r}; train with --model.pooling"
                " mean"
            )
        else:
            weight, body = bound.head
            self.weight, self.skip = weight.double().cpu(), bound.skip
            self.rest = self._beyond(body)
            if _is_unordered(self.model):
                # As the number of tokens grows, the columns of attention grow to their limit.
                free = certify(self.model, seq_len=2**40, norm="sum", cross_check=False).head
                assert free is not None
                self.free_rest = self._beyond(free[1])
        self.exact = self.rest <= ROUNDING
        """Whether k replaced words can do all that is allowed for."""
        self._along: dict[int, Tensor] = {}
        self._tables: dict[int, Tensor] = {}

    def _beyond(self, total: float) -> float:
        return max(0.0, total - self.skip) + 1e-12 * total

    @property
    def how(self) -> str:
        """The certificate in a few words, or the reason why there is none."""
        if self.reason:
            return f"no certificate: {self.reason}"
        if self.exact:
            return "replaced words exactly"
        shares = f"{self.skip:.3g} of a state is its own token, the rest has bound {self.rest:.3g}"
        return f"norm sum, {shares}"

    @property
    def unread(self) -> str:
        """The reason why inserted and deleted words have no certificate; empty if they have one."""
        if self.reason or math.isfinite(self.free_rest):
            return ""
        return "where the order of words is read: train with --model.position none"

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text."""
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)

    def names(self, ids: Tensor) -> list[str]:
        """Return words as text; a row of the table without a word by its number."""
        words = zip(self.tokenizer.convert_ids_to_tokens(ids.tolist()), ids.tolist(), strict=True)
        return [f"row {number}" if word is None else word for word, number in words]

    def read(
        self, input_ids: Tensor, attention_mask: Tensor, *, shifted: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits of a batch, and the real tokens of each text.

        Raises:
            ShapeError: a text is longer than the bounds cover.
        """
        del shifted
        real = attention_mask.bool()
        if int(real.sum(1).max()) > self.limit:
            raise ShapeError(
                f"words: a text of {int(real.sum(1).max())} tokens, and the bounds are for at most"
                f" {self.limit}; ask for a larger max_length"
            )
        logits = logits_of(self.model, input_ids=input_ids, attention_mask=real.long()).double()
        return logits, list(input_ids[real].split(real.sum(1).tolist()))

    def along(self, label: int) -> Tensor:
        """Return ``s (w_c - w_y) . e_w`` of every word and class, (words, classes), made once."""
        if label not in self._along:
            self._along[label] = self.vectors @ (self.skip * self._apart(label)).mT
        return self._along[label]

    def _apart(self, label: int) -> Tensor:
        return self.weight - self.weight[label]

    def gains(self, label: int, ids: Tensor) -> Tensor:
        """Return the most that replacing each of these words adds to ``n (z_c - z_y)``, (words,
        classes).

        ``max_w s (w_c - w_y) . (e_w - e_v) + rest |w_c - w_y| |e_w - e_v|``; computed once for
        each word and label.
        """
        along, widen = self.along(label), self.rest * self._apart(label).norm(dim=-1)
        if self.exact:
            return along.amax(0) - along[ids] + 2 * self.longest * widen
        table = self._tables.setdefault(label, torch.full_like(along, math.nan))
        new, squares = ids.unique(), self.vectors.square().sum(-1)
        for rows in new[table[new, label].isnan()].split(_ROWS):
            products = self.vectors[rows] @ self.vectors.mT
            # What is added is above the rounding of the difference of squares.
            apart = (squares[rows, None] + squares - 2 * products).clamp_min(0)
            apart = (apart + 1e-12 * self.longest**2).sqrt()
            reached = [torch.add(along[:, c], apart, alpha=float(r)) for c, r in enumerate(widen)]
            table[rows] = torch.stack([each.amax(1) for each in reached], 1) - along[rows]
        return table[ids]

    def held_edits(self, logits: Tensor, ids: Tensor, label: int, most: int) -> int:
        """Return how many edits, up to ``most``, hold for a text; -1 if the answer is not
        the label."""
        ahead = ahead_of(logits, label)
        if not bool((ahead > 0).all()):
            return -1
        if math.isinf(self.free_rest):
            return 0

        def holds(k: int) -> bool:
            return self._menu_holds(ahead, ids, label, self._any_words(ids, label, k))

        return most_held(holds, most)

    def _menu_holds(self, ahead: Tensor, ids: Tensor, label: int, menu: Menu) -> bool:
        """Return whether no entry of a menu of removed and added words makes another class win.

        The sum of the linear part is known, its divisor changes with the number of words, and what
        is left moves by its constant times the share of words that are not the same (a distance of
        two distributions of words, B14).
        """
        n, linear = len(ids), self.along(label)[ids].sum(0)
        widen = 2 * self.longest * self.free_rest * self._apart(label).norm(dim=-1)
        for (removed, added), gain in menu.items():
            left = n + added - removed
            if left < 1:
                return False
            share = max(removed, added) / max(n, left)
            moved = (linear + gain) / left - linear / n + widen * share
            if not bool((rounded_up(moved) < ahead).all()):
                return False
        return True

    def _any_words(self, ids: Tensor, label: int, most: int) -> Menu:
        """Return the menu of removing the d least helpful words and adding b of the best, for every
        d and b up to ``most``."""
        best = self.along(label).amax(0)
        along = self.along(label)[ids].sort(0).values
        lost = torch.cat([along.new_zeros(1, along.shape[1]), along.cumsum(0)])
        return {
            (removed, added): added * best - lost[removed]
            for removed, added in itertools.product(range(most + 1), repeat=2)
            if removed <= len(ids)
        }

    def propose(self, kind: str, ids: Tensor, label: int) -> Propose:
        """Return what an attack tries on a text: one more edit of this kind."""
        limit = self.limit if kind == "edits" else None
        return WordSwaps(self.model, self.vectors, ids, label, edits_within=limit)


def _is_unordered(model: Any) -> bool:
    """Whether the model reads a text as the set of its words, counted."""
    body = model.model
    places = torch.arange(model.config.max_position_embeddings)
    codes = body.embeddings.position(places.to(next(model.parameters()).device))
    return not body.is_causal and bool((codes == codes[:1]).all())


def _check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not read words between white space, and these alone."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    form = {} if inner is None else json.loads(inner.to_str())
    kinds = [(form.get(part) or {}).get("type") for part in ("model", "pre_tokenizer")]
    around = tokenizer.num_special_tokens_to_add()
    added, cut = form.get("added_tokens", ()), tokenizer.split_special_tokens
    inside = [token["content"] for token in added if not (cut and token["special"])]
    by_words = kinds == ["WordLevel", "WhitespaceSplit"] and form["normalizer"] is None
    if not by_words or around or inside:
        raise ConfigError(
            "words are counted for words between white space, and this tokenizer"
            f" is {kinds[0] or type(tokenizer).__name__} with {kinds[1] or 'no'} pre-tokenizer"
            f" and {around} special tokens around a text, and finds"
            f" {shortened(inside) or 'none'} inside words. Train with --tokenizer word, or keep"
            " the model and let it read windows of words: --certified-windows 1, or"
            " wellposed.words.read_in_windows in Python"
        )
