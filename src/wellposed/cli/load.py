"""Finding the model a user names: a run folder, a saved model folder, or a model of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, DataError, nearest_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def model_folder(name: str) -> str:
    """Return the folder (or hub name) to load ``name`` from: ``final/`` of a run folder, else the name itself.

    Raises:
        CheckpointError: a run folder whose run has not finished.
        DataError: a path that does not exist and cannot be the name of a hub model.
    """
    path = Path(name)
    if (path / "final" / "config.json").is_file():
        return str(path / "final")
    if (path / "config.json").is_file():
        return name
    if (path / "config.toml").is_file():
        raise CheckpointError(f"{name}: the run has no final model yet; finish it with --resume auto, then try again")
    if path.is_dir():
        runs = sorted(str(found.parent.parent) for found in path.glob("**/final/config.json"))
        raise DataError(
            f"{name}: expected a run folder or a saved model, found neither config.json nor final/"
            + (f"; runs inside: {', '.join(runs[:5])}" if runs else "")
        )
    if path.is_absolute() or name.startswith((".", "runs/")) or name.count("/") > 1:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest_names(path.name, siblings)
        raise DataError(f"{name}: no such folder" + (f"; nearest: {', '.join(near)}" if near else ""))
    return name


def load_model(name: str) -> PreTrainedModel:
    """Load the model with the class it was saved from (our own classes are registered with the Auto classes)."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from wellposed.models import auto_class

    folder = model_folder(name)
    auto: Any = auto_class(_architecture(folder)) or transformers.AutoModel
    try:
        return auto.from_pretrained(folder).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: the model cannot be loaded: {_first_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved beside the model."""
    from transformers import AutoTokenizer

    folder = model_folder(name)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{name}: no tokenizer can be loaded from {folder}: {_first_line(error)}") from error


def _architecture(folder: str) -> str:
    config = Path(folder) / "config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{config}: not valid JSON: {error}") from error
    else:
        from transformers import AutoConfig

        try:
            values = AutoConfig.from_pretrained(folder).to_dict()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: neither a folder nor a model of the hub that can be reached: {_first_line(error)}"
            ) from error
    return (values.get("architectures") or [""])[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
