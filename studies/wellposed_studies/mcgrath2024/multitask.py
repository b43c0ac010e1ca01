"""One encoder and three heads trained on sentiment, paraphrase and similarity together (McGrath
2024, sec. 4.1)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.errors import ConvergenceError
from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty
from wellposed.training.loop.batches import to_device
from wellposed.training.loop.build import decay_groups, set_learning_rate
from wellposed_studies.mcgrath2024.encoders import (
    EncodedSets,
    MultiTaskModel,
    batch_of,
    build_multitask_model,
)
from wellposed_studies.mcgrath2024.multitask_options import SETS, MultiTaskOptions, overall_score

WARMUP_SHARE = 0.1
PROBE_ROWS = 16
ERROR, SCALE_FREE_ERROR = "/orthogonality_error", "/scale_free_orthogonality_error"


def task_loss(
    name: str, logits: Tensor, labels: Tensor, *, sts_loss: str = "squared_error"
) -> Tensor:
    """Return the mean loss of one set.

    sst: cross entropy of five classes. para: binary cross entropy. sts: ``squared_error``, the mean
    of ``(5 sigmoid(z) - y)^2``; or ``cosine``, ``1 - cos(z, y)`` with z and y the batch's outputs
    and scores as vectors. McGrath (2024, sec. 4.1) prints "cosine embedding loss on the output
    node"; of one number the cosine is +1 or -1 and has no gradient, so the vector over the batch is
    the reading that trains.
    """
    if name == "sst":
        return F.cross_entropy(logits, labels.long())
    output = logits.squeeze(-1)
    if name == "para":
        return F.binary_cross_entropy_with_logits(output, labels)
    if sts_loss == "cosine":
        return 1 - F.cosine_similarity(output, labels, dim=0)
    return F.mse_loss(5 * output.sigmoid(), labels)


def endless_batches(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of row numbers: every row once per pass, each pass in a new order decided by
    ``seed`` alone."""
    draw = torch.Generator().manual_seed(seed)
    size = min(batch_size, count)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=draw).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


@torch.no_grad()
def evaluate(
    model: MultiTaskModel, sets: EncodedSets, *, batch_size: int = 128
) -> dict[str, float]:
    """Return accuracy of sst and para, Pearson's r of sts, and `overall_score`, on all valid rows.

    r of a constant output, which is not defined, is given as 0: it orders nothing.
    """
    model.eval()
    device = next(model.parameters()).device
    scores: dict[str, float] = {}
    for name, rows in sets.valid.items():
        order = sorted(range(len(rows)), key=lambda index: len(rows.columns["input_ids"][index]))
        outputs, labels = [], []
        for start in range(0, len(order), batch_size):
            columns, wanted = batch_of(
                rows, order[start : start + batch_size], sets.tokenizer.pad_token_id
            )
            outputs.append(model(name, to_device(columns, device)).float().cpu())
            labels.append(wanted)
        scores[name] = _score(name, torch.cat(outputs), torch.cat(labels))
    return {**scores, "overall": overall_score(scores)}


def _score(name: str, logits: Tensor, labels: Tensor) -> float:
    if name == "sst":
        return (logits.argmax(-1) == labels.long()).double().mean().item()
    if name == "para":
        return ((logits.squeeze(-1) > 0) == labels.bool()).double().mean().item()
    return pearson(logits.squeeze(-1), labels)


def pearson(found: Tensor, wanted: Tensor) -> float:
    """Return Pearson's r; 0 where one of them is constant."""
    try:
        return statistics.correlation(found.tolist(), wanted.tolist())
    except statistics.StatisticsError:
        return 0.0


