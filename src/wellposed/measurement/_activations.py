"""Run a model on a batch and measure what flows through it; the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.measurement._capture import AttentionCapture
from wellposed.measurement._measurement import PER_HEAD
from wellposed.roles import AttentionRole, Roles


@dataclass(frozen=True)
class _Place:
    """A module whose output is measured."""

    path: str
    stack: str
    layer: int
    kind: str


def measure_activations(model: nn.Module, roles: Roles, batch: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per layer, attention and feed-forward module, and notes on what was not seen."""
    masks = _real_tokens(batch)
    attention = {role.path: role for role in roles.attention}
    places = _places(roles)
    norms: dict[str, list[Tensor]] = {place.path: [] for place in places}

    def real(path: str) -> Tensor | None:
        return masks[_side(attention[path].stack, roles)] if path in attention else None

    handles = [_watch(model, place, masks[_side(place.stack, roles)], norms[place.path]) for place in places]
    capture = AttentionCapture(model, attention, real)
    try:
        with undisturbed(model), capture:
            _call(model, batch)
    finally:
        capture.remove()
        for handle in handles:
            handle.remove()
    rows = [_row(place, norms[place.path], capture) for place in places]
    return rows, _notes(rows, capture)


def _row(place: _Place, norms: Sequence[Tensor], capture: AttentionCapture) -> dict[str, Any]:
    values = torch.cat([item.flatten() for item in norms]) if norms else None
    seen = values is not None and values.numel() > 0
    heads = capture.statistics[place.path].per_head() if place.path in capture.statistics else None
    return {
        "stack": place.stack,
        "layer": place.layer,
        "kind": place.kind,
        "path": place.path,
        "mean_norm": values.mean().item() if seen and values is not None else None,
        "max_norm": values.max().item() if seen and values is not None else None,
        **(heads or dict.fromkeys(PER_HEAD)),
    }


def _notes(rows: Sequence[Mapping[str, Any]], capture: AttentionCapture) -> list[str]:
    silent = [row["path"] for row in rows if row["mean_norm"] is None]
    unseen = [path for path, found in capture.statistics.items() if found.per_head() is None and path not in silent]
    masked = sum(found.masked for found in capture.statistics.values())
    notes = []
    if silent:
        notes.append(f"these modules gave no token vectors on this batch: {', '.join(silent)}")
    if unseen:
        notes.append(
            f"attention weights were not seen in {', '.join(unseen)}: a fused kernel computes them; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    if masked:
        notes.append(f"{masked} queries attend to no key at all and are left out of the entropy")
    return notes


def _places(roles: Roles) -> list[_Place]:
    found: dict[str, _Place] = {}
    for network in roles.feedforward:
        partners = [role for role in roles.attention if (role.stack, role.layer) == (network.stack, network.layer)]
        if not partners:
            found[network.path] = _Place(network.path, network.stack, network.layer, "feedforward")
            continue
        nearest = max(partners, key=lambda role: len(_common(role.path, network.path)))
        layer = ".".join(_common(nearest.path, network.path))
        together = [
            role for role in partners if _common(role.path, network.path) == _common(nearest.path, network.path)
        ]
        for role in together:
            found.setdefault(role.path, _attention_place(role))
        if network.path != layer:
            found[network.path] = _Place(network.path, network.stack, network.layer, "feedforward")
        found[layer] = _Place(layer, network.stack, network.layer, "layer")
    for role in roles.attention:
        found.setdefault(role.path, _attention_place(role))
    return list(found.values())


def _attention_place(role: AttentionRole) -> _Place:
    return _Place(role.path, role.stack, role.layer, "attention" if role.kind == "self" else "cross_attention")


def _common(first: str, second: str) -> list[str]:
    """Leading path segments two modules share."""
    shared = []
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return shared


def _watch(model: nn.Module, place: _Place, real: Tensor | None, norms: list[Tensor]) -> Any:
    module = model.get_submodule(place.path)
    sequence_first = any(not part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention))

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        tokens = _first_tensor(output)
        if tokens is None:
            return
        lengths = torch.linalg.vector_norm(tokens.detach().float(), dim=-1)
        keep = real.T if real is not None and sequence_first else real
        norms.append((lengths[keep] if keep is not None and keep.shape == lengths.shape else lengths).cpu())

    return module.register_forward_hook(hook)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.ndim >= 2 and output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)) and output:
        return _first_tensor(output[0])
    return None


def _side(stack: str, roles: Roles) -> str:
    """Which attention mask of the batch tells the real tokens of a stack."""
    translating = any(role.kind == "cross" for role in roles.attention)
    return "decoder_attention_mask" if translating and stack == "decoder" else "attention_mask"


def _real_tokens(batch: Any) -> dict[str, Tensor | None]:
    """Boolean (batch, tokens), True for real tokens, from the masks of the batch; None where there is none."""
    masks: dict[str, Tensor | None] = {"attention_mask": None, "decoder_attention_mask": None}
    if not isinstance(batch, Mapping):
        return masks
    for name in masks:
        if isinstance(batch.get(name), Tensor) and batch[name].ndim == 2:
            masks[name] = batch[name].bool()
    for name in ("key_padding_mask", "src_key_padding_mask"):
        if isinstance(batch.get(name), Tensor) and batch[name].dtype == torch.bool:
            masks["attention_mask"] = ~batch[name]
    if isinstance(batch.get("tgt_key_padding_mask"), Tensor):
        masks["decoder_attention_mask"] = ~batch["tgt_key_padding_mask"].bool()
    return masks


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradient, and the random state and training flags put back afterwards."""
    flags = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        for module, training in flags.items():
            module.training = training


def _call(model: nn.Module, batch: Any) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        model(move(batch))
    elif isinstance(batch, Mapping):
        model(**{str(name): move(value) for name, value in batch.items()})
    elif isinstance(batch, (tuple, list)):
        model(*(move(value) for value in batch))
    else:
        raise ConfigError(
            f"a batch is a tensor, a tuple of arguments or a mapping of keywords; received {type(batch).__name__}"
        )
