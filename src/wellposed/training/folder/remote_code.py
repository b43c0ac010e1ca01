"""What lets ``from_pretrained(folder, trust_remote_code=True)`` find classes of this package
without its import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from wellposed.finite_json import to_json
from wellposed.training.folder import durable_files

MODULE = "modeling_wellposed"


def is_ours(model: nn.Module) -> bool:
    """Return whether the class of ``model`` is one of this package, which transformers does not
    have."""
    return type(model).__module__.startswith("wellposed.")


def name_our_classes(folder: Path, model: Any) -> None:
    """Add ``auto_map`` to ``config.json`` and the file that imports what it names, for a model of
    this package."""
    if not is_ours(model):
        return
    from wellposed.models import auto_class

    auto = getattr(auto_class(type(model).__name__), "__name__", "AutoModel")
    names = {"AutoConfig": type(model.config).__name__, auto: type(model).__name__}
    path = folder / "config.json"
    auto_map = {auto: f"{MODULE}.{name}" for auto, name in names.items()}
    durable_files.write_synced(
        path, to_json({**json.loads(path.read_bytes()), "auto_map": auto_map}, indent=2)
    )
    imports = "\n".join(f"from wellposed.models import {name} as {name}" for name in names.values())
    text = (
        '"""The classes of this model are in the package wellposed; this file only imports'
        f' them."""\n\n{imports}\n'
    )
    durable_files.write_synced(folder / f"{MODULE}.py", text.encode())
