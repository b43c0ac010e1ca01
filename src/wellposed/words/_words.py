"""Certified replaced words if logits are linear up to a Lipschitz part (theory note B14)."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from wellposed.attack import in_dtype
from wellposed.certification import certify
from wellposed.errors import ConfigError, ShapeError, shortened
from wellposed.models import input_vectors
from wellposed.words._attack import Propose, WordSwaps, logits_of

ROUNDING = 1e-9
"""Relative to what is compared, and absolute: far above float64 rounding here."""
_ROWS = 256


def ahead_of(logits: Tensor, label: int) -> Tensor:
    """Return the logit of the label minus that of each class; infinity at the label."""
    ahead = logits[label] - logits
    ahead[label] = math.inf
    return ahead


def rounded_up(moved: Tensor) -> Tensor:
    """Return an upper bound of a sum computed in float64: add its rounding error."""
    return moved + ROUNDING * (1 + moved.abs())


class WordReader:
    """Bounds what replaced words do to the logits of ``W mean_i(s x_i + r_i(X)) + b``.

    Status: certified for exact arithmetic with the weights as stored (theory note B14). Exact if r
    is constant (no blocks). `NotLipschitzError` names parts without a bound in norm sum. An
    unsupported model, pooling or tokenizer raises `ConfigError`.
    """

    tokens = words = 1
    """Tokens of a word, and words that a replacement can change."""

    @torch.no_grad()
    def __init__(self, model: Any, tokenizer: Any, limit: int, *, required: bool) -> None:
        _check_tokenizer(tokenizer)
        self.model: Any = in_dtype(model, torch.float64).eval()
        self.tokenizer = tokenizer
        self.limit = limit
        bound = certify(self.model, seq_len=limit, norm="sum")
        if required:
            bound.require()

        self.reason = ""
        """Why nothing is certified; empty if something is."""
        self.skip = math.nan
        self.rest = math.inf
        """s, and the bound of r in norm sum for at most `limit` tokens."""
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
                f"words are counted for a classifier of texts pooled by the mean; received a"
                f" {type(model).__name__} with pooling"
                f" {getattr(model.config, 'pooling', 'of its own')!r}; train with --model.pooling"
                " mean"
            )
        else:
            weight, body = bound.head
            self.weight = weight.double().cpu()
            self.skip = bound.skip
            self.rest = max(0.0, body - self.skip) + 1e-12 * body

        self.exact = self.rest <= ROUNDING
        """Whether the bound is attained by k replaced words."""
        self._along: dict[int, Tensor] = {}
        self._tables: dict[int, Tensor] = {}

    @property
    def method(self) -> str:
        """The certificate in a few words, or why there is none."""
        if self.reason:
            return f"no certificate: {self.reason}"
        if self.exact:
            return "replaced words exactly"
        shares = f"{self.skip:.3g} of a state is its own token, the rest has bound {self.rest:.3g}"
        return f"norm sum, {shares}"

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text."""
        return torch.tensor(self.tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)

    def decode(self, ids: Tensor) -> str:
        """Return the words of a text, without padding."""
        return " ".join(self.names(ids[ids != self.tokenizer.pad_token_id]))

    def names(self, ids: Tensor) -> list[str]:
        """Return words as text, or as the number of their row."""
        words = zip(self.tokenizer.convert_ids_to_tokens(ids.tolist()), ids.tolist(), strict=True)
        return [f"row {number}" if word is None else word for word, number in words]

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the logits and unpadded tokens of texts within `limit` tokens (else
        `ShapeError`)."""
        real = attention_mask.bool()
        if int(real.sum(1).max()) > self.limit:
            raise ShapeError(
                f"words: a text has {int(real.sum(1).max())} tokens, and the bounds cover at most"
                f" {self.limit}; set a larger max_length"
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
        """Return the most that replacing each of these words adds to ``n (z_c - z_y)`` (B14)."""
        along = self.along(label)
        widen = self.rest * self._apart(label).norm(dim=-1)
        if self.exact:
            return along.amax(0) - along[ids] + 2 * self.longest * widen

        table = self._tables.setdefault(label, torch.full_like(along, math.nan))
        new = ids.unique()
        squares = self.vectors.square().sum(-1)
        for rows in new[table[new, label].isnan()].split(_ROWS):
            products = self.vectors[rows] @ self.vectors.mT
            # The added term exceeds the rounding of the difference of squares.
            apart = (squares[rows, None] + squares - 2 * products).clamp_min(0)
            apart = (apart + 1e-12 * self.longest**2).sqrt()
            reached = [torch.add(along[:, c], apart, alpha=float(r)) for c, r in enumerate(widen)]
            table[rows] = torch.stack([column.amax(1) for column in reached], 1) - along[rows]

        return table[ids]

    def propose(self, ids: Tensor, label: int) -> Propose:
        """Return the edits of an attack on a text: one more replaced word."""
        return WordSwaps(self.model, self.vectors, ids, label)


def _check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not read words between white space, and nothing else."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    form = {} if inner is None else json.loads(inner.to_str())
    kinds = [(form.get(part) or {}).get("type") for part in ("model", "pre_tokenizer")]
    around = tokenizer.num_special_tokens_to_add()
    added = form.get("added_tokens", ())
    cut = tokenizer.split_special_tokens
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
