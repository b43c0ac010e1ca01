"""The frozen configuration of a run, which identifies it: task, model, penalty and training.

Docstrings of fields are the command line's help. Free of torch, so that it starts fast.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from wellposed import options
from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.options import Count, Positive, Rate, Seed, Size, Strength, rms_radius
from wellposed.safe_read import read_text
from wellposed_lab.tasks.task import TASKS

SCHEMA_VERSION = 1

Schedule = Literal["constant", "linear", "inverse_sqrt", "inverse_sqrt_warmup", "kim2021", "cosine"]
Scalar = str | int | float | bool | None

DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
NEEDS_WARMUP = ("inverse_sqrt_warmup", "kim2021")
DECAYS_TO_ZERO = ("cosine", "linear")
SCION_READS = ("scion_radius", "scion_head_radius")
SCION_LEAVES = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Options that scion alone reads, and those that it alone does not."""
GONE = {"average_checkpoints": (0,), "num_workers": (0,), "parallel": ("ddp", "fsdp")}
"""Removed training options, with the values at which older runs can still be read."""
RENAMED = {"temperature": "logit_scale"}
"""Training options by their names in older runs."""
GONE_OF_TASKS: dict[str, dict[str, tuple[Any, ...]]] = {
    "text_classification": {"class_names": ("auto",), "quoting": ("auto",)},
    "image_classification": {"flip": (False,)},
    "translation": {"lowercase": (False,), "bleu_tokens": ("auto",)},
    "word_lm": {"words": ("auto",), "eos": (True,)},
    "dialogue": {"lowercase": (False,)},
}
STRENGTHS = ("affinity", "attention", "feedforward", "query", "key", "value", "embedding")


@dataclass(frozen=True)
class PenaltyOptions(options.CheckedOptions):
    """Keywords of `wellposed.OrthogonalityPenalty` and the strength of the certified bound; all zero
    means no penalty."""

    affinity: Strength = 0.0
    """Strength of |A^T A - I|_F^2 on attention affinities."""
    attention: Strength = 0.0
    """Strength on query, key, value and output weights."""
    feedforward: Strength = 0.0
    """Strength on feed-forward weights."""
    query: Strength = 0.0
    """Strength on query weights alone."""
    key: Strength = 0.0
    """Strength on key weights alone."""
    value: Strength = 0.0
    """Strength on value weights alone."""
    embedding: Strength = 0.0
    """Strength on token embeddings."""
    bound: Strength | None = None
    """Strength of the logarithm of the certified bound, for models that have one; None: 0, or what the
    variant says."""
    bound_every: Size = 5
    """Apply that of the bound on every k-th step, scaled by k."""
    form: Literal["paper", "gram_squared", "gram", "qr"] = "paper"
    """Distance to orthogonality. paper: squared for attention and feedforward (Zhang et al.), the
    norm for query, key, value and embedding (McGrath)."""
    feedforward_form: Literal["same", "gram_squared", "gram", "qr"] = "same"
    """Form for feed-forward weights; same: as form (zhang2021 prints gram beside squared norms)."""
    attention_mode: Literal["joint", "separate"] = "joint"
    """joint: one Gram matrix for the four attention weights; separate: one for each."""
    estimator: Literal["exact", "probes"] = "exact"
    """How the affinity penalty is computed."""
    every: Size = 1
    """Apply on every k-th step, scaled by k; not that of the bound."""
    qr_method: Literal["householder", "gram_schmidt"] = "householder"
    """QR decomposition of the form qr."""

    @property
    def active(self) -> bool:
        """Whether any strength of `wellposed.OrthogonalityPenalty` is non-zero."""
        return any(getattr(self, name) for name in STRENGTHS)


NO_PENALTY = PenaltyOptions(bound=0.0)
"""No penalty, for variants too that else train with their bound."""


