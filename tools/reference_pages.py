"""Write docs/reference: one page a topic, every re-exported public name of the library on it,
and files of the lab.

    python tools/reference_pages.py

A test compares the pages with what this script would write, so that no public name stays
undocumented.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, LAB = ROOT / "src" / "wellposed", ROOT / "lab" / "wellposed_lab"
TARGET = ROOT / "docs" / "reference"
PAGES = {
    "models": ("Models", "models"),
    "penalties": ("Roles and penalties", "roles penalize presets functional"),
    "constrain": ("Exact orthogonality", "constrain linalg"),
    "lipschitz": ("Lipschitz attention and inverses", "nn"),
    "initialize": ("Initialisation", "initialize"),
    "certificates": ("Certificates", "certification attack words"),
    "measuring": ("Measuring", "measurement"),
    "training": (
        "Tasks, training, comparisons, reports",
        "tasks.task tasks.language_modeling tasks.text_classification tasks.translation"
        " tasks.image_classification training.config training.loop.train training.loop.build"
        " training.loop.schedules training.loop.tracking training.folder.run_folder"
        " training.folder.result training.folder.atomic training.folder.manifest compare.variants compare.compare"
        " compare.run_presets cli.commands report.aggregate report.page report.extra_sections statistics"
        " plugins",
    ),
    "integrations": ("Integrations", "integrations"),
    "errors": ("Errors", "errors registry"),
}


def page(title: str, modules: str) -> str:
    """Return the Markdown of one page."""
    lines = [f"# {title}", ""]
    for module in modules.split():
        path = module.replace(".", "/")
        if not (SOURCE / path).is_dir():
            root = "wellposed_lab" if (LAB / f"{path}.py").is_file() else "wellposed"
            lines += [f"::: {root}.{module}", ""]
            continue
        text = (SOURCE / path / "__init__.py").read_text(encoding="utf-8")
        described = ast.get_docstring(ast.parse(text)) or ""
        lines += [f"## wellposed.{module}", "", described, ""]
        for name in sorted(set(re.findall(r"\b(\w+) as \1\b", text))):
            lines += [f"::: wellposed.{module}.{name}", ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[Path, str]:
    """Return every page by its path."""
    return {TARGET / f"{name}.md": page(title, modules) for name, (title, modules) in PAGES.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
