"""Run a model on a batch and measure what flows through it; the model is left as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellposed import watch
from wellposed.functional import attention_entropy, softmax_sensitivity
from wellposed.measurement._measurement import PER_HEAD
from wellposed.roles import AttentionRole, FeedForwardRole, Roles, distinct_paths, shared_segments


@dataclass
class _Place:
    """A module whose output is measured, and what was seen of it: the norms of its tokens, and where
    it attends, entropy and sensitivity of every query and err_orth of every example, by head."""

    stack: str
    layer: int
    kind: str
    path: str
    module: str
    norms: list[Tensor] = field(default_factory=list)
    by_head: list[tuple[Tensor, ...]] = field(default_factory=list)
    masked: int = 0

    def add(self, probabilities: Tensor, real: Tensor | None) -> None:
        """Add weights ``(batch, heads, queries, keys)``; ``real`` (batch, queries) leaves out
        padded queries."""
        attends = probabilities.isfinite().all(-1).all(1)
        keep = real if real is not None and real.shape == attends.shape else attends | True
        self.masked += int((keep & ~attends).sum())
        keep = keep & attends
        if keep.any():
            measures = (attention_entropy, softmax_sensitivity)
            by_query = [measure(probabilities).transpose(1, 2)[keep] for measure in measures]
            found = (*by_query, _orthogonality_errors(probabilities, keep))
            self.by_head.append(tuple(values.double().cpu() for values in found))

    def row(self) -> dict[str, Any]:
        norms = torch.cat(self.norms) if self.norms else torch.empty(0)
        means = [torch.cat(values).mean(0).tolist() for values in zip(*self.by_head, strict=True)]
        return {
            **{name: getattr(self, name) for name in ("stack", "layer", "kind", "path")},
            "mean_norm": norms.mean().item() if len(norms) else None,
            "max_norm": norms.max().item() if len(norms) else None,
            **dict(zip(PER_HEAD, means or [None] * len(PER_HEAD), strict=True)),
        }


def measure_activations(
    model: nn.Module, roles: Roles, batch: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per layer, attention and feed-forward module, and notes on what was not
    seen."""
    real = {
        stack: watch.real_tokens(batch, stack, roles.attention) for stack in ("encoder", "decoder")
    }
    places = _places(roles)
    names = {id(role): path for path, role in distinct_paths(roles.attention).items()}

    def found(role: AttentionRole, calls: Sequence[tuple[watch.AttentionCall, Tensor]]) -> None:
        for call, _ in calls:
            places[names[id(role)]].add(call.weights(), real[role.stack])

    handles = [_note_norms(model, place, real[place.stack]) for place in places.values()]
    watcher = watch.AttentionWatcher(model, roles.attention, found)
    try:
        with watch.quiet_run(model):
            watch.call_model(model, batch)
    finally:
        for handle in (*handles, watcher):
            handle.remove()
    rows = [place.row() for place in places.values()]
    return rows, _notes(rows, places)


def _notes(rows: Sequence[Mapping[str, Any]], places: Mapping[str, _Place]) -> list[str]:
    silent = [row["path"] for row in rows if row["mean_norm"] is None]
    attends = [row for row in rows if row["kind"].endswith("attention")]
    without = [row["path"] for row in attends if row["attention_entropy"] is None]
    unseen = [path for path in without if path not in silent]
    masked = sum(place.masked for place in places.values())
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
    kinds = {"self": "attention", "cross": "cross_attention"}

    names = {id(role): path for path, role in distinct_paths(roles.attention).items()}

    def note(role: AttentionRole | FeedForwardRole) -> None:
        kind = kinds[role.kind] if isinstance(role, AttentionRole) else "feedforward"
        path = names.get(id(role), role.path)
        found.setdefault(path, _Place(role.stack, role.layer, kind, path, role.path))

    for network in roles.feedforward:
        beside: dict[str, list[AttentionRole]] = {}
        for role in roles.attention:
            if (role.stack, role.layer) == (network.stack, network.layer):
                shared = ".".join(shared_segments(role.path, network.path))
                beside.setdefault(shared, []).append(role)
        layer = max(beside, key=len, default=None)
        for role in beside.get(layer or "", []):
            note(role)
        if network.path != layer:
            note(network)
        if layer is not None:
            found[layer] = _Place(network.stack, network.layer, "layer", layer, layer)
    for role in roles.attention:
        note(role)
    return found


def _note_norms(model: nn.Module, place: _Place, real: Tensor | None) -> Any:
    module = model.get_submodule(place.module)
    sequence_first = any(
        not part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)
    )

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        tokens = watch.first_tensor(output)
        if tokens is None:
            return
        lengths = torch.linalg.vector_norm(tokens.detach().float(), dim=-1)
        keep = real.T if real is not None and sequence_first else real
        if keep is not None and keep.shape == lengths.shape:
            lengths = lengths[keep]
        place.norms.append(lengths.flatten().cpu())

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
