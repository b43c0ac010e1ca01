"""Penalties of a run: terms of its loss beside that of the task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certification import certified_bound, certify
from wellposed.errors import ConfigError, NotLipschitzError, shortened
from wellposed.penalize import OrthogonalityPenalty
from wellposed_lab.training.config import PenaltyOptions
from wellposed_lab.training.loop.step import Penalty


class BoundPenalty:
    """``strength * log L``, with L the certified bound of a model in eval mode, in norm tok.

    Status: exact; its gradient is that of `certified_bound`. The logarithm makes the strength the
    loss that an e-fold of the bound is worth. If training has led to weights without a bound, the
    value is infinite, and the step diverges.

    Args:
        model: The model of a run.
        strength: Factor of the logarithm.

    Raises:
        ConfigError: the model has no bound on all inputs, the bound is 0, or no weight is trained;
            at a call, if none that is trained changes the bound.

    Cost: a certificate and its backward pass in float64 on the CPU at each call.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        self._model = model
        self._strength = strength
        self._tokens = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        began = perf_counter()
        self._check()
        self.seconds = perf_counter() - began
        """How long a first certificate took."""

    def __call__(self) -> Tensor:
        device = next(self._model.parameters()).device
        try:
            with self._evaluating(), torch.enable_grad():
                bound = certified_bound(self._model, seq_len=self._tokens)
        except NotLipschitzError:
            return torch.tensor(math.inf, device=device)
        return self._strength * bound.log().to(device, torch.float32)

    def remove(self) -> None:
        """Nothing is attached to the model."""

    def _check(self) -> None:
        """Refuse parts without a bound, also those that count nothing yet: a ReZero residual starts
        at 0 times its branch."""
        with self._evaluating():
            certificate = certify(self._model, seq_len=self._tokens, cross_check=False)
        reasons = [
            f"{part.path or 'the model'} ({part.module}): {part.reason}"
            for part in certificate.uncertified
        ]
        if not reasons and math.isinf(certificate.total):
            reasons = ["the product overflows"]
        if not reasons and certificate.total == 0:
            reasons = ["it is 0, as some map is constant"]
        if not any(weight.requires_grad for weight in self._model.parameters()):
            reasons.append("no weight is trained")
        if reasons:
            raise ConfigError(
                f"penalty.bound = {self._strength:g} needs a Lipschitz bound on all inputs, other than 0, to"
                f" train: {shortened(reasons)}; give --penalty.bound 0, or a variant with a bound, such as"
                " lipschitz"
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(part, part.training) for part in self._model.modules()]
        self._model.eval()  # dropout is not part of the bound
        try:
            yield
        finally:
            for part, was_training in modes:
                part.training = was_training


@dataclass
class Term:
    """A penalty, added at every ``every``-th step, that many times as strong."""

    penalty: Any
    every: int
    reads_batch: bool
    """Whether it depends on the batch, as affinities do, not on weights alone."""
    last: Tensor | None = None
    """Its latest value in a step, without the factor ``every``."""

    def of_step(self, step: int) -> Penalty | None:
        """Return what the step after ``step`` others adds, or None."""
        return None if step % self.every else self._scaled

    def _scaled(self) -> Tensor:
        value = self.penalty()
        self.last = value.detach()
        return value if self.every == 1 else value * self.every


@dataclass(frozen=True)
class Due:
    """The penalties of one step."""

    of_batch: Penalty | None
    of_weights: Penalty | None


class Penalties:
    """All penalties of a run. The loop counts optimizer steps, the penalties would count
    micro-batches."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms

    def __call__(self) -> Tensor:
        """Return the sum of all."""
        return torch.stack([term.penalty() for term in self.terms]).sum()

    def of_step(self, step: int) -> Due:
        """Return the penalties of the step after ``step`` others."""
        batch, weights = (
            [term.of_step(step) for term in self.terms if term.reads_batch == reads_batch]
            for reads_batch in (True, False)
        )
        return Due(_summed(batch), _summed(weights))

    def last_value(self) -> float:
        """Return the sum of their latest values in steps, without the factors of their periods."""
        return sum(float(term.last) for term in self.terms if term.last is not None)

    def last_step(self, steps: int) -> int:
        """Return the number of steps before the last one with a penalty."""
        return max((steps - 1) // term.every * term.every for term in self.terms)

    def notes(self) -> list[str]:
        """Return a note on the time of the certified bound, if it is one of them."""
        return [
            f"the certified bound takes {term.penalty.seconds:.2g} s, every {term.every} steps;"
            " --penalty.bound-every spaces it"
            for term in self.terms
            if isinstance(term.penalty, BoundPenalty)
        ]

    def remove(self) -> None:
        for term in self.terms:
            term.penalty.remove()


def _summed(penalties: Sequence[Penalty | None]) -> Penalty | None:
    due = [penalty for penalty in penalties if penalty is not None]
    if len(due) < 2:
        return next(iter(due), None)
    return lambda: torch.stack([penalty() for penalty in due]).sum()


def build_penalty(options: PenaltyOptions, model: nn.Module) -> Penalties | None:
    """Return the attached penalties of ``options``, or None if all strengths are zero. A role without
    a weight in the model is a `RoleNotFoundError`."""
    terms = []
    if options.active:
        terms.append(Term(_orthogonality(options, model), options.every, bool(options.affinity)))
    if options.bound:
        terms.append(Term(BoundPenalty(model, options.bound), options.bound_every, False))
    return Penalties(terms) if terms else None


def _orthogonality(options: PenaltyOptions, model: nn.Module) -> OrthogonalityPenalty:
    keywords = {**dataclasses.asdict(options), "every": 1}
    del keywords["bound"], keywords["bound_every"]
    feedforward_form = keywords.pop("feedforward_form")
    if feedforward_form != "same":
        others = dict.fromkeys(("attention", "query", "key", "value", "embedding"), options.form)
        keywords["form"] = {**others, "feedforward": feedforward_form}
    return OrthogonalityPenalty(model, **keywords)
