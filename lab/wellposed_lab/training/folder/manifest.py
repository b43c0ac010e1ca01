"""``manifest.json``: sizes and SHA-256 of files, to find damage."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed_lab.training.folder.atomic import replace_file


def digest(path: Path) -> str:
    """Return the SHA-256 of the file ``path``."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


Names = Collection[str]
MANIFEST = "manifest.json"
FORMAT = 1
MEASURED = ("measure-initial.json", "measure-final.json")
RECORDS = ("config.toml", "env.json", "metrics.jsonl", "result.json", *MEASURED)
"""Files of a run folder that its manifest lists, once the run has ended."""


def describe(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file, from its bytes."""
    digests = {name: sha256(data).hexdigest() for name, data in sorted(files.items())}
    return {name: {"bytes": len(files[name]), "sha256": sha} for name, sha in digests.items()}


def write_manifest(
    folder: Path, names: Iterable[str], *, coming: Mapping[str, bytes] | None = None
) -> None:
    """Write the manifest of the existing ``names`` and of files still to come, atomically."""
    files = [path for path in (folder / name for name in sorted(names)) if path.is_file()]
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in files}
    record = {"format": FORMAT, "files": entries | describe(coming or {})}
    replace_file(folder / MANIFEST, to_json(record, indent=2))


def verify(folder: Path, advice: str, *, needed: Names = (), only: Names | None = None) -> None:
    """Check each file in the manifest of ``folder``, or those of ``only``. Missing, cut or altered
    files, no ``needed`` name, or a bad manifest are a `CheckpointError` with ``advice``."""
    path = folder / MANIFEST
    try:
        manifest = from_json(path.read_bytes())
        files = manifest["files"].items()
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files}
        is_readable = manifest["format"] == FORMAT and set(needed) <= set(entries)
        if not is_readable or any(os.sep in name for name in entries):
            raise ValueError(f"not a manifest of format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path}: unreadable manifest ({type(error).__name__}: {error})"
        raise CheckpointError(f"{problem}; {advice}") from error

    wanted = entries if only is None else entries.keys() & set(only)
    results = (_problem(folder / name, *entries[name]) for name in sorted(wanted))
    problems = list(filter(None, results))
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}; {advice}")


def verify_run_file(path: Path) -> None:
    """Check a file of a run by its manifest (none before the end); `CheckpointError` if damaged."""
    if (path.parent / MANIFEST).is_file():
        advice = f"restore it; if you changed it yourself, remove {path.parent / MANIFEST}"
        verify(path.parent, advice, only=(path.name,))


def verify_final(folder: Path, *, weights: bool = True) -> None:
    """Check a saved model (``final/`` of a run, or a copy) against its manifest; without one
    (version 0.1) it passes.

    Args:
        folder: the saved model.
        weights: also read the weights, nearly all of the bytes.

    Raises:
        CheckpointError: missing, cut or altered files, with the expected and actual digests.

    Cost: reading the files, about a second for a gigabyte. It does not tell who wrote the files.

    >>> verify_final(Path("no-such-folder"))
    """
    if not (folder / MANIFEST).is_file():
        return
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    small = None if weights else [name for name in names if not name.endswith(".safetensors")]
    verify(
        folder,
        "the saved model cannot be trusted: copy the folder again from an intact copy, or"
        f" remove {folder} and finish the run again with --resume auto",
        only=small,
    )


def _problem(path: Path, size: int, expected: str) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    size_now = path.stat().st_size
    if size_now != size:
        change = "cut short" if size_now < size else "added to"
        return f"{path}: {size_now} bytes, expected {size} ({change})"
    actual = digest(path)
    is_right = actual == expected
    return None if is_right else f"{path}: SHA-256 is {actual}, expected {expected} (altered)"
