"""The weight that a layer computes with: with its adapters, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wellposed.errors import ConfigError
from wellposed.linalg import is_sharded
from wellposed.roles._roles import AttentionRole, Roles
from wellposed.roles._views import BASE, WeightView
from wellposed.watch import evaluating, observing_paused, unmerges_when_called

_ROUNDING = 64
"""A layer may differ by this many eps from its matrix, relative to the norms of both factors."""


@dataclass(frozen=True)
class AdaptedView(WeightView):
    """The matrix that an adapted layer computes with in evaluation mode, without adapter dropout.

    LoRA (`closed`) is ``W + sum_a scale_a B_a A_a`` over the active adapters. Any other layer is
    called on the identity, which costs one product of its size. Adapters that are merged or
    switched off leave W. The gradient goes to whatever the layer trains.
    """

    layer: nn.Module = field(default_factory=nn.Module, repr=False, compare=False)
    is_called: bool = True
    """Whether the model calls the layer; `torch.nn.MultiheadAttention` reads a weight instead."""

    @property
    def closed(self) -> bool:
        """Whether the adapters that are active now add B A to the weight, and do nothing else."""
        layer = self.layer
        return layer is not self.owner and (self._is_of_parameter or _is_lora(layer))

    @property
    def is_computed(self) -> bool:
        """Whether the layer computes its weight from others: always."""
        return True

    @property
    def key(self) -> tuple[Any, ...]:
        """As `WeightView.key`; one weight under two adapters is two."""
        return (*super().key, id(self.layer))

    @property
    def is_idle(self) -> bool:
        """Whether the adapters are merged into the weight or switched off.

        Raises:
            ConfigError: they are both, so that the next call of the layer changes its weights.
        """
        if unmerges_when_called(self.layer):
            raise self._problem("its adapters are merged and switched off; call unmerge_adapter()")
        return any(getattr(self.layer, name, False) for name in ("merged", "disable_adapters"))

    @property
    def trainable(self) -> bool:
        """Whether W or what an active adapter adds to it receives a gradient."""
        if self.is_idle or super().trainable:
            return super().trainable
        if not self.closed or self._is_of_parameter:
            return any(parameter.requires_grad for parameter in self.layer.parameters())
        factors = (factor for a, b, _ in self._factors() for factor in (a, b))
        return any(factor.requires_grad for factor in factors)

    def tensor(self) -> Tensor:
        """Return the weight, shape ``shape``: a new tensor, part of the graph of what it is
        computed from.

        Raises:
            ConfigError: the layer computes no product with one matrix.
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
            return self.seen(self._called())
        if self._is_of_parameter:
            names = (name for name in _active(layer) if name in layer.lora_A)
            return self.seen(sum(map(layer.get_delta_weight, names), start=self.parameter))
        weight = super().tensor()
        for a, b, scale in self._factors():
            rows = replace(self, transposed=False).seen(b)
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
                a, b = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
                yield b.T, a.T, layer.scaling[name]

    def _called(self) -> Tensor:
        """Return the whole weight, as it is stored, from the layer's own outputs."""
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

    def _outputs(self, given: Tensor) -> Tensor:
        """Call the layer without its biases, whose size would cost digits."""
        named = self.layer.named_parameters()
        biases = {n: torch.zeros_like(p) for n, p in named if n.rpartition(".")[2] == "bias"}
        kind = given.device.type
        try:
            with evaluating(self.layer), observing_paused(), torch.autocast(kind, enabled=False):
                output = functional_call(self.layer, biases, (given,))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"called on an identity, it fails: {type(error).__name__}: {error!s:.200}"
            raise self._problem(reason) from error
        if not isinstance(output, Tensor):
            raise self._problem(f"it returns a {type(output).__name__}")
        return output

    def _problem(self, reason: str) -> ConfigError:
        path = self.owner_path.removesuffix(f".{BASE}")
        return ConfigError(
            f"{path} ({type(self.layer).__name__}): the weight it computes with cannot be read:"
            f" {reason}. Merge the adapters first (peft: model.merge_and_unload()), or leave this"
            " layer out"
        )


