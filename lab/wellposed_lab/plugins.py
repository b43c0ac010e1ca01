"""Code from outside this package: Python files named with ``--import``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from wellposed.errors import ConfigError, WellposedError, is_about_resources, listed

_imported: dict[str, str] = {}


def import_file(path: Path) -> None:
    """Run the Python file ``path`` once in this process, to use what it registers: tasks, variants,
    ...

    Its path and SHA-256 are recorded in the runs of this process. A folder cannot make a file run:
    `import_again` only asks for it. For code that others install, use an entry point, see
    `wellposed.registry.load_entry_point`.

    Raises:
        ConfigError: no such file, or an error in it, such as a name that is already registered.
    """
    if not path.is_file():
        raise ConfigError(f"--import {path}: no such file; name a Python file")
    path = path.resolve()
    source = path.read_bytes()
    digest = sha256(source).hexdigest()
    if _imported.get(str(path)) == digest:
        return

    try:
        _run(source, path, f"wellposed_import_{digest[:16]}")
    except (Exception, SystemExit) as error:
        if is_about_resources(error):
            raise
        kind = "" if isinstance(error, WellposedError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"--import {path}: {kind}{error}; --debug shows where in the file"
        ) from error
    _imported[str(path)] = digest


def _run(source: bytes, path: Path, name: str) -> None:
    """Run a file as the module ``name``, which stays importable only if the file ends well."""
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise


def imported_files() -> dict[str, str]:
    """Return path and SHA-256 of every file that this process imported."""
    return dict(_imported)


def import_again(files: Mapping[str, str], *, where: str) -> None:
    """Refuse a run (``where``) whose files are not imported; a folder never runs code by itself.

    ``files`` are from `imported_files`. Files that are missing, moved, changed or not imported are
    a `ConfigError`, which names the option that imports them.
    """
    problems = []
    for name, digest in files.items():
        path = Path(name)
        if name in _imported or digest in _imported.values():
            continue
        if not path.is_file():
            problems.append(f"{name}: no such file; give --import with its new place")
        elif sha256(path.read_bytes()).hexdigest() != digest:
            problems.append(f"{name}: has changed; to run it as it is now, give --import {name}")
        else:
            problems.append(f"{name}: if you trust it, give --import {name}")
    if problems:
        raise ConfigError(
            f"{where} was made with code from outside wellposed, which is never imported by itself (in"
            f" Python: wellposed_lab.plugins.import_file):\n{listed(problems)}"
        )
