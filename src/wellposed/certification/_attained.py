"""The slopes that layers of a certified module attain, by gradient ascent."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import Call, activation_dtype, lipschitz_lower_bound
from wellposed.call_checks import known_keywords
from wellposed.certification._certificate import Certificate
from wellposed.certification._cross_check import TRIED_TOKENS, channels_of, width_of
from wellposed.errors import ConfigError, ConvergenceError, ShapeError, is_about_resources
from wellposed.interrupts import undoing

_ANY_WIDTH = 8


@known_keywords
def attain(certificate: Certificate, *, steps: int = 30, restarts: int = 4) -> Certificate:
    """Return the certificate with the slope that an attack attains in each layer.

    Status: lower bounds of each layer's Lipschitz constant (`lipschitz_lower_bound`, at most four
    tokens, inputs of any size or in the layer's ball). Bound over attained slope, printed by
    ``table(attained=True)``, is an upper estimate of how loose the bound is.

    Args:
        certificate: Of a module that still exists, with the weights of then.
        steps: Adam steps of each attack.
        restarts: Inputs of each attack.

    Returns:
        A copy with `Certificate.attained`. Layers that cannot be called by themselves are left out.

    Raises:
        ConfigError: the module no longer exists, has changed, or does not run.

    Cost: an attack a layer; some seconds for a Transformer of width 64.

    >>> from wellposed.certification import certify
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> attained = attain(certify(net), steps=5).attained
    >>> 0 < attained[""] <= certify(net).total
    True
    """
    module = None if certificate.module is None else certificate.module()
    if module is None:
        raise ConfigError(
            "attain: the certificate's module no longer exists (or this is a copy of the"
            " certificate); certify the module again and attack it while it is alive"
        )

    certificate.require_weights_of(module)
    shapes = _input_shapes(module, certificate)
    slopes: dict[str, float] = {}
    for layer in [*certificate.layers, None]:
        path = "" if layer is None else layer.path
        if path not in shapes:
            continue
        radius = certificate.ball if layer is None else layer.radius
        attacked = {"norm": certificate.norm, "steps": steps, "restarts": restarts}
        if math.isfinite(radius):
            attacked["radius"] = radius
        try:
            attack = lipschitz_lower_bound(module.get_submodule(path), shapes[path], **attacked)
        except (ConfigError, ConvergenceError, ShapeError):
            continue
        slopes[path] = max(attack.value, attack.slope)

    return replace(certificate, attained=slopes)


def _input_shapes(module: nn.Module, certificate: Certificate) -> dict[str, tuple[int, ...]]:
    """Return the shape of an example that each layer reads, by one forward pass."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts = dict(module.named_modules(remove_duplicate=False))
    paths = {layer.path for layer in certificate.layers if layer.path in parts} | {""}

    def note(path: str, _part: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim > 1:
            shapes[path] = tuple(args[0].shape[1:])

    tokens = min(certificate.tokens or TRIED_TOKENS, TRIED_TOKENS)
    tokens = channels_of(module) or max(tokens, certificate.min_tokens)
    example = (tokens, width_of(module) or _ANY_WIDTH)
    device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
    with undoing() as undo, torch.no_grad():
        for path in paths - {""}:
            undo.hook(parts[path].register_forward_pre_hook, partial(note, path))
        x = torch.zeros(1, *example, dtype=activation_dtype(module), device=device)
        try:
            Call(module, {})(x)
        except (RuntimeError, ValueError, TypeError) as error:
            if is_about_resources(error):
                raise
            raise ConfigError(
                f"attain: the module does not run on an input of shape {(1, *example)}: {error}"
            ) from error
    return {**shapes, "": example}
