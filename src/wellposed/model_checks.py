"""Check that an argument is a model whose weights this process has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wellposed.errors import ConfigError, NotLipschitzError, listed, shortened
from wellposed.zero_weights import check_whole


def require_module(call: str, model: object) -> None:
    """Raise `ConfigError` unless ``model`` is a ``torch.nn.Module`` (not its name), with weights that
    this process has whole, or as shards of torch."""
    if callable(getattr(model, "named_modules", None)) and not isinstance(model, type):
        weights: Any = getattr(model, "named_parameters", dict)()
        lazy = [name for name, weight in weights if type(weight).__name__.startswith("Uninit")]
        if lazy:
            raise ConfigError(
                f"{call}: these weights of lazy layers have no shape yet: {shortened(lazy)}; run the"
                " model once on a batch, then call it again"
            )
        check_whole(call, model)
        return

    hint = ""
    if isinstance(model, str):
        hint = f"; load it first, as with transformers.AutoModel.from_pretrained({model!r})"

    raise ConfigError(
        f"{call}: expected a model (torch.nn.Module), received {type(model).__name__}{hint}"
    )


def require_finite_weights(caller: str, module: nn.Module) -> None:
    """Raise `NotLipschitzError` that names every parameter with NaN or infinity."""
    # Packed and sharded weights have products of their own, and are refused where they are read.
    plain = [(n, p) for n, p in module.named_parameters() if type(p) is nn.Parameter]
    loaded = [(name, weight) for name, weight in plain if not weight.is_meta]
    # One-byte dtypes cannot be summed.
    named = [(name, weight.float() if weight.itemsize == 1 else weight) for name, weight in loaded]
    bad = [
        f"{name} {tuple(weight.shape)}: {int((~torch.isfinite(weight)).sum())} of"
        f" {weight.numel()} entries"
        for name, weight in named
        if not (bool(torch.isfinite(weight.sum())) or bool(torch.isfinite(weight).all()))
    ]
    if bad:
        raise NotLipschitzError(
            f"{caller}: parameters hold NaN or infinity, so there is nothing to certify:\n"
            + listed(bad)
            + "\nload an earlier checkpoint, or find the step at which training diverged"
        )
