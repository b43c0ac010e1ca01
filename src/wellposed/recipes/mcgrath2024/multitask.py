"""One encoder and three heads trained on sentiment, paraphrase and similarity together (McGrath 2024, sec. 4.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.errors import CheckpointError, ConfigError, ConvergenceError, missing_extra
from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty
from wellposed.recipes.mcgrath2024.multitask_options import SETS, MultiTaskOptions, overall_score
from wellposed.tasks.data.minbert import EncodedRows, MinBertSet, encode_rows, train_word_pieces
from wellposed.training.optimizer import decay_groups

WARMUP_SHARE = 0.1
PROBE_ROWS = 16
ERROR = "/orthogonality_error"
OUTPUTS = {"sst": 5, "para": 1, "sts": 1}


@dataclass(frozen=True)
class EncodedSets:
    """The three sets as token ids, the tokenizer that made them, and what to say about them."""

    train: dict[str, EncodedRows]
    valid: dict[str, EncodedRows]
    tokenizer: Any
    description: dict[str, Any]


def encode_sets(sets: Mapping[str, MinBertSet], options: MultiTaskOptions) -> EncodedSets:
    """Encode the first ``train_rows`` of every set and all valid rows with one tokenizer.

    Raises:
        ConfigError: the tokenizer of ``options.encoder`` cannot be loaded, or cannot pad.
    """
    kept = {name: data.train.first(options.train_rows) for name, data in sets.items()}
    if options.encoder is None:
        texts = [text for rows in kept.values() for sentences in rows.sentences for text in sentences]
        tokenizer: Any = train_word_pieces(texts, vocab_size=options.vocab_size, max_length=options.max_length)
    else:
        tokenizer = _load("AutoTokenizer", options.encoder)
    length = options.max_length
    train = {name: encode_rows(rows, tokenizer, max_length=length) for name, rows in kept.items()}
    valid = {name: encode_rows(data.valid, tokenizer, max_length=length) for name, data in sets.items()}
    description = {
        name: {
            "train_rows": len(train[name]),
            "train_rows_available": len(data.train),
            "valid_rows": len(valid[name]),
            "rows_cut": train[name].cut + valid[name].cut,
            "files": list(data.files),
        }
        for name, data in sets.items()
    }
    return EncodedSets(train, valid, tokenizer, description)


class MultiTaskModel(nn.Module):
    """Return ``head(dropout(encoder(x)[:, 0]))``: the [CLS] token of one encoder through the head of a set.

    Args:
        encoder: any Hugging Face encoder; its first token stands for the row.
        dropout: before the heads.

    >>> from transformers import BertConfig, BertModel
    >>> encoder = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    >>> MultiTaskModel(encoder)("sst", {"input_ids": torch.zeros(3, 4, dtype=torch.long)}).shape
    torch.Size([3, 5])
    """

    def __init__(self, encoder: nn.Module, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        config: Any = encoder.config
        self.heads = nn.ModuleDict({name: nn.Linear(config.hidden_size, count) for name, count in OUTPUTS.items()})

    def forward(self, name: str, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the head ``name``."""
        return self.heads[name](self.dropout(self.encoder(**batch).last_hidden_state[:, 0]))


def build_multitask_model(options: MultiTaskOptions, tokenizer: Any) -> MultiTaskModel:
    """Return the model of ``options``: a small BERT with fresh weights, or a pretrained encoder, and fresh heads."""
    if options.encoder is not None:
        return MultiTaskModel(_load("AutoModel", options.encoder), options.dropout)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=options.max_length,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=0.0,  # with it, attention on a CPU leaves its fused kernel
        pad_token_id=tokenizer.pad_token_id,
    )
    return MultiTaskModel(BertModel(config, add_pooling_layer=False), options.dropout)


def task_loss(name: str, logits: Tensor, labels: Tensor, *, sts_loss: str = "squared_error") -> Tensor:
    """Return the mean loss of one set.

    sst: cross entropy of five classes. para: binary cross entropy. sts: ``squared_error``, the mean of
    ``(5 sigmoid(z) - y)^2``; or ``cosine``, ``1 - cos(z, y)`` with z and y the batch's outputs and scores as vectors.
    McGrath (2024, sec. 4.1) prints "cosine embedding loss on the output node"; of one number the cosine is +1 or -1
    and has no gradient, so the vector over the batch is the reading that trains.
    """
    if name == "sst":
        return F.cross_entropy(logits, labels.long())
    output = logits.squeeze(-1)
    if name == "para":
        return F.binary_cross_entropy_with_logits(output, labels)
    if sts_loss == "cosine":
        return 1 - F.cosine_similarity(output, labels, dim=0)
    return F.mse_loss(5 * output.sigmoid(), labels)


def batch_of(rows: EncodedRows, indices: Sequence[int], pad_id: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the padded columns of the rows ``indices`` and their labels."""
    length = max(len(rows.columns["input_ids"][index]) for index in indices)
    columns = {
        name: torch.tensor(
            [
                row + [pad_id if name == "input_ids" else 0] * (length - len(row))
                for row in map(column.__getitem__, indices)
            ]
        )
        for name, column in rows.columns.items()
    }
    return columns, torch.tensor([rows.labels[index] for index in indices])


def endless_batches(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of row numbers: every row once per pass, each pass in a new order decided by ``seed`` alone."""
    draw = torch.Generator().manual_seed(seed)
    size = min(batch_size, count)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=draw).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


