"""One trial: a package with one change, imported afresh in a child, against the tests that run the
changed lines."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType
from typing import Any

import pytest
from tools.mutants.changes import Mutant, mutated
from tools.mutants.coverage_map import QUIET, use_fixed_examples

ALL_PASSED = 0


@dataclass(frozen=True)
class Trial:
    """A mutant, or an unchanged control, the tests by file (quickest file first), and the seconds
    they took before."""

    mutant: Mutant
    groups: tuple[tuple[str, ...], ...]
    seconds: float
    is_control: bool = False


class ChangedLoader(SourceFileLoader):
    def __init__(self, mutant: Mutant, code: CodeType) -> None:
        super().__init__(mutant.module, str(mutant.file))
        self.code = code

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.code


class ChangedFinder(importlib.abc.MetaPathFinder):
    """Finds one module, changed; every other is found as ever."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.code = compile(mutated(mutant), str(mutant.file), "exec")

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.mutant.file, loader=ChangedLoader(self.mutant, self.code)
        )


def planned(mutant: Mutant, mapped: Mapping[str, Mapping[str, Any]], budget: float) -> Trial:
    """Choose the tests that run the mutant's lines, quickest first, as many as take at most
    `budget` seconds."""
    lines = range(mutant.first, mutant.last + 1)
    file = str(mutant.file)
    covering = [
        (test["seconds"], name)
        for entry in mapped.values()
        for name, test in entry["tests"].items()
        if any(line in lines for line in test["lines"].get(file, ()))
    ]
    groups: dict[str, list[str]] = defaultdict(list)
    costs: dict[str, float] = defaultdict(float)
    spent = 0.0
    for seconds, name in sorted(covering):
        if groups and spent + seconds > budget:
            break
        spent += seconds
        groups[name.partition("::")[0]].append(name)
        costs[name.partition("::")[0]] += seconds
    return Trial(
        mutant, tuple(tuple(groups[name]) for name in sorted(groups, key=costs.__getitem__)), spent
    )


def attempt(trial: Trial) -> str:
    """Run a trial, in a child: return the first test file that fails, or nothing."""
    if not trial.is_control:
        sys.meta_path.insert(0, ChangedFinder(trial.mutant))
        importlib.import_module(
            trial.mutant.module
        )  # before pytest, which loads a file of examples by itself
    use_fixed_examples()
    for group in trial.groups:
        if pytest.main([*QUIET, "-x", *group]) != ALL_PASSED:
            return group[0].partition("::")[0]
    return ""
