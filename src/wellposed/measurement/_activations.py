"""Run a model on a batch and measure what flows through it; the model is left as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.functional import attention_entropy, softmax_sensitivity
from wellposed.measurement._measurement import PER_HEAD
from wellposed.roles import AttentionRole, FeedForwardRole, Roles
from wellposed.roles.layer_paths import shared_segments
from wellposed.watch import (
    AttentionCall,
    AttentionWatcher,
    call_model,
    first_tensor,
    quiet_run,
    real_tokens,
)


class AttentionStatistics:
    """Entropy and sensitivity of every query, err_orth of every example, by head of one module."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {name: [] for name in PER_HEAD}
        self.masked = 0

    def add(self, probabilities: Tensor, real: Tensor | None) -> None:
        """Add weights ``(batch, heads, queries, keys)``; ``real`` (batch, queries) leaves out
        padded queries."""
        attends = probabilities.isfinite().all(-1).all(1)
        keep = real if real is not None and real.shape == attends.shape else attends | True
        self.masked += int((keep & ~attends).sum())
        keep = keep & attends
        if keep.any():
            entropy, sensitivity = (
                attention_entropy(probabilities),
                softmax_sensitivity(probabilities),
            )
            by_query = [each.transpose(1, 2)[keep] for each in (entropy, sensitivity)]
            errors = _orthogonality_errors(probabilities, keep)
            for name, values in zip(PER_HEAD, (*by_query, errors), strict=True):
                self.found[name].append(values.double().cpu())

    def per_head(self) -> dict[str, list[float]] | None:
        """Return the means per head by the names of a row, or None where no attention was seen."""
        if not all(self.found.values()):
            return None
        return {name: torch.cat(values).mean(0).tolist() for name, values in self.found.items()}


@dataclass
class _Place:
    """A module whose output is measured, and what was seen of it."""

    path: str
    stack: str
    layer: int
    kind: str
    norms: list[Tensor] = field(default_factory=list)
    statistics: AttentionStatistics = field(default_factory=AttentionStatistics)

    def row(self) -> dict[str, Any]:
        values = (
            torch.cat([item.flatten() for item in self.norms]) if self.norms else torch.empty(0)
        )
        return {
            "stack": self.stack,
            "layer": self.layer,
            "kind": self.kind,
            "path": self.path,
            "mean_norm": values.mean().item() if len(values) else None,
            "max_norm": values.max().item() if len(values) else None,
            **(self.statistics.per_head() or dict.fromkeys(PER_HEAD)),
        }


def measure_activations(
    model: nn.Module, roles: Roles, batch: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per layer, attention and feed-forward module, and notes on what was not
    seen."""
    real = {stack: real_tokens(batch, stack, roles.attention) for stack in ("encoder", "decoder")}
    places = _places(roles)

    def found(role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, _ in calls:
            places[role.path].statistics.add(call.weights(), real[role.stack])

    handles = [_note_norms(model, place, real[place.stack]) for place in places.values()]
    watcher = AttentionWatcher(model, roles.attention, found)
    try:
        with quiet_run(model):
            call_model(model, batch)
    finally:
        for handle in (*handles, watcher):
            handle.remove()
    rows = [place.row() for place in places.values()]
    return rows, _notes(rows, places)


def _notes(rows: Sequence[Mapping[str, Any]], places: Mapping[str, _Place]) -> list[str]:
    silent = [row["path"] for row in rows if row["mean_norm"] is None]
    unseen = [
        row["path"]
        for row in rows
        if row["kind"].endswith("attention")
        and row["attention_entropy"] is None
        and row["path"] not in silent
    ]
    masked = sum(place.statistics.masked for place in places.values())
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


def _places(roles: Roles) -> dict[str, _Place]:
    """Return every layer, its attention and its feed-forward module, each once.

    A layer is what attention and feed-forward network of one number have in common in their paths.
    """
    found: dict[str, _Place] = {}

    def note(path: str, role: AttentionRole | FeedForwardRole, kind: str) -> None:
        found.setdefault(path, _Place(path, role.stack, role.layer, kind))

    def note_attention(role: AttentionRole) -> None:
        note(role.path, role, "attention" if role.kind == "self" else "cross_attention")

    for network in roles.feedforward:
        beside: dict[str, list[AttentionRole]] = {}
        for role in roles.attention:
            if (role.stack, role.layer) == (network.stack, network.layer):
                beside.setdefault(".".join(shared_segments(role.path, network.path)), []).append(
                    role
                )
        layer = max(beside, key=len, default=None)
        for role in beside.get(layer or "", []):
            note_attention(role)
        if network.path != layer:
            note(network.path, network, "feedforward")
        if layer is not None:
            found[layer] = _Place(layer, network.stack, network.layer, "layer")
    for role in roles.attention:
        note_attention(role)
    return found


def _note_norms(model: nn.Module, place: _Place, real: Tensor | None) -> Any:
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
        if keep is not None and keep.shape == lengths.shape:
            lengths = lengths[keep]
        place.norms.append(lengths.cpu())

    return module.register_forward_hook(hook)


def _orthogonality_errors(probabilities: Tensor, keep: Tensor) -> Tensor:
    """Return ``max |(A A^T)_ij|`` over queries i != j marked in ``keep`` (batch, queries), per
    example that has any, and head.

    McGrath (2024, eq. 3). One example at a time, so that one more N x N matrix per head is held,
    not a batch of them.
    """
    errors: list[Tensor] = []
    with torch.autocast(probabilities.device.type, enabled=False):
        for matrices, real in zip(probabilities, keep, strict=True):
            if real.any():
                rows = matrices[:, real].to(torch.promote_types(matrices.dtype, torch.float32))
                gram = rows @ rows.mT
                gram.diagonal(dim1=-2, dim2=-1).zero_()
                errors.append(gram.abs().amax((-2, -1)))
    return torch.stack(errors)
