"""Certified and attacked accuracy of a classifier or language model under perturbed embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import in_dtype, perturbation_size, steepest_direction
from wellposed.call_checks import checked_arguments
from wellposed.certification import Certificate
from wellposed.errors import ConfigError, DataError
from wellposed.head_kind import check_single_label
from wellposed.hooks import evaluating
from wellposed.linalg import Norm
from wellposed.measurement import write_csv
from wellposed.models import input_vectors
from wellposed.nn import frozen
from wellposed.options import Size

Batch = Mapping[str, Tensor]
_NO_LABEL = -100
# Most entries of one chunk of the slopes of class pairs.
_MOST_ENTRIES = 2**24


@dataclass(frozen=True)
class CertifiedAccuracy:
    """For every radius: certified accuracy <= true robust accuracy <= attacked accuracy."""

    radii: list[float]
    """Sizes r of perturbations ``|delta| <= r`` of the embedded input, increasing."""
    certified: list[float]
    """Fraction of examples that no perturbation of each size can make wrong."""
    attacked: list[float]
    """Fraction of examples that stay right under the attack; never below ``certified``."""
    examples: int
    norm: str
    lipschitz: float
    clean: float
    """Accuracy without a perturbation."""
    median_radius: float
    """Median certified radius of the correctly classified examples; 0 if there are none."""
    median_token: float
    """Median 2-norm of the embedded tokens, the scale for radii."""
    largest_token: float
    """Largest 2-norm of the embedded tokens."""
    attack: str
    """The attack, in words."""
    notes: tuple[str, ...] = ()
    """Limits on certified accuracy other than the margins."""
    predictions: int = 0
    """Number of predicted tokens of a language model; 0 if examples have one label each."""

    def in_tokens(self, radius: float) -> float:
        """Return ``radius`` as a multiple of the median token norm; infinite if that is 0."""
        return radius / self.median_token if self.median_token > 0 else math.inf

    def table(self) -> str:
        """Return the curve as plain text, with radii also as multiples of the median token norm."""
        texts = f"{self.predictions} next tokens of {self.examples} texts"
        counted = texts if self.predictions else f"{self.examples} examples"
        return "\n".join(
            [
                f"{counted}, clean accuracy {self.clean:.4f}, L = {self.lipschitz:.4g} in norm"
                f" {self.norm}, median certified radius {self.median_radius:.4g} ="
                f" {self.in_tokens(self.median_radius):.3g} of a token",
                f"    radius  of a token  certified   attacked   ({self.attack})",
                *(
                    f"{r:>10.4g}  {self.in_tokens(r):>10.3g}  {sure:>9.4f}  {attacked:>9.4f}"
                    for r, sure, attacked in self._points()
                ),
                *self.notes,
                f"for scale: embedded tokens have 2-norm {self.median_token:.4g} (median),"
                f" {self.largest_token:.4g} at most",
            ]
        )

    def _points(self) -> Iterator[tuple[float, float, float]]:
        return zip(self.radii, self.certified, self.attacked, strict=True)

    def to_csv(self, path: Path) -> None:
        names = ["radius", "certified", "attacked"]
        write_csv(path, names, [dict(zip(names, point, strict=True)) for point in self._points()])


@checked_arguments
def certified_accuracy(
    model: nn.Module,
    batches: Iterable[Batch],
    certificate: Certificate,
    *,
    radii: Sequence[float] | None = None,
    in_tokens: bool = False,
    attack_steps: Size = 20,
    restarts: Size = 1,
    seed: int = 0,
) -> CertifiedAccuracy:
    """Return certified accuracy and accuracy under a PGD attack for each size r of a perturbation.

    An example is certified at r if ``min_k (f_y - f_k) / (|w_y - w_k| L_body) > r``, which is at
    least ``margin / (sqrt(2) L) > r`` (Tsuzuku, Sato, Sugiyama 2018; theory note B9).

    The perturbation acts on ``inputs_embeds`` of real tokens, in the certificate's norm: in ``tok``
    every token may move by r at once. On a ball, an input is certified only while its tokens stay
    inside. In pairs, both texts move. For a language model every next token is an example, and one
    perturbation of a text attacks all of its tokens.

    Status: certified in exact arithmetic: ``certified <= true <= attacked``. The attack (projected
    gradient ascent on the margin, Madry et al. 2018) runs in float64 and can only be too weak. A
    break at one size counts at every larger radius.

    Args:
        model: Takes ``inputs_embeds``, returns ``logits`` of one label or next tokens; copied.
        batches: Dicts with ``input_ids``, ``attention_mask`` (1 = real) and ``labels``: one class
            per example, or the token at each position (-100: none). Pairs also have
            ``input_ids_pair`` and ``attention_mask_pair``.
        certificate: Of this model, from `wellposed.certify`.
        radii: Increasing sizes >= 0; default: `default_radii`.
        in_tokens: Radii are multiples of the median 2-norm of an embedded token.
        attack_steps: Gradient steps for each radius.
        restarts: Starts for each radius: the clean input first, then random ones drawn by ``seed``.

    Raises:
        ConfigError: radii out of order or negative, no step or restart, or a foreign certificate.
        DataError: no examples, or labels that are not one class each.
        ShapeError: inputs longer or shorter than the certificate covers.

    Cost: ``len(radii) x attack_steps x restarts`` forward and backward passes over the data.
    """
    rising = sorted({size for size in radii or () if 0 <= size < math.inf})
    if radii is not None and (not radii or list(radii) != rising):
        problem = f"radii: expected finite increasing sizes >= 0, received {list(radii)}"
        raise ConfigError(f"certified accuracy: {problem}")

    with evaluating(model):  # below, a copy in eval mode is run
        certificate.require_weights_of(model)
    check_single_label(model, "certified accuracy")
    # Checked once: otherwise each radius computes a digest of all weights.
    certificate = replace(certificate, module=None)
    target = in_dtype(model, torch.float64).eval().requires_grad_(False)
    embedded = [_embed(target, batch) for batch in batches]
    if not embedded:
        raise DataError("certified accuracy: no examples were given; expected at least one batch")

    largest = torch.cat([batch.sizes.amax(-1) for batch in embedded])
    certified = torch.cat([_certified_radii(certificate, batch) for batch in embedded])
    median_token = float(torch.cat([batch.sizes[batch.mask.bool()] for batch in embedded]).median())
    unit = median_token if in_tokens else 1.0
    sizes = default_radii(certified) if radii is None else [size * unit for size in radii]
    attack = {"norm": certificate.norm, "steps": attack_steps, "restarts": restarts}
    attack |= {"generator": torch.Generator().manual_seed(seed)}
    with frozen(target):
        breaks = [_smallest_breaks(target, batch, sizes, **attack) for batch in embedded]
    counted = torch.cat([batch.is_counted.flatten() for batch in embedded])
    broken_at = torch.cat([sizes_of_batch.flatten() for sizes_of_batch in breaks])[counted]
    correct = torch.cat([batch.correct.flatten() for batch in embedded])[counted]

    return CertifiedAccuracy(
        list(sizes),
        [_share(correct & ((certified > size) | (size == 0))) for size in sizes],
        [_share(broken_at > size) for size in sizes],
        examples=len(largest),
        norm=str(certificate.norm),
        lipschitz=certificate.total,
        clean=_share(correct),
        median_radius=float(certified[correct].median()) if bool(correct.any()) else 0.0,
        median_token=median_token,
        largest_token=float(largest.max()),
        attack=f"PGD, {attack_steps} steps, {restarts} start{'s' if restarts > 1 else ''}, float64",
        notes=_notes(certificate, largest),
        predictions=0 if embedded[0].logits.shape[1] == 1 else len(certified),
    )


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _notes(certificate: Certificate, largest: Tensor) -> tuple[str, ...]:
    if not math.isfinite(certificate.total):
        paths = [layer.path or "the module itself" for layer in certificate.uncertified[:3]]
        why = ", ".join(paths) or "the product overflows"
        return (f"no bound ({why}), so nothing is certified at any radius above 0",)
    if certificate.ball == math.inf:
        return ()

    ball = f"the ball |x_i| <= {certificate.ball:g}"
    outside = int((largest > certificate.ball).sum())
    if outside:
        where = f"{outside} of {len(largest)} inputs lie outside {ball}"
        return (f"{where}, so they are not certified",)
    room = float((certificate.ball - largest).median())
    return (f"radii end at {ball}; the median input is {room:.4g} inside",)


def default_radii(certified: Tensor, count: int = 8) -> list[float]:
    """Return 0 and ``count`` sizes, each 4 times the one before, from a quarter of the median
    certified radius (or 0.01): certified radii are often far below those of attacks.

    >>> default_radii(torch.tensor([0.0, 0.4]), 3)
    [0.0, 0.1, 0.4, 1.6]
    """
    positive = certified[(certified > 0) & torch.isfinite(certified)]
    start = float(positive.median()) / 4 if len(positive) else 0.01
    return [0.0, *(float(f"{start * 4**power:.2g}") for power in range(count))]


@dataclass(frozen=True)
class _EmbeddedBatch:
    """A batch as token vectors, with the unperturbed logits (batch, labels, classes)."""

    vectors: Tensor
    mask: Tensor
    labels: Tensor
    logits: Tensor
    sides: tuple[int, ...]
    """Number of tokens of each text of an example; the texts are concatenated."""

    @property
    def is_counted(self) -> Tensor:
        return self.labels != _NO_LABEL

    @property
    def correct(self) -> Tensor:
        return self.logits.argmax(-1) == self.labels

    @property
    def sizes(self) -> Tensor:
        """The 2-norm of each token, 0 for padding."""
        return self.vectors.norm(dim=-1) * self.mask


_SIDES = ("", "_pair")


def _scores(model: Any, vectors: Tensor, mask: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Return logits (batch, labels, classes): of one label, or of the next token of each."""
    inputs: dict[str, Tensor] = {}
    parts = zip(_SIDES, vectors.split(sides, dim=1), mask.split(sides, dim=1), strict=False)
    for name, part, part_mask in parts:
        inputs |= {f"inputs_embeds{name}": part, f"attention_mask{name}": part_mask}
    logits = model(**inputs).logits
    return logits[:, None] if logits.ndim == 2 else logits[:, :-1]