def train_multitask(
    sets: EncodedSets,
    options: MultiTaskOptions,
    *,
    penalty: Mapping[str, Any] | None = None,
    seed: int = 0,
    check: Callable[[int], None] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Minimise ``loss_sst + loss_para + loss_sts + penalty`` and return scores, losses and
    orthogonality over time.

    Status: deterministic on a CPU: ``seed`` decides the weights, the batches and dropout, so two
    penalties with one seed start at the same weights and see the same rows in the same order.
    Source: McGrath (2024, sec. 4.1 and 4.2).

    Args:
        sets: from `encode_sets`.
        options: of the model and its training.
        penalty: keywords of `wellposed.OrthogonalityPenalty`; None is the baseline.
        seed: of this run.
        check: called with the number of steps done before each step; may raise to stop.
        device: where to train.

    Returns:
        ``scores`` (sst, para, sts, overall), ``train_loss`` and ``penalty`` (means of the last
        tenth), ``errors`` (rows of step and err_orth by weight), ``scale_free_errors`` (likewise,
        of weights alone), ``seconds``, ``cpu_seconds``, ``parameters``.

    Raises:
        ConvergenceError: the loss is no longer finite.
        RoleNotFoundError, ConfigError: the penalty does not fit the encoder.

    Cost: three forward and one backward pass a step.
    """
    torch.manual_seed(seed)
    place = torch.device(device)
    model = build_multitask_model(options, sets.tokenizer).to(place)
    term = OrthogonalityPenalty(model.encoder, **penalty) if penalty else None
    optimizer = torch.optim.AdamW(
        decay_groups(model, options.weight_decay), lr=options.learning_rate
    )
    streams = {
        name: endless_batches(len(rows), options.batch_size, 1000 * seed + number)
        for number, (name, rows) in enumerate(sets.train.items())
    }
    watch = OrthogonalityWatch(model, sets, place)
    started, cpu_started = time.perf_counter(), time.process_time()
    watch.look(0)
    losses: list[float] = []
    penalties: list[float] = []
    for step in range(options.steps):
        if check is not None:
            check(step)
        model.train()
        set_learning_rate(optimizer, options.learning_rate * _rate(step, options.steps))
        loss = torch.zeros((), device=place)
        for name in SETS:
            columns, labels = batch_of(
                sets.train[name], next(streams[name]), sets.tokenizer.pad_token_id
            )
            logits = model(name, to_device(columns, place))
            loss = loss + task_loss(name, logits, labels.to(place), sts_loss=options.sts_loss)
        extra = term() if term is not None else torch.zeros((), device=place)
        (loss + extra).backward()
        losses.append(loss.item())
        penalties.append(extra.item())
        if not math.isfinite(losses[-1] + penalties[-1]):
            raise ConvergenceError(
                f"step {step + 1}: loss {losses[-1]:g} and penalty {penalties[-1]:g} are not"
                " finite; lower the learning rate or the strength"
            )
        nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % options.measure_every == 0 or step + 1 == options.steps:
            watch.look(step + 1)
    tail = max(1, options.steps // 10)
    return {
        "scores": evaluate(model, sets),
        "train_loss": statistics.fmean(losses[-tail:]),
        "penalty": statistics.fmean(penalties[-tail:]),
        "errors": watch.errors,
        "scale_free_errors": watch.scale_free_errors,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: linear warm-up over a tenth of the steps, then
    linearly to zero."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


class OrthogonalityWatch:
    """err_orth of the embeddings, queries, keys, values and affinities of a model, over its
    training."""

    def __init__(self, model: MultiTaskModel, sets: EncodedSets, device: torch.device) -> None:
        self.model = model
        self.monitor = Monitor(model.encoder, every=1)
        rows = sets.valid["sts"]
        columns, _ = batch_of(rows, range(min(PROBE_ROWS, len(rows))), sets.tokenizer.pad_token_id)
        self.batch = to_device(columns, device)
        self.errors: list[dict[str, float]] = []
        self.scale_free_errors: list[dict[str, float]] = []

    def look(self, step: int) -> None:
        """Keep err_orth by weight: ``encoder.0.query``, ``token_embedding``, ``affinity.0``."""
        state = torch.get_rng_state()
        numbers = self.monitor.step()
        raw, scale_free = (
            {
                name.removeprefix("cond/").removesuffix(ending): value
                for name, value in numbers.items()
                if name.endswith(ending) and "feedforward" not in name
            }
            for ending in (ERROR, SCALE_FREE_ERROR)
        )
        self.errors.append({"step": step, **raw, **affinity_errors(self.model, self.batch)})
        self.scale_free_errors.append({"step": step, **scale_free})
        torch.set_rng_state(state)


@torch.no_grad()
def affinity_errors(model: MultiTaskModel, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ``affinity.<layer>``: ``max_{i != j} (A A^T)_ij`` over real tokens, the mean over rows
    and heads."""
    model.eval()
    encoder: Any = model.encoder
    before = encoder.config._attn_implementation
    encoder.set_attn_implementation("eager")  # the only one that returns its affinities
    try:
        attentions = encoder(**batch, output_attentions=True).attentions
    finally:
        encoder.set_attn_implementation(before)
    real = batch["attention_mask"][:, None, :, None].to(attentions[0].dtype)
    errors = {}
    for layer, affinity in enumerate(attentions):
        gram = (affinity * real) @ (affinity * real).mT
        gram.diagonal(dim1=-2, dim2=-1).zero_()
        errors[f"affinity.{layer}"] = gram.amax((-2, -1)).mean().item()
    return errors
