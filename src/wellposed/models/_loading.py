"""Loading saved models and tokenizers: safetensors only, no code of theirs, all weights present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging

from wellposed.errors import (
    CheckpointError,
    WellposedError,
    is_about_resources,
    is_out_of_memory,
    shortened,
    shown_value,
)
from wellposed.hub import UNREACHABLE, hub_answers
from wellposed.initialize import remove_recorded_norms_
from wellposed.integrations import set_attention_
from wellposed.interrupts import undoing
from wellposed.model_edits import recorded
from wellposed.models._build import AUTO_CLASSES
from wellposed.models._folder_checks import check_config_file, check_folder

_BY_SUFFIX = {
    **{auto.__name__.removeprefix("AutoModel"): auto for auto in AUTO_CLASSES.values()},
    "LMHeadModel": AUTO_CLASSES["causal_lm"],
    "ForConditionalGeneration": AUTO_CLASSES["seq2seq_lm"],
}
"""The Auto class by the end of a class name; an encoder's end is empty."""
_OF_HOOKS = ("_orig", "_g", "_v")
"""Endings of what pruning, spectral_norm and weight_norm of the old style compute a weight from."""
_LATE_POSITIONS = ("roberta", "xlm-roberta", "camembert")
"""Families whose position codes begin after the index of the padding token."""


def auto_class(architecture: str) -> Any | None:
    """Return the Auto class that loads ``architecture``; None if its name does not tell.

    >>> auto_class("WellposedForSeq2SeqLM").__name__
    'AutoModelForSeq2SeqLM'
    """
    ends = (auto for end, auto in _BY_SUFFIX.items() if end and architecture.endswith(end))
    return next(ends, None)


def load_pretrained(kind: Any, name: str | Path) -> Any:
    """Return ``kind.from_pretrained(name)``; code that comes with the files is refused, never run.

    Status: exact. ``trust_remote_code=False`` is passed, so nothing is read from standard input. If
    the hub cannot be reached (one attempt), only its cache is used.

    Args:
        kind: ``AutoTokenizer``, ``AutoConfig``, or another class with ``from_pretrained``.
        name: a folder, or the name of a hub model.

    Raises:
        CheckpointError: it cannot be loaded, or needs code of its own.

    Cost: reading the files. When not to use: for weights, see `load_pretrained_model`.

    >>> load_pretrained(transformers.AutoTokenizer, "/no/such/folder")
    Traceback (most recent call last):
    wellposed.errors.CheckpointError: /no/such/folder: no such folder
    """
    return _load(kind, str(name))


def start_config(source: str | Path) -> Any:
    """Return the configuration in a folder, ``config.json`` or hub model; else a
    `CheckpointError`."""
    return load_pretrained(transformers.AutoConfig, source)


def load_pretrained_model(kind: Any, name: str | Path, *, unread: str | None = None) -> Any:
    """Return ``kind.from_pretrained(name)`` in evaluation mode, with every weight as it was saved.

    Status: exact, as `load_pretrained`. Weights come from safetensors files only, as a pickle can
    run code. Every tensor of the model must be present (Hugging Face draws missing ones at random),
    and a model of wellposed must use every tensor of the file.

    Args:
        kind: an Auto class, or a model class.
        name: a folder, or the name of a hub model.
        unread: prefix of tensors that may be missing, because the caller never reads their output.

    Raises:
        CheckpointError: as `load_pretrained`; or weights are pickled (the message tells how to
            convert them) or missing (they are named).

    Cost: reading the weights. When not to use: to put a new head on a trained body.

    >>> load_pretrained_model(transformers.AutoModel, "/no/such/folder")
    Traceback (most recent call last):
    wellposed.errors.CheckpointError: /no/such/folder: no such folder
    """
    model, report = load_with_report(kind, name)
    refuse_other_shapes(name, report)
    skipped = () if unread is None else unread
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(skipped))
    refuse_computed_weights(name, missing, report)
    ours = type(model).__module__.startswith("wellposed.")
    unexpected = sorted(report["unexpected_keys"]) if ours else []
    problems = [f"lacks {shortened(missing)}"] if missing else []
    if unexpected:
        problems.append(f"has {shortened(unexpected)}, which {type(model).__name__} does not use")

    if problems:
        raise CheckpointError(
            f"{name}: the file of weights {' and '.join(problems)}; it is damaged or of another"
            " architecture: copy the folder again from an intact copy, or save the model again"
        )
    return model.eval()


