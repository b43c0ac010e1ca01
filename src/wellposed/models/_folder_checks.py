"""The files of a folder from elsewhere, before a library reads any: none is a pipe or a device, none
leads out of the folder, and their values are of the kinds that everything behind relies on."""

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
from wellposed.regular_file import read_bytes, refuse_special

_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".py", ".bin"}
_LARGEST = 1 << 24
"""Bytes up to which a JSON file is looked into; vocabularies are larger, and read by parsers of their
own."""
_AGAIN = "copy the folder again from where it was whole, or correct the file"
_DEPTHS, _DEEP = ("layers", "n_layer"), 1000
"""How names of a number of layers end, and a number that weights shared by layers leave in
doubt."""
_KINDS: dict[str, tuple[str, Any]] = {
    "architectures": ("a list of names of classes", (list, str)),
    "id2label": ("names of labels by number", (dict, str)),
    "label2id": ("numbers of labels by name", (dict, int | str)),
    "num_labels": (f"at most {MOST_LABELS:,}", Annotated[float, Le(MOST_LABELS)]),
    "problem_type": ("a name", str),
    "chunk_size_feed_forward": ("a number", int),
}


def check_folder(folder: Path, *, reads_model: bool) -> None:
    """Raise `CheckpointError` if a file that loading may open is not a regular file, lies outside, is an
    adapter in place of a model, or has a value of another kind; nothing but small JSON files is read.

    Status: exact for the files of transformers, PEFT and tokenizers. Files of the hub's cache are links
    into its ``blobs``, which count as inside.
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
            continue  # damaged in a way that loading names
        if (
            path.name != "config.json"
        ):  # whose labels are shown escaped; training from it is refused
            _check_text(path, values)
        values = values if isinstance(values, Mapping) else {}
        for file in _named_files(path.name, values):
            _check_inside(path, folder, file)
        if path.name == "config.json":
            _check_values(path, values)
            _check_depth(path, values)
    if reads_model and (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: holds an adapter, whose model is elsewhere; load both with PEFT and save"
            " merge_and_unload() of them, or delete adapter_config.json if this folder has all weights"
        )


def _named_files(name: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the names of files that a JSON file tells a library to read."""
    if name.endswith(".index.json"):
        shards = values.get("weight_map")
        yield from dict.fromkeys(map(str, shards.values())) if isinstance(shards, Mapping) else ()
    if name == "config.json" and values.get("transformers_weights") is not None:
        yield str(values["transformers_weights"])
    if name == "tokenizer_config.json" and isinstance(values.get("fast_tokenizer_files"), list):
        yield from map(str, values["fast_tokenizer_files"])


def _check_inside(path: Path, folder: Path, name: str) -> None:
    """Refuse a name that is none of a file beside ``path``, or of a pickle in place of safetensors."""
    whole, problem = folder.resolve(), ""
    if name != Path(name).name or "\0" in name:
        problem = "leads out of the folder"
    elif path.name != "tokenizer_config.json" and name.endswith((".bin", ".pt", ".pth", ".ckpt")):
        problem = "" if path.name.startswith("pytorch_model") else "is a pickle, which can run code"
    elif (folder / name).exists():
        target = (folder / name).resolve()
        inside = target.parent in (whole, whole.parent.parent / "blobs")
        problem = "" if inside and target.is_file() else "is no file of this folder"
    if problem:
        raise CheckpointError(f"{path}: names {name[:80]!r}, which {problem}; {_AGAIN}")


def _check_text(path: Path, values: Any) -> None:
    """Refuse halves of characters, which JSON can spell and no file can hold."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: holds text that is no Unicode ({error}); {_AGAIN}"
        ) from error


def check_config_file(path: Path) -> None:
    """Raise `CheckpointError` if a ``config.json`` has a value of another kind than its reader expects."""
    try:
        values = dict(from_json(read_bytes(path), any_number=True))
    except (OSError, ValueError, TypeError):
        return  # damaged in a way that loading names
    _check_values(path, values)


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} = {values[name]!r:.80}, expected {expected}"
        for name, (expected, kind) in _KINDS.items()
        if values.get(name) is not None and not _is_of(values[name], kind)
    ]
    kernels = [f"{key} = {value!r:.80}" for key, value in _implementations(values) if "/" in value]
    if kernels:
        wrong.append(f"{shortened(kernels)}, which runs code of the hub")
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}; {_AGAIN}")
    _check_architecture(path, str(values.get("model_type")))


def _check_architecture(path: Path, model_type: str) -> None:
    """Refuse an architecture that no installed package has."""
    ARCHITECTURES.names()  # imports those of installed packages, so that the Auto classes know them
    if model_type.startswith("wellposed_") and model_type not in CONFIG_MAPPING:
        try:
            ARCHITECTURES.get(model_type.removeprefix("wellposed_"))
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error


def _is_of(value: Any, kind: Any) -> bool:
    if not isinstance(kind, tuple):
        return fits(value, kind)
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, kind[0]) and all(fits(each, kind[1]) for each in entries)


def _check_depth(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a model of more layers than its files have tensors, before it is built."""
    deep = {k: v for k, v in values.items() if k.endswith(_DEPTHS) and fits(v, int) and v > _DEEP}
    tensors = _count_tensors(path.parent) if deep else None
    if beyond := [f"{k} = {v}" for k, v in deep.items() if tensors is not None and v > tensors]:
        raise CheckpointError(
            f"{path}: {', '.join(beyond)}, and the weights are {tensors} tensors; the file is"
            " damaged or of another model: copy the folder again from where it was whole"
        )


def _implementations(values: Any) -> Iterator[tuple[str, str]]:
    """Yield what a configuration, or a part of it, asks for by the name of a kernel."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key.endswith(("implementation", "implementation_internal")):
            yield key, json.dumps(value)
        else:
            yield from _implementations(value)


def _count_tensors(folder: Path) -> int | None:
    """Return how many tensors the files of a folder hold; None without one, or where one is damaged."""
    counts = []
    with suppress(OSError, SafetensorError):
        for file in filter(Path.is_file, folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                counts.append(len(weights.keys()))
        return sum(counts) if counts else None
    return None