@dataclass(frozen=True)
class ConstrainOptions(options.CheckedOptions):
    """Weights that `wellposed.constrain_` keeps in a set during training."""

    where: str = ""
    """Names, patterns or roles to constrain, as *.q_proj,*.k_proj or query,key; empty: none."""
    embeddings: Literal["refuse", "fit"] = "refuse"
    """fit: constrain embeddings at their present size, tall ones by their columns; refuse: raise an
    error for tall ones."""
    to: Literal[
        "orthogonal", "spectral", "spectral_soft", "spectral_hammer", "spectral_sphere", "columns",
        "rows", "hypersphere", "logits",
    ] = "orthogonal"  # fmt: skip
    """The set: orthogonal matrices, spectral norm at most bound (soft: by a polynomial, hammer: of the
    largest singular value alone, sphere: exactly), columns, rows, or (hypersphere) vectors along the
    width of a token of length bound, or queries and keys whose largest attention logit is at most
    bound."""
    bound: Positive | str | None = None
    """Bound of a spectral norm, or length (default 1), or of logits (default 100); for spectral norms
    also rms:X, which is X sqrt(fan_out / fan_in)."""
    gain: Literal["auto", "one", "fit"] = "auto"
    """Common singular value of an orthogonal weight. one: 1; fit: its present mean, the smallest
    change; auto: fit for a pretrained model (--from), else one."""
    per: Literal["weight", "head"] = "weight"
    """Constrain each weight, or each head's rows of a query, key or value weight."""

    def problems(self) -> Iterator[str]:
        if self.where and not all(part.strip() for part in self.where.split(",")):
            yield f"where = {self.where!r}, expected names or patterns between its commas"
        for name, chosen in {"embeddings": "fit", "to": "logits", "per": "head"}.items():
            if getattr(self, name) == chosen and not self.where:
                yield f"{name} = {chosen!r} without where, so no weight is constrained; name weights or roles"

        for name in ("embeddings", "gain"):
            if getattr(self, name) == "fit" and self.to != "orthogonal":
                yield f"{name} = 'fit' with to = {self.to!r}, expected to = orthogonal"

        if self.bound not in (None, 1.0) and self.to == "orthogonal":
            yield f"bound = {self.bound!r} with to = orthogonal, which takes no bound"
        elif isinstance(self.bound, str) and not (
            self.to.startswith("spectral") and rms_radius(self.bound)
        ):
            yield f"bound = {self.bound!r}, expected a number above 0, or rms:X for to = spectral"

    @property
    def patterns(self) -> list[str]:
        return [part.strip() for part in self.where.split(",")] if self.where else []


