"""What a certificate says: the bound, layer by layer, the norm, the domain, and how far it can be
trusted."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, listed
from wellposed.head_kind import check_single_label
from wellposed.linalg import TokenNorm
from wellposed.text_table import aligned

Label = Literal["exact", "certified", "empirical", "uncertified"]
_ORDER: tuple[Label, ...] = ("exact", "certified", "empirical", "uncertified")
_NOT_RUN = "not run: "
_SMALLEST = torch.finfo(torch.float64).tiny

# Fields that are no plain values, or are written in their own way.
_NOT_PLAIN = ("layers", "head", "skip", "module")


def worst_label(labels: Sequence[Label]) -> Label:
    """Return the least trustworthy of several labels; a composition of more than one map is never
    exact."""
    worst = max(labels, key=_ORDER.index) if labels else _ORDER[0]
    return "certified" if worst == "exact" and len(labels) > 1 else worst


@dataclass(frozen=True)
class CertifiedLayer:
    """One module of a certificate: ``|f(x) - f(y)| <= lipschitz |x - y|`` for input tokens within
    ``radius``."""

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
    """Largest 2-norm of a token entering this module in the domain; infinite where the bound is
    global."""


def leaves(layers: Sequence[CertifiedLayer]) -> Iterator[CertifiedLayer]:
    """Return the layers with a path that no other layer lies inside."""
    return (
        layer
        for layer in layers
        if layer.path
        and not any(_inside(other.path, layer.path) for other in layers if other is not layer)
    )


@dataclass(frozen=True)
class Certificate:
    """``|f(X) - f(Y)| <= total |X - Y|`` for all X, Y of the domain, with the layers it is made of.

    Status: ``label``. ``exact``: equal to the Lipschitz constant up to ``1e-4``; ``certified``: a
    proved upper bound, in exact arithmetic for the weights as stored, with the rounding of the
    bound's own computation included; ``empirical``: a rule of yours said so; ``uncertified``: some
    module has no bound, ``total`` is infinite, and `uncertified` names it. Rounding of the *forward
    pass* is not covered; in half precision it is not small.
    """

    total: float
    layers: tuple[CertifiedLayer, ...]
    label: Label
    norm: TokenNorm
    tokens: int
    """The bound holds for at most this many tokens."""
    min_tokens: int
    """The bound holds for at least this many real tokens (sharpens mean pooling in norm 2 only)."""
    mask: str
    domain: str
    """``"all inputs"`` or ``"tokens with |x_i| <= r"``."""
    dtype: str
    ball: float = math.inf
    """The r of ``domain``: no input token may have a larger 2-norm; infinite on all inputs."""
    notes: tuple[str, ...] = ()
    head: tuple[Tensor, float] | None = field(default=None, repr=False, compare=False)
    """Weight of the last linear map and the bound of everything before it, where known: sharpens
    `radius`."""
    skip: float | None = None
    """Of a classifier that pools by the mean: its states are ``skip x_i + r_i(X)``, where r has the
    bound of the body minus skip."""
    cross_check: str = "not run"
    """What came of trying the bounds out by a few forward passes."""
    reason: str = ""
    """Where the total is of no use: which parts make it so, and what to change."""

    weights: str = ""
    """SHA-256 of the weights and buffers that were certified; empty where there is no bound."""
    module: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    """The module that was certified, while it lives; copies of the certificate have none."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": None}

    @property
    def uncertified(self) -> tuple[CertifiedLayer, ...]:
        """The innermost modules without a bound."""
        without = [layer for layer in self.layers if layer.label == "uncertified"]
        return tuple(
            layer
            for layer in without
            if not any(other is not layer and _inside(other.path, layer.path) for other in without)
        )

    def losses(self) -> list[CertifiedLayer]:
        """Return the innermost modules with a factor above 1, largest first: where the certificate
        loses."""
        return sorted(
            (layer for layer in leaves(self.layers) if layer.lipschitz > 1),
            key=lambda layer: -layer.lipschitz,
        )

    def require_weights_of(self, module: nn.Module) -> None:
        """Refuse a module whose weights are not the certified ones; cost: one SHA-256 of them.

        Raises:
            ConfigError: they are others, so this certificate says nothing of the module.
        """
        if self.weights not in ("", weights_digest(module)):
            raise ConfigError(
                f"the certificate is of other weights (SHA-256 {self.weights[:12]}...) than those of"
                f" this {type(module).__name__}; certify it again, or load the weights that were"
                " certified"
            )

    def _say_if_changed(self) -> None:
        module = None if self.module is None else self.module()
        if module is not None and self.weights not in ("", weights_digest(module)):
            warnings.warn(
                f"radius: a certificate is a snapshot, and this {type(module).__name__} is not what"
                " was certified: its weights have changed since; the radius is right for logits of"
                " the certified weights alone, for those of the module certify it again",
                stacklevel=3,
            )

    def require(self) -> Certificate:
        """Return this certificate if it has a bound.

        Raises:
            NotLipschitzError: some module has none; every one is named with its reason.
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
        """Return r such that no input perturbation with ``|delta| < r`` (in ``norm``) changes the
        decision, which is the largest logit: one label, or the next token.

        A head of several labels or of a regression decides otherwise: each of its outputs moves by
        at most ``total |delta|``.

        Certified: ``min_k (f_y - f_k) / (|w_y - w_k| L_body)`` where the last linear map is known,
        and at least ``margin / (sqrt(2) total)``, since ``|(e_y - e_k) . df| <= sqrt(2) |df|``;
        ``margin / (2 total)`` for ``norm="inf"``. The perturbation acts on the embedded input; in
        ``tok`` every token may move by r at once.
        A bound that holds on a ball says nothing outside it, so r is at most the room left: ``ball
        - max_i |x_i|``, divided by ``sqrt(width)`` for ``norm="inf"``, where a token moves by up to
          ``sqrt(width) r`` in 2-norm.

        Args:
            logits: ``(..., classes)`` of the clean input, from the certified module in eval mode.
            labels: ``(...)`` true classes; a wrong prediction has radius 0. The predicted class
                where not given.
            tokens: number of real tokens, one for all inputs or ``(...)``; needed where
                ``min_tokens > 1``.
            largest_token: ``max_i |x_i|``, the largest 2-norm of a real token, one for all inputs
                or ``(...)``; needed where the certificate is on a ball. An input outside the ball
                has radius 0.
            width: entries of an input token; needed for ``norm="inf"`` on a ball.

        Returns:
            ``(...)`` float64 radii >= 0; zero throughout where there is no bound, and where logits
            are not finite.

        Raises:
            ShapeError: fewer than two classes; an input longer or shorter than the certificate
                covers, or of unknown length where ``min_tokens > 1``; ``labels``, ``tokens`` or
                ``largest_token`` not one per input.
            ConfigError: a module whose ``problem_type`` is not a single label; a certificate on a
                ball without ``largest_token`` (>= 0), or without
                ``width`` (>= 1) for ``norm="inf"``.

        A `UserWarning` says that the module's weights have changed since it was certified: the
        radius is right for logits of the certified weights.

        Cost: O(classes) per row, O(classes^2) once for the head, a SHA-256 of the module's weights.
        Says nothing about rounding of the forward pass.
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
        known = () if labels is None else labels.unique().tolist()
        if wrong := [label for label in known if label not in classes]:
            raise ShapeError(f"radius: labels must be in [0, {len(classes)}), received {wrong[:5]}")
        self._check_lengths(tokens, inputs)
        room = self._room(largest_token, width, inputs).to(logits.device)
        scores = logits.detach().to(torch.float64)
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
        # A slope of zero is a constant function: a margin above zero divided by it is infinite, and
        # rightly so.
        radii = torch.where(others, margins / slopes, math.inf).amin(-1)
        radii = torch.where(scores.isfinite().all(-1), torch.minimum(radii, room), 0.0)
        return radii.clamp_min(0).nan_to_num(nan=0.0, posinf=math.inf)

    def _check_lengths(self, tokens: int | Tensor | None, inputs: torch.Size) -> None:
        if tokens is None:
            if self.min_tokens > 1:
                raise ShapeError(
                    f"radius: the certificate holds for inputs of at least {self.min_tokens} real"
                    " tokens, received none of their lengths; give tokens=, the real tokens of"
                    " each input, or certify with min_tokens=1"
                )
            return
        lengths = _per_input("tokens", tokens, inputs)
        problems = []
        # Written so that a length that is no number is among the offenders.
        if (long := ~(lengths <= self.tokens)).any():
            worst = f"{float(lengths[long].max()):g}"
            problems.append(
                f"the certificate holds for at most {self.tokens} tokens, received {worst}"
                f" ({int(long.sum())} of {lengths.numel()} inputs are longer); certify again with"
                f" seq_len={worst}"
            )
        if (short := lengths < self.min_tokens).any():
            least = float(lengths[short].min())
            advice = (
                f"certify again with min_tokens={least:g}"
                if least >= 1
                else "leave inputs without a token out"
            )
            problems.append(
                f"the certificate holds for at least {self.min_tokens} real tokens, received"
                f" {least:g} ({int(short.sum())} of {lengths.numel()} inputs are shorter); {advice}"
            )
        if problems:
            raise ShapeError("radius: " + "\n".join(problems))

    def _room(
        self, largest_token: float | Tensor | None, width: int | None, inputs: torch.Size
    ) -> Tensor:
        """How far each input may move, in the certificate's norm, with every token still inside the
        ball."""
        if self.ball == math.inf:
            return torch.full(inputs, math.inf, dtype=torch.float64)
        problems = []
        if largest_token is None:
            problems.append("give largest_token=, the largest 2-norm of a token of each input")
        elif bool((torch.as_tensor(largest_token) < 0).any()):
            problems.append("largest_token is a 2-norm, so it must be >= 0")
        if self.norm == "inf" and (width is None or width < 1):
            problems.append(
                f"give width= >= 1, the entries of a token (norm inf); received {width}"
            )
        if problems or largest_token is None:
            raise ConfigError(
                f"radius: the certificate holds for {self.domain} only, so how far an input may"
                " move depends on where it stands:\n" + listed(problems)
            )
        spread = math.sqrt(width) if self.norm == "inf" and width is not None else 1.0
        largest = _per_input("largest_token", largest_token, inputs)
        return ((self.ball - largest) / spread).clamp_min(0)

    def _head_slopes(self, chosen: Tensor) -> Tensor:
        """``|w_y - w_k| L_body`` from above: what is not zero stays so, however small."""
        assert self.head is not None
        weight, body = self.head
        weight = weight.detach().to(chosen.device, torch.float64)
        differences = weight[chosen].unsqueeze(-2) - weight
        largest = differences.abs().amax(-1)
        # Scaled, as squares of small differences would be rounded to zero.
        scaled = differences / torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
        order = 1 if self.norm == "inf" else 2
        size = largest * torch.linalg.vector_norm(scaled, order, dim=-1)
        size = torch.where(largest > 0, size.clamp_min(_SMALLEST), size)
        slopes = size * body * (1 + 1e-9)
        return torch.where((size > 0) & (body > 0), slopes.clamp_min(_SMALLEST), slopes)

    def table(self) -> str:
        """Return the layers as plain text: bound, label, form (or why there is none), path, the
        total, `reason`."""
        rows = [("bound", "label", "radius", "module", "form or reason")]
        for layer in self.layers:
            form = "" if layer.label == "uncertified" else layer.form
            told = "; ".join(filter(None, (form, layer.reason)))
            name = f"{layer.path or '.'} ({layer.module})"
            rows.append((_number(layer.lipschitz), layer.label, _number(layer.radius), name, told))
        total = f"total, norm {self.norm}"
        rows.append((_number(self.total), self.label, "", total, self._scope()))
        not_run = self.cross_check.startswith(_NOT_RUN) and math.isfinite(self.total)
        tried = "not tried out: " + self.cross_check.removeprefix(_NOT_RUN) if not_run else ""
        return "\n".join(filter(None, (aligned(rows, "l"), tried, self.reason)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values (infinities as the string ``"inf"``), for JSON."""
        plain = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        plain["layers"] = [asdict(layer) for layer in self.layers]
        return json.loads(json.dumps(plain), parse_constant=lambda word: str(float(word)))

    def _span(self) -> str:
        least = "<=" if self.min_tokens == 1 else f"{self.min_tokens} to"
        return f"{least} {self.tokens} tokens"

    def _scope(self) -> str:
        scope = f"{self._span()}, mask {self.mask}, {self.domain}, {self.dtype}"
        return "; ".join((scope, *self.notes))

    def __str__(self) -> str:
        return self.table()


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of a module's state: names, dtypes, shapes and bytes of what it saves."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_sparse):
            plain = tensor.detach().cpu().contiguous()
            # By address: without numpy torch hands out no bytes.
            digest.update((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
    return digest.hexdigest()


def _per_input(name: str, value: float | Tensor, inputs: torch.Size) -> Tensor:
    """Return one float64 number per input; the shape is never broadcast, so that no input gets
    another one's."""
    values = torch.as_tensor(value).detach().cpu().to(torch.float64)
    if values.ndim and values.shape != inputs:
        raise ShapeError(
            f"radius: expected {name} as one number or {tuple(inputs)}, one per input; received"
            f" {tuple(values.shape)}"
        )
    return values.expand(inputs)


def _inside(path: str, parent: str) -> bool:
    return parent == "" or path.startswith(f"{parent}.")


def _number(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.4g}"
