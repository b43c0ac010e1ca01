"""Build the parts of a run from a `RunConfig`, and load the model of a run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from wellposed.constrain import MuonAndAdamW, decay_groups
from wellposed.errors import (
    CheckpointError,
    ConfigError,
    RoleNotFoundError,
    ShapeError,
    is_about_resources,
    shortened,
)
from wellposed.half_weights import dtype_names, lost_steps
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import (
    ConstrainOptions,
    RunConfig,
    StartOptions,
    TrainOptions,
)
from wellposed_lab.training.folder import manifest
from wellposed_lab.training.folder.run_folder import FINAL, import_recorded, read_config
from wellposed_lab.training.loop.batches import forward, model_inputs

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from wellposed.constrain import Constraint, SigmaReparametrized
    from wellposed_lab.training.start import Start


FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    model: nn.Module,
    options: TrainOptions,
    *,
    constrained: Iterable[nn.Parameter] = (),
    where: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer of ``options`` over the trainable parameters of ``model``.

    AdamW and SGD use a fused kernel if the device has one. ``constrained`` weights, named by
    ``where``, have no decay. Muon for a model without hidden matrices is a `ConfigError`. Weights
    outside their ball of Scion are divided by their size first.
    """
    device = next(model.parameters()).device.type
    betas = (options.adam_beta1, options.adam_beta2)
    adam: dict[str, Any] = {"betas": betas, "eps": options.adam_epsilon}
    if options.optimizer == "muon":
        adam |= {"momentum": 0.95 if options.momentum is None else options.momentum}
        adam |= {"weight_decay": options.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        rate = options.learning_rate
        return MuonAndAdamW(model, lr=rate, adamw_lr=rate, where=list(where) or None, **adam)

    rate = options.learning_rate
    if options.optimizer == "scion":
        return _scion(model, options)

    groups = decay_groups(model, options.weight_decay, constrained=constrained)
    fused = device in FUSED_DEVICES
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, fused=fused, **adam)
    momentum = 0.9 if options.momentum is None else options.momentum
    return torch.optim.SGD(groups, lr=rate, fused=fused, momentum=momentum)


def reparametrize(options: StartOptions, model: nn.Module) -> SigmaReparametrized | None:
    """Return the handle of matrices with a learnt spectral norm, or None if ``options`` has none. A
    resumed run makes them anew, and then loads their gains and vectors."""
    if not options.sigma_reparam:
        return None
    from wellposed.constrain import sigma_reparam_

    return sigma_reparam_(model)


