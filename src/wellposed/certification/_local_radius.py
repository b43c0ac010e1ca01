"""Certified radii around given inputs: the largest one that its own local bound proves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import activation_dtype
from wellposed.call_checks import known_keywords
from wellposed.certification._as_called import without_compiler
from wellposed.certification._centres import Centre, Centres, check_around, record_centres
from wellposed.certification._certificate import Certificate
from wellposed.certification._cross_check import undisturbed
from wellposed.certification._walk import CertificateBuilder, RuleContext
from wellposed.errors import ConfigError, ShapeError
from wellposed.linalg import MASK_KINDS, MaskKind
from wellposed.model_checks import require_finite_weights, require_module

# The first guess of a radius, relative to the largest token; and the range that is searched.
_FIRST = 1e-2
_SMALLEST = 1e-12


@known_keywords
@torch.no_grad()
def local_radius(
    module: nn.Module,
    around: Tensor,
    labels: Tensor | None = None,
    *,
    mask: MaskKind | None = None,
    steps: int = 16,
) -> Tensor:
    """Return r of each input: moving every token by less than r does not change its largest logit.

    Status: certified, as `certify` with ``around=``: r is the largest one found at which the bound
    on the balls of radius r proves that the answer stays. Rounding of the forward pass is not
    covered. Source: theory note B22.

    Args:
        module: A classifier of sequences; call ``module.eval()``.
        around: Inputs (batch, tokens, width) of one length, without padding; of token ids those of
            `wellposed.models.input_vectors`.
        labels: (batch,) true classes; wrong predictions have radius 0. Default: predicted.
        mask: As in `certify`.
        steps: Halvings of the range of r on a logarithmic scale.

    Returns:
        (batch,) float64 radii in norm tok; 0 if nothing is proved.

    Raises:
        ShapeError: the inputs are empty, or the module has no single vector of logits for each.
        ConfigError: inputs are not finite vectors, or the mask is unknown.
        NotLipschitzError: a parameter holds NaN or infinity.

    Cost: a walk of `certify` for each input and step; norms of weights are computed once.

    >>> from wellposed.models import WellposedConfig, WellposedForSequenceClassification
    >>> model = WellposedForSequenceClassification(WellposedConfig(
    ...     hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)).eval()
    >>> local_radius(model, torch.randn(2, 5, 8), steps=4).shape
    torch.Size([2])
    """
    require_module("local_radius", module)
    module = without_compiler(module)
    if mask is not None and mask not in MASK_KINDS:
        raise ConfigError(f"local_radius: unknown mask {mask!r}; known: {', '.join(MASK_KINDS)}")

    require_finite_weights("local_radius", module)
    inputs = check_around(module, around, None, caller="local_radius")
    with undisturbed(module):
        centres = record_centres(module, inputs, is_causal=mask == "causal", caller="local_radius")
        logits = centres.outputs
        if logits.ndim != 3 or logits.shape[1] != 1 or logits.shape[2] < 2:
            raise ShapeError(
                "local_radius: expected a module with one vector of logits for each input, received"
                f" outputs {tuple(logits.shape)}"
            )
        search = _Search(module, centres, inputs, mask)
        radii = [search.radius(index, labels, steps) for index in range(len(inputs))]

    return torch.tensor(radii, dtype=torch.float64)


@dataclass
class _Search:
    """The radius of one input after the other, with norms of weights that are computed once."""

    module: nn.Module
    centres: Centres
    inputs: Tensor
    mask: MaskKind | None
    memory: dict[tuple[int, object], tuple[object, Any]] = field(default_factory=dict)

    def radius(self, index: int, labels: Tensor | None, steps: int) -> float:
        """Return the largest radius that a bisection proves for one input."""
        largest = float(self.inputs[index].norm(dim=-1).max())
        high = max(largest, 1.0)
        low = high * _SMALLEST
        label = None if labels is None else labels[index : index + 1]
        best = self._proved(index, low, label)
        if best == 0.0:
            return 0.0

        tried = high * _FIRST
        for _ in range(steps):
            proved = self._proved(index, tried, label)
            best = max(best, proved)
            # At the fixed point the radius that is proved is the one that was asked for.
            low, high = (tried, high) if proved >= tried else (max(low, proved), tried)
            tried = math.sqrt(low * high)

        return best

    def _proved(self, index: int, radius: float, label: Tensor | None) -> float:
        """Return the radius, at most this one, that the bound on balls of this size proves."""
        builder = CertificateBuilder(memory=self._of_weights())
        builder.centres = {
            key: Centre(centre.tokens[index : index + 1], centre.mask)
            for key, centre in self.centres.by_module.items()
        }
        seq_len = self.inputs.shape[1]
        ball = float(self.inputs[index].norm(dim=-1).max()) * (1 + 1e-9) + radius
        dtype = activation_dtype(self.module)
        context = RuleContext("", ball, "tok", seq_len, 1, self.mask, dtype, builder, moved=radius)
        bound = builder.visit(self.module, context)
        self.memory = builder.memory
        if not math.isfinite(bound.lipschitz):
            return 0.0

        certificate = Certificate(
            bound.lipschitz, (), bound.label, "tok", seq_len, 1, "", "", "", head=builder.head
        )
        logits = self.centres.outputs[index]
        return min(radius, float(certificate.radius(logits, label)[0]))

    def _of_weights(self) -> dict[tuple[int, object], tuple[object, Any]]:
        """Return what was computed of weights alone; bounds of modules depend on the input."""
        return {key: made for key, made in self.memory.items() if isinstance(key[1], str)}
