"""`certified_bound`: the total of a certificate as a loss, with the gradient of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wellposed.call_checks import known_keywords
from wellposed.certification._certify import certify, checked_context
from wellposed.certification._cross_check import undisturbed
from wellposed.errors import ConfigError
from wellposed.linalg import MaskKind, TokenNorm


@known_keywords
def certified_bound(
    module: nn.Module,
    *,
    seq_len: int | None = None,
    norm: TokenNorm = "tok",
    radius: float | None = None,
    mask: MaskKind | None = None,
    min_tokens: int = 1,
) -> Tensor:
    """Return the total of `certify` as a number with gradient, to train margins with.

    Status: the value is certified, as `Certificate.total`. The gradient is that of the winning
    forms by linear maps: of products by top singular vectors, of multipliers by the envelope
    theorem (the multipliers of the proof are held fixed, theory note B18). It is exact if
    multipliers are optimal and top singular values are simple, else a direction of descent in
    practice. Bounds of other parts (attention, norms, convolutions), slopes of activations and
    scales of residuals count as constants.

    Args:
        module: As in `certify`, in eval mode if it has dropout.
        seq_len: As in `certify`.
        norm: As in `certify`.
        radius: As in `certify`.
        mask: As in `certify`.
        min_tokens: As in `certify`.

    Returns:
        A float64 number on the CPU.

    Raises:
        NotLipschitzError: there is no bound; the parts without one are named.
        ConfigError: no linear map of the bound has a weight that is trained; or as `certify`.

    Cost: a certificate without its cross-check, and a backward pass of small products.
    When not to use: every step of a large model; every tenth step, or a spectral cap, is cheaper.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> loss = certified_bound(net).log()
    >>> loss.backward()
    >>> net[0].weight.grad.shape
    torch.Size([8, 4])
    """
    asked = {"seq_len": seq_len, "norm": norm, "radius": radius, "mask": mask}
    certified, context = checked_context(module, **asked, min_tokens=min_tokens)
    with torch.no_grad(), undisturbed(certified):
        bound = context.builder.visit(certified, context)

    if math.isinf(bound.lipschitz):
        certify(module, **asked, min_tokens=min_tokens, cross_check=False).require()
    with torch.enable_grad():
        slope = bound.differentiable()

    if not isinstance(slope, Tensor) or not slope.requires_grad:
        raise ConfigError(
            "certified_bound: the bound has no gradient, as no linear map in it has a weight that is"
            " trained; use certify for the number alone"
        )
    # The value is the certified one, rounding included.
    return slope + (bound.lipschitz - slope.detach())