@torch.no_grad()
def evaluate(model: MultiTaskModel, sets: EncodedSets, *, batch_size: int = 128) -> dict[str, float]:
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
            columns, wanted = batch_of(rows, order[start : start + batch_size], sets.tokenizer.pad_token_id)
            outputs.append(model(name, {key: value.to(device) for key, value in columns.items()}).float().cpu())
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
    """Return ``cos(x - mean x, y - mean y)`` in float64; 0 where one of them is constant."""
    x, y = found.double() - found.double().mean(), wanted.double() - wanted.double().mean()
    size = (x.norm() * y.norm()).item()
    return (x @ y).item() / size if size > 0 else 0.0


@torch.no_grad()
def affinity_errors(model: MultiTaskModel, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ``affinity.<layer>``: ``max_{i != j} (A A^T)_ij`` over real tokens, the mean over rows and heads."""
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


def train_multitask(
    sets: EncodedSets,
    options: MultiTaskOptions,
    *,
    penalty: Mapping[str, Any] | None = None,
    seed: int = 0,
    check: Callable[[int], None] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Minimise ``loss_sst + loss_para + loss_sts + penalty`` and return scores, losses and orthogonality over time.

    Status: deterministic on a CPU: ``seed`` decides the weights, the batches and dropout, so two penalties with one
    seed start at the same weights and see the same rows in the same order. Source: McGrath (2024, sec. 4.1 and 4.2).

    Args:
        sets: from `encode_sets`.
        options: of the model and its training.
        penalty: keywords of `wellposed.OrthogonalityPenalty`; None is the baseline.
        seed: of this run.
        check: called with the number of steps done before each step; may raise to stop.
        device: where to train.

    Returns:
        ``scores`` (sst, para, sts, overall), ``train_loss`` and ``penalty`` (means of the last tenth), ``errors``
        (rows of step and err_orth by weight), ``seconds``, ``cpu_seconds``, ``parameters``.

    Raises:
        ConvergenceError: the loss is no longer finite.
        RoleNotFoundError, ConfigError: the penalty does not fit the encoder.

    Cost: three forward and one backward pass a step.
    """
    torch.manual_seed(seed)
    model = build_multitask_model(options, sets.tokenizer).to(device)
    term = OrthogonalityPenalty(model.encoder, **penalty) if penalty else None
    optimizer = torch.optim.AdamW(decay_groups(model, options.weight_decay), lr=options.learning_rate)
    streams = {
        name: endless_batches(len(rows), options.batch_size, 1000 * seed + number)
        for number, (name, rows) in enumerate(sets.train.items())
    }
    pad_id = sets.tokenizer.pad_token_id
    watch = _Watch(model, sets, device)
    started, cpu_started = time.perf_counter(), time.process_time()
    errors = [{"step": 0, **watch.errors()}]
    losses: list[float] = []
    penalties: list[float] = []
    for step in range(options.steps):
        if check is not None:
            check(step)
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _rate(step, options.steps)
        loss = torch.zeros((), device=device)
        for name in SETS:
            columns, labels = batch_of(sets.train[name], next(streams[name]), pad_id)
            logits = model(name, {key: value.to(device) for key, value in columns.items()})
            loss = loss + task_loss(name, logits, labels.to(device), sts_loss=options.sts_loss)
        extra = term() if term is not None else torch.zeros((), device=device)
        (loss + extra).backward()
        losses.append(loss.item())
        penalties.append(extra.item())
        if not math.isfinite(losses[-1] + penalties[-1]):
            raise ConvergenceError(
                f"step {step + 1}: loss {losses[-1]:g} and penalty {penalties[-1]:g} are not finite; "
                "lower the learning rate or the strength"
            )
        nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % options.measure_every == 0 or step + 1 == options.steps:
            errors.append({"step": step + 1, **watch.errors()})
    tail = max(1, options.steps // 10)
    return {
        "scores": evaluate(model, sets),
        "train_loss": math.fsum(losses[-tail:]) / tail,
        "penalty": math.fsum(penalties[-tail:]) / tail,
        "errors": errors,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


class _Watch:
    """err_orth of the embeddings, queries, keys, values and affinities of a model."""

    def __init__(self, model: MultiTaskModel, sets: EncodedSets, device: str) -> None:
        self.model = model
        self.monitor = Monitor(model.encoder, every=1)
        rows = sets.valid["sts"]
        columns, _ = batch_of(rows, range(min(PROBE_ROWS, len(rows))), sets.tokenizer.pad_token_id)
        self.batch = {key: value.to(device) for key, value in columns.items()}

    def errors(self) -> dict[str, float]:
        """Return err_orth by weight: ``encoder.0.query``, ``token_embedding``, ``affinity.0``."""
        state = torch.get_rng_state()
        weights = {
            name.removeprefix("cond/").removesuffix(ERROR): value
            for name, value in self.monitor.step().items()
            if name.endswith(ERROR) and "feedforward" not in name
        }
        found = {**weights, **affinity_errors(self.model, self.batch)}
        torch.set_rng_state(state)
        return found


def _rate(step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def _load(kind: str, name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf", "pretrained encoders") from error
    from wellposed.models import load_pretrained, load_pretrained_model

    try:
        if kind == "AutoTokenizer":
            return load_pretrained(transformers.AutoTokenizer, name)
        return load_pretrained_model(transformers.AutoModel, name, unread="pooler.")  # the first hidden state is read
    except CheckpointError as error:
        raise ConfigError(
            f"encoder {name!r} cannot be loaded ({kind}): {error}; give a folder that holds "
            "config.json, model.safetensors and tokenizer.json, or a hub name that is cached or reachable"
        ) from error