def effective_roles(model: nn.Module, roles: Roles) -> Roles:
    """Return the same roles with views of the weights that layers compute with."""

    def seen(part: Any) -> Any:
        views = {n: v for n, v in vars(part).items() if isinstance(v, WeightView)}
        changed: dict[str, Any] = {n: effective_view(model, view) for n, view in views.items()}
        if isinstance(part, AttentionRole):
            changed["further"] = tuple((n, effective_view(model, v)) for n, v in part.further)
        return replace(part, **changed)

    groups = ("attention", "feedforward", "embeddings", "loose")
    return replace(roles, **{name: tuple(map(seen, getattr(roles, name))) for name in groups})


def effective_view(model: nn.Module, view: WeightView) -> WeightView:
    """Return the view of the weight that the layer computes with: ``view`` itself if it is stored,
    or computed by a parametrization or a hook of torch.

    Layers that PEFT wraps are known by their ``base_layer``, other layers of low rank by a class
    of their own below `torch.nn.Linear`.

    Raises:
        ConfigError: the weight is quantised.
    """
    if isinstance(view, AdaptedView):
        return view
    if _is_packed(view.parameter):
        raise ConfigError(
            f"{view.parameter_name} is a {type(view.parameter).__name__}, a weight that is quantised or"
            " packed and cannot be read as a matrix; find roles on the model before it is quantised"
        )
    path, layers = view.owner_path, list[Any]()
    while path.rpartition(".")[2] == BASE or path == BASE:
        path = path.rpartition(".")[0]
        layers.append(model.get_submodule(path))
    stacked = [each for each in layers if hasattr(each, "parameter_name")]
    if stacked:
        layers = [each for each in stacked if each.parameter_name == view.attribute]
    if layers:
        layer = layers[-1]
        around = model.get_submodule(path.rpartition(".")[0])
        called = layer is around or not isinstance(around, nn.MultiheadAttention)
        return AdaptedView(**vars(view), layer=layer, is_called=called)
    return view if view.is_computed or is_stored(view) else _called_view(view)


def is_stored(view: WeightView) -> bool:
    """Tell whether a module computes with the very tensor that it stores under a name.

    A linear layer of a class of its own does if it has no other parameters or buffers, and gives
    the rows of its weight for unit vectors.
    """
    owner, stored = view.owner, view.parameter
    if view.is_computed or _is_packed(stored):
        return False
    if (
        not isinstance(owner, nn.Linear)
        or type(owner).forward is nn.Linear.forward
        or stored.is_meta
        or is_sharded(stored)
    ):
        return True
    names = {name for name, _ in (*owner.named_parameters(), *owner.named_buffers())}
    if names - {"weight", "bias"}:
        return False
    try:
        with torch.enable_grad():  # whether it is linear is looked at when it is read
            return torch.allclose(_called_view(view)._called(), stored, rtol=1e-3)
    except ConfigError:
        return True  # such as a router, which does more with the product


def _called_view(view: WeightView) -> AdaptedView:
    return AdaptedView(**vars(view), layer=view.owner)


def _is_packed(stored: Tensor) -> bool:
    return is_traceable_wrapper_subclass(stored) and not is_sharded(stored)


def _is_lora(layer: Any) -> bool:
    """Tell whether a layer adds B A to its weight, and does nothing else."""
    special = {**getattr(layer, "lora_variant", {})}
    special |= {name: 1 for name, dora in getattr(layer, "use_dora", {}).items() if dora}
    nested = BASE in layer._modules[BASE]._modules or "forward" in vars(layer)
    return has_lora(layer) and not nested and special.keys().isdisjoint(_active(layer))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let each adapted layer be called as the layer below its adapters, which plays the same role."""
    changed: list[tuple[dict[str, Any], Any]] = []
    try:
        for layer in model.modules():
            base = layer._modules.get(BASE)
            if base is not None:
                changed.append((vars(layer), vars(layer).get("forward")))
                layer.forward = base.__call__
        yield
    finally:
        for attributes, forward in changed:
            del attributes["forward"]
            attributes.update({"forward": forward} if forward is not None else {})


def has_lora(module: nn.Module) -> bool:
    """Tell whether a module holds LoRA factors by name of adapter, as PEFT's linear layers do."""
    factors = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    return all(isinstance(each, nn.ModuleDict) for each in factors)


def _active(layer: Any) -> list[str]:
    active = getattr(layer, "active_adapters", None)
    if active is None:
        return list(getattr(layer, "lora_A", ()))
    return [active] if isinstance(active, str) else list(active)
