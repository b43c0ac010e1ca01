"""The weight that a layer with LoRA factors computes with, as a view like any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wellposed.errors import ConfigError
from wellposed.roles._views import WeightView

_BASE = "base_layer"


@dataclass(frozen=True)
class AdaptedView(WeightView):
    """``W + sum_a scale_a B_a A_a`` over the active adapters: what the layer computes without
    adapter dropout.

    W is a `WeightView`, in its rows; A is (rank, in_features) and B (out_features, rank), in any
    storage of W. The gradient goes to A and B, and to W where it is trained.
    """

    layer: nn.Module = field(default_factory=nn.Module, repr=False, compare=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """As `WeightView.key`; one weight under two adapters is two."""
        return (*super().key, id(self.layer))

    @property
    def trainable(self) -> bool:
        """Whether W or a factor of an active adapter receives a gradient."""
        factors = (factor for a, b, _ in self._factors() for factor in (a, b))
        return super().trainable or any(factor.requires_grad for factor in factors)

    def tensor(self) -> torch.Tensor:
        """Return the sum, shape ``shape``: a new tensor, part of the graph of W and of the
        factors."""
        weight = super().tensor()
        for a, b, scale in self._factors():
            rows = replace(self, transposed=False).seen(b)
            weight = weight + (scale * (rows @ a)).to(weight.dtype)
        return weight

    def _factors(self) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        layer: Any = self.layer
        return [
            (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
            for name in _active(layer)
            if name in layer.lora_A
        ]


def adapted_view(model: nn.Module, view: WeightView) -> WeightView:
    """Return the view of the weight that the layer computes with: ``view`` itself where no LoRA
    adapter is on it.

    Raises:
        ConfigError: adapters that are merged or switched off, or that compute something other than
        ``W + scale B A``.
    """
    path, _, last = view.owner_path.rpartition(".")
    layer: Any = model.get_submodule(path) if last == _BASE else None
    if layer is None or not has_lora(layer):
        return view
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        raise ConfigError(
            f"{path}: its adapters are merged into the base weight or switched off, so they receive"
            " no gradient; unmerge or enable them"
        )
    variants = [name for name in _active(layer) if _is_variant(layer, name)]
    if variants or view.attribute != "weight":
        raise ConfigError(
            f"{path}: adapters {', '.join(variants) or 'of a fused projection'} compute something"
            " other than W + scale B A (as DoRA and others do); adapters=True is for LoRA on"
            " linear layers"
        )
    return AdaptedView(**vars(view), layer=layer)


def has_lora(module: nn.Module) -> bool:
    """Tell whether a module holds LoRA factors by name of adapter, as PEFT's linear layers do."""
    factors = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    return all(isinstance(each, nn.ModuleDict) for each in factors)


def _active(layer: Any) -> list[str]:
    active = getattr(layer, "active_adapters", None)
    if active is None:
        return list(layer.lora_A)
    return [active] if isinstance(active, str) else list(active)


def _is_variant(layer: Any, name: str) -> bool:
    use_dora = getattr(layer, "use_dora", {})
    variants = getattr(layer, "lora_variant", {})
    return bool(isinstance(use_dora, Mapping) and use_dora.get(name)) or name in variants