def words_of(margin_loss: str | None) -> float:
    """Return K of a margin loss ``words:K``, 0 for other losses, and NaN if K is no number."""
    name, _, count = (margin_loss or "").partition(":")
    if name != "words":
        return 0.0
    try:
        return float(count)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class TrainOptions(options.CheckedOptions):
    """How a model is trained."""

    steps: Size = 1000
    """Optimizer steps."""
    epochs: Positive | None = None
    """Passes over the train split, in place of steps."""
    batch_size: Size = 32
    """Sequences in one micro-batch."""
    gradient_accumulation: Size = 1
    """Micro-batches in one optimizer step."""
    learning_rate: Positive = 1e-3
    """Peak learning rate (the schedule kim2021 uses gamma instead)."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule."""
    warmup_steps: Count = 0
    """Steps of linear warm-up (constant, linear, cosine); w of kim2021 and inverse_sqrt_warmup."""
    warmup_share: Rate = 0.0
    """Fraction of the steps for warm-up, in place of warmup_steps."""
    decay_steps: Size = 4000
    """D of inverse_sqrt: lr sqrt(D / (D + n))."""
    gamma: Positive = 1.0
    """gamma of kim2021: gamma / sqrt(hidden_size) min(t^-1/2, t w^-3/2)."""
    optimizer: Literal["adamw", "muon", "scion", "sgd"] = "adamw"
    """muon: Muon on hidden matrices (rates scaled to match AdamW), AdamW on the rest; scion: steps in
    norm balls by role, at rates from 0 to 1; sgd: SGD with momentum."""
    momentum: Rate | None = None
    """Momentum of muon (default 0.95), scion and sgd (default 0.9)."""
    scion_radius: Positive = 50.0
    """Radius of the balls of hidden matrices and vectors of scion."""
    scion_head_radius: Positive = 3000.0
    """Radius of the ball of the output embedding of scion."""
    weight_decay: Strength = 0.01
    """Weight decay on matrices; biases, norms and scalars have none. Scion has none, and
    refuses one: its balls bound the weights."""
    adam_beta1: Rate = 0.9
    """AdamW beta 1."""
    adam_beta2: Rate = 0.98
    """AdamW beta 2."""
    adam_epsilon: Strength = 1e-9
    """AdamW epsilon."""
    max_grad_norm: Strength = 1.0
    """Gradient clipping by global norm; 0 switches it off."""
    label_smoothing: Rate = 0.0
    """Label smoothing of the training loss."""
    logit_scale: Positive = 1.0
    """Multiply the logits by this in losses and metrics. Lipschitz models need it: their logits are small."""
    margin_radius: Strength = 0.0
    """Train on the worst-case logits when the input moves by this much."""
    margin_loss: str | None = None
    """ce, certified (cross entropy of the worst-case logits within margin_radius), or words:K
    (train for answers that stay the same if K words are replaced; docs/howto/words.md)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 runs the forward pass under autocast, on float32 weights; fp16 (runs of an earlier version)
    is refused."""
    device: str = "auto"
    """auto (a GPU if present) | cpu | cuda | cuda:N | mps."""
    compile: bool = False
    """Train through torch.compile."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    eval_every: Size = 200
    """Steps between evaluations on the validation split; the last step is always evaluated."""
    eval_batches: Size | None = None
    """Most validation batches (default: all)."""
    patience: Size | None = None
    """Stop after this many evaluations without a better validation result (default: never)."""
    checkpoint_every: Size = 200
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Size = 1
    """Number of latest checkpoints to keep (the best one is always kept)."""
    log_every: Size = 10
    """Steps between rows of metrics.jsonl."""
    monitor: Count = 0
    """Steps between rows of vital signs (attention logits, activations, updates), with alarms; 0: never."""
    seed: Seed = 0
    """Seed of weights, data order and dropout."""

    def problems(self) -> Iterator[str]:
        share = self.warmup_share
        warm = self.warmup_steps
        schedule = self.schedule
        if not DEVICE.fullmatch(self.device):
            yield f"device = {self.device!r}, expected auto, cpu, cuda, cuda:N or mps"
        if self.optimizer == "adamw" and self.momentum is not None:
            yield f"momentum = {self.momentum} with optimizer = adamw, which reads adam_beta1"
        if self.optimizer == "scion" and self.learning_rate > 1.0:
            yield f"learning_rate = {self.learning_rate} with optimizer = scion, expected at most 1"

        yield from self._unread_by_the_optimizer()
        if share and warm:
            yield f"warmup_share = {share} and warmup_steps = {warm}: give one"
        if schedule in NEEDS_WARMUP and not (warm or share):
            yield f"warmup_steps = {warm}, expected at least 1 for the schedule {schedule}"
        if schedule in DECAYS_TO_ZERO and self.epochs is None and self.steps <= warm:
            fewer = f"expected fewer than steps = {self.steps}"
            yield f"warmup_steps = {warm}, {fewer} for the schedule {schedule}"
        yield from self._problems_of_margins()

    def _unread_by_the_optimizer(self) -> Iterator[str]:
        is_scion = self.optimizer == "scion"
        usual = {option.name: option.default for option in dataclasses.fields(self)}
        for name in SCION_LEAVES if is_scion else SCION_READS:
            value = getattr(self, name)
            # A decay of 0 is that of scion.
            if value == usual[name] or (name == "weight_decay" and value == 0.0):
                continue
            who = "optimizer = scion does not read" if is_scion else "only optimizer = scion reads"
            yield f"{name} = {value}, which {who}"

    def _problems_of_margins(self) -> Iterator[str]:
        loss = self.margin_loss
        radius = self.margin_radius
        words = words_of(loss)
        if not 0 <= words < math.inf or ((loss or "").startswith("words") and not words):
            yield f"margin_loss = {loss!r}, expected words:K with a number K above 0"
        elif not words and loss not in (None, "ce", "certified", "hinge"):
            yield f"margin_loss = {loss!r}, expected 'ce', 'certified', 'words:K' or None"

        if words and radius:
            yield f"margin_radius = {radius} with margin_loss = {loss}, expected one of them"
        if loss == "ce" and radius:
            both = f"margin_radius = {radius} with margin_loss = ce"
            yield f"{both}, which has no margin; give certified"
        if loss == "certified" and not radius:
            yield f"margin_loss = {loss} needs a margin_radius above 0"


@dataclass(frozen=True)
class StartOptions(options.CheckedOptions):
    """A Hugging Face model to start from, in place of an architecture of wellposed."""

    model: str = ""
    """Start from this model: a folder, a hub name, a finished run, or a config.json (random weights)."""
    from_scratch: bool = False
    """Read only the configuration of that model and draw all weights at random."""
    new_head: bool = False
    """Draw a new head even if the saved one has other labels."""
    frozen: bool = False
    """Freeze its body and train two layers on its output for each window (with --certified-windows)."""
    attention: Annotated[
        Literal["own", "l2", "cosine"], "a model of wellposed takes --model.attention"
    ] = "own"
    """own: the model's attention; l2 or cosine: wellposed_l2 or wellposed_cosine in place of dot products."""
    init: Annotated[Literal["own", "t_fixup"], "a model of wellposed takes --model.init"] = "own"
    """own: the model's weights; t_fixup: T-Fixup's weights and no LayerNorm, with --from-scratch."""
    dt_fixup: Count = 0
    """Draw the layers by DT-Fixup, from this many batches of train, and remove LayerNorms; 0: no."""
    sigma_reparam: bool = False
    """Train every matrix of the layers as g W / sigma(W) with a learnt gain g; final/ has plain weights."""

    def problems(self) -> Iterator[str]:
        if self.dt_fixup and self.init != "own":
            yield f"dt_fixup and init = {self.init!r} both draw the layers; leave one of them out"
        if not self.model:
            for name in ("from_scratch", "new_head", "frozen", "attention", "init"):
                if getattr(self, name) not in (False, "own"):
                    ours = f", or give --model.{name}" if name in ("attention", "init") else ""
                    yield f"{name} needs a model to start from; name it with --from{ours}"
        elif self.from_scratch and self.new_head:
            yield "from_scratch already draws a new head; leave new_head out"
        elif self.from_scratch and self.frozen:
            yield "frozen keeps weights that from_scratch draws anew; leave one of the two out"
        elif self.init == "t_fixup" and not self.from_scratch:
            yield (
                "init = 't_fixup' draws all weights anew and removes the LayerNorms that"
                " pretrained weights need; give --from-scratch, or another variant"
            )


