"""All studies; importing this module registers their recipes."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

for _package in iter_modules([str(Path(__file__).parent)], "wellposed_studies."):
    if _package.ispkg:
        for _study in iter_modules(import_module(_package.name).__path__, f"{_package.name}."):
            import_module(_study.name)
