"""The files of a folder from elsewhere, before a library reads any: none is a pipe or a device, none
leads out of the folder, and their values are of the kinds that everything behind relies on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError, shortened
from wellposed.finite_json import from_json
from wellposed.regular_file import read_bytes, refuse_special

_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".py", ".bin"}
_LARGEST = 1 << 24
"""Bytes up to which a JSON file is looked into; vocabularies are larger, and read by parsers of their
own."""
_AGAIN = "copy the folder again from where it was whole, or correct the file"
_LABELS = "names of labels by number"
_KINDS: dict[str, tuple[str, Any]] = {
    "architectures": ("a list of names of classes", (list, str)),
    "id2label": (_LABELS, (dict, str)),
    "label2id": ("numbers of labels by name", (dict, (int, str))),
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
            _check_kinds(path, values)
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


def _check_kinds(path: Path, values: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} = {values[name]!r:.80}, expected {expected}"
        for name, (expected, kind) in _KINDS.items()
        if values.get(name) is not None and not _fits(values[name], kind)
    ]
    kernels = [f"{key} = {value!r:.80}" for key, value in _implementations(values) if "/" in value]
    if kernels:
        wrong.append(f"{shortened(kernels)}, which runs code of the hub")
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}; {_AGAIN}")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple) and kind[0] in (list, dict):
        entries = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind[0]) and all(_fits(each, kind[1]) for each in entries)
    return isinstance(value, kind) and not isinstance(value, bool)


def _implementations(values: Any) -> Iterator[tuple[str, str]]:
    """Yield what a configuration, or a part of it, asks for by the name of a kernel."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key.endswith(("implementation", "implementation_internal")):
            yield key, json.dumps(value)
        else:
            yield from _implementations(value)
