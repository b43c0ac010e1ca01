"""Start from the user's model: its weights with a head for the task, or only its configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from wellposed.errors import CheckpointError, ConfigError, ShapeError
from wellposed.head_kind import SINGLE, problem_type
from wellposed.models import (
    AUTO_CLASSES,
    load_with_report,
    refuse_computed_weights,
    refuse_other_shapes,
    start_config,
    stored_dtypes,
    text_positions,
)

_HUGGING_FACE = {kind: auto for kind, auto in AUTO_CLASSES.items() if "pair" not in kind}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
LABELS = ("num_labels", "id2label", "label2id", "problem_type")


@dataclass(frozen=True)
class Start:
    """A model that a run begins with."""

    model: PreTrainedModel
    new_weights: tuple[str, ...]
    """Names of the tensors drawn at random: those of the head, or all of a model from scratch."""
    left_out: tuple[str, ...]
    """Names of the saved tensors that the model for this task does not use, such as another head."""
    labels: str = ""
    """How the labels of a saved classifier were matched with those of the data."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Entries of ``train_info`` about weights that depend on data."""
    stored_dtype: str = ""
    """Dtype of the weights in the file; empty if it is that of training."""
    config_dtype: str = ""
    """Dtype that ``config.json`` names; empty if there is none, or that of training."""


def check_start(source: str | Path, kind: str) -> PreTrainedConfig:
    """Return the configuration of ``source`` if its family has a model of ``kind``; no weights.

    Raises:
        ConfigError: Hugging Face has no model of that kind, or none of this family.
        CheckpointError: the configuration cannot be read.
    """
    if kind not in _HUGGING_FACE:
        kinds = ", ".join(_HUGGING_FACE)
        raise ConfigError(f"{source}: Hugging Face has no head {kind!r}; it has: {kinds}")
    config = start_config(source)
    if type(config) not in AUTO_CLASSES[kind]._model_mapping:
        raise ConfigError(
            f"{source}: a {config.model_type} model has no head for {kind.replace('_', ' ')} in"
            " transformers; choose a task of its kind, or another model"
        )
    return config


