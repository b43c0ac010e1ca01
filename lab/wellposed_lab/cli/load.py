"""Find the model that a user names: a run folder, a saved model folder, or a hub model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, DataError, nearest_names
from wellposed_lab.tasks.text.tokenizers import TOKENIZER_FILES, has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ("config.json", "config.toml", "final/config.json")


def model_folder(name: str) -> str:
    """Return ``final/`` of a run folder, which must have finished (`CheckpointError`), else
    ``name``. A hub name is ``name`` or ``owner/name``, and neither it nor a folder ``owner`` exists
    here. Other missing paths are a `DataError`, with the nearest names."""
    path = Path(name)
    if (path / "final" / "config.json").is_file():
        return str(path / "final")
    if (path / "config.json").is_file():
        return name
    if (path / "config.toml").is_file():
        raise CheckpointError(
            f"{name}: the run has no final model yet; finish it with --resume auto, then try again"
        )
    if path.is_dir():
        runs = sorted(str(config.parent.parent) for config in path.glob("**/final/config.json"))
        raise DataError(
            f"{name}: expected a run folder or a saved model, found neither config.json nor final/"
            + (f"; runs inside: {', '.join(runs[:5])}" if runs else "")
        )
    if path.exists():
        only = ": a config.json holds no weights" if path.suffix == ".json" else ""
        raise DataError(
            f"{name}: is a file, expected a run folder or a saved model{only}; name the folder of a"
            " model"
        )

    # runs/ is the default folder of runs, which may not exist yet.
    below = os.sep in name and (path.parent.is_dir() or name.startswith("runs/"))
    if below or _HUB_NAME.fullmatch(name) is None:
        raise DataError(f"{name}: no such folder{_nearest(path)}")
    return name


def load_model(name: str) -> PreTrainedModel:
    """Load the model with its saved class (ours are registered with the Auto classes)."""
    from wellposed.models import load_saved_model

    folder = _verified(name, weights=True)
    with near_names(name):
        return load_saved_model(folder)


@contextmanager
def near_names(name: str) -> Iterator[None]:
    """Add the nearest folders to the error for a name that neither the hub nor a folder has."""
    try:
        yield
    except CheckpointError as error:
        if Path(name).exists():
            raise
        raise DataError(f"{error}; no folder has that name either{_nearest(Path(name))}") from error


def load_model_or_draw(name: str) -> PreTrainedModel:
    """Load the model as `load_model`; a ``config.json`` gives random weights (seed 0) and a note."""
    if not Path(name).is_file() or Path(name).suffix != ".json":
        return load_model(name)
    import torch

    from wellposed.models import draw_model

    torch.manual_seed(0)
    model = draw_model(name)
    print(f"{name}: random weights of a {type(model).__name__} (seed 0)", file=sys.stderr)
    return model


def trained_logit_scale(name: str) -> float:
    """Return the factor on the logits in the losses of a run; 1 for a model that is no run."""
    from wellposed_lab.training.folder.run_folder import CONFIG, read_config

    run = Path(name).parent if Path(name).name == "final" else Path(name)
    return read_config(run).train.logit_scale if (run / CONFIG).is_file() else 1.0


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved beside the model."""
    from wellposed_lab.tasks.text.tokenizers import load_tokenizer as load

    folder = _verified(name, weights=False)
    if Path(folder).is_dir() and not has_tokenizer(Path(folder)):
        raise CheckpointError(
            f"{folder}: the folder has no tokenizer; expected one of"
            f" {', '.join(TOKENIZER_FILES)}; save it beside the model with"
            f" tokenizer.save_pretrained({folder!r})"
        )
    return load(folder)


def load_image_processor(name: str) -> Any:
    """Load the image processor saved beside the model."""
    from wellposed_lab.tasks.image_classification import load_processor

    return load_processor(_verified(name, weights=False))


def _verified(name: str, *, weights: bool) -> str:
    """Return the folder to load from, after a check of its files against their digests."""
    from wellposed_lab.training.folder.manifest import verify_final, verify_run_file
    from wellposed_lab.training.folder.run_folder import CONFIG, import_recorded

    folder = model_folder(name)
    config = Path(name) / CONFIG
    verify_final(Path(folder), weights=weights)
    if Path(folder) != Path(name):
        verify_run_file(config)
        if config.is_file():
            import_recorded(Path(name))
    return folder


def _nearest(path: Path) -> str:
    """Return the end of a message: the nearest folders beside ``path`` with a model or a run."""
    folders = sorted(entry for entry in path.parent.glob("[!.]*") if entry.is_dir())
    models = [folder for folder in folders if any((folder / file).is_file() for file in _FILES)]
    near = nearest_names(path.name, [folder.name for folder in models or folders])
    return f"; nearest: {', '.join(str(path.parent / name) for name in near)}" if near else ""
