"""All studies; importing this module registers their recipes."""

from importlib import import_module
from pkgutil import iter_modules

import wellposed_studies

for _package in iter_modules(wellposed_studies.__path__, "wellposed_studies."):
    if _package.ispkg:
        for _study in iter_modules(import_module(_package.name).__path__, f"{_package.name}."):
            import_module(_study.name)
