"""Run a model on a batch and measure its activations; the model is left as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wellposed import hooks
from wellposed.functional import attention_entropy, softmax_sensitivity
from wellposed.interrupts import undoing
from wellposed.measurement._measurement import PER_HEAD
from wellposed.measurement._stacks import transferred
from wellposed.roles import AttentionRole, Roles, distinct_paths, shared_segments


class _Point(NamedTuple):
    """A module whose output is measured; ``path`` is unique even if it holds several attentions."""

    stack: str
    layer: int
    kind: str
    path: str
    module: str


def measure_activations(
    model: nn.Module, roles: Roles, batch: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return one row per layer, attention and feed-forward module, and notes on unseen ones."""
    real = {
        stack: hooks.real_tokens(batch, stack, roles.attention) for stack in ("encoder", "decoder")
    }
    points = _points(roles)
    names = {id(role): path for path, role in distinct_paths(roles.attention).items()}
    sums: list[tuple[str, Tensor]] = []
    called: set[str] = set()

    def attended(role: AttentionRole, calls: Sequence[tuple[hooks.AttentionCall, Tensor]]) -> None:
        for call, _ in calls:
            numbers = _of_heads(call.weights(), real[role.stack])
            sums.append((f"{names[id(role)]} heads", numbers))

    def returned(point: _Point, module: nn.Module, _: Any, output: Any) -> None:
        tokens = hooks.first_tensor(output)
        if tokens is not None:
            parts = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
            turned = not all(part.batch_first for part in parts)
            sums.append((point.path, _of_tokens(tokens, real[point.stack], turned=turned)))

    with undoing() as undo:
        undo.hook(hooks.AttentionWatcher, model, roles.attention, attended)
        for point in points:
            hook = hooks.ObservingHook(returned, point)
            undo.hook(model.get_submodule(point.module).register_forward_hook, hook)
        for path, module in model.named_modules():
            hook = hooks.ObservingHook(lambda path, *_: called.add(path), path)
            undo.hook(module.register_forward_hook, hook)
        with hooks.quiet_run(model):
            hooks.call_model(model, batch)
    passes: dict[str, list[Tensor]] = defaultdict(list)
    for (name, _), numbers in zip(sums, transferred([tensor for _, tensor in sums]), strict=True):
        passes[name].append(numbers)
    rows = [_row(point, passes[point.path], passes[f"{point.path} heads"]) for point in points]
    masked = sum(int(t[-1].amax()) for name in passes for t in passes[name] if t.ndim > 1)
    past = hooks.run_past_hooks([point.module for point in points], called)
    return rows, _notes(rows, masked, past)


def _of_tokens(tokens: Tensor, real: Tensor | None, *, turned: bool) -> Tensor:
    """Return the number of real tokens, the sum of their norms and the largest."""
    lengths = torch.linalg.vector_norm(tokens.detach().float(), dim=-1)
    keep = real.T if real is not None and turned else real
    if keep is None or keep.shape != lengths.shape:
        keep = torch.ones_like(lengths, dtype=torch.bool)
    lengths = lengths.where(keep, 0.0)
    return torch.stack([keep.sum(), lengths.sum(), lengths.amax()])


def _of_heads(probabilities: Tensor, real: Tensor | None) -> Tensor:
    """Sum entropy, sensitivity, err_orth by head; count queries, examples, queries without a
    key."""
    attends = probabilities.isfinite().all(-1).all(1)
    keep = real if real is not None and real.shape == attends.shape else attends | True
    masked = keep & ~attends
    keep = keep & attends
    rows = probabilities.where(keep[:, None, :, None], 0.0)
    sums = [measure(rows).sum((0, 2)) for measure in (attention_entropy, softmax_sensitivity)]
    counts = (keep.sum(), keep.any(1).sum(), masked.sum())
    return torch.stack(
        [*sums, _orthogonality_errors(rows), *(n.expand_as(sums[0]) for n in counts)]
    )


def _row(point: _Point, tokens: Sequence[Tensor], heads: Sequence[Tensor]) -> dict[str, Any]:
    row: dict[str, Any] = point._asdict()
    del row["module"]
    count, total, largest = torch.stack([*tokens, torch.zeros(3)]).double().unbind(-1)
    is_seen = bool(count.sum() > 0)
    row["mean_norm"] = (total.sum() / count.sum()).item() if is_seen else None
    row["max_norm"] = largest.amax().item() if is_seen else None
    row |= dict.fromkeys(PER_HEAD)
    sums = torch.stack([*heads]).sum(0) if heads else None
    if sums is not None and sums[3].any():
        means = sums[:3] / sums[[3, 3, 4]]
        row |= zip(PER_HEAD, means.tolist(), strict=True)
    return row


def _notes(rows: Sequence[Mapping[str, Any]], masked: int, past: Sequence[str]) -> list[str]:
    silent = [row["path"] for row in rows if row["mean_norm"] is None and row["path"] not in past]
    attends = [row for row in rows if row["kind"].endswith("attention")]
    without = [row["path"] for row in attends if row["attention_entropy"] is None]
    unseen = [path for path in without if path not in (*silent, *past)]
    notes = []
    if silent:
        notes.append(f"these modules gave no token vectors on this batch: {', '.join(silent)}")
    if past:
        notes.append(f"not seen: {', '.join(dict.fromkeys(past))}; {hooks.PAST_HOOKS}")

    if unseen:
        notes.append(
            f"attention weights were not seen in {', '.join(unseen)}: a fused kernel computes them;"
            " load the model with attn_implementation='sdpa' or 'eager'"
        )

    if masked:
        notes.append(f"{masked} queries attend to no key at all and are left out of the entropy")
    return notes


def _points(roles: Roles) -> list[_Point]:
    """Return each layer, attention and feed-forward module once; a layer is their common path."""
    attention: dict[str, _Point] = {}
    for path, role in distinct_paths(roles.attention).items():
        kind = "attention" if role.kind == "self" else "cross_attention"
        attention[path] = _Point(role.stack, role.layer, kind, path, role.path)

    points: dict[str, _Point] = {}
    for network in roles.feedforward:
        stack = network.stack
        number = network.layer
        same_number = [point for point in attention.values() if point[:2] == (stack, number)]
        layers = [".".join(shared_segments(point.module, network.path)) for point in same_number]
        layer = max(layers, key=len, default=None)
        near = zip(same_number, layers, strict=True)
        points |= {point.path: point for point, path in near if path == layer}
        if network.path != layer:
            points[network.path] = _Point(stack, number, "feedforward", network.path, network.path)
        if layer is not None:
            points[layer] = _Point(stack, number, "layer", layer, layer)

    for path, point in attention.items():
        points.setdefault(path, point)
    return [*points.values()]


def _orthogonality_errors(rows: Tensor) -> Tensor:
    """Sum ``max |(A A^T)_ij|`` (McGrath, 2024, eq. 3) by head, one example at a time."""
    total = rows.new_zeros(rows.shape[1], dtype=torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        for matrices in rows.to(torch.promote_types(rows.dtype, torch.float32)):
            gram = matrices @ matrices.mT
            gram.diagonal(dim1=-2, dim2=-1).zero_()
            total = total + gram.amax((-2, -1))
    return total
