"""The line of pip that installs a missing part, as it can be typed on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

PARTS = {"wellposed": ".", "wellposed-lab": "lab", "wellposed-studies": "studies"}
"""Our packages, and their folders in a clone."""


@dataclass(frozen=True)
class Source:
    """Where an installed `wellposed` came from."""

    clone: Path | None = None
    """Folder of the clone, if it still exists."""
    wheel: str = ""
    """Address of the archive, if it is one."""
    editable: bool = False
    index: bool = False
    """Whether an index has it."""


def install_line(package: str, extra: str = "") -> str:
    """Return the line that installs one of our packages, or one of its extras.

    If this `wellposed` was installed from a clone, the line names the clone, as no index may have
    it. `wellposed-studies` needs the lab, so the line of a clone names both.
    """
    source = _source()
    wanted = f"[{extra}]" if extra else ""
    if source.index:
        return f"pip install {shlex.quote(package + wanted)}"
    if source.clone is None and source.wheel and package == "wellposed":
        return f"pip install {shlex.quote(f'{package}{wanted} @ {source.wheel}')}"
    clone = source.clone
    option = "-e " if source.editable else ""
    parts = ["wellposed-lab", package] if package == "wellposed-studies" else [package]
    places = [_requirement(clone, part) + (wanted if part == package else "") for part in parts]
    line = f"pip install {' '.join(option + shlex.quote(path) for path in places)}"
    return line if clone else f"{line} (in a clone of wellposed)"


def _requirement(clone: Path | None, package: str) -> str:
    """Return the folder of a package as pip takes it: with a dot, or absolute."""
    folder = PARTS[package]
    if clone is None or clone == Path.cwd():
        return "." if folder == "." else f"./{folder}"
    return str(clone / folder)


def _source() -> Source:
    """Return where `wellposed` came from, by what pip recorded, else by the files around it."""
    around = _as_clone(Path(__file__).parents[2])
    try:
        distribution = importlib.metadata.distribution("wellposed")
    except importlib.metadata.PackageNotFoundError:
        return Source(clone=around)

    recorded = distribution.read_text("direct_url.json")
    if recorded is None:
        return Source(clone=around, index=around is None)

    details = json.loads(recorded)
    url = str(details.get("url", ""))
    if "dir_info" not in details:
        return Source(wheel=url)
    clone = _as_clone(Path(unquote(urlsplit(url).path)))
    return Source(clone=clone, editable=bool(details["dir_info"].get("editable")))


def _as_clone(folder: Path) -> Path | None:
    """Return the folder if it is a clone of ours with its packages."""
    names = (folder / part / "pyproject.toml" for part in PARTS.values())
    return folder.resolve() if all(path.is_file() for path in names) else None
