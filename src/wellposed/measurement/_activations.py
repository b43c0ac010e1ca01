"""Run a model on a batch and measure what flows through it; the model is left as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.measurement._attention_statistics import AttentionStatistics
from wellposed.measurement._measurement import PER_HEAD
from wellposed.roles import AttentionRole, Roles
from wellposed.roles.layer_paths import shared_segments
from wellposed.watch import (
    AttentionCall,
    AttentionWatcher,
    call_model,
    first_tensor,
    quiet_run,
    real_tokens,
)


@dataclass(frozen=True)
class _Place:
    """A module whose output is measured."""

    path: str
    stack: str
    layer: int
    kind: str


def measure_activations(
    model: nn.Module, roles: Roles, batch: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per layer, attention and feed-forward module, and notes on what was not
    seen."""
    real = {stack: real_tokens(batch, stack, roles) for stack in ("encoder", "decoder")}
    places = _places(roles)
    norms: dict[str, list[Tensor]] = {place.path: [] for place in places}
    statistics = {role.path: AttentionStatistics() for role in roles.attention}

    def found(role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, _ in calls:
            statistics[role.path].add(call.weights(), real[role.stack])

    handles = [_note_norms(model, place, real[place.stack], norms[place.path]) for place in places]
    watcher = AttentionWatcher(model, roles.attention, found)
    try:
        with quiet_run(model):
            call_model(model, batch)
    finally:
        for handle in (*handles, watcher):
            handle.remove()
    rows = [_row(place, norms[place.path], statistics.get(place.path)) for place in places]
    return rows, _notes(rows, statistics)


def _row(
    place: _Place, norms: Sequence[Tensor], statistics: AttentionStatistics | None
) -> dict[str, Any]:
    values = torch.cat([item.flatten() for item in norms]) if norms else None
    seen = values is not None and values.numel() > 0
    heads = statistics.per_head() if statistics is not None else None
    return {
        "stack": place.stack,
        "layer": place.layer,
        "kind": place.kind,
        "path": place.path,
        "mean_norm": values.mean().item() if seen and values is not None else None,
        "max_norm": values.max().item() if seen and values is not None else None,
        **(heads or dict.fromkeys(PER_HEAD)),
    }


def _notes(
    rows: Sequence[Mapping[str, Any]], statistics: Mapping[str, AttentionStatistics]
) -> list[str]:
    silent = [row["path"] for row in rows if row["mean_norm"] is None]
    unseen = [
        path
        for path, found in statistics.items()
        if found.per_head() is None and path not in silent
    ]
    masked = sum(found.masked for found in statistics.values())
    notes = []
    if silent:
        notes.append(f"these modules gave no token vectors on this batch: {', '.join(silent)}")
    if unseen:
        notes.append(
            f"attention weights were not seen in {', '.join(unseen)}: a fused kernel computes them;"
            " load the model with attn_implementation='sdpa' or 'eager'"
        )
    if masked:
        notes.append(f"{masked} queries attend to no key at all and are left out of the entropy")
    return notes


def _places(roles: Roles) -> list[_Place]:
    found: dict[str, _Place] = {}
    for network in roles.feedforward:
        partners = [
            role
            for role in roles.attention
            if (role.stack, role.layer) == (network.stack, network.layer)
        ]
        if not partners:
            found[network.path] = _Place(network.path, network.stack, network.layer, "feedforward")
            continue
        nearest = max(partners, key=lambda role: len(shared_segments(role.path, network.path)))
        layer = ".".join(shared_segments(nearest.path, network.path))
        together = [
            role
            for role in partners
            if shared_segments(role.path, network.path)
            == shared_segments(nearest.path, network.path)
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
    return _Place(
        role.path, role.stack, role.layer, "attention" if role.kind == "self" else "cross_attention"
    )


def _note_norms(model: nn.Module, place: _Place, real: Tensor | None, norms: list[Tensor]) -> Any:
    module = model.get_submodule(place.path)
    sequence_first = any(
        not part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)
    )

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        tokens = first_tensor(output)
        if tokens is None:
            return
        lengths = torch.linalg.vector_norm(tokens.detach().float(), dim=-1)
        keep = real.T if real is not None and sequence_first else real
        norms.append(
            (lengths[keep] if keep is not None and keep.shape == lengths.shape else lengths).cpu()
        )

    return module.register_forward_hook(hook)
