"""What a certificate says: the bound, layer by layer, the norm, the domain, and how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.errors import NotLipschitzError, ShapeError, listed
from wellposed.linalg import Norm

Label = Literal["exact", "certified", "empirical", "uncertified"]
_ORDER: tuple[Label, ...] = ("exact", "certified", "empirical", "uncertified")


def worst_label(labels: Sequence[Label]) -> Label:
    """Return the least trustworthy of several labels; a composition of more than one map is never exact."""
    worst: Label = "exact"
    for label in _ORDER:
        worst = label if label in labels else worst
    return "certified" if worst == "exact" and len(labels) > 1 else worst


@dataclass(frozen=True)
class CertifiedLayer:
    """One module of a certificate: ``|f(x) - f(y)| <= lipschitz |x - y|`` for input tokens within ``radius``."""

    path: str
    """Dotted module path; empty for the module itself."""
    module: str
    """Class name."""
    lipschitz: float
    """The bound; infinite where there is none."""
    form: str
    """Which proved bound was the least."""
    label: Label
    reason: str
    """Why there is no bound, or what the bound assumes."""
    radius: float
    """Largest 2-norm of a token entering this module in the domain; infinite where the bound is global."""


@dataclass(frozen=True)
class Certificate:
    """``|f(X) - f(Y)| <= total |X - Y|`` for all X, Y of the domain, with the layers it is made of.

    Status: ``label``. ``exact``: equal to the Lipschitz constant up to ``1e-4``; ``certified``: a proved upper bound,
    in exact arithmetic for the weights as stored, with the rounding of the bound's own computation included;
    ``empirical``: a rule of yours said so; ``uncertified``: some module has no bound, ``total`` is infinite, and
    `uncertified` names it. Rounding of the *forward pass* is not covered; in half precision it is not small.
    """

    total: float
    layers: tuple[CertifiedLayer, ...]
    label: Label
    norm: Norm
    tokens: int
    """The bound holds for at most this many tokens."""
    min_tokens: int
    """The bound holds for at least this many real tokens (matters for mean pooling in norm 2 only)."""
    mask: str
    domain: str
    """``"all inputs"`` or ``"tokens with |x_i| <= r"``."""
    dtype: str
    notes: tuple[str, ...] = ()
    head: tuple[Tensor, float] | None = field(default=None, repr=False, compare=False)
    """Weight of the last linear map and the bound of everything before it, where known: sharpens `radius`."""
    cross_check: str = "not run"
    """What came of trying the bounds out by a few forward passes."""

    @property
    def uncertified(self) -> tuple[CertifiedLayer, ...]:
        """The innermost modules without a bound."""
        without = [layer for layer in self.layers if layer.label == "uncertified"]
        return tuple(
            layer
            for layer in without
            if not any(other is not layer and _inside(other.path, layer.path) for other in without)
        )

    def require(self) -> Certificate:
        """Return this certificate if it has a bound.

        Raises:
            NotLipschitzError: some module has none; every one is named with its reason.
        """
        if math.isfinite(self.total):
            return self
        offenders = [
            f"{layer.path or '(the module itself)'} ({layer.module}): {layer.reason}" for layer in self.uncertified
        ]
        raise NotLipschitzError("no Lipschitz bound is known for:\n" + listed(offenders or ["the product overflows"]))

    def radius(self, logits: Tensor, labels: Tensor | None = None, *, tokens: int | None = None) -> Tensor:
        """Return r such that no input perturbation with ``|delta| < r`` (in ``norm``) changes the decision.

        Certified: ``min_k (f_y - f_k) / (|w_y - w_k| L_body)`` where the last linear map is known, and at least
        ``margin / (sqrt(2) total)``, since ``|(e_y - e_k) . df| <= sqrt(2) |df|``; ``margin / (2 total)`` for
        ``norm="inf"``. The perturbation acts on the embedded input; in ``tok`` every token may move by r at once.

        Args:
            logits: ``(..., classes)`` of the clean input, from the certified module in eval mode.
            labels: ``(...)`` true classes; a wrong prediction has radius 0. The predicted class where not given.
            tokens: number of tokens of the input, to be checked against the certified length.

        Returns:
            ``(...)`` float64 radii >= 0; zero throughout where there is no bound.

        Raises:
            ShapeError: fewer than two classes, or more ``tokens`` than certified.

        Cost: O(classes) per row, O(classes^2) once for the head. Says nothing about rounding of the forward pass.
        """
        if logits.ndim < 1 or logits.shape[-1] < 2:
            raise ShapeError(f"radius: expected logits (..., classes >= 2), received {tuple(logits.shape)}")
        if tokens is not None and tokens > self.tokens:
            raise ShapeError(
                f"radius: the certificate holds for at most {self.tokens} tokens, received {tokens}; "
                f"certify again with seq_len={tokens}"
            )
        scores = logits.detach().to(torch.float64)
        chosen = scores.argmax(-1, keepdim=True) if labels is None else labels.to(scores.device).unsqueeze(-1)
        margins = scores.gather(-1, chosen) - scores
        others = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, value=False)
        slopes = torch.full_like(scores, (2.0 if self.norm == "inf" else math.sqrt(2.0)) * self.total)
        if self.head is not None:
            slopes = torch.minimum(slopes, self._head_slopes(chosen[..., 0]))
        # A slope of zero is a constant function: any margin above zero then holds for every perturbation.
        radii = torch.where(slopes > 0, margins / slopes, torch.where(margins > 0, math.inf, 0.0))
        radii = torch.where(others, radii, math.inf).amin(-1)
        return radii.clamp_min(0).nan_to_num(nan=0.0, posinf=math.inf)

    def _head_slopes(self, chosen: Tensor) -> Tensor:
        assert self.head is not None
        weight, body = self.head
        weight = weight.detach().to(chosen.device, torch.float64)
        differences = weight[chosen].unsqueeze(-2) - weight
        size = differences.abs().sum(-1) if self.norm == "inf" else differences.square().sum(-1).sqrt()
        return size * body * (1 + 1e-9)

    def table(self) -> str:
        """Return the layers as plain text: bound, label, form (or why there is none), path, and the total last."""
        rows = [("bound", "label", "radius", "module", "form or reason")]
        rows += [
            (
                _number(layer.lipschitz),
                layer.label,
                _number(layer.radius),
                f"{layer.path or '.'} ({layer.module})",
                layer.reason if layer.label == "uncertified" else "; ".join(filter(None, (layer.form, layer.reason))),
            )
            for layer in self.layers
        ]
        rows.append((_number(self.total), self.label, "", f"total, norm {self.norm}", self._scope()))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)), row[4]]).rstrip()
            for row in rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values (infinities as the string ``"inf"``), for JSON."""
        plain: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("total", "label", "norm", "tokens", "min_tokens", "mask", "domain", "dtype", "cross_check")
        }
        plain["notes"] = list(self.notes)
        plain["layers"] = [asdict(layer) for layer in self.layers]
        return _json_safe(plain)

    def _scope(self) -> str:
        scope = f"<= {self.tokens} tokens, mask {self.mask}, {self.domain}, {self.dtype}"
        return "; ".join((scope, *self.notes))

    def __str__(self) -> str:
        return self.table()


def _inside(path: str, parent: str) -> bool:
    return parent == "" or path.startswith(f"{parent}.")


def _number(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.4g}"


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
