"""The final model of a run, for other programs and for the hub."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from wellposed.errors import CheckpointError, is_out_of_memory
from wellposed.finite_json import to_json
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.folder import atomic, checkpoints, manifest
from wellposed_lab.training.folder.run_folder import FINAL

MODULE = "modeling_wellposed"


def is_ours(model: nn.Module) -> bool:
    """Return whether the class of ``model`` is one of wellposed, which transformers lacks."""
    return type(model).__module__.startswith("wellposed.")


def name_our_classes(folder: Path, model: Any) -> None:
    """Add ``auto_map`` to ``config.json`` and the file that imports a model's wellposed classes."""
    if not is_ours(model):
        return
    from wellposed.models import auto_class

    auto = getattr(auto_class(type(model).__name__), "__name__", "AutoModel")
    names = {"AutoConfig": type(model.config).__name__, auto: type(model).__name__}
    path = folder / "config.json"
    auto_map = {"auto_map": {auto: f"{MODULE}.{name}" for auto, name in names.items()}}
    atomic.write_synced(path, to_json(json.loads(path.read_bytes()) | auto_map, indent=2))
    imports = "\n".join(f"from wellposed.models import {name} as {name}" for name in names.values())
    docstring = (
        '"""The classes of this model are in the package wellposed; this file imports them."""'
    )
    atomic.write_synced(folder / f"{MODULE}.py", f"{docstring}\n\n{imports}\n".encode())


CARD = "README.md"


def save_final(run_folder: Path, model: nn.Module, task: Task, card: str) -> Path:
    """Save model, tokenizer or image processor, and card as ``final/``, complete or not at all
    (`OSError`), for ``from_pretrained``. The manifest lacks the card, so readers may edit it."""
    folder = run_folder / FINAL
    with atomic.replace_folder(folder) as temporary:
        _save_into(temporary, model, task)
        for path in temporary.iterdir():
            atomic.sync_file(path)
        manifest.write_manifest(temporary, [path.name for path in temporary.iterdir()])
        atomic.write_synced(temporary / CARD, card.encode())
    return folder


def check_savable(model: Any, task: Task) -> None:
    """Save everything but the weights to a temporary folder, as a test before training. A value of
    the configuration or tokenizer that cannot be saved is a `CheckpointError`."""
    if not hasattr(model, "save_pretrained"):
        return
    from wellposed.models import quiet_transformers

    with TemporaryDirectory() as folder:
        try:
            with quiet_transformers():
                model.save_pretrained(folder, state_dict={})
            task.processor.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # from a library's own checks and encoders
            if is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"the model to start from cannot be saved again: {reason}; correct the model's or the"
                " tokenizer's JSON files in the folder that --from or --tokenizer names"
            ) from error


def _save_into(folder: Path, model: nn.Module, task: Task) -> None:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        atomic.write_synced(
            folder / checkpoints.MODEL, checkpoints.encode(checkpoints.model_tensors(model))
        )
        return
    from safetensors import SafetensorError

    from wellposed.models import quiet_transformers

    try:
        with quiet_transformers():
            save(folder)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(errno.EIO, str(error), str(folder)) from error
    name_our_classes(folder, model)
    task.processor.save_pretrained(folder)
    readable = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(readable)  # safetensors writes files that other users cannot read
