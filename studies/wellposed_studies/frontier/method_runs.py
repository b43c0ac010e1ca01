"""One training of `frontier/methods`, after nanoGPT, and the measurements of its end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wellposed_studies.frontier.training_methods import METHODS, Attached

if TYPE_CHECKING:
    from torch import Tensor, nn

TRAIN = 0.9
"""Part of the text that trains; the rest is valid, and there is no test, as in nanoGPT."""
LAST = 0.1
"""The rate at the end, in units of the largest."""
CLIP = 1.0
EVALUATIONS = 4
KINDS = ("ours", "llama")
"""Models whose methods are compared."""
NANOGPT = "gpt2"
"""The architecture of nanoGPT, by Hugging Face: the public loss is of this model."""


@dataclass(frozen=True)
class Training:
    """Everything that a run depends on, apart from the text."""

    model: str
    """One of `KINDS`, or `NANOGPT`."""
    method: str
    rate: float
    seed: int
    steps: int
    layers: int
    width: int
    heads: int
    block: int
    batch: int
    warmup: int
    decay: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Text:
    """Token ids of a text, cut as nanoGPT cuts it: the first nine tenths train."""

    train: Tensor
    valid: Tensor
    vocabulary: int

    @property
    def constant_loss(self) -> float:
        """The entropy of the tokens of valid: the least loss of a predictor without context."""
        import torch

        shares = torch.bincount(self.valid).double() / len(self.valid)
        return float(torch.special.entr(shares).sum())


def read_text(data: str | None, limit: int | None) -> Text:
    """Return the characters of a text of the task ``char_lm``."""
    import torch

    from wellposed_lab.tasks.task import build_task

    options = {"data": data, "limit_chars": limit}
    task: Any = build_task("char_lm", {name: value for name, value in options.items() if value})
    splits = (torch.as_tensor(task.dataset(split).tokens) for split in ("train", "valid", "test"))
    stream = torch.cat([tokens.long() for tokens in splits])
    cut = int(TRAIN * len(stream))
    return Text(stream[:cut], stream[cut:], int(stream.max()) + 1)


def build(training: Training, vocabulary: int) -> nn.Module:
    """Return the model of a run, with random weights."""
    shape: dict[str, Any] = {
        "hidden_size": training.width,
        "num_hidden_layers": training.layers,
        "num_attention_heads": training.heads,
        "max_position_embeddings": training.block,
        "vocab_size": vocabulary,
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

    from wellposed.models import WellposedConfig, WellposedForCausalLM

    options: dict[str, Any] = {
        "norm": "pre",
        "dropout": training.dropout,
        **METHODS[training.method].model,
    }
    # The gated branch of nGPT has three matrices.
    is_gated = options.get("feedforward") == "ngpt"
    inner = 8 * round(training.width / 3) if is_gated else 4 * training.width
    sides: dict[str, Any] = {"intermediate_size": inner, "is_causal": True}
    return WellposedForCausalLM(WellposedConfig(**shape, **sides, **options))


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
    device: str
    rates: list[float]
    """The largest rate of each group."""

    def step(self, number: int, batch: Tensor) -> float:
        """Train on a batch, and return its loss."""
        import torch

        optimizer = self.attached.optimizer
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * rate_at(number, self.training)

        optimizer.zero_grad()
        task_loss = _loss(self.model, batch.to(self.device))
        penalty = self.attached.penalty
        loss = task_loss if penalty is None else task_loss + penalty()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        optimizer.step()
        return float(task_loss.detach())


def start(training: Training, text: Text) -> Started:
    """Return a model of random weights with the method attached."""
    import torch

    torch.manual_seed(training.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(training, text.vocabulary).to(device)
    attached = METHODS[training.method].attach(model, training.rate, training.decay)
    model.train()
    rates = [group["lr"] for group in attached.optimizer.param_groups]
    return Started(training, model, attached, device, rates)


def train(training: Training, text: Text) -> dict[str, Any]:
    """Return what a training found: its least and last loss on valid, its cost, and its end."""
    started = start(training, text)
    model, device = started.model, started.device
    every = max(1, training.steps // EVALUATIONS)
    losses: list[float] = []
    seconds = 0.0
    for step, batch in enumerate(batches(text.train, training)):
        begun = time.process_time()
        loss = started.step(step, batch)
        seconds += time.process_time() - begun
        if not math.isfinite(loss):
            return {"valid": math.inf, "failed": f"loss {loss} at step {step + 1}"}
        if (step + 1) % every == 0 or step + 1 == training.steps:
            losses.append(evaluate(model, text.valid, training, device))
    return {
        "valid": min(losses),
        "last": losses[-1],
        "failed": "",
        "seconds_per_step": seconds / training.steps,
        **at_the_end(model, text, training, device),
    }


def batches(tokens: Tensor, training: Training) -> Iterator[Tensor]:
    """Yield random windows of the text, drawn by the seed alone, so that methods read the same."""
    import torch

    generator = torch.Generator().manual_seed(training.seed)
    window = torch.arange(training.block + 1)
    for _ in range(training.steps):
        high = len(tokens) - training.block
        first = torch.randint(high, (training.batch, 1), generator=generator)
        yield tokens[first + window]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    from torch.nn import functional as F

    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def evaluate(model: nn.Module, tokens: Tensor, training: Training, device: str) -> float:
    """Return the mean loss over the windows of a text, one after the other."""
    import torch

    rows = (len(tokens) - 1) // training.block
    starts = torch.arange(rows)[:, None] * training.block
    windows = tokens[starts + torch.arange(training.block + 1)]
    model.eval()
    with torch.no_grad():
        parts = windows.split(8 * training.batch)
        total = sum(float(_loss(model, part.to(device))) * len(part) for part in parts)
    model.train()
    return total / len(windows)


def at_the_end(model: nn.Module, text: Text, training: Training, device: str) -> dict[str, Any]:
    """Return the largest singular value of the layers, the largest logit, and the certified bound."""
    import torch

    from wellposed.measurement import Monitor, worst_vitals

    model.eval()
    batch = next(batches(text.valid, training)).to(device)
    idle = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, idle, every=1) as monitor:
        _loss(model, batch).backward()
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
        "certified": certified_bound(model, training),
    }


def certified_bound(model: nn.Module, training: Training) -> float | None:
    """Return the bound on the ball of the embedded tokens; None if there is no rule."""
    from wellposed.certification import certify
    from wellposed.errors import WellposedError

    if training.model != "ours":
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
