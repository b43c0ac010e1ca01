"""Terms of the loss of a run that depend on its weights alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certification import certified_bound, certify
from wellposed.errors import ConfigError, shortened
from wellposed.penalize import OrthogonalityPenalty
from wellposed_lab.training.config import PenaltyOptions


class BoundPenalty:
    """``strength * log L``, with L the certified bound of a model in eval mode, in norm tok.

    Status: exact; its gradient is that of `certified_bound`. The logarithm makes the strength the
    loss that an e-fold of the bound is worth. A model without a bound is refused here, before
    training.

    Args:
        model: The model of a run.
        strength: Factor of the logarithm.

    Raises:
        ConfigError: the model has no bound on all inputs, or no weight that changes it.

    Cost: a certificate and its backward pass in float64 on the CPU at each call.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        self._model = model
        self._strength = strength
        self._tokens = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self._check_parts()
        began = perf_counter()
        try:
            self()
        except ConfigError as error:
            raise ConfigError(f"penalty.bound = {strength:g}: {error}") from error
        self.seconds = perf_counter() - began
        """How long the first bound took."""

    def __call__(self) -> Tensor:
        with self._evaluating(), torch.enable_grad():
            bound = certified_bound(self._model, seq_len=self._tokens)
        device = next(self._model.parameters()).device
        return self._strength * bound.log().to(device, torch.float32)

    def remove(self) -> None:
        """Nothing is attached to the model."""

    def _check_parts(self) -> None:
        """Refuse parts without a bound, also those that count nothing yet: a ReZero residual starts
        at 0 times its branch."""
        with self._evaluating():
            certificate = certify(self._model, seq_len=self._tokens, cross_check=False)
        names = [f"{part.path or 'the model'} ({part.module})" for part in certificate.uncertified]
        if names or math.isinf(certificate.total):
            raise ConfigError(
                f"penalty.bound = {self._strength:g}: no Lipschitz bound on all inputs is known for"
                f" {shortened(names or ['the product, which overflows'])}; leave the option out, or give a"
                " variant with a bound, such as lipschitz"
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()  # dropout is not part of the bound
        try:
            yield
        finally:
            self._model.train(was_training)


class SummedPenalties:
    """The sum of penalties."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __call__(self) -> Tensor:
        return torch.stack([part() for part in self.parts]).sum()

    def remove(self) -> None:
        for part in self.parts:
            part.remove()


def build_penalty(options: PenaltyOptions, model: nn.Module) -> Any | None:
    """Return the attached penalties of ``options`` as one, or None if all strengths are zero.

    The loop handles ``every``: it counts optimizer steps, a penalty would count micro-batches. A
    role without a weight in the model is a `RoleNotFoundError`.
    """
    penalties: list[Any] = []
    if options.bound:
        penalties.append(BoundPenalty(model, options.bound))
    if options.active:
        penalties.append(_orthogonality(options, model))
    return SummedPenalties(penalties) if len(penalties) > 1 else next(iter(penalties), None)


def notes_on_cost(penalty: Any, every: int) -> list[str]:
    """Return a note on the time of the certified bound, if it is part of a run's penalty."""
    parts = penalty.parts if isinstance(penalty, SummedPenalties) else [penalty]
    return [
        f"the certified bound takes {part.seconds:.2g} s every {every} steps; penalty.every spaces it"
        for part in parts
        if isinstance(part, BoundPenalty)
    ]


def _orthogonality(options: PenaltyOptions, model: nn.Module) -> OrthogonalityPenalty:
    keywords = {**dataclasses.asdict(options), "every": 1}
    del keywords["bound"]
    feedforward_form = keywords.pop("feedforward_form")
    if feedforward_form != "same":
        others = dict.fromkeys(("attention", "query", "key", "value", "embedding"), options.form)
        keywords["form"] = {**others, "feedforward": feedforward_form}
    return OrthogonalityPenalty(model, **keywords)