def _scion(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    from wellposed.optim import Scion

    optimizer = Scion(
        model,
        lr=options.learning_rate,
        momentum=0.9 if options.momentum is None else options.momentum,
        radius=options.scion_radius,
        head_radius=options.scion_head_radius,
    )
    optimizer.shrink_into_balls_()
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group of ``optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = value


def started_from(config: RunConfig, start: Start) -> dict[str, Any]:
    """Return the entries of ``train_info`` on a start model and on DT-Fixup, if there are any."""
    if not config.start.model:
        return {**start.info}
    names: dict[str, Any] = {n: list(getattr(start, n)) for n in ("new_weights", "left_out")}
    phrases = ("labels", "stored_dtype", "config_dtype")
    names |= {name: getattr(start, name) for name in phrases if getattr(start, name)}
    return {"started_from": {"model": config.start.model, **names}, **start.info}


_DT_FIXUP = "DT-Fixup: mu = {mu:.4g} of {tokens} tokens, factor {factor:.4g}"


def start_notes(started: dict[str, Any], model: nn.Module) -> list[str]:
    """Return notes for the user about the model that a run starts from, and about DT-Fixup.

    >>> begun = {"model": "bert", "new_weights": ["bias"], "left_out": []}
    >>> start_notes({"started_from": begun}, nn.Linear(2, 2))
    ['starts from bert; drawn at random: bias']
    """
    notes = [_DT_FIXUP.format(**started["dt_fixup"])] if "dt_fixup" in started else []
    if "started_from" not in started:
        return notes

    begun = started["started_from"]
    drawn = begun["new_weights"]
    left_out = begun["left_out"]
    everything = {name for name, _ in model.named_parameters()} <= set(drawn)
    parts = [f"starts from {begun['model']}"]
    if drawn:
        parts.append(f"drawn at random: {'every weight' if everything else shortened(drawn)}")
    if left_out:
        parts.append(f"in the file and not used: {shortened(left_out)}")

    labels = begun.get("labels")
    if labels:
        parts.append(labels)
    return ["; ".join(parts), *_dtype_notes(begun, model), *notes]


def _dtype_notes(begun: dict[str, Any], model: nn.Module) -> list[str]:
    """Return a note if the file of the start model has another dtype than the trained weights."""
    trained = f"trained in {dtype_names(trained_weights(model))}"
    stored = begun.get("stored_dtype")
    if stored:
        return [f"weights are stored in {stored}; {trained}"]
    configured = begun.get("config_dtype")
    if configured:
        return [f"config.json says {configured}; weights are {trained}"]
    return []


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def half_notes(model: nn.Module, checkpoint: Path | None) -> list[str]:
    """Return a note if a run trains weights of 16 bits, which loses small steps."""
    lost = lost_steps(model.parameters())
    if not lost:
        return []
    if checkpoint is None:
        return [f"{lost}; give a float32 model, and --precision bf16 for its products"]
    return [f"{lost}; the run was begun so and continues so: begin another one for float32"]


ModelFactory = Callable[[RunConfig, "Task"], nn.Module]


def build_run_model(config: RunConfig, task: Task) -> nn.Module:
    """Return the model of ``config.start`` or ``config.model`` for the data of ``task``. An unknown
    architecture, attention or residual (nearest named) or bad mix is a `ConfigError`."""
    return build_start(config, task).model


def load_run_model(run_dir: Path | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of a finished run and its tokenizer, or the image processor in its place.

    Status: exact. It is read from ``final/``, with the weights that were best on *valid*, in
    evaluation mode.

    Args:
        run_dir: a run folder.

    Raises:
        ConfigError: no run folder, or one that needs ``--import`` of a file, not imported so far.
        CheckpointError: the run has not ended, or files do not load.

    Cost: reading the weights. For a folder written by ``save_pretrained``, use ``from_pretrained``.

    >>> load_run_model("no/such/run")
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: no/such/run: not a run folder (no config.toml); name one that `wellposed train` wrote
    """
    run_dir = Path(run_dir)
    read_config(run_dir)
    import_recorded(run_dir)
    final = run_dir / FINAL
    if not final.is_dir():
        raise CheckpointError(
            f"{run_dir}: no {FINAL}/, as the run has not ended; finish it with --resume auto"
        )
    from transformers import AutoImageProcessor, AutoTokenizer

    from wellposed.models import load_pretrained, load_saved_model, reads_images

    manifest.verify_final(final)
    model = load_saved_model(final)
    processor = AutoImageProcessor if reads_images(model) else AutoTokenizer
    return model, load_pretrained(processor, final)


def check_models(runs: Iterable[tuple[RunConfig, Task]]) -> None:
    """Raise the errors of `build_run_model` for the options of runs, without weights."""
    for config, task in runs:
        _check_inputs(config, task)
        if not config.start.model:
            with torch.device("meta"):
                build_run_model(config, task)


def build_start(config: RunConfig, task: Task, dtype: torch.dtype = torch.float32) -> Start:
    """Return the model of `build_run_model`, and which of its weights were read from a start model.
    Its weights are in ``dtype``, also if those of the start model are stored in another one.

    Raises:
        ConfigError: as there; no head for the task, attention that cannot be replaced, or a frozen
            body with weights drawn at random.
        CheckpointError: it cannot be loaded.
        RoleNotFoundError: T-Fixup has no rule for one of its weights.
    """
    windows = getattr(task, "windows", None)
    _check_inputs(config, task)
    start = _build_whole(config, task, dtype, reads_windows=windows is not None)
    if config.start.dt_fixup and not next(start.model.parameters()).is_meta:
        start = _dt_fixup(start, config, task)
    frozen = config.start.frozen
    if windows is None:
        if frozen:
            problem = "frozen is for models that read windows"
            raise ConfigError(f"{problem}; give --certified-windows 1, or leave it out")
        return start
    from wellposed.models import WindowsForSequenceClassification

    pad = task.model_kwargs()["pad_token_id"]
    model = WindowsForSequenceClassification.around(start.model, **windows, pad=pad, frozen=frozen)
    new = [f"model.{name}" for name in start.new_weights]
    if frozen:
        _refuse_drawn_body(config.start.model, start)
        new += [f"head.{name}" for name, _ in model.head.named_parameters()]
    return dataclasses.replace(start, model=model, new_weights=tuple(new))


_READ = {"seq2seq_lm": "a source and a target", "image_classification": "patches of images"}


def _check_inputs(config: RunConfig, task: Task) -> None:
    """Refuse options for models of one text if the task has other inputs, before any training."""
    read = _READ.get(task.kind) or ("windows of words" if getattr(task, "windows", None) else "")
    embedding = task.kind == "image_classification" and config.penalty.embedding
    asked = "DT-Fixup" if config.start.dt_fixup else "penalty.embedding" if embedding else ""
    if asked and read:
        problem = f"{asked} is for models of one text, and those of {task.name} read {read}"
        raise ConfigError(f"{config.variant}: {problem}; give another variant, such as plain")


def _dt_fixup(start: Start, config: RunConfig, task: Task) -> Start:
    """Draw the layers by DT-Fixup. A resumed run draws the same and then loads its checkpoint, so
    nothing is scaled twice."""
    from wellposed.initialize import dt_fixup_

    model = start.model
    train = config.train
    examples = task.dataset("train")
    order = task.batches("train", train.batch_size, seed=train.seed, epoch=0)
    read = ([examples[row] for row in rows] for rows in order[: config.start.dt_fixup])
    seed = int(torch.randint(2**62, ()))  # the run's own seed has drawn the embeddings
    report = dt_fixup_(model, (model_inputs(model, task.collate(e)) for e in read), seed=seed)
    sizes = {"mu": report.mu, "tokens": report.tokens, "factor": report.factors["new layers"]}
    drawn = {*start.new_weights, *(row.name for row in report.rows if row.drawn)}
    return dataclasses.replace(start, info={"dt_fixup": sizes}, new_weights=tuple(sorted(drawn)))


def _refuse_drawn_body(source: str, start: Start) -> None:
    """Refuse to freeze a body with weights drawn at random; the pooler is not used."""
    body = f"{start.model.base_model_prefix}."
    inside = [name for name in start.new_weights if name.startswith(body)]
    drawn = [name for name in inside if not name.startswith(f"{body}pooler.")]
    if drawn:
        raise ConfigError(
            f"{source}: frozen needs every weight of the body in the file, these were drawn at random:"
            f" {shortened(drawn)}; give a folder with weights, or leave frozen out"
        )


def _build_whole(
    config: RunConfig, task: Task, dtype: torch.dtype, *, reads_windows: bool
) -> Start:
    from wellposed.models import build_model, model_keywords
    from wellposed_lab.training.start import Start, start_model

    options = config.start
    if not options.model:
        keywords = {**model_keywords(config.model), **task.model_kwargs()}
        return Start(build_model(config.model.architecture, task.kind, **keywords), (), ())
    if not options.from_scratch:
        _refuse_other_tokens(options.model, task)
    start = start_model(
        options.model,
        task.kind,
        task.model_kwargs(),
        from_scratch=options.from_scratch,
        new_head=options.new_head,
        dtype=dtype,
    )
    voting = "votes" if hasattr(start.model, "votes") else ""
    if voting or (reads_windows and (options.init, options.attention) != ("own", "own")):
        keywords = voting or f"{options.attention} attention, {options.init} weights"
        raise ConfigError(
            f"{options.model}: windows of words need a classifier with its own attention and norms,"
            f" received {keywords}; give --from a model without windows, no --start.attention, and"
            " another variant than t_fixup"
        )
    if task.kind == "image_classification":
        _try_image(start.model, task, options.model)
    if options.init == "t_fixup":
        if task.kind == "image_classification":
            raise ConfigError(
                f"{options.model}: T-Fixup has no rule for patch embeddings; train it with its"
                " norms, as another variant"
            )
        from wellposed.initialize import t_fixup_

        t_fixup_(start.model)
    if options.attention != "own":
        from wellposed.integrations import set_attention_

        set_attention_(start.model, f"wellposed_{options.attention}")
    return start


def _try_image(model: nn.Module, task: Task, source: str) -> None:
    """Run ``model`` on one image: only its forward pass knows which sizes and channels it takes."""
    batch = task.collate([task.dataset("train")[0]])
    try:
        with torch.no_grad():
            forward(model.eval(), batch)
    except (ValueError, RuntimeError) as error:
        if is_about_resources(error):
            raise
        shape = tuple(batch["pixel_values"].shape[1:])
        raise ConfigError(
            f"{source}: the model cannot read images of shape {shape} (channels, height, width):"
            f" {error}; give the processor that was saved with it (--processor hf:FOLDER), or"
            " --processor config:FOLDER for its size"
        ) from error
    model.train()


def _refuse_other_tokens(source: str, task: Task) -> None:
    """Refuse pretrained weights whose saved tokenizer, if any, differs from that of the data."""
    from transformers import AutoTokenizer

    from wellposed.models import load_pretrained

    if Path(source).is_file() or task.kind == "image_classification":
        return
    try:
        saved = load_pretrained(AutoTokenizer, source).get_vocab()
    except CheckpointError:
        return
    if not saved.items() <= task.tokenizer.get_vocab().items():
        raise ConfigError(
            f"{source}: its weights need the model's own tokens, and the data of {task.name} has"
            " others; choose a task that uses the model's tokenizer, without --tokenizer, or give"
            " --from-scratch"
        )


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass; a model that cannot is a `ConfigError`."""
    older_name = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", older_name)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"train.gradient_checkpointing: {type(model).__name__} cannot recompute its"
            " activations; leave the option out, and lower --batch-size with a higher"
            " --gradient-accumulation to save memory"
        )
    enable({"use_reentrant": False})


def constrained_weights(options: ConstrainOptions, model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that ``options`` constrains, which the optimizer must not decay. A pattern
    that matches nothing is a `ConfigError`, with near names."""
    if not options.where or options.to == "logits":  # these weights may decay
        return []
    from wellposed.constrain import select_weights

    try:
        candidates = select_weights(model, options.patterns, per=_PER[options.per])
    except RoleNotFoundError as error:
        raise _unusable(options, error) from error
    return [candidate.parameter for candidate in candidates if candidate.parameter is not None]


_GAINS: dict[str, Literal["fit"] | float | None] = {"auto": None, "one": 1.0, "fit": "fit"}
_PER: dict[str, Literal["head"] | None] = {"weight": None, "head": "head"}


def build_constraint(
    options: ConstrainOptions, model: nn.Module, optimizer: Optimizer
) -> Constraint | None:
    """Return the handle that constrains the weights of ``options``, or None if it names none. A
    resumed run needs only the weights and the optimizer's state. Weights that cannot be constrained
    are a `ConfigError`, each with the reason."""
    if not options.where:
        return None
    from wellposed.constrain import constrain_

    try:
        return constrain_(
            model,
            optimizer,
            options.patterns,
            to=options.to,
            bound=options.bound,
            embeddings=options.embeddings,
            gain=_GAINS[options.gain],
            per=_PER[options.per],
        )
    except ShapeError as error:
        raise _unusable(options, error) from error


def _unusable(options: ConstrainOptions, error: Exception) -> ConfigError:
    return ConfigError(f"constrain.where = {options.where!r} cannot be used for the model: {error}")
