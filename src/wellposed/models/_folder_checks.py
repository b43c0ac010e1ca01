"""Checks of a folder before a library reads it: no device, no path out of it, expected types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from wellposed.errors import CheckpointError, ConfigError, shortened
from wellposed.finite_json import from_json
from wellposed.models._build import ARCHITECTURES
from wellposed.models._config import MOST_LABELS
from wellposed.options import Le, fits
from wellposed.safe_read import read_bytes, refuse_special

_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".py", ".bin"}
_LARGEST = 1 << 24
"""Most bytes of a JSON file that is checked; vocabularies are larger, with their own parsers."""
_AGAIN = "copy the folder again from an intact copy, or correct the file"
_DEPTHS = ("layers", "n_layer")
_DEEP = 1000
"""Endings of names of a number of layers; up to this number, layers may share weights."""
_KINDS: dict[str, tuple[str, Any]] = {
    "architectures": ("a list of class names", (list, str)),
    "id2label": ("label names by number", (dict, str)),
    "label2id": ("label numbers by name", (dict, int | str)),
    "num_labels": (f"at most {MOST_LABELS:,}", Annotated[float, Le(MOST_LABELS)]),
    "problem_type": ("a name", str),
    "chunk_size_feed_forward": ("a number", int),
}


def check_folder(folder: Path, *, reads_model: bool) -> None:
    """Raise `CheckpointError` for files that are unsafe to load; only small JSON files are read.

    Refused are special files, files outside the folder, an adapter in place of a model, and values
    of a wrong type. Exact for files of transformers, PEFT and tokenizers; links into a hub cache's
    ``blobs`` are inside.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix not in _SUFFIXES:
            continue
        try:
            refuse_special(path)
            small = path.suffix == ".json" and path.exists() and path.stat().st_size <= _LARGEST
            values = from_json(read_bytes(path), any_number=True) if small else None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}; {_AGAIN}") from error
        except ValueError:
            continue  # loading names the damage
        if path.name != "config.json":  # its labels are shown escaped, and training refuses it
            _check_text(path, values)
        values = values if isinstance(values, Mapping) else {}
        for file in _named_files(path.name, values):
            _check_inside(path, folder, file)
        if path.name == "config.json":
            _check_values(path, values)
            _check_depth(path, values)
    if reads_model and (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: contains an adapter without its model; load both with PEFT and save"
            " merge_and_unload() of them, or delete adapter_config.json if this folder has all weights"
        )


def _named_files(name: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the file names in a JSON file that a library would read."""
    if name.endswith(".index.json"):
        shards = values.get("weight_map")
        yield from dict.fromkeys(map(str, shards.values())) if isinstance(shards, Mapping) else ()
    if name == "config.json" and values.get("transformers_weights") is not None:
        yield str(values["transformers_weights"])
    if name == "tokenizer_config.json" and isinstance(values.get("fast_tokenizer_files"), list):
        yield from map(str, values["fast_tokenizer_files"])


def _check_inside(path: Path, folder: Path, name: str) -> None:
    """Refuse a name that is not a file beside ``path``, or is a pickle instead of safetensors."""
    root = folder.resolve()
    problem = ""
    if name != Path(name).name or "\0" in name:
        problem = "points outside the folder"
    elif path.name != "tokenizer_config.json" and name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        problem = "" if path.name.startswith("pytorch_model") else "is a pickle, which can run code"
    elif (folder / name).exists():
        target = (folder / name).resolve()
        inside = target.parent in (root, root.parent.parent / "blobs")
        problem = "" if inside and target.is_file() else "is not a file of this folder"
    if problem:
        raise CheckpointError(f"{path}: names {name[:80]!r}, which {problem}; {_AGAIN}")


def _check_text(path: Path, values: Any) -> None:
    """Refuse halves of characters (surrogates), which JSON can express and no file can store."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: contains text that is not Unicode ({error}); {_AGAIN}"
        ) from error


def check_config_file(path: Path) -> None:
    """Raise `CheckpointError` if a ``config.json`` has a value of a wrong type."""
    try:
        values = dict(from_json(read_bytes(path), any_number=True))
    except (OSError, ValueError, TypeError):
        return  # loading names the damage
    _check_values(path, values)


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} = {repr(values[name])[:80]}, expected {expected}"
        for name, (expected, kind) in _KINDS.items()
        if values.get(name) is not None and not _is_of(values[name], kind)
    ]
    kernels = [
        f"{key} = {repr(value)[:80]}" for key, value in _implementations(values) if "/" in value
    ]
    if kernels:
        wrong.append(f"{shortened(kernels)}, which runs code from the hub")
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}; {_AGAIN}")
    _check_architecture(path, str(values.get("model_type")))


def _check_architecture(path: Path, model_type: str) -> None:
    """Refuse an architecture that no installed package has."""
    ARCHITECTURES.names()  # imports installed packages, which extend the Auto classes
    if model_type.startswith("wellposed_") and model_type not in CONFIG_MAPPING:
        try:
            ARCHITECTURES.get(model_type.removeprefix("wellposed_"))
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _is_of(value: Any, kind: Any) -> bool:
    if not isinstance(kind, tuple):
        return fits(value, kind)
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, kind[0]) and all(fits(entry, kind[1]) for entry in entries)


def _check_depth(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a model with more layers than its files have tensors, before it is built."""
    deep = {k: v for k, v in values.items() if k.endswith(_DEPTHS) and fits(v, int) and v > _DEEP}
    tensors = _count_tensors(path.parent) if deep else None
    beyond = [f"{k} = {v}" for k, v in deep.items() if tensors is not None and v > tensors]
    if beyond:
        raise CheckpointError(
            f"{path}: {', '.join(beyond)}, but the weights have {tensors} tensors; the file is"
            " damaged or of another model: copy the folder again from an intact copy"
        )


def _implementations(values: Any) -> Iterator[tuple[str, str]]:
    """Yield the kernel names that a configuration, or a part of it, asks for."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key.endswith(("implementation", "implementation_internal")):
            yield key, json.dumps(value)
        else:
            yield from _implementations(value)


def _count_tensors(folder: Path) -> int | None:
    """Return how many tensors a folder's files have; None if there are none, or one is damaged."""
    counts = []
    with suppress(OSError, SafetensorError):
        for file in filter(Path.is_file, folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                counts.append(len(weights.keys()))
        return sum(counts) if counts else None
    return None
