"""Recipes: one table or figure of a paper as a function of a `Request`; no torch."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from wellposed.errors import ConfigError
from wellposed.registry import Registry
from wellposed_lab.charts import Panel
from wellposed_lab.compare.runs import say_nothing
from wellposed_studies.evidence import OWN, PAPER_SIZES, Kind, Verdict
from wellposed_studies.protocol import judge_digest, measurement_digest

Scale = Literal["toy", "mini", "medium", "paper"]
"""Toy: seconds, for tests. Mini: minutes on two cores. Medium: hours on two cores or less than one on
a large GPU, enough to confirm or refute the claim. Paper: the paper's sizes."""
Given = Literal["data", "encoder", "vectors", "languages", "minutes"]
"""Inputs that a user may give a recipe."""
SCALES: tuple[Scale, ...] = get_args(Scale)
MINUTES, EFFORTS, SIZES, WITHDRAWN = (
    tomllib.loads(Path(__file__).with_name(f"{file}.toml").read_text(encoding="utf-8"))
    for file in ("minutes", "efforts", "sizes", "withdrawn")
)
"""Minutes of each recipe, its numbers at each scale, the `study.Sizes` of each study, and the verdicts
that were withdrawn after their run."""


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Request:
    """The scale, folder, data and other inputs of a call of a recipe."""

    scale: Scale
    out: Path
    """Folder for runs that the recipe trains; its own files are written by `reproduce`."""
    data: str | None = None
    """Data of the recipe's task; its own if not given."""
    announce: Callable[[str], None] = say_nothing
    """Called with one line of progress at a time."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, to fine-tune or to score sentences with."""
    vectors: str | None = None
    """File of word vectors, for recipes that score words with them."""
    languages: str | None = None
    """Source and target, as ``en,fr``, to translate ``data``; the recipe's own if not given."""
    jobs: int | None = None
    """Processes that train independent runs in parallel; the recipe's default if not given."""
    minutes: float | None = None
    """Minutes after which a recipe of many hours begins no further training; None: it ends."""

    def pick(self, *, toy: Any, mini: Any, medium: Any, paper: Any) -> Any:
        return {"toy": toy, "mini": mini, "medium": medium, "paper": paper}[self.scale]

    def effort(self, recipe: str) -> Any:
        """Return the numbers of a recipe at this scale, from efforts.toml."""
        return _as_tuples(EFFORTS[recipe][self.scale])

    def runs(self, group: str) -> Path:
        """Return the folder of a group of runs; recipes that share runs use one group name."""
        return self.out / "runs" / f"{group}-{self.scale}"


@dataclass(frozen=True)
class Criterion:
    """The test, seeds and uncertainty that decide a verdict."""

    test: str
    """When the claim counts as confirmed, in words."""
    seeds: int = 0
    """Trainings behind each number; 0 if nothing is drawn."""
    uncertainty: str = "none: nothing is drawn"
    """How sure the numbers are."""


@dataclass(frozen=True)
class Reproduction:
    """Result of a recipe: rows, panels and the verdict on the claim."""

    rows: Sequence[Mapping[str, Any]]
    panels: Sequence[Panel]
    got: str
    """Our result with its numbers, shown next to the paper's claim."""
    holds: Verdict
    """Whether the claim holds at this scale, a key of `evidence.VERDICTS`; the toy scale never decides."""
    notes: tuple[str, ...] = ()
    """Differences from the paper's experiment."""
    criterion: Criterion | None = None
    """Test behind the verdict; required for any verdict."""
    size: Mapping[str, Any] | None = None
    """Size of what was trained, by `evidence.FIELDS`; None if nothing was."""
    missing: int = 0
    """Trainings that have not ended, if a later call continues the run."""

    def __post_init__(self) -> None:
        if self.holds is not None and self.criterion is None:
            raise ConfigError(
                f"Reproduction: holds={self.holds} without a criterion; name the test in words, the"
                " seeds and the uncertainty, or leave holds=None"
            )


