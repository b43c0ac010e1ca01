"""One training of `frontier/methods` or `frontier/classifiers`, after nanoGPT, and the measurements of its end."""

from __future__ import annotations

import itertools
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wellposed_studies.frontier.method_data import CLASSIFIER, NANOGPT, OUR_MODELS, Training
from wellposed_studies.frontier.training_methods import METHODS, Attached

if TYPE_CHECKING:
    from torch import nn

    from wellposed_studies.frontier.method_data import Batch, Data

LAST = 0.1
"""The rate at the end, in units of the largest."""
CLIP = 1.0
EVALUATIONS = 4
BATCHES = 8
"""Of train, to see whether blocks are needed."""


def build(training: Training, data: Data) -> nn.Module:
    """Return the model of a run, with random weights."""
    shape: dict[str, Any] = {
        "hidden_size": training.width,
        "num_hidden_layers": training.layers,
        "num_attention_heads": training.heads,
        "max_position_embeddings": training.block,
        "vocab_size": data.vocabulary,
    }
    if training.model == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        # Three matrices of 8/3 widths have the parameters of two of 4.
        inner = 8 * round(training.width / 3)
        return LlamaForCausalLM(
            LlamaConfig(intermediate_size=inner, tie_word_embeddings=True, **shape)
        )
    if training.model == NANOGPT:
        from transformers import GPT2Config, GPT2LMHeadModel

        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), training.dropout)
        ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(GPT2Config(**off, **ends, **shape))

    from wellposed.models import (
        WellposedConfig,
        WellposedForCausalLM,
        WellposedForSequenceClassification,
    )

    options: dict[str, Any] = {
        "norm": "pre",
        "dropout": training.dropout,
        **METHODS[training.method].model,
    }
    # The gated branch of nGPT has three matrices.
    is_gated = options.get("feedforward") == "ngpt"
    inner = 8 * round(training.width / 3) if is_gated else 4 * training.width
    options["intermediate_size"] = inner
    if training.model == CLASSIFIER:
        options["num_labels"] = data.num_labels
        return WellposedForSequenceClassification(WellposedConfig(**shape, **options))

    options["is_causal"] = True
    return WellposedForCausalLM(WellposedConfig(**shape, **options))


def rate_at(step: int, training: Training) -> float:
    """Return the factor of the rate: linear warm-up, then a cosine to `LAST`."""
    if step < training.warmup:
        return (step + 1) / (training.warmup + 1)
    share = (step - training.warmup) / max(1, training.steps - training.warmup)
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass
class Started:
    """A model with its method, before the first step or between two."""

    training: Training
    model: nn.Module
    attached: Attached
    data: Data
    device: str
    rates: list[float]
    """The largest rate of each group."""
    products: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Context of the optimizer's steps; launches are counted without one."""

    def step(self, number: int, batch: Batch) -> float:
        """Train on a batch, and return its loss."""
        import torch

        optimizer = self.attached.optimizer
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_at(number, self.training)

        optimizer.zero_grad()
        task_loss = self.data.loss(self.model, on_device(batch, self.device))
        penalty = self.attached.penalty
        loss = task_loss if penalty is None else task_loss + penalty()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        with self.products:
            optimizer.step()
        return float(task_loss.detach())


def start(training: Training, data: Data) -> Started:
    """Return a model of random weights with the method attached."""
    import torch

    torch.manual_seed(training.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(training, data).to(device)
    attached = METHODS[training.method].attach(model, training.rate, training.decay)
    model.train()
    rates = [group["lr"] for group in attached.optimizer.param_groups]
    return Started(training, model, attached, data, device, rates)


def train(training: Training, data: Data) -> dict[str, Any]:
    """Return what a training found: its least and last loss on valid, its cost, and its end."""
    from wellposed_studies.frontier.emulated_products import bfloat16_products

    started = replace(start(training, data), products=bfloat16_products())
    every = max(1, training.steps // EVALUATIONS)
    losses: list[float] = []
    seconds = 0.0
    for step, batch in enumerate(data.batches(training)):
        begun = time.process_time()
        loss = started.step(step, batch)
        seconds += time.process_time() - begun
        if not math.isfinite(loss):
            return {"valid": math.inf, "failed": f"loss {loss} at step {step + 1}"}
        if (step + 1) % every == 0 or step + 1 == training.steps:
            losses.append(evaluate(started))

    return {
        "valid": min(losses),
        "last": losses[-1],
        "failed": "",
        "seconds_per_step": seconds / training.steps,
        **at_the_end(started),
    }


def on_device(batch: Batch, device: str) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def evaluate(started: Started) -> float:
    """Return the mean loss on valid."""
    import torch

    model = started.model
    model.eval()
    total = 0.0
    rows = 0
    with torch.no_grad():
        for batch in started.data.valid_batches(started.training):
            loss = started.data.loss(model, on_device(batch, started.device))
            total += float(loss) * len(batch["input_ids"])
            rows += len(batch["input_ids"])
    model.train()
    return total / rows


def needs_blocks(started: Started) -> bool:
    """Return whether the loss on train rises if the blocks return their inputs, as `blocks.needs_blocks`."""
    import torch

    from wellposed_studies.blocks import skipped_blocks

    batches = list(itertools.islice(started.data.batches(started.training), BATCHES))

    @torch.no_grad()
    def loss() -> float:
        placed = (on_device(batch, started.device) for batch in batches)
        return sum(float(started.data.loss(started.model, batch)) for batch in placed)

    started.model.eval()
    trained = loss()
    with skipped_blocks(started.model):
        return not loss() <= trained


def at_the_end(started: Started) -> dict[str, Any]:
    """Return the largest singular value of the layers, the largest logit, the certified bound, and
    whether the blocks are needed."""
    import torch

    from wellposed.measurement import Monitor, worst_vitals

    model = started.model
    model.eval()
    batch = on_device(next(started.data.batches(started.training, "valid")), started.device)
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, idle, every=1) as monitor:
        started.data.loss(model, batch).backward()
        idle.step()
        measured = monitor.step()
    model.zero_grad()
    sizes = [
        value
        for name, value in measured.items()
        if name.endswith("/sigma_max") and "embedding" not in name
    ]
    vitals = worst_vitals({n: v for n, v in measured.items() if n.startswith("vital/")})
    return {
        "sigma_max": max(sizes, default=None),
        "logit_max": vitals.get("vital/logit_max"),
        "certified": certified_bound(model, started.training),
        "needs_blocks": needs_blocks(started),
    }


def certified_bound(model: nn.Module, training: Training) -> float | None:
    """Return the bound on the ball of the embedded tokens; None if there is no rule."""
    from wellposed.certification import certify
    from wellposed.errors import WellposedError

    if training.model not in OUR_MODELS:
        return None
    from wellposed.models import embedding_radius

    body: Any = model
    try:
        certificate = certify(
            body.model, seq_len=training.block, radius=embedding_radius(body), cross_check=False
        )
    except WellposedError:
        return None
    return certificate.total if math.isfinite(certificate.total) else None