def load_with_report(kind: Any, name: str | Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return ``kind.from_pretrained(name, **options)`` and its missing, unread and unfit tensors.

    Unfit tensors are drawn at random, see `refuse_other_shapes`. Changes recorded in the
    configuration are repeated: removed norms, and another attention.
    """
    _refuse_pickles(Path(name), kind)
    checks = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = _load(kind, str(name), **checks, **options)
    removed = tuple(f"{path}." for path in _change_as_recorded_(model))
    missing = {key for key in report["missing_keys"] if not key.startswith(removed)}
    return model, {**report, "missing_keys": missing}


def refuse_other_shapes(
    name: str | Path, report: Mapping[str, Any], allowed: Callable[[str], bool] | None = None
) -> None:
    """Raise `CheckpointError` for tensors, unless ``allowed``, of other shapes than the model's."""
    unfit = sorted(
        f"{key} is {tuple(saved)} in the file and {tuple(made)} in the model"
        for key, saved, made in report["mismatched_keys"]
        if allowed is None or not allowed(key)
    )
    if unfit:
        raise CheckpointError(
            f"{name}: the weights do not fit config.json: {'; '.join(unfit[:3])}"
            + (f"; and {len(unfit) - 3} more" if len(unfit) > 3 else "")
            + "; they are of another model: copy the folder again from an intact copy"
        )


def refuse_computed_weights(
    name: str | Path, missing: Iterable[str], report: Mapping[str, Any]
) -> None:
    """Raise `CheckpointError` for missing tensors that were saved as what they are computed from."""
    in_file = report["unexpected_keys"]

    def is_computed(key: str) -> bool:
        path, _, attribute = key.rpartition(".")
        is_new_style = any(
            name.startswith(f"{path}.parametrizations.{attribute}.") for name in in_file
        )
        return is_new_style or any(f"{key}{end}" in in_file for end in _OF_HOOKS)

    # A body that was saved alone has names without the first part.
    computed = [key for key in missing if is_computed(key) or is_computed(key.partition(".")[2])]
    if computed:
        raise CheckpointError(
            f"{name}: {shortened(computed)} was saved while a parametrization or hook computed it."
            " On the model call torch.nn.utils.parametrize.remove_parametrizations (old style:"
            " remove_weight_norm, remove_spectral_norm, prune.remove), and save it again"
        )


def _change_as_recorded_(model: Any) -> tuple[str, ...]:
    """Apply the changes recorded in a model's configuration; return the paths of removed norms."""
    removed = remove_recorded_norms_(model)
    attention = recorded(model.config).get("attention")
    if attention is not None:  # recorded by older versions only
        set_attention_(model, attention)
    return removed


def draw_model(config_file: str | Path) -> Any:
    """Return the model of a ``config.json``, in evaluation mode, with freshly initialised weights.

    Status: deterministic in torch's generator. Recorded changes are applied, as in
    `load_saved_model`.

    Args:
        config_file: a ``config.json`` of Hugging Face.

    Raises:
        CheckpointError: the file cannot be read, or no known model can be made of it.

    Cost: drawing the weights. When not to use: for training, `start_model` adds the task's head.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(folder)
    ...     type(draw_model(Path(folder) / "config.json")).__name__
    'GPT2Model'
    """
    config = load_pretrained(transformers.AutoConfig, config_file)
    kind = _saved_class(config)
    try:
        model = kind.from_config(config) if hasattr(kind, "_model_mapping") else kind(config)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        if is_about_resources(error):
            raise
        reason = _first_line(error)
        raise CheckpointError(f"{config_file}: no model can be made of it: {reason}") from error
    _change_as_recorded_(model)
    return model.eval()


def load_saved_model(name: str | Path) -> Any:
    """Return the saved model in ``name``, of its own class, in evaluation mode.

    Status: exact. Norms removed by `wellposed.t_fixup_` or `wellposed.remove_norms_` stay removed,
    and attention stays ``wellposed_l2`` or ``wellposed_cosine``: logits are those of the saved
    model.

    Args:
        name: a folder, or the name of a hub model.

    Raises:
        CheckpointError: as `load_pretrained_model`, or ``config.json`` cannot be read.

    Cost: reading the weights. When not to use: for another head, use `load_pretrained_model`.

    >>> load_saved_model("/no/such/folder")
    Traceback (most recent call last):
    wellposed.errors.CheckpointError: /no/such/folder: no such folder
    """
    return load_pretrained_model(_saved_class(load_pretrained(transformers.AutoConfig, name)), name)


def text_positions(config: Any) -> int | None:
    """Return the most tokens that a model of ``config`` reads; None if it has no limit.

    Status: exact for families of transformers whose position codes begin at 0, or after the index
    of the padding token (RoBERTa and relatives). When not to use: for images.

    >>> text_positions(transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1))
    512
    """
    has = getattr(config, "max_position_embeddings", None)
    if not has:
        return None
    taken = (config.pad_token_id or 0) + 1 if config.model_type in _LATE_POSITIONS else 0
    return int(has) - taken


def reads_images(model: Any) -> bool:
    """Return whether ``model`` reads ``pixel_values``. Status: exact for models of transformers.

    >>> reads_images(transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=0)))
    True
    """
    return getattr(model, "main_input_name", None) == "pixel_values"


def _saved_class(config: Any) -> Any:
    """Return the class that loads the architecture that ``config`` names."""
    named = config.architectures if isinstance(config.architectures, list) else []
    name = next((item for item in named[:1] if isinstance(item, str)), "")
    named_class = getattr(transformers, name, None) if name else None
    is_model = isinstance(named_class, type) and issubclass(
        named_class, transformers.PreTrainedModel
    )
    auto = auto_class(name)
    if is_model and (auto is None or type(config) not in auto._model_mapping):
        return named_class
    return auto or transformers.AutoModel


def _load(kind: Any, name: str, **options: Any) -> Any:
    folder = Path(name)
    if folder.is_dir():
        check_folder(
            folder, reads_model=kind is transformers.AutoConfig or "use_safetensors" in options
        )
    elif folder.suffix == ".json":
        check_config_file(folder)

    if folder.is_absolute() and not folder.exists():
        raise CheckpointError(f"{name}: no such folder")
    try:
        local = {"local_files_only": folder.exists() or not hub_answers()}
        with quiet_transformers():
            return kind.from_pretrained(name, trust_remote_code=False, **local, **options)
    except Exception as error:  # parsers of damaged files raise anything, also RecursionError
        if is_out_of_memory(error):
            raise
        text = str(error)
        if "trust_remote_code" in text or "custom code" in text:
            raise CheckpointError(
                f"{name}: needs Python code that comes with it, which wellposed never runs; if you"
                " trust it, load it in Python with trust_remote_code=True and pass the model to"
                " wellposed"
            ) from error
        ours = isinstance(error, WellposedError)
        reason = " ".join(text.split()) if ours else _first_line(error).rstrip(".")
        if "couldn't connect" in text:
            reason = UNREACHABLE
        reason = reason if ours else shown_value(reason)
        raise CheckpointError(f"{name}: cannot be loaded: {reason}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _refuse_pickles(folder: Path, kind: Any) -> None:
    pickled = ", ".join(sorted(path.name for path in folder.glob("pytorch_model*.bin")))
    if pickled and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder}: the weights are pickled ({pickled}), which can run code;"
            " expected safetensors; if you trust the file, convert it once: model ="
            f" transformers.{kind.__name__}.from_pretrained({str(folder)!r},"
            f" use_safetensors=False), then model.save_pretrained({str(folder)!r})"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and notices of transformers off the terminal; errors are still raised."""
    with undoing() as undo:
        undo.later(logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            undo.later(logging.enable_progress_bar)
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        yield
