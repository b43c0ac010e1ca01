"""The floating dtypes in files of weights, which say what precision a checkpoint has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Names of torch by those of safetensors; others, such as F8_E4M3, are given as they are."""
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def stored_dtypes(name: str | Path) -> tuple[str, ...]:
    """Return the floating dtypes of the weights in a folder or cached hub model, most entries first.

    Status: exact; read from the headers of the safetensors files that ``from_pretrained`` reads.
    ``config.json`` may name another dtype, in which transformers then loads the model.

    Args:
        name: a folder, or the name of a hub model that was loaded before.

    Returns:
        Names such as ``("bfloat16", "float32")``; empty if there is no safetensors file.

    Raises:
        SafetensorError: a file is damaged.

    Cost: reading headers, no weights. When not to use: for pickled weights, which are not read.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"weight": torch.ones(2).bfloat16()}, f"{folder}/model.safetensors")
    ...     stored_dtypes(folder)
    ('bfloat16',)
    """
    entries: Counter[str] = Counter()
    for path in _files(str(name)):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(key)
                count = 1
                for length in part.get_shape():
                    count *= length
                entries[part.get_dtype()] += count
    floats = (kind for kind, _ in entries.most_common() if kind.startswith(("F", "BF")))
    return tuple(_NAMES.get(kind, kind) for kind in floats)


def _files(name: str) -> list[str]:
    """Return the files of weights; none is fetched."""
    options: dict[str, Any] = {
        "local_files_only": True,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    path = cached_file(name, _ONE_FILE, **options)
    if path is not None:
        return [path]

    index = cached_file(name, _INDEX, **options)
    if index is None:
        return []
    shards: Any = get_checkpoint_shard_files(name, index, local_files_only=True)[0]
    return list(shards)
