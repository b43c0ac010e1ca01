"""``manifest.json``: size and SHA-256 of every file of a folder, so that damage is found and the
file named."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed.training.folder import durable_files

Names = Collection[str]
NAME = "manifest.json"
FORMAT = 1
MEASURED = ("measure-initial.json", "measure-final.json")
RECORDS = ("config.toml", "env.json", "examples.json", "metrics.jsonl", "result.json", *MEASURED)
"""Files of a run folder that its own manifest describes, once the run has ended."""


def describe(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return size and digest of each file, from its bytes."""
    digests = {name: sha256(data).hexdigest() for name, data in sorted(files.items())}
    return {name: {"bytes": len(files[name]), "sha256": each} for name, each in digests.items()}


def write(folder: Path, names: Iterable[str], *, coming: Mapping[str, bytes] | None = None) -> None:
    """Write the manifest of those files of ``folder`` that exist, and of those still to come, in
    one step."""
    there = [path for path in (folder / name for name in sorted(names)) if path.is_file()]
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": durable_files.digest(path)}
        for path in there
    }
    record = {"format": FORMAT, "files": entries | describe(coming or {})}
    durable_files.replace_file(folder / NAME, to_json(record, indent=2))


def problems(folder: Path, *, needed: Names = (), only: Names | None = None) -> list[str]:
    """Return what is wrong with each file that the manifest names, or with the manifest itself.

    Args:
        folder: a folder with a manifest.
        needed: names that the manifest must have.
        only: names to look at; all where not given.
    """
    path = folder / NAME
    try:
        manifest = from_json(path.read_bytes())
        files = manifest["files"].items()
        entries = {name: (int(each["bytes"]), str(each["sha256"])) for name, each in files}
        known = manifest["format"] == FORMAT and set(needed) <= set(entries)
        if not known or any(os.sep in name for name in entries):
            raise ValueError(f"not a manifest of format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{path}: unreadable manifest ({type(error).__name__}: {error})"]
    wanted = entries if only is None else entries.keys() & set(only)
    found = (_problem(folder / name, *entries[name]) for name in sorted(wanted))
    return [problem for problem in found if problem]


def verify_run_file(path: Path) -> None:
    """Check one file of a run folder against the manifest beside it; without one (an unfinished
    run) all is well.

    Raises:
        CheckpointError: the file is missing, cut or altered.
    """
    refuse(
        problems(path.parent, only=(path.name,)) if (path.parent / NAME).is_file() else [],
        f"restore it; if you changed it yourself, remove {path.parent / NAME}",
    )


def verify_final(folder: Path, *, weights: bool = True) -> None:
    """Check every file of a saved model against its manifest; a folder without one, as of version
    0.1, passes.

    Args:
        folder: ``final/`` of a run, or a copy of it.
        weights: read the weights too, which are nearly all of the bytes.

    Raises:
        CheckpointError: all missing, cut or altered files, with the digests expected and found.

    Cost: reading the files once, about a second for a gigabyte. When not to use: it cannot tell who
    wrote the files.

    >>> verify_final(Path("no-such-folder"))
    """
    if not (folder / NAME).is_file():
        return
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    small = None if weights else [name for name in names if not name.endswith(".safetensors")]
    refuse(
        problems(folder, only=small),
        "the saved model cannot be trusted: copy the folder again from where it was whole, or"
        f" remove {folder} and finish the run again with --resume auto",
    )


def refuse(found: Collection[str], advice: str) -> None:
    """Raise one `CheckpointError` of all that was found, if anything was."""
    if found:
        raise CheckpointError(f"{'; '.join(found)}; {advice}")


def _problem(path: Path, size: int, digest: str) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    if (there := path.stat().st_size) != size:
        how = "cut short" if there < size else "added to"
        return f"{path}: {there} bytes, expected {size} ({how})"
    found = durable_files.digest(path)
    return None if found == digest else f"{path}: SHA-256 is {found}, expected {digest} (altered)"