@dataclass(frozen=True)
class Recipe:
    """One table or figure: a row of a paper's catalogue."""

    name: str
    """``paper/item``."""
    summary: str
    function: Callable[[Request], Reproduction]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Measured minutes by scale: mini and medium on two CPU cores, paper on one large GPU."""
    estimated: Mapping[str, float] = field(default_factory=dict)
    """Minutes by scale: number of updates times the cost of one at mini."""
    beyond: str = ""
    """Time on one large GPU for settings beyond these scales, as in docs/paper_scale.md."""
    folders: tuple[str, ...] = ()
    """Candidate places of its data in a folder of many data sets; empty to read the folder itself."""
    takes: tuple[Given, ...] = ()
    """Inputs of a request that it reads; others are refused."""
    builtin: str = ""
    """Data read if none is given; empty if it reads none or requires some."""
    power: Callable[[Request], Mapping[str, Any]] | None = None
    """Smallest effect that its verdict can detect, before training; None if nothing is trained."""

    @property
    def claim(self) -> str:
        return "; ".join(self.notes_under("Claim"))

    @property
    def minutes(self) -> dict[str, float]:
        """Minutes by scale, measured or estimated; other scales cannot be run."""
        return {**self.estimated, **self.measured}

    @property
    def is_ours(self) -> bool:
        """Whether its claim is one of this project, not of a paper."""
        return self.name in OWN

    @property
    def paper_size(self) -> Mapping[str, Any] | None:
        """Size of the paper's experiment; None for mathematics and for claims of our own."""
        return PAPER_SIZES.get(self.name)

    def kind(self, scale: str, encoder: str | None = None) -> Kind:
        """Return the kind of evidence at a scale: the paper's own size counts as mathematics.

        An encoder of the user is not the encoder of the paper, at any scale.
        """
        smaller = scale != "paper" or self.is_ours or encoder is not None
        trains = self.power is not None or self.paper_size is not None
        return "trained" if trains and smaller else "mathematics"

    @property
    def withdrawals(self) -> list[str]:
        """Notes on the verdicts that were withdrawn, from withdrawn.toml."""
        return [
            f"withdrawn on {withdrawn['date']} ({withdrawn['was']}): {withdrawn['why']}"
            for withdrawn in WITHDRAWN.get(self.name, ())
        ]

    def protocol(self, scale: str) -> str:
        """Return a digest of the numbers of its measurement: in its module, without judges, its sizes.

        If it trains, it includes those shared by recipes of its paper. A row with another digest is
        stale; changed names, words, or formulas with the same numbers go unnoticed.
        """
        paper = self.name.partition("/")[0]
        shared = [name for name in SIZES if name.startswith(f"{paper}/") and name not in RECIPES]
        names = (self.name, paper, *(shared if self.power else ()))
        spent = [table.get(name, {}).get(scale) for table in (EFFORTS, SIZES) for name in names]
        return measurement_digest(self._source(), self._function_name, spent)

    def judge(self) -> str:
        """Return a digest of the program that judges it; a row with another was judged earlier."""
        rules = Path(__file__).with_name("verdicts.py").read_text(encoding="utf-8")
        trained = self.power is not None
        return judge_digest(self._source(), rules, self._function_name, trained=trained)

    @property
    def _function_name(self) -> str:
        return getattr(self.function, "__name__", "")

    def _source(self) -> str:
        try:
            return inspect.getsource(sys.modules[self.function.__module__])
        except (OSError, TypeError):  # of a recipe that is typed at a prompt
            return ""

    def notes_under(self, word: str) -> list[str]:
        """Return each text after ``word`` (Claim, Quote, Test or Note), constants filled in."""
        parts = re.split(
            r"\b(Claim|Quote|Test|Note): ", " ".join((self.function.__doc__ or "").split())
        )
        names = getattr(self.function, "__globals__", {})
        entries = zip(parts[1::2], parts[2::2], strict=True)
        return [
            text.strip().removesuffix(".").format_map(names)
            for kind, text in entries
            if kind == word
        ]

    def __call__(self, request: Request) -> Reproduction:
        """Run the recipe and add its docstring's test and notes to the result."""
        result = self.function(request)
        criterion = result.criterion
        test = "; ".join(self.notes_under("Test"))
        if criterion is not None and not criterion.test:
            criterion = replace(criterion, test=test)
        return replace(
            result, criterion=criterion, notes=(*result.notes, *self.notes_under("Note"))
        )

    def time(self, scale: Scale) -> str:
        """Return the time of a scale, with ~ if estimated."""
        if scale not in self.minutes:
            return "-"
        about = "" if scale in self.measured else "~"
        return f"{about}{duration(self.minutes[scale])}"


def duration(minutes: float) -> str:
    if minutes >= 2 * 60 * 24:
        return f"{minutes / (60 * 24):.0f} days"
    return f"{minutes / 60:.0f} h" if minutes >= 120 else f"{minutes:g} min"


Function = TypeVar("Function", bound=Callable[[Request], Reproduction])
RECIPES: Registry[Recipe] = Registry("recipe", entry_points="wellposed.recipes")
"""Every recipe of the installed packages, by name."""


def recipe(name: str, **options: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function of a `Request` as a recipe.

    The docstring has a summary, ``Claim:`` and optionally ``Quote:`` (the paper's words and their
    place), ``Test:`` (what decides) and ``Note:`` (what differs).

    Args:
        name: ``paper/item``.
        **options: other fields of `Recipe`; minutes of the recipes here come from minutes.toml.

    Raises:
        ConfigError: the name is taken, or the docstring has no claim.

    >>> @recipe("mine/figure-1", measured={"mini": 1})
    ... def figure(request: Request) -> Reproduction:
    ...     "Y against x. Claim: y grows. Test: every step is up, by {LEAST:g} or more."
    >>> LEAST = 0.5
    >>> RECIPES.get("mine/figure-1").claim, RECIPES.get("mine/figure-1").notes_under("Test")
    ('y grows', ['every step is up, by 0.5 or more'])
    """

    def register(function: Function) -> Function:
        summary = " ".join((function.__doc__ or "").split()).partition("Claim: ")[0]
        minutes: dict[str, Any] = {
            kind: table[name] for kind, table in MINUTES.items() if name in table
        }
        made = Recipe(name, summary.strip().removesuffix("."), function, **minutes | options)
        if not made.claim:
            raise ConfigError(f"recipe {name}: its docstring has no claim; add `Claim: ...`")
        RECIPES.register(name)(made)
        return function

    return register


def recipe_names() -> list[str]:
    """Return every name by paper, figures before tables, 2 before 10."""

    def parts(name: str) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
        ]

    return sorted(RECIPES, key=parts)
