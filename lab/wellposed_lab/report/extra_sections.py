"""Report sections of installed packages, each about files in folders without a run.

A package registers a reader in `REPORT_SECTIONS`, in a module that its entry point in the group
``wellposed.report_sections`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wellposed.registry import Registry
from wellposed_lab.report.html_table import Column, Table, slug  # noqa: F401 (for readers)


@dataclass(frozen=True)
class ExtraSection:
    """One section of the page; all of its texts are escaped."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """Texts by their heading."""
    remarks: Sequence[str] = ()
    """Items of a list below the facts."""
    images: Sequence[tuple[str, str]] = ()
    """Description and ``data:`` address of each image; images cannot run or fetch anything."""
    tables: Sequence[Table] = ()


SectionReader = Callable[[Sequence[Path]], Sequence[ExtraSection]]
"""Takes folders without a run and returns a section for each result it recognises. It raises
`wellposed.errors.DataError` for a damaged file."""
REPORT_SECTIONS: Registry[SectionReader] = Registry(
    "report section", entry_points="wellposed.report_sections"
)
"""All readers of installed packages, by name."""


def extra_sections(paths: Sequence[Path]) -> list[ExtraSection]:
    """Return the sections about ``paths`` and the folders directly inside them.

    Raises:
        DataError: a file of a section is damaged.
    """
    folders: dict[Path, Path] = {}
    for path in filter(Path.is_dir, map(Path, paths)):
        # Folders with a dot are still being written.
        inside = sorted(child for child in path.glob("[!.]*") if child.is_dir())
        for folder in (path, *inside):
            if not (folder / "config.toml").exists() and not (folder / "result.json").exists():
                folders.setdefault(folder.resolve(), folder)
    readers = [REPORT_SECTIONS.get(name) for name in REPORT_SECTIONS]
    return [section for read in readers for section in read(list(folders.values()))]
