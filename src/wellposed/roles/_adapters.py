"""The weight that a layer computes with, adapters of any kind included."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wellposed.errors import ConfigError, is_about_resources
from wellposed.hooks import class_name, evaluating, observing_paused, unmerges_when_called
from wellposed.interrupts import undoing
from wellposed.linalg import gathered, is_sharded
from wellposed.roles._as_called import deviation, doubt_of_experts, is_called, unusual_call
from wellposed.roles._roles import AttentionRole, Roles
from wellposed.roles._views import BASE, WeightView

_ROUNDING = 64
"""A layer may differ by this many eps from its matrix, relative to the norms of both factors."""


@dataclass(frozen=True)
class AdaptedView(WeightView):
    """Matrix that an adapted layer computes with in evaluation mode, without adapter dropout.

    For LoRA (`closed`) it is ``W + sum_a scale_a B_a A_a`` over the active adapters. Any other
    layer is called on the identity, at the cost of one product of its size. Merged or disabled
    adapters leave W. The gradient goes to the parameters that the layer trains.
    """

    layer: nn.Module = field(default_factory=nn.Module, repr=False, compare=False)
    is_called: bool = True
    """Whether the model calls the layer; `torch.nn.MultiheadAttention` reads its weight instead."""

    @property
    def closed(self) -> bool:
        """Whether the active adapters add B A to the weight and do nothing else."""
        layer = self.layer
        if layer is self.owner or not (self._is_of_parameter or _is_lora(layer)):
            return False
        return unusual_call(layer) is None and unusual_call(self.owner) is None

    @property
    def is_computed(self) -> bool:
        """Always True: the layer computes its weight from others."""
        return True

    @property
    def key(self) -> tuple[Any, ...]:
        """As `WeightView.key`; one weight under two adapters counts as two."""
        return (*super().key, id(self.layer))

    @property
    def is_idle(self) -> bool:
        """Whether adapters are merged into the weight or disabled; both is a `ConfigError`."""
        if unmerges_when_called(self.layer):
            raise self._problem("its adapters are merged and switched off; call unmerge_adapter()")
        return any(getattr(self.layer, name, False) for name in ("merged", "disable_adapters"))

    @property
    def trainable(self) -> bool:
        """Whether W, or what an active adapter adds to it, receives a gradient."""
        if self.is_idle or super().trainable:
            return super().trainable
        if not self.closed or self._is_of_parameter:
            return any(parameter.requires_grad for parameter in self.layer.parameters())
        factors = (factor for a, b, _ in self._factors() for factor in (a, b))
        return any(factor.requires_grad for factor in factors)

    def tensor(self) -> Tensor:
        """Return the weight, shape ``shape``: a new tensor with a graph to its sources.

        Raises:
            ConfigError: the layer does not compute a product with one matrix.
        """
        if self.is_idle:
            return super().tensor()
        layer: Any = self.layer
        if not self.is_called:
            raise self._problem(
                "torch's attention does not call this layer, so its adapter is ignored, or added twice"
                " (peft's MultiheadAttention)"
            )
        if not self.closed:
            return self.matrix_in(self._called())
        if self._is_of_parameter:
            names = (name for name in _active(layer) if name in layer.lora_A)
            total = sum(map(layer.get_delta_weight, names), start=self.parameter)
            return self.matrix_in(gathered(total) if self.crosses_shards else total)

        weight = super().tensor()
        for a, b, scale in self._factors():
            if self.crosses_shards:
                a = gathered(a)
                b = gathered(b)
            rows = replace(self, transposed=False).matrix_in(b)
            weight = weight + (scale * (rows @ a)).to(weight.dtype)

        return weight

    @property
    def _is_of_parameter(self) -> bool:
        return hasattr(self.layer, "parameter_name")

    def _factors(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        layer: Any = self.layer
        for name in _active(layer):
            if name in layer.lora_A:
                yield layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
            elif name in getattr(layer, "lora_embedding_A", ()):
                a = layer.lora_embedding_A[name]
                b = layer.lora_embedding_B[name]
                yield b.T, a.T, layer.scaling[name]

    def _called(self) -> Tensor:
        stored = self.parameter
        alike = {"dtype": stored.dtype, "device": stored.device}
        if isinstance(self.owner, nn.Embedding):
            if type(self.owner).forward is not nn.Embedding.forward:
                raise self._problem(f"{type(self.owner).__name__} does more than look vectors up")
            return self._outputs(torch.arange(len(stored), device=stored.device))

        size = stored.shape[0 if self.transposed else -1]
        columns, zero = self._outputs(torch.eye(size + 1, size, **alike)).split([size, 1])
        output = columns - zero  # a bias may go by any name
        matrix = output if self.transposed else output.mT
        if matrix.shape != stored.shape:
            raise self._problem(f"it returns {tuple(output.shape)} for an identity of {size}")

        if not torch.is_grad_enabled():
            probe = torch.linspace(-1, 1, size, **alike)[None]
            excess = (self._outputs(probe) - zero - probe @ output).abs().max()
            limit = _ROUNDING * torch.finfo(stored.dtype).eps * probe.norm() * output.norm()
            if not excess <= limit:
                raise self._problem("what it computes is no product with one matrix")

        return matrix

    def _outputs(self, inputs: Tensor) -> Tensor:
        """Call the layer with zero biases, whose size would cost digits."""
        named = self.layer.named_parameters()
        biases = {n: torch.zeros_like(p) for n, p in named if n.rpartition(".")[2] == "bias"}
        kind = inputs.device.type
        try:
            with evaluating(self.layer), observing_paused(), torch.autocast(kind, enabled=False):
                output = functional_call(self.layer, biases, (inputs,))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_about_resources(error):
                raise
            reason = f"called on an identity, it fails: {type(error).__name__}: {error!s:.200}"
            raise self._problem(reason) from error

        if not isinstance(output, Tensor):
            raise self._problem(f"it returns a {type(output).__name__}")
        return output

    def _problem(self, reason: str) -> ConfigError:
        path = self.owner_path.removesuffix(f".{BASE}")
        return ConfigError(
            f"{path} ({class_name(self.layer)}): the weight it computes with cannot be read:"
            f" {reason}. Merge the adapters first (peft: model.merge_and_unload()), remove hooks that"
            " change it, or leave this layer out"
        )


def effective_roles(model: nn.Module, roles: Roles) -> Roles:
    """Return the same roles with views of the weights that layers compute with.

    A note names each layer that computes something else than its weight.
    """
    own_weights = [weight for weight in roles.weights() if weight.role != "adapter"]
    owners = {id(weight.view.owner) for weight in own_weights}
    notes: list[str] = []

    def effective(view: WeightView) -> WeightView:
        changed = effective_view(model, view, owners)
        if changed.deviation is not None:
            name = changed.parameter_name
            notes.append(
                f"{changed.deviation}. Numbers are of the matrix that it computes, not of {name}"
                if changed.is_computed
                else f"{changed.deviation}. Numbers are of {name}, which is not what it computes"
            )
        elif (doubt := doubt_of_experts(view)) is not None:
            notes.append(doubt)
        notes.extend(_lost_by_merging(changed))
        return changed

    def with_effective_views(part: Any) -> Any:
        views = {n: v for n, v in vars(part).items() if isinstance(v, WeightView)}
        changed: dict[str, Any] = {name: effective(view) for name, view in views.items()}
        if isinstance(part, AttentionRole):
            extra = ((name, effective(view)) for name, view in part.extra_projections)
            changed["extra_projections"] = tuple(extra)
        return replace(part, **changed)

    groups = ("attention", "feedforward", "embeddings", "loose")
    parts: dict[str, Any] = {
        name: tuple(map(with_effective_views, getattr(roles, name))) for name in groups
    }
    return replace(roles, **parts, notes=tuple(dict.fromkeys((*roles.notes, *notes))))


def current_roles(model: nn.Module, roles: Roles) -> Roles:
    """Return roles that `find_roles` found earlier, with what the layers compute now."""
    with evaluating(model):
        return effective_roles(model, roles)


def effective_view(model: nn.Module, view: WeightView, owners: Collection[int]) -> WeightView:
    """Return the view of the weight that the layer computes with; `ConfigError` if quantised.

    This is ``view`` itself if the weight is stored, or computed by a parametrization or hook of
    torch. PEFT layers are recognised by ``base_layer``, others by `deviation`. If the layer is not
    linear, the view is that of the weight with its ``deviation`` set.
    """
    if isinstance(view, AdaptedView):
        return view
    if _is_packed(view.parameter):
        raise ConfigError(
            f"{view.parameter_name} is a {type(view.parameter).__name__}, a weight that is quantised or"
            " packed and cannot be read as a matrix; find roles on the model before it is quantised"
        )

    path = view.owner_path
    layers = list[Any]()
    while path.rpartition(".")[2] == BASE or path == BASE:
        path = path.rpartition(".")[0]
        layers.append(model.get_submodule(path))

    stacked = [candidate for candidate in layers if hasattr(candidate, "parameter_name")]
    if stacked:
        layers = [candidate for candidate in stacked if candidate.parameter_name == view.attribute]
    if layers:
        layer = layers[-1]
        return AdaptedView(**vars(view), layer=layer, is_called=is_called(model, path))
    if not is_called(model, view.owner_path):
        _refuse_stale(view)
        return replace(view, deviation=None)

    differs = deviation(model, view, owners)
    if differs is None:
        return replace(view, deviation=None)
    named = replace(view, deviation=differs.text)
    return AdaptedView(**vars(named), layer=differs.layer) if differs.is_linear else named


def _refuse_stale(view: WeightView) -> None:
    """Raise `ConfigError` for the weight of a layer whose hooks compute it before calls that never
    come."""
    last: Any = getattr(view.owner, view.attribute)
    if not view.is_computed or last.is_meta:
        return
    if not torch.equal(last.detach(), view.parameter.detach()):
        raise ConfigError(
            f"{view.owner_path} ({class_name(view.owner)}): torch's attention reads its weight without"
            " calling it, so its hook (weight_norm, spectral_norm or pruning) never runs again. Use"
            " torch.nn.utils.parametrizations, or make the weight permanent (prune.remove)"
        )


def _lost_by_merging(view: WeightView) -> Iterator[str]:
    """Yield a note on adapters over a weight that is computed, to which PEFT writes in vain."""
    if not isinstance(view, AdaptedView) or not hasattr(view.layer, "merge"):
        return
    if view.attribute in view.owner._parameters:
        return
    path = view.owner_path.removesuffix(f".{BASE}")
    sources = ", ".join(name.rpartition(f"{BASE}.")[2] for name in view.sources)
    computed = f"the weight below them is computed from {sources} at each call"
    remedy = "remove its parametrization or hook first, then merge"
    if getattr(view.layer, "merged", False):
        yield f"{path}: its merged adapters are lost, as {computed}. Unmerge; {remedy}"
    else:
        yield f"{path}: merging its adapters would lose them, as {computed}; {remedy}"


def is_stored(view: WeightView) -> bool:
    """Return whether a module stores the weight as a plain tensor, neither computed nor packed."""
    return not (view.is_computed or _is_packed(view.parameter))


def _is_packed(stored: Tensor) -> bool:
    return is_traceable_wrapper_subclass(stored) and not is_sharded(stored)


def _is_lora(layer: Any) -> bool:
    special = {**getattr(layer, "lora_variant", {})}
    special |= {name: 1 for name, dora in getattr(layer, "use_dora", {}).items() if dora}
    if not has_lora(layer) or BASE not in layer._modules:
        return False
    nested = BASE in layer._modules[BASE]._modules or "forward" in vars(layer)
    return not nested and special.keys().isdisjoint(_active(layer))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Call each adapted layer as the layer below its adapters, which has the same role."""
    with undoing() as undo:
        for layer in model.modules():
            base = layer._modules.get(BASE)
            if base is not None:
                undo.later(_restore_forward, vars(layer), vars(layer).get("forward"))
                layer.forward = base.__call__
        yield


def _restore_forward(attributes: dict[str, Any], forward: Any) -> None:
    attributes.pop("forward", None)
    attributes.update({"forward": forward} if forward is not None else {})


def has_lora(module: nn.Module) -> bool:
    """Return whether a module stores LoRA factors by adapter name, as PEFT's linear layers do."""
    factors = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    return all(isinstance(factor, nn.ModuleDict) for factor in factors)


def _active(layer: Any) -> list[str]:
    active = getattr(layer, "active_adapters", None)
    if active is None:
        return list(getattr(layer, "lora_A", ()))
    return [active] if isinstance(active, str) else list(active)
