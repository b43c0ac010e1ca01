"""Write docs/reference: one page a topic, every re-exported public name of the library on it,
and files and packages of the lab.

    python tools/reference_pages.py

Each package comes in two tiers: the names that README and the how-tos use, and below them those
for extensions. So a how-to that uses a name moves it up, and nobody keeps a list. A test compares
the pages with what this script would write, so that no public name stays undocumented.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "wellposed"
LAB = ROOT / "lab" / "wellposed_lab"
TARGET = ROOT / "docs" / "reference"
# Who writes a set, a rule or a task reads all of a page.
FOR_EXTENSIONS = "extend.md"
PAGES = {
    "models": ("Models", "models"),
    "penalties": ("Roles and penalties", "roles penalize presets functional"),
    "constrain": ("Exact orthogonality", "constrain optim linalg"),
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
        " compare.run_presets cli.commands report.aggregate report.comparison report.page report.extra_sections"
        " statistics plugins",
    ),
    "integrations": ("Integrations", "integrations"),
    "errors": ("Errors", "errors registry"),
}


def used_by_guides() -> set[str]:
    """Return what the code of README, the tutorial and the how-tos calls or reads of a module."""
    folder = ROOT / "docs" / "howto"
    guides = [path for path in folder.glob("*.md") if path.name != FOR_EXTENSIONS]
    guides += [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in guides)
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    return set(re.findall(r"\b[A-Z]\w+|(?<=\.)\w+|\b\w+(?=\()", code))


def returned_by(folder: Path, names: set[str]) -> set[str]:
    """Return the names in the return annotations of a package's functions ``names``."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns]
    called = [
        ast.unparse(node.returns) for node in functions if node.name in names and node.returns
    ]
    return set(re.findall(r"\w+", " ".join(called)))


def page(title: str, modules: str, used: set[str]) -> str:
    """Return the Markdown of one page; names that are in ``used`` come first."""
    lines = [f"# {title}", ""]
    for module in modules.split():
        path = module.replace(".", "/")
        is_of_lab = (LAB / path).is_dir() or (LAB / f"{path}.py").is_file()
        root, base = ("wellposed_lab", LAB) if is_of_lab else ("wellposed", SOURCE)
        folder = base / path
        if not folder.is_dir():
            lines += [f"::: {root}.{module}", ""]
            continue
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        described = ast.get_docstring(ast.parse(text)) or ""
        lines += [f"## {root}.{module}", "", described, ""]
        names = sorted(set(re.findall(r"\b(\w+) as \1\b", text)))
        first = used | returned_by(folder, used & {*names})
        for name in filter(first.__contains__, names):
            lines += [f"::: {root}.{module}.{name}", ""]
        others = [name for name in names if name not in first]
        if others:
            lines += [f"### Further names of {root}.{module}, most for extensions", ""]
        for name in others:
            lines += [f"::: {root}.{module}.{name}", ""]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[Path, str]:
    """Return every page by its path."""
    used = used_by_guides()
    return {
        TARGET / f"{name}.md": page(title, modules, used)
        for name, (title, modules) in PAGES.items()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
