"""Code from outside this package: Python files named with ``--import``, and entry points of
installed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from wellposed.errors import ConfigError, WellposedError, listed

_imported: dict[str, str] = {}


def import_file(path: Path) -> None:
    """Run the Python file ``path`` once in this process, so that the names it registers can be
    used.

    Its path and SHA-256 go to the user's own list of imported files, below ``XDG_STATE_HOME`` or
    ``~/.local/state``. Only what is on that list is ever run again because a run folder names it.

    Args:
        path: a file that registers tasks, variants, attentions or model families, as a file of this
        package would.

    Raises:
        ConfigError: no such file, or an error while it runs, such as a name that is taken.

    When not to use: for code that others install; give its package an entry point, see
    `load_entry_points`.

    >>> import_file(Path("no-such-file.py"))
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: --import no-such-file.py: no such file; name a Python file
    """
    if not path.is_file():
        raise ConfigError(f"--import {path}: no such file; name a Python file")
    path, source = path.resolve(), path.read_bytes()
    digest = sha256(source).hexdigest()
    if _imported.get(str(path)) == digest:
        return
    module = ModuleType(f"wellposed_import_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[module.__name__]
        kind = "" if isinstance(error, WellposedError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"--import {path}: {kind}{error}; --debug shows where in the file"
        ) from error
    _imported[str(path)] = digest
    _remember(_line(str(path), digest))


def imported_files() -> dict[str, str]:
    """Return path and SHA-256 of every file that this process imported."""
    return dict(_imported)


def import_again(files: Mapping[str, str], *, where: str) -> None:
    """Import the files that a run was made with, unless this process has them already.

    Args:
        files: path and SHA-256 of each, as `imported_files` returned them.
        where: the run, for an error.

    Raises:
        ConfigError: a file that is gone, has changed, or was never imported by this user: a folder
            runs no code of its own accord. All are named, with the option that imports them.
    """
    remembered = _list().read_text(encoding="utf-8").splitlines() if _list().is_file() else []
    problems = []
    for name, digest in files.items():
        if name in _imported:
            continue
        path = Path(name)
        if not path.is_file():
            problems.append(
                f"{name}: no such file; where it is somewhere else now, give --import with its new"
                " place"
            )
        elif sha256(path.read_bytes()).hexdigest() != digest:
            problems.append(
                f"{name}: has changed since; to run it as it is now, give --import {name}"
            )
        elif _line(name, digest) not in remembered:
            problems.append(
                f"{name}: you have not imported it before; if you trust it, give --import {name}"
            )
        else:
            import_file(path)
    if problems:
        raise ConfigError(f"{where} was made with code from outside wellposed:\n{listed(problems)}")


def load_entry_points(group: str) -> None:
    """Import what installed packages register under ``group``, one of the groups below.

    The groups are ``wellposed.tasks``, ``wellposed.variants``, ``wellposed.presets``,
    ``wellposed.recipes``, ``wellposed.attentions`` and ``wellposed.families``; an entry point names
    a module that registers its names when it is imported. The registry of each kind calls this at its first use.

    Raises:
        ConfigError: an entry point cannot be imported; it is named with its package.
    """
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "an installed package"
            raise ConfigError(
                f"entry point {entry.name} = {entry.value} of {package} in {group}:"
                f" {type(error).__name__}: {error}; repair or remove that package"
            ) from error


def _list() -> Path:
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "wellposed"
        / "imports"
    )


def _line(path: str, digest: str) -> str:
    return f"{digest}  {path}"


def _remember(line: str) -> None:
    with suppress(OSError):  # a home that cannot be written: --import is then given every time
        _list().parent.mkdir(parents=True, exist_ok=True)
        with _list().open("a+", encoding="utf-8") as file:
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(line + "\n")