@torch.no_grad()
def _embed(model: Any, batch: Batch) -> _EmbeddedBatch:
    labels = batch["labels"]
    is_text = labels.shape == batch["input_ids"].shape
    lowest = _NO_LABEL if is_text else 0
    is_shaped = labels.ndim == 1 or is_text
    if labels.is_floating_point() or not is_shaped or bool((labels < lowest).any()):
        raise DataError(
            "certified accuracy: labels must be (batch,) class numbers, or (batch, tokens) of"
            f" input_ids, received {labels.dtype} {tuple(labels.shape)}"
        )

    names = [name for name in _SIDES if f"input_ids{name}" in batch]
    masks = [batch[f"attention_mask{name}"] for name in names]
    pairs = zip(names, masks, strict=True)
    texts = [input_vectors(model, batch[f"input_ids{name}"], mask) for name, mask in pairs]
    vectors = torch.cat(texts, dim=1)
    mask = torch.cat(masks, dim=1)
    sides = tuple(text.shape[1] for text in texts)
    logits = _scores(model, vectors, mask, sides)
    labels = labels[:, 1:] if is_text else labels[:, None]

    return _EmbeddedBatch(vectors, mask, labels, logits, sides)


def _certified_radii(certificate: Certificate, batch: _EmbeddedBatch) -> Tensor:
    chosen = batch.is_counted
    sides = [side.sum(-1) for side in batch.mask.split(batch.sides, dim=1)]
    of_examples = (batch.sizes.amax(-1), *sides)
    largest, *lengths = (values[:, None].expand(chosen.shape)[chosen] for values in of_examples)
    width = batch.vectors.shape[-1]
    rows = max(1, _MOST_ENTRIES // (batch.logits.shape[-1] * width))

    def radii(length: Tensor) -> Tensor:
        columns = (batch.logits[chosen], batch.labels[chosen], length, largest)
        chunks = []
        parts = (part.split(rows) for part in columns)
        for logits, labels, tokens, token in zip(*parts, strict=True):
            asked = {"tokens": tokens, "largest_token": token, "width": width}
            chunks.append(certificate.radius(logits, labels, **asked))
        return torch.cat(chunks)

    # Each text of an example must have a length that the certificate covers.
    return torch.stack([radii(length) for length in lengths]).amin(0)


def _smallest_breaks(
    model: Any,
    batch: _EmbeddedBatch,
    sizes: Sequence[float],
    *,
    norm: Norm,
    steps: int,
    restarts: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the smallest size at which gradient descent breaks each label, or infinity."""
    broken_at = torch.where(batch.correct, math.inf, 0.0).double()
    allowed = batch.mask[..., None].double()

    def margin(delta: Tensor) -> Tensor:
        nonlocal broken_at
        logits = _scores(model, batch.vectors + delta, batch.mask, batch.sides)
        right = batch.labels.clamp_min(0).unsqueeze(-1)
        margins = logits.gather(-1, right)[..., 0] - logits.scatter(-1, right, -math.inf).amax(-1)
        wrong = logits.argmax(-1) != batch.labels
        size = torch.where(wrong, perturbation_size(delta.detach(), norm)[:, None], math.inf)
        broken_at = torch.minimum(broken_at, size)
        return margins * batch.is_counted

    def descend(delta: Tensor, size: float) -> Tensor:
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(margin(delta).sum(), delta)
            step = steepest_direction(-gradient * allowed, norm) * (2.5 * size / steps)
            delta = _project(delta.detach() + step, norm, size)
        with torch.no_grad():
            margin(delta)
        return delta

    carried = torch.zeros_like(batch.vectors)
    for size in (size for size in sizes if size > 0):
        # The first start is the end of the attack at the previous radius.
        carried = descend(carried, size)
        for _ in range(restarts - 1):
            noise = torch.randn(carried.shape, dtype=carried.dtype, generator=generator) * allowed
            scale = size / perturbation_size(noise, norm).clamp_min(1e-12)
            descend(noise * scale[:, None, None], size)
    return broken_at


def _project(delta: Tensor, norm: Norm, size: float) -> Tensor:
    if norm == "inf":
        return delta.clamp(-size, size)
    length = delta.norm(dim=-1 if norm == "tok" else (1, 2), keepdim=True)
    return delta * (size / length.clamp_min(size)) if size > 0 else torch.zeros_like(delta)
