"""Certificates: the bound layer by layer, its norm, its domain, and its status."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, listed
from wellposed.head_kind import check_single_label
from wellposed.hooks import content_digest, module_options
from wellposed.linalg import TokenNorm
from wellposed.text_table import aligned
from wellposed.torch_modes import in_float64

Label = Literal["exact", "certified", "empirical", "uncertified"]
_ORDER: tuple[Label, ...] = ("exact", "certified", "empirical", "uncertified")
_NOT_RUN = "not run: "
SEE = "see "
"""How the reason of a module begins that lacks a bound because a part of it does."""
_SMALLEST = torch.finfo(torch.float64).tiny

# Fields that `to_dict` leaves out or writes itself.
_NOT_PLAIN = ("layers", "head", "skip", "module", "outputs")


def worst_label(labels: Sequence[Label]) -> Label:
    """Return the least trustworthy label; a composition of several maps is never exact."""
    worst = max(labels, key=_ORDER.index) if labels else _ORDER[0]
    return "certified" if worst == "exact" and len(labels) > 1 else worst


@dataclass(frozen=True)
class CertifiedLayer:
    """One row: ``|f(x) - f(y)| <= lipschitz |x - y|`` for input tokens within ``radius``."""

    path: str
    """Dotted module path; empty for the module itself."""
    module: str
    """Class name."""
    lipschitz: float
    """The bound; infinite if there is none."""
    form: str
    """Which proved bound was the smallest."""
    label: Label
    reason: str
    """Why there is no bound, or what the bound assumes."""
    radius: float
    """Largest 2-norm of a token entering this module; infinite if the bound is global."""


def leaves(layers: Sequence[CertifiedLayer]) -> Iterator[CertifiedLayer]:
    """Return the layers whose path contains no other layer."""
    return (
        layer
        for layer in layers
        if layer.path
        and not any(_inside(other.path, layer.path) for other in layers if other is not layer)
    )


@dataclass(frozen=True)
class Certificate:
    """``|f(X) - f(Y)| <= total |X - Y|`` for all X, Y of the domain, and the layers behind it.

    Status: see ``label``. An ``exact`` total is the Lipschitz constant up to ``1e-4``. A
    ``certified`` one is a proved upper bound for exact arithmetic with the weights as stored;
    rounding of its own computation is included. An ``empirical`` one rests on a claim of yours. An
    ``uncertified`` one is infinite; `uncertified` names the modules without a bound. Rounding of
    the *forward pass* is not covered; in half precision it is not small.
    """

    total: float
    layers: tuple[CertifiedLayer, ...]
    label: Label
    norm: TokenNorm
    tokens: int | None
    """Largest number of tokens covered; None if the bound does not depend on it."""
    min_tokens: int
    """Smallest number of real tokens covered; sharpens mean pooling in norms 2 and sum."""
    mask: str
    domain: str
    """``"all inputs"`` or ``"tokens with |x_i| <= r"``."""
    dtype: str
    ball: float = math.inf
    """The r of ``domain``, the largest 2-norm of an input token; infinite on all inputs."""
    notes: tuple[str, ...] = ()
    head: tuple[Tensor, float] | None = field(default=None, repr=False, compare=False)
    """Weight of the last linear map and bound of all before it, if known; sharpens `radius`."""
    skip: float | None = None
    """If pooled by the mean: states are ``skip x_i + r_i(X)``, r with the bound ``body - skip``."""
    cross_check: str = "not run"
    """Result of testing the bounds with a few forward passes."""
    reason: str = ""
    """If the total is too large to use: which parts cause it, and what to change."""

    weights: str = ""
    """SHA-256 of the certified weights and saved buffers; empty if there is no bound."""
    options: str = ""
    """SHA-256 of `wellposed.hooks.module_options`: plain attributes (``eps``), train mode if it
    matters, hooks; empty if there is no bound, and in certificates saved by 0.4."""
    form: str = ""
    """Which proved bound of the whole module was the smallest; empty in certificates before 0.5."""
    around: int = 0
    """Number of inputs of ``around=``; 0 if the domain is all inputs or a ball about 0."""
    reach: float = math.inf
    """How far a token may be from its place in ``around=``."""
    outputs: Tensor | None = field(default=None, repr=False, compare=False)
    """Outputs of the module for the inputs of ``around=``."""
    attained: Mapping[str, float] | None = field(default=None, compare=False)
    """Largest slope that was measured, by path: by the cross-check, or by `attain`."""
    module: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    """The certified module while it is alive; None in copies of the certificate."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": None}

    @property
    def uncertified(self) -> tuple[CertifiedLayer, ...]:
        """Modules without a bound: the innermost, and those with a reason of their own."""
        without = [layer for layer in self.layers if layer.label == "uncertified"]
        return tuple(
            layer
            for layer in without
            if not layer.reason.startswith(SEE)
            or not any(other is not layer and _inside(other.path, layer.path) for other in without)
        )

    def losses(self) -> list[CertifiedLayer]:
        """Return the modules with a factor above 1 that contain no other such module, largest
        first; a module without a bound counts as infinite."""
        above = [layer for layer in self.layers if layer.lipschitz > 1]
        innermost = (
            layer
            for layer in above
            if not any(other is not layer and _inside(other.path, layer.path) for other in above)
        )
        return sorted(innermost, key=lambda layer: -layer.lipschitz)

    def require_weights_of(self, module: nn.Module) -> None:
        """Refuse a module that is not the certified one: other weights, or other options such as an
        ``eps``, train mode or a hook. Cost: one SHA-256 of the weights.

        Raises:
            ConfigError: it differs, so this certificate does not cover the module.
        """
        if self.weights not in ("", weights_digest(module)):
            raise ConfigError(
                f"the certificate is of other weights (SHA-256 {self.weights[:12]}...) than those of"
                f" this {type(module).__name__}; certify it again, or load the certified weights"
            )
        if self.options not in ("", options_digest(module)):
            raise ConfigError(
                f"the certificate is of other options than those of this {type(module).__name__}: an"
                " attribute (such as eps), train or eval mode, or a hook differs; certify it again"
            )

    def _say_if_changed(self) -> None:
        module = None if self.module is None else self.module()
        if module is None:
            return

        changed = ""
        if self.weights not in ("", weights_digest(module)):
            changed = "weights"
        elif self.options not in ("", options_digest(module)):
            changed = "options (an attribute such as eps, train or eval mode, or a hook)"

        if changed:
            warnings.warn(
                f"radius: the {changed} of this {type(module).__name__} have changed since it was"
                " certified. A certificate is a snapshot: use logits of the certified module, or"
                " certify the module again",
                stacklevel=3,
            )

    def require(self) -> Certificate:
        """Return this certificate if it has a bound.

        Raises:
            NotLipschitzError: some module has none; all are named with their reasons.
        """
        if math.isfinite(self.total):
            return self
        offenders = [
            f"{layer.path or '(the module itself)'} ({layer.module}): {layer.reason}"
            for layer in self.uncertified
        ]
        raise NotLipschitzError(
            "no Lipschitz bound is known for:\n" + listed(offenders or ["the product overflows"])
        )

    def radius(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        *,
        tokens: int | Tensor | None = None,
        largest_token: float | Tensor | None = None,
        width: int | None = None,
    ) -> Tensor:
        """Return r such that no ``|delta| < r`` (in ``norm``) changes the largest logit.

        Status: certified (theory note B9); rounding of the forward pass is not covered. r is
        ``min_k (f_y - f_k) / (|w_y - w_k| L_body)`` if the last linear map is known, at least
        ``margin / (sqrt(2) total)``, and for ``norm="inf"`` at least ``margin / (2 total)``. On a
        ball it is at most ``ball - max_i |x_i|``, for ``norm="inf"`` divided by ``sqrt(width)``. Of
        a certificate around inputs the logits must be theirs, and r is at most its radius;
        `wellposed.certification.local_radius` looks for the best one.
        The perturbation acts on the embedded input; in ``tok`` every token may move by r at once.
        When not to use: with a head of several labels or of a regression, whose outputs move by
        at most ``total |delta|`` each.

        Args:
            logits: ``(..., classes)`` of the clean input, from the certified module in eval mode.
            labels: ``(...)`` true classes; wrong predictions have radius 0. Default: predicted.
            tokens: Number of real tokens, one or ``(...)``; needed if ``min_tokens > 1``.
            largest_token: ``max_i |x_i|`` of real tokens, one or ``(...)``; needed on a ball
                (an input outside it has radius 0).
            width: Entries of an input token; needed for ``norm="inf"`` on a ball.

        Returns:
            ``(...)`` float64 radii >= 0; all zero if there is no bound, 0 if logits are not finite.

        Raises:
            ShapeError: fewer than two classes; a number of tokens that is not covered, or unknown
                though ``min_tokens > 1``; labels out of range; not one value per input.
            ConfigError: ``problem_type`` is not a single label; logits of other inputs than
                ``around=``; ``largest_token >= 0`` missing on a
                ball, or ``width >= 1`` for ``norm="inf"``.

        A `UserWarning` tells that the module's weights or options have changed: r is right for the
        certified ones.
        Cost: O(classes) per row, O(classes^2) once for the head, a SHA-256 of the module's weights.
        """
        module = None if self.module is None else self.module()
        check_single_label(module, "radius: the margin of the largest logit")
        if logits.ndim < 1 or logits.shape[-1] < 2:
            raise ShapeError(
                f"radius: expected logits (..., classes >= 2), received {tuple(logits.shape)}"
            )

        self._say_if_changed()
        inputs = logits.shape[:-1]
        if labels is not None and labels.shape != inputs:
            raise ShapeError(
                f"radius: expected labels {tuple(inputs)}, received {tuple(labels.shape)}"
            )

        classes = range(logits.shape[-1])
        asked = () if labels is None else labels.unique().tolist()
        wrong = [label for label in asked if label not in classes]
        if wrong:
            raise ShapeError(f"radius: labels must be in [0, {len(classes)}), received {wrong[:5]}")

        self._check_lengths(tokens, inputs)
        room = self._room(largest_token, width, inputs).to(logits.device)
        scores = logits.detach().to(torch.float64)
        self._check_centres(logits)
        room = room.clamp_max(self.reach)
        if self.label == "uncertified" or not 0 <= self.total < math.inf:
            return torch.zeros_like(room)

        answers = scores.argmax(-1) if labels is None else labels.to(scores.device)
        chosen = answers.unsqueeze(-1)
        margins = scores.gather(-1, chosen) - scores
        others = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, value=False)
        factor = 2.0 if self.norm == "inf" else math.sqrt(2.0)
        slopes = torch.full_like(scores, factor * self.total)
        if self.head is not None:
            slopes = torch.minimum(slopes, self._head_slopes(chosen[..., 0]))

        # A slope of zero is a constant function, so a margin above zero gives an infinite radius.
        radii = torch.where(others, margins / slopes, math.inf).amin(-1)
        radii = torch.where(scores.isfinite().all(-1), torch.minimum(radii, room), 0.0)
        return radii.clamp_min(0).nan_to_num(nan=0.0, posinf=math.inf)

    def _check_centres(self, logits: Tensor) -> None:
        """Refuse logits of other inputs than those that the certificate is around."""
        if self.outputs is None or not self.around:
            return
        unit = math.sqrt(torch.finfo(logits.dtype).eps) if logits.is_floating_point() else 0.0
        clean = self.outputs.to(logits.device)
        fits = clean.numel() == logits.numel()
        off = (clean.reshape(logits.shape) - logits.detach().double()).abs() if fits else clean
        if not fits or not bool((off <= unit * (1 + clean.abs().max())).all()):
            raise ConfigError(
                f"radius: the certificate covers {self.domain}, and these logits {tuple(logits.shape)}"
                " are not those of the inputs that were passed as around; certify around these inputs"
            )

    def _check_lengths(self, tokens: int | Tensor | None, inputs: torch.Size) -> None:
        if tokens is None:
            if self.min_tokens > 1:
                raise ShapeError(
                    f"radius: the certificate covers inputs of at least {self.min_tokens} real tokens,"
                    " and their lengths were not given; give tokens= (real tokens of each input),"
                    " or certify with min_tokens=1"
                )
            return

        lengths = _per_input("tokens", tokens, inputs)
        problems = []
        # NaN must count as too long, hence the negation.
        most = math.inf if self.tokens is None else self.tokens
        if (long := ~(lengths <= most)).any():
            worst = f"{float(lengths[long].max()):g}"
            problems.append(
                f"the certificate covers at most {self.tokens} tokens, received {worst}"
                f" ({int(long.sum())} of {lengths.numel()} inputs are longer); certify again with"
                f" seq_len={worst}"
            )

        if (short := lengths < self.min_tokens).any():
            shortest = float(lengths[short].min())
            advice = (
                f"certify again with min_tokens={shortest:g}"
                if shortest >= 1
                else "leave out inputs without tokens"
            )
            problems.append(
                f"the certificate covers at least {self.min_tokens} real tokens, received"
                f" {shortest:g} ({int(short.sum())} of {lengths.numel()} inputs are shorter); {advice}"
            )
        if problems:
            raise ShapeError("radius: " + "\n".join(problems))

    def _room(
        self, largest_token: float | Tensor | None, width: int | None, inputs: torch.Size
    ) -> Tensor:
        """Return how far each input may move (in ``norm``) with all its tokens inside the ball."""
        if self.ball == math.inf:
            return torch.full(inputs, math.inf, dtype=torch.float64)
        problems = []
        if largest_token is None:
            problems.append("give largest_token=, the largest 2-norm of a token of each input")
        elif bool((in_float64(largest_token) < 0).any()):
            problems.append("largest_token is a 2-norm, so it must be >= 0")

        if self.norm == "inf" and (width is None or width < 1):
            problems.append(
                f"give width= >= 1, the entries of a token (norm inf); received {width}"
            )

        if problems or largest_token is None:
            raise ConfigError(
                f"radius: the certificate covers {self.domain} only, so the radius depends on the"
                " input:\n" + listed(problems)
            )

        spread = math.sqrt(width) if self.norm == "inf" and width is not None else 1.0
        largest = _per_input("largest_token", largest_token, inputs)
        return ((self.ball - largest) / spread).clamp_min(0)

    def _head_slopes(self, chosen: Tensor) -> Tensor:
        """Return an upper bound of ``|w_y - w_k| L_body``; what is not zero never rounds to zero."""
        assert self.head is not None
        weight, body = self.head
        weight = weight.detach().to(chosen.device, torch.float64)
        differences = weight[chosen].unsqueeze(-2) - weight
        largest = differences.abs().amax(-1)
        # Scaled, since squares of small differences would underflow.
        scaled = differences / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
        order = 1 if self.norm == "inf" else 2
        size = largest * torch.linalg.vector_norm(scaled, order, dim=-1)
        size = torch.where(largest > 0, size.clamp_min(_SMALLEST), size)
        slopes = size * body * (1 + 1e-9)
        return torch.where((size > 0) & (body > 0), slopes.clamp_min(_SMALLEST), slopes)

    def table(self, *, attained: bool = False) -> str:
        """Return the layers, the total and `reason` as plain text.

        Args:
            attained: Also print the largest slope that was measured in each layer, and how many
                times larger its bound is. The cross-check measures few slopes; `attain` climbs.
        """
        rows = [("bound", "label", "radius", "module", "form or reason")]
        for layer in self.layers:
            form = "" if layer.label == "uncertified" else layer.form
            detail = "; ".join(filter(None, (form, layer.reason)))
            name = f"{layer.path or '.'} ({layer.module})"
            rows.append(
                (_number(layer.lipschitz), layer.label, _number(layer.radius), name, detail)
            )

        total = f"total, norm {self.norm}"
        rows.append((_number(self.total), self.label, "", total, self._scope()))
        if attained:
            slopes = self.attained or {}
            paths = [*(layer.path for layer in self.layers), ""]
            bounds = [*(layer.lipschitz for layer in self.layers), self.total]
            looseness = [
                _looseness(slopes.get(path), bound)
                for path, bound in zip(paths, bounds, strict=True)
            ]
            columns = [("attained", "loose"), *looseness]
            rows = [
                (row[0], *measured, *row[1:]) for row, measured in zip(rows, columns, strict=True)
            ]

        not_run = self.cross_check.startswith(_NOT_RUN) and math.isfinite(self.total)
        tried = "not tested: " + self.cross_check.removeprefix(_NOT_RUN) if not_run else ""
        return "\n".join(filter(None, (aligned(rows, "l"), tried, self.reason)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinities are the string ``"inf"``."""
        plain = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        plain["layers"] = [asdict(layer) for layer in self.layers]
        return json.loads(json.dumps(plain), parse_constant=lambda word: str(float(word)))

    def _span(self) -> str:
        if self.tokens is None:
            return (
                "any number of tokens" if self.min_tokens == 1 else f">= {self.min_tokens} tokens"
            )
        smallest = "<=" if self.min_tokens == 1 else f"{self.min_tokens} to"
        return f"{smallest} {self.tokens} tokens"

    def _scope(self) -> str:
        scope = f"{self._span()}, mask {self.mask}, {self.domain}, {self.dtype}"
        # Certificates that were saved before 0.5 have no form.
        form = getattr(self, "form", "")
        chained = (form,) if "multipliers" in form else ()
        return "; ".join((*chained, scope, *self.notes))

    def __str__(self) -> str:
        return self.table()


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_sparse):
            plain = tensor.detach().cpu().contiguous()
            # By address: torch needs numpy to return bytes.
            digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return digest.hexdigest()


def options_digest(module: nn.Module) -> str:
    """Return the SHA-256 of what decides a module's output beside its state."""
    lines = "\n".join(module_options(module, content_digest))
    return hashlib.sha256(lines.encode()).hexdigest()


def _per_input(name: str, value: float | Tensor, inputs: torch.Size) -> Tensor:
    """Return one float64 number per input; shapes are never broadcast from input to input."""
    values = in_float64(value)
    if values.ndim and values.shape != inputs:
        raise ShapeError(
            f"radius: expected {name} as one number or {tuple(inputs)}, one per input; received"
            f" {tuple(values.shape)}"
        )
    return values.expand(inputs)


def _inside(path: str, parent: str) -> bool:
    return parent == "" or path.startswith(f"{parent}.")


def _looseness(slope: float | None, bound: float) -> tuple[str, str]:
    """Return a slope and how many times larger its bound is, as text."""
    if slope is None:
        return "", ""
    return _number(slope), "" if slope == 0 else f"{bound / slope:.3g}"


def _number(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.4g}"
