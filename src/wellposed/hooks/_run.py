"""Run a user's model on a batch and leave it as it was."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, WellposedError, is_about_resources, listed
from wellposed.hooks._attention_calls import Attends
from wellposed.hooks._recomputation import without_recomputation
from wellposed.hooks._torch_tools import class_name
from wellposed.interrupts import undoing
from wellposed.module_state import ModuleState, plain_tensors

ModuleKind = TypeVar("ModuleKind", bound=nn.Module)
_PADDING = {
    "key_padding_mask": "attention_mask",
    "src_key_padding_mask": "attention_mask",
    "tgt_key_padding_mask": "decoder_attention_mask",
}

_TOKENS = 8


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Clear every ``training`` flag, then restore them; ``eval`` may merge weights as well."""
    parts = (part for module in modules for part in module.modules() if part.training)
    if torch.compiler.is_compiling():
        yield
        return
    with undoing() as undo:
        for part in [*parts]:
            undo.set(part, "training", False)
        yield


@contextmanager
def quiet_run(model: nn.Module, *, evaluate: bool = True) -> Iterator[None]:
    """Run without gradients; training flags, buffers, tensors, random states are restored.

    Buffers and plain tensors are the same objects with the same shapes and values, and new ones are
    removed. Tables with a largest norm are restored, too. A Python counter, a list, or a layer that
    the pass makes is not. ``evaluate=False`` runs each module in its own mode.

    Raises:
        ConfigError: adapters that are merged and switched off; their next call would unmerge them.
    """
    restless = [path for path, part in model.named_modules() if unmerges_when_called(part)]
    if restless:
        raise ConfigError(
            "these adapters are merged and switched off, so that a call would change the weights; call"
            f" unmerge_adapter() or enable them:\n{listed(restless)}"
        )

    parts = list(model.modules())
    modes = {part: part.training for part in parts}
    renormed = (part for part in parts if getattr(part, "max_norm", None) is not None)
    state = ModuleState(parts, [part._parameters for part in renormed])
    counted = tuple(tensor for tensor in state.tensors if not tensor.is_inference())
    fast = torch.backends.mha.get_fastpath_enabled()
    # Values are restored bit for bit, so graphs that hold them stay valid.
    kept_versions = torch.autograd._unsafe_preserve_version_counter(counted)
    with kept_versions, undoing() as undo, ExitStack() as run:
        undo.later(_put_back, modes, state)
        undo.later(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)  # the fused layer hides its parts from hooks
        for context in (same_draws(), torch.inference_mode(False), torch.no_grad()):
            run.enter_context(context)
        run.enter_context(without_recomputation())
        run.enter_context(evaluating(*[model] if evaluate else []))
        yield


def _put_back(modes: Mapping[nn.Module, bool], state: ModuleState) -> None:
    for part, training in modes.items():
        part.training = training
    state.restore()


@contextmanager
def same_draws() -> Iterator[None]:
    """Restore the generators of torch, numpy and Python at the end."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    numpy = sys.modules.get("numpy")
    with undoing() as undo:
        undo.later(random.setstate, random.getstate())
        if numpy:
            undo.later(numpy.random.set_state, numpy.random.get_state())
        with torch.random.fork_rng(devices):
            yield


def unmerges_when_called(module: nn.Module) -> bool:
    """Return whether a call of an adapted layer changes its weights, as PEFT's do."""
    return all(getattr(module, name, False) is True for name in ("merged", "disable_adapters"))


def copied(module: ModuleKind) -> ModuleKind:
    """Return a deep copy with constants for tensors of a graph, which torch refuses to copy."""
    with undoing() as undo:
        for part in module.modules():
            tensors = plain_tensors(part)
            undo.later(vars(part).update, tensors)
            vars(part).update({name: value.detach() for name, value in tensors.items()})
        return copy.deepcopy(module)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, tensors moved to its device.

    Raises:
        ConfigError: the batch is none of the three, or the model fails on the listed arguments.
    """
    if isinstance(batch, str) or not isinstance(batch, (Mapping, Tensor, Sequence)):
        expected = "a tensor, a mapping of keyword arguments or a sequence of positional ones"
        raise ConfigError(f"batch: received {type(batch).__name__}; expected {expected}")

    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    named = batch if isinstance(batch, Mapping) else {}
    keywords = {str(name): _moved(value, device) for name, value in named.items()}
    sequence = [batch] if isinstance(batch, Tensor) else [] if keywords else batch
    arguments = [_moved(value, device) for value in sequence]
    try:
        return model(*arguments, **keywords)
    except (WellposedError, OSError, StopIteration):
        raise
    except Exception as error:
        if is_about_resources(error):
            raise
        passed = [*keywords.items(), *(("argument", value) for value in arguments)]
        received = [_described(name, value) for name, value in passed]
        problem = f"{class_name(model)} fails on the batch: {type(error).__name__}: {error}"
        raise ConfigError(f"{problem}; it was called with\n{listed(received)}") from error


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _described(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{name}: {type(value).__name__}"
    return f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating tensor of two or more dimensions in mappings and sequences."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.ndim >= 2 else None
    if isinstance(value, Mapping):
        value = list(value.values())
    parts = value if isinstance(value, (tuple, list)) else ()
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)


def real_tokens(batch: Any, stack: str | None, attention: Sequence[Attends]) -> Tensor | None:
    """Return the mask (batch, tokens) of a stack's real tokens; None if the batch has none."""
    if not isinstance(batch, Mapping):
        return None
    translating = any(role.kind == "cross" for role in attention)
    wanted = "decoder_attention_mask" if translating and stack == "decoder" else "attention_mask"
    mask = batch.get(wanted)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.bool()
    padding = (batch.get(name) for name, kind in _PADDING.items() if kind == wanted)
    return next((~mask.bool() for mask in padding if isinstance(mask, Tensor)), None)


def own_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a small batch for a model of transformers, by its config, or None."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return None

    config = config.get_text_config() if name == "input_ids" else config
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", 2)
        positions = getattr(config, "max_position_embeddings", None) or 0
        length = positions if 0 < positions < _TOKENS else _TOKENS
        length = getattr(config, "word_tokens", length)  # one word, if windows of words vote
        # Small ids are often padding; transformers warns of padding at either end.
        batch = {name: torch.arange(length).roll(length // 2)[None] % vocabulary}
        mark = getattr(config, "word_mark", None)
        if mark is not None:
            batch[name] = torch.nn.functional.pad(batch[name], (1, 0), value=mark)
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        channels = getattr(config, "num_channels", 3)
        side = config.image_size
        batch = {name: torch.linspace(-1, 1, channels * side**2).reshape(1, channels, side, side)}
    else:
        return None

    if type(model).__name__.endswith("PairClassification"):
        batch["input_ids_pair"] = batch["input_ids"]
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.arange(_TOKENS)[None] % getattr(config, "vocab_size", 2)

    dtypes = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    dtype = next(dtypes, torch.float32)
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