@dataclass(frozen=True)
class RunConfig:
    """Everything that identifies a run; written to ``config.toml`` before step 1."""

    task: str
    """Registered task."""
    task_options: Mapping[str, Scalar] = field(default_factory=dict)
    """Options of the task, by field name of its options class."""
    variant: str = "post_ln"
    """Name of the run in reports."""
    model: ModelOptions = field(default_factory=ModelOptions)
    penalty: PenaltyOptions = PenaltyOptions()
    train: TrainOptions = TrainOptions()
    constrain: ConstrainOptions = ConstrainOptions()
    start: StartOptions = StartOptions()
    imports: Mapping[str, str] = field(default_factory=dict)
    """Path and SHA-256 of every Python file imported for this run."""

    def __post_init__(self) -> None:
        if self.constrain.to == "logits" and self.train.compile:
            problem = "constrain.to = logits needs hooks on attention, which a compiled model skips"
            raise ConfigError(f"{problem}; leave train.compile out, or the constraint")

        again = "gradient_checkpointing" if self.train.gradient_checkpointing else "compile"
        if self.start.sigma_reparam and getattr(self.train, again):
            raise ConfigError(
                f"start.sigma_reparam with train.{again}: each pass takes a power step, which runs"
                " once only in plain passes; leave one of the two out"
            )
        if self.start.model and self.model != ModelOptions():
            both = (dataclasses.asdict(options_of) for options_of in (self.model, ModelOptions()))
            chosen, usual = map(options.flat_options, both)
            names = [f"model.{k} = {value!r}" for k, value in chosen.items() if value != usual[k]]
            raise ConfigError(
                f"{self.start.model}: a model to start from has its own architecture, received also"
                f" {', '.join(names)}; leave out these options, or the model"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values without ``None`` fields, as TOML has no null."""
        values = {"schema_version": SCHEMA_VERSION, **_without_none(dataclasses.asdict(self))}
        if not self.imports:
            del values["imports"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "config") -> RunConfig:
        """Build from nested plain values. Unknown options (with the nearest three), wrong types or
        another schema version are a `ConfigError`; it names every unknown option and wrong type."""
        values = dict(values)
        version = values.pop("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{where}: schema_version is {version!r}, this version reads {SCHEMA_VERSION}; "
                "write the file again with `wellposed train TASK --print-config`"
            )

        of_task = GONE_OF_TASKS.get(str(values.get("task")), {})
        for section, gone in (("train", GONE), ("task_options", of_task)):
            table = values.get(section)
            if isinstance(table, Mapping):
                new = RENAMED if section == "train" else {}
                values_of_today = {
                    new.get(n, n): v for n, v in table.items() if v not in gone.get(n, ())
                }
                values[section] = values_of_today

        constrain = values.get("constrain")
        start = values.get("start")
        if isinstance(constrain, Mapping) and isinstance(start, Mapping) and start.get("model"):
            # Older runs on a pretrained model recorded no gain, which was 1.
            former = {"gain": "one"} if constrain.get("where") else {}
            values["constrain"] = {**former, **constrain}

        return options.build_options(cls, values, where=where)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file; an unreadable one is a `ConfigError` with the line."""
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        deep = "nested too deeply" if isinstance(error, RecursionError) else error
        why = getattr(error, "strerror", None) or deep
        raise ConfigError(f"{path}: cannot be read: {why}; correct or replace it") from error


def config_difference(old: RunConfig, new: RunConfig) -> list[str]:
    """Return one line ``section.field: old -> new`` for each field that differs."""
    before = _meaning(old)
    after = _meaning(new)
    return [
        f"{name}: {before.get(name, 'not set')!r} -> {after.get(name, 'not set')!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _meaning(config: RunConfig) -> dict[str, Any]:
    """Return the options, with one name for equivalent forms."""
    values = options.flat_options(config.to_dict())
    penalty = config.penalty
    unsquared = (penalty.query, penalty.key, penalty.value, penalty.embedding)
    if penalty.form == "gram_squared" and not any(unsquared):
        values["penalty.form"] = "paper"
    if not penalty.bound:
        values.pop("penalty.bound", None)
        values.pop("penalty.bound_every", None)
    values.setdefault("constrain.bound", 1.0)
    if config.task in TASKS:  # older runs lack newer options
        for item in dataclasses.fields(TASKS.get(config.task).options):
            if item.default is not dataclasses.MISSING:
                values.setdefault(f"task_options.{item.name}", item.default)
    return values


def _without_none(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _without_none(value) for key, value in values.items() if value is not None}
    return values
