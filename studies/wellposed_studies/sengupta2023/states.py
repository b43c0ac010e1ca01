"""Sengupta et al. (2023): activation factors, entropies and gates of trained models."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed_studies.recipe import Request
from wellposed_studies.sengupta2023.distances import Metric, activation_factors, hidden_states
from wellposed_studies.sengupta2023.entropy import layer_entropy

METRICS: tuple[Metric, ...] = ("euclidean", "cosine", "dot")
_BATCH = 16
_PAIRS = 500


@dataclass
class Layers:
    """Values per test sequence for layers 1..L; entropies also for the embedding (layer 0)."""

    factors: dict[str, list[list[float]]] = field(default_factory=dict)
    """By metric, per layer: mean ratio of each sequence (equation 5 without its outer mean)."""
    entropies: list[list[float]] = field(default_factory=list)
    """Per state 0..L: mean over tokens (equation 6) of each batch, in nats."""

    def median_factor(self, metric: str = "euclidean", layer: int = -1) -> float:
        """Return the median over sequences at a layer (default: the last)."""
        return quantile(self.factors[metric][layer], 0.5)

    def entropy(self) -> float:
        return statistics.fmean(map(statistics.fmean, self.entropies[1:]))


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation, or -inf if the lower neighbour is -inf.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([-math.inf, -math.inf, 2.0], 0.6)
    (2.0, -inf)
    """
    low, high = (float(np.quantile(values, share, method=method)) for method in ("lower", "higher"))
    return low if low == high or math.isinf(low) else float(np.quantile(values, share))


def probe_batches(request: Request, task: Any) -> list[dict[str, Tensor]]:
    """Return batches, without labels, of test examples of at least two tokens, by a fixed seed."""
    count = request.pick(toy=6, mini=64, medium=256, paper=1000)
    examples = task.dataset("test")
    lengths = task.lengths("test")
    usable = [index for index in range(len(examples)) if lengths[index] > 1]
    chosen = sorted(
        random.Random("probe").sample(usable, min(count, len(usable))), key=lambda i: -lengths[i]
    )
    batches = []
    for start in range(0, len(chosen), _BATCH):
        batch = task.collate([examples[i] for i in chosen[start : start + _BATCH]])
        batches.append({name: batch[name] for name in ("input_ids", "attention_mask")})
    return batches


def measure_layers(model: Any, batches: Sequence[dict[str, Tensor]]) -> Layers:
    """Return activation factors (up to 500 pairs a sequence) and nearest-neighbour entropies."""
    layers = Layers()
    for batch in batches:
        states = hidden_states(model.base_model, batch)
        mask = batch["attention_mask"]
        pairs = None if mask.shape[1] ** 2 <= _PAIRS else _PAIRS
        for metric in METRICS:
            factors = activation_factors(states, mask, metric=metric, pairs=pairs)
            _extend(layers.factors.setdefault(metric, []), factors)
        _extend(layers.entropies, layer_entropy(states, mask).tolist())
    return layers


def _extend(target: list[list[float]], rows: Sequence[Sequence[float]]) -> None:
    if not target:
        target.extend([] for _ in rows)
    for values, row in zip(target, rows, strict=True):
        values.extend(row)


def part_entropies(model: Any, batches: Sequence[dict[str, Tensor]]) -> list[list[float]]:
    """Return per layer the entropy, in nats, of each head's or expert's output (figure 3b)."""
    body = model.base_model
    is_transject = hasattr(body, "stack")
    layers = _layers(body)
    totals: list[list[list[float]]] = [[] for _ in layers]
    for batch in batches:
        with _watched_parts(layers, experts=is_transject) as outputs, torch.no_grad():
            body(**batch)
        for index, parts in enumerate(outputs):
            heads = len(parts) if is_transject else layers[index].attention.num_heads
            entropy = layer_entropy([torch.cat(parts, -1)], batch["attention_mask"], heads)
            totals[index].append(entropy.tolist()[0])
    return [[statistics.fmean(column) for column in zip(*rows, strict=True)] for rows in totals]


def _layers(body: Any) -> list[Any]:
    return list(body.stack.layers if hasattr(body, "stack") else body.layers)


@contextmanager
def _watched_parts(layers: Sequence[Any], *, experts: bool) -> Iterator[list[list[Tensor]]]:
    """Collect, per layer, the outputs of experts, or the heads' inputs to the output projection."""
    outputs: list[list[Tensor]] = [[] for _ in layers]
    handles = []
    for parts, layer in zip(outputs, layers, strict=True):
        if experts:
            handles += [
                expert.register_forward_hook(
                    lambda _module, _args, out, parts=parts: parts.append(out.detach())
                )
                for expert in layer.attention.experts
            ]
        else:
            handles.append(
                layer.attention.o_proj.register_forward_pre_hook(
                    lambda _module, args, parts=parts: parts.append(args[0].detach())
                )
            )

    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def gate_weights(model: Any, batches: Sequence[dict[str, Tensor]]) -> list[list[list[float]]]:
    """Return for each layer the expert weights of each sequence (figure 7)."""
    body = model.base_model
    rows: list[list[list[float]]] = []
    with torch.no_grad():
        for batch in batches:
            gates = body(**batch).gates
            rows = rows or [[] for _ in gates]
            for weights, gate in zip(rows, gates, strict=True):
                weights.extend(gate.reshape(-1, gate.shape[-1]).tolist())
    return rows


def residual_weights(model: Any) -> list[float]:
    """Return ``alpha_l``, the residual weight of each layer before division by L (figure 5)."""
    layers = _layers(model.base_model)
    return [float(layer.residual.scale().detach()) * len(layers) for layer in layers]