def start_model(
    source: str | Path,
    kind: str,
    wanted: Mapping[str, Any],
    *,
    from_scratch: bool = False,
    new_head: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Start:
    """Return the model of ``source`` with its saved weights and the head that ``kind`` needs.

    Status: exact for what is read. As in `load_pretrained_model`, no code of the folder runs and
    weights are safetensors. A missing tensor of the body is an error. Missing tensors of the head
    are drawn by the model's own initialisation and named in ``new_weights``. Weights are in
    ``dtype``, also if the file has another one: a float32 copy of a bfloat16 weight is exact.

    Args:
        source: A folder with ``config.json`` and weights, a ``config.json``, or a hub name.
        kind: Kind of the task, such as ``causal_lm``.
        wanted: Values fixed by data: ``vocab_size``, ``max_position_embeddings``, ids, labels.
        from_scratch: Read only the configuration and draw every weight.
        new_head: Draw a new head even if the saved one has other labels.
        dtype: Dtype of the weights. In bfloat16 and float16 most steps of fine-tuning are lost.

    Returns:
        The model in training mode, with the names of drawn and unused tensors, and the dtype of the
        file if it is another one.

    Raises:
        ConfigError: a family without a head of this kind, a language model whose tokens see later
            ones, labels that differ, or too few positions.
        ShapeError: a vocabulary larger than the model's.
        CheckpointError: it cannot be loaded, lacks tensors of its body, or has some of other shape.

    Cost: reading the weights. When not to use: resume a finished run of this library instead.

    >>> start_model("/no/such/folder", "causal_lm", {})
    Traceback (most recent call last):
    ...
    wellposed.errors.CheckpointError: /no/such/folder: no such folder
    """
    config = check_start(source, kind)
    auto = AUTO_CLASSES[kind]
    if "num_labels" in wanted:
        wanted = {**wanted, "problem_type": SINGLE}

    drawn = from_scratch or Path(source).is_file()
    configured = _other_than(dtype, [str(getattr(config, "dtype", None) or dtype)])
    _check_positions(source, config, wanted)
    if drawn:
        model = _drawn(config, auto, wanted, dtype)
        _check_direction(source, kind, model)
        names = tuple(name for name, _ in model.named_parameters())
        return Start(model.train(), names, (), config_dtype=configured)

    _check_tokens(source, config, wanted)
    labels = {name: wanted[name] for name in LABELS if name in wanted}
    has_labels = bool(labels) and not new_head and _is_classifier(config)
    order, matched = _match_labels(source, config, wanted["id2label"]) if has_labels else ([], "")
    model, report = load_with_report(auto, source, dtype=dtype, **labels)
    _check_direction(source, kind, model)
    refuse_other_shapes(source, report, lambda name: new_head and _belongs_to_head(model, name))
    missing = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    lacking = sorted(name for name in missing if not _belongs_to_head(model, name))
    if lacking:
        refuse_computed_weights(source, lacking, report)
        raise CheckpointError(
            f"{source}: the file of weights lacks {', '.join(lacking[:10])} of the body, so it is"
            " damaged or has another architecture; copy the folder again, or give --from-scratch to"
            " use only its configuration"
        )

    _add_tokens(model, wanted)
    if order != sorted(order):
        _order_labels_(model, auto, order)

    return Start(
        model.train(),
        tuple(sorted(missing)),
        tuple(sorted(report["unexpected_keys"])),
        matched,
        stored_dtype=_other_than(dtype, stored_dtypes(source)),
        config_dtype=configured,
    )


def _check_positions(
    source: str | Path, config: PreTrainedConfig, wanted: Mapping[str, Any]
) -> None:
    has = text_positions(config)
    asked = wanted.get("max_position_embeddings")
    if has is not None and asked is not None and asked > has:
        raise ConfigError(
            f"{source}: the data asks for {asked} positions and the model has {has}; give"
            f" --max-length {has} (--seq-len for a language model, --max-tokens for translation)"
        )


def _drawn(
    config: PreTrainedConfig, auto: Any, wanted: Mapping[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """Return a model of a configuration, with the values that data fix and drawn weights."""
    for name in ("vocab_size", *TOKENS, *LABELS):
        if wanted.get(name) is not None:
            setattr(config, name, wanted[name])
    # transformers iterates over it if a family has two classes
    config.architectures = config.architectures or []
    return auto.from_config(config, dtype=dtype)


def _add_tokens(model: PreTrainedModel, wanted: Mapping[str, Any]) -> None:
    """Set the ids of special tokens that the model's configurations lack."""
    for config in filter(None, (model.config, getattr(model, "generation_config", None))):
        for name in TOKENS:
            if getattr(config, name, None) is None and wanted.get(name) is not None:
                setattr(config, name, wanted[name])


def _other_than(dtype: torch.dtype, names: Sequence[str]) -> str:
    """Return the names of dtypes in one phrase; empty if ``dtype`` is the only one."""
    plain = [name.removeprefix("torch.") for name in names]
    return "" if plain in ([], [str(dtype).removeprefix("torch.")]) else " and ".join(plain)


def _belongs_to_head(model: PreTrainedModel, name: str) -> bool:
    body = "" if model.base_model is model else f"{model.base_model_prefix}."
    return not name.startswith(body) or name.startswith(f"{body}pooler.")


def _check_tokens(source: str | Path, config: PreTrainedConfig, wanted: Mapping[str, Any]) -> None:
    rows = getattr(config, "vocab_size", None)
    tokens = wanted.get("vocab_size")
    if rows is not None and tokens is not None and tokens > rows:
        raise ShapeError(
            f"{source}: the tokenizer has {tokens} tokens and the model's embedding {rows} rows; "
            "use the tokenizer that was saved with the model"
        )

    first = getattr(config, TOKENS[-1], None)
    asked = wanted.get(TOKENS[-1])
    if None not in (first, asked) and first != asked:
        raise ConfigError(
            f"{source}: the decoder starts with token {first} and the data's tokenizer begins"
            f" targets after {asked}; use the tokenizer that was saved with the model"
        )


def _check_direction(source: str | Path, kind: str, model: PreTrainedModel) -> None:
    """Refuse a language model whose tokens see later ones, and an encoder whose first sees none."""
    direct = kind != "encoder" or not model.config.is_encoder_decoder
    if kind == "encoder" and not (direct and _first_token_sees_the_last(model)):
        raise ConfigError(
            f"{source}: a {type(model).__name__} is no encoder whose first token sees all others;"
            " give a model such as BERT, RoBERTa or DistilBERT"
        )
    if kind == "causal_lm" and _first_token_sees_the_last(model):
        raise ConfigError(
            f"{source}: the tokens of a {type(model).__name__} see later tokens, which a language"
            " model has to predict; give a decoder such as GPT-2 or Llama, or the task"
            " text_classification"
        )


@torch.no_grad()
def _first_token_sees_the_last(model: Any) -> bool:
    """Return whether the output at the first token changes with the second token."""
    both = torch.tensor([[1, 0], [1, 1]], device=model.device)
    outputs = model.eval()(input_ids=both, attention_mask=torch.ones_like(both))[0][:, 0]
    return not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6)


def _is_classifier(config: PreTrainedConfig) -> bool:
    kinds = ("ForSequenceClassification", "ForImageClassification")
    return any(kind in str(name) for name in config.architectures or () for kind in kinds)


def _match_labels(
    source: str | Path, config: PreTrainedConfig, wanted: Mapping[int, str]
) -> tuple[list[int], str]:
    """Return the checkpoint's label for each label of the data, by name, and a note on the match."""
    kind = problem_type(config)
    if kind != SINGLE:
        raise ConfigError(
            f"{source}: its problem_type is {kind}, and the data has one label a row; give"
            " --new-head to draw another head"
        )

    tables = (cast(Mapping[int, str], config.id2label), wanted)
    has, names = ([str(labels[index]) for index in sorted(labels)] for labels in tables)
    if len(has) == len(names) and has == [f"LABEL_{index}" for index in range(len(has))]:
        return list(range(len(has))), f"its labels have no names, taken as {', '.join(names)}"

    for spelled in (str, str.casefold):
        index_of = {spelled(name): index for index, name in enumerate(has)}
        if len(index_of) == len(has) and sorted(index_of) == sorted(map(spelled, names)):
            order = [index_of[spelled(name)] for name in names]
            moved = order != sorted(order)
            return order, f"labels matched by name: {', '.join(names)}" if moved else ""

    raise ConfigError(
        f"{source}: its classifier has the labels {', '.join(has)} and the data"
        f" {', '.join(names)}; give --new-head to draw a new one, or data with the same labels"
    )


@torch.no_grad()
def _order_labels_(model: PreTrainedModel, auto: Any, order: Sequence[int]) -> None:
    """Reorder the rows of a classifier's tensors, one row per label."""
    shapes: list[dict[str, torch.Size]] = []
    for count in (len(order), len(order) + 1):
        config = copy.deepcopy(model.config)
        config.num_labels = count
        with torch.device("meta"):
            made = auto.from_config(config)
        shapes.append({name: parameter.shape for name, parameter in made.named_parameters()})

    parameters = dict(model.named_parameters())
    for name, shape in shapes[0].items():
        for axis, (size, more) in enumerate(zip(shape, shapes[1][name], strict=True)):
            if size != more:
                rows = torch.tensor(order, device=parameters[name].device)
                parameters[name].copy_(parameters[name].index_select(axis, rows))
