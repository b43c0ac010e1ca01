"""Run a model once to see its roles, on a batch or on what its configuration says that it eats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from wellposed.roles._graph import Incomplete, roles_of
from wellposed.roles._roles import Roles
from wellposed.roles._trace import Tracer
from wellposed.watch import call_model, observing_paused, quiet_run

_TOKENS = 8
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Trace:
    """What one pass showed: roles, and the parameters that it read."""

    roles: Roles
    incomplete: tuple[Incomplete, ...]
    products: frozenset[str]
    """Names of the weights that products read as they are."""
    storages: frozenset[int]
    switched: bool

    def reached(self, parameter: Tensor) -> bool:
        """Tell whether the pass read a parameter."""
        return parameter.untyped_storage().data_ptr() in self.storages


def trace(model: nn.Module, batch: Any = None) -> Trace | None:
    """Return what one forward pass shows, on a batch of the model's own where none is given; None
    where nothing can be run."""
    inner = getattr(model, "_orig_mod", model)  # a compiled model keeps the original here
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    weights = [*model.parameters(), *model.buffers()]
    if any(type(each) not in _PLAIN or each.is_meta for each in weights):
        return None
    batch = own_batch(inner) if batch is None else batch
    if batch is None:
        return None
    first = _pass(model, inner, batch, forced=False)
    if not first.switched:
        return first
    second = _pass(model, inner, batch, forced=True)
    counts = [len(each.roles.attention) + len(each.roles.feedforward) for each in (first, second)]
    return second if counts[1] > counts[0] else first


def _pass(model: nn.Module, inner: nn.Module, batch: Any, *, forced: bool) -> Trace:
    tracer = Tracer(model, forced=forced)
    record = tracer.record
    eager = torch.compiler.set_stance("force_eager")
    with observing_paused(), quiet_run(model), torch.enable_grad(), eager:
        with (
            register_module_forward_pre_hook(tracer.entered),
            register_module_forward_hook(tracer.left),
            tracer,
        ):
            output = call_model(inner, tree_map_only(Tensor, tracer.given, batch))
        tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        roles, incomplete = roles_of(model, record, tensors)
        norms = [
            path
            for path, module in model.named_modules(remove_duplicate=False)
            if module in record.alike and _ignores_scale(module, record.alike[module])
        ]
    norms = [path for path in norms if not any(n.startswith(f"{path}.") for n in norms)]
    inline = [
        path
        for path, module in model.named_modules()
        if path not in norms and module in record.inline_norms
    ]
    roles = replace(roles, norms=tuple(norms), inline_norms=tuple(inline))
    return Trace(
        roles,
        tuple(incomplete),
        frozenset(product.view.parameter_name for product in record.products),
        frozenset(record.used),
        record.switched,
    )


@torch.no_grad()
def _ignores_scale(module: nn.Module, like: Tensor) -> bool:
    """Tell whether a module gives the same for large numbers, beside which no eps counts, and for
    twice these, and not for their negatives; every second is small, where activations bend."""
    given = 30 * torch.randn_like(like)
    given[..., ::2] *= 0.01
    once, twice, turned = (module(scale * given) for scale in (1, 2, -1))
    limit = 0.01 * once.abs().max()
    return bool((once - twice).abs().max() <= limit < (once - turned).abs().max())


def own_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a small batch for a model of transformers, from its configuration; None for other
    models."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return None
    config = config.get_text_config() if name == "input_ids" else config
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", 2)
        positions = getattr(config, "max_position_embeddings", None) or 0
        length = positions if 0 < positions < _TOKENS else _TOKENS
        # Small ids are often padding, of which transformers warns at either end.
        batch = {name: torch.arange(length).roll(length // 2)[None] % vocabulary}
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = (getattr(config, "num_channels", 3), config.image_size, config.image_size)
        batch = {name: torch.linspace(-1, 1, size[0] * size[1] ** 2).reshape(1, *size)}
    elif name == "input_values" and hasattr(config, "conv_stride"):
        length = _TOKENS
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            length = (length - 1) * stride + kernel
        batch = {name: torch.linspace(-1, 1, length)[None]}
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        batch = {name: torch.linspace(-1, 1, shape[1] * shape[2]).reshape(shape)}
    else:
        return None
    if type(model).__name__.endswith("PairClassification"):
        batch["input_ids_pair"] = batch["input_ids"]
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.arange(_TOKENS)[None] % getattr(config, "vocab_size", 2)
    dtype = next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32
    )
    return {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()
    }
