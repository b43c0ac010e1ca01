"""What a recipe is: one table or figure of a paper as a function of a `Request`; free of torch."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from wellposed.errors import ConfigError
from wellposed.registry import Registry
from wellposed_lab.charts import Panel
from wellposed_lab.compare.runs import say_nothing

Scale = Literal["toy", "mini", "medium", "paper"]
"""mini: minutes on two cores; medium: hours on two cores, less than one on a large GPU, sized so
that the claim can be seen or refuted; paper: the paper's sizes; toy: seconds, for tests, too small
to show anything."""
Given = Literal["data", "encoder", "vectors", "languages"]
"""What a user may give a recipe."""
SCALES: tuple[Scale, ...] = get_args(Scale)
Verdict: TypeAlias = bool | str | None
VERDICTS: Mapping[Verdict, str] = {
    True: "confirmed",
    False: "contradicted",
    "smaller": "none of that size",
    None: "undecided at this size",
}
"""What is said of a claim. ``smaller``: a gain as large as the claim's would have been seen, and none
was; that is an answer."""
MINUTES, EFFORTS, SIZES = (
    tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    for file in ("minutes.toml", "efforts.toml", "sizes.toml")
)
"""``measured`` and ``estimated`` of the recipes of the papers; what they spend at each scale; and what
each study trains, as fields of `study.Sizes`."""


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Request:
    """The scale, folder, data and other inputs of a call of a recipe."""

    scale: Scale
    out: Path
    """Folder for runs that the recipe trains; its own files are written by `reproduce`."""
    data: str | None = None
    """Data of the recipe's task; its own where not given."""
    announce: Callable[[str], None] = say_nothing
    """Called with one line now and then."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, for recipes that fine-tune one or score sentences
    with it."""
    vectors: str | None = None
    """File of word vectors, for recipes that score words with them."""
    languages: str | None = None
    """Source and target, as ``en,fr``, for recipes that translate ``data``; the recipe's own where
    not given."""
    jobs: int | None = None
    """Processes that train independent runs at the same time; where not given one, or as many as a
    recipe takes."""

    def pick(self, *, toy: Any, mini: Any, medium: Any, paper: Any) -> Any:
        """Return the value for this scale."""
        return {"toy": toy, "mini": mini, "medium": medium, "paper": paper}[self.scale]

    def effort(self, recipe: str) -> Any:
        """Return the numbers that a recipe of the papers spends at this scale."""
        return _as_tuples(EFFORTS[recipe][self.scale])

    def runs(self, group: str) -> Path:
        """Return the folder of a group of runs, which the recipes that share them name alike."""
        return self.out / "runs" / f"{group}-{self.scale}"


@dataclass(frozen=True)
class Criterion:
    """The test, seeds and uncertainty that decide a verdict."""

    test: str
    """When the claim counts as confirmed, in words."""
    seeds: int = 0
    """Trainings behind each number; 0 where nothing is drawn."""
    uncertainty: str = "none: nothing is drawn"
    """How sure the numbers are."""


@dataclass(frozen=True)
class Reproduction:
    """What came out: the rows of the table or figure, and what the paper says beside what we
    got."""

    rows: Sequence[Mapping[str, Any]]
    panels: Sequence[Panel]
    got: str
    """What we found, with its numbers, to be put beside the paper's claim."""
    holds: Verdict
    """Whether the claim holds at this scale, a key of `VERDICTS`; the toy scale never decides."""
    notes: tuple[str, ...] = ()
    """How this differs from the paper's experiment."""
    criterion: Criterion | None = None
    """What decided; a verdict without one is refused."""

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
    """Minutes by scale, as they were measured: mini and medium on two CPU cores, paper on one large
    GPU."""
    estimated: Mapping[str, float] = field(default_factory=dict)
    """Minutes by scale, from updates times what one costs at mini."""
    beyond: str = ""
    """How long one large GPU would take for what is needed beyond its scales, as in
    docs/paper_scale.md."""
    folders: tuple[str, ...] = ()
    """Where its data lies in a folder of many data sets, the first that is there; empty where that
    folder is read."""
    takes: tuple[Given, ...] = ()
    """What it reads of a request; anything else given is refused."""
    builtin: str = ""
    """What it reads where no data is given; empty where it reads none, or cannot do without."""
    power: Callable[[Request], Mapping[str, Any]] | None = None
    """What its verdict could see, where it trains: ``seeds``, ``words`` and ``levelled_off``, before
    anything is trained; None where nothing is."""

    @property
    def says(self) -> str:
        """What the paper says."""
        return "; ".join(self.told("Claim"))

    @property
    def minutes(self) -> dict[str, float]:
        """Minutes by scale, measured or estimated; a scale that is not here cannot be run."""
        return {**self.estimated, **self.measured}

    def protocol(self, scale: str) -> str:
        """Return a digest of every number that this recipe runs and is judged by: those of its module,
        of the rules of verdicts, and what it spends at a scale.

        A row that was made under another digest is stale. Names and words may change without one; a
        formula that changes and keeps its numbers is not seen.
        """
        judge = Path(__file__).with_name("verdicts.py").read_text(encoding="utf-8")
        sources = [inspect.getsource(sys.modules[self.function.__module__]), judge]
        names = (self.name, self.name.partition("/")[0])
        spent = [of.get(name, {}).get(scale) for of in (EFFORTS, SIZES) for name in names]
        numbers = [*map(numbers_of, sources), spent]
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]

    def told(self, word: str) -> list[str]:
        """Return what the docstring says after each ``Claim:``, ``Quote:``, ``Test:`` or ``Note:``;
        constants of the module stand in braces."""
        parts = re.split(
            r"\b(Claim|Quote|Test|Note): ", " ".join((self.function.__doc__ or "").split())
        )
        names = getattr(self.function, "__globals__", {})
        found = zip(parts[1::2], parts[2::2], strict=True)
        return [
            text.strip().removesuffix(".").format_map(names) for of, text in found if of == word
        ]

    def __call__(self, request: Request) -> Reproduction:
        """Run the recipe; what its docstring tells of test and notes is added to what comes out."""
        found = self.function(request)
        criterion, told = found.criterion, "; ".join(self.told("Test"))
        if criterion is not None and not criterion.test:
            criterion = replace(criterion, test=told)
        return replace(found, criterion=criterion, notes=(*found.notes, *self.told("Note")))

    def time(self, scale: Scale) -> str:
        """Return how long a scale takes, with ~ where that is an estimate.

        >>> Recipe("a", "b", print, {"mini": 3}, {"medium": 240}).time("medium")
        '~4 h'
        """
        if scale not in self.minutes:
            return "-"
        about = "" if scale in self.measured else "~"
        return f"{about}{duration(self.minutes[scale])}"


def numbers_of(source: str) -> list[float]:
    """Return the numbers that stand in a program, in their order.

    >>> numbers_of("def f(x, rate=1e-3): return x * 3  # of 7")
    [0.001, 3]
    """
    found = [
        (node.lineno, node.col_offset, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    ]
    return [value for *_, value in sorted(found)]


def duration(minutes: float) -> str:
    """Return minutes in words.

    >>> duration(0.5), duration(90), duration(300), duration(14400)
    ('0.5 min', '90 min', '5 h', '10 days')
    """
    if minutes >= 2 * 60 * 24:
        return f"{minutes / (60 * 24):.0f} days"
    return f"{minutes / 60:.0f} h" if minutes >= 120 else f"{minutes:g} min"


Function = TypeVar("Function", bound=Callable[[Request], Reproduction])
RECIPES: Registry[Recipe] = Registry("recipe", entry_points="wellposed.recipes")
"""Every recipe of the installed packages, by name."""


def recipe(name: str, **options: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function of a `Request` as a recipe; its docstring says what
    it shows, ``Claim:``, and where it has them ``Quote:``, the paper's words and their place,
    ``Test:``, what decides, and ``Note:``, what differs.

    Args:
        name: ``paper/item``.
        options: fields of `Recipe`: ``measured``, ``estimated`` (of the recipes here in minutes.toml),
            ``beyond``, ``folders``, ``takes``, ``builtin``, ``power``.

    Raises:
        ConfigError: the name is taken, or the docstring holds no claim.

    >>> @recipe("mine/figure-1", measured={"mini": 1})
    ... def figure(request: Request) -> Reproduction:
    ...     "Y against x. Claim: y grows. Test: every step is up, by {LEAST:g} or more."
    >>> LEAST = 0.5
    >>> RECIPES.get("mine/figure-1").summary, RECIPES.get("mine/figure-1").says
    ('Y against x', 'y grows')
    >>> RECIPES.get("mine/figure-1").told("Test")
    ['every step is up, by 0.5 or more']
    """

    def register(function: Function) -> Function:
        summary = " ".join((function.__doc__ or "").split()).partition("Claim: ")[0]
        minutes: dict[str, Any] = {kind: of[name] for kind, of in MINUTES.items() if name in of}
        made = Recipe(name, summary.strip().removesuffix("."), function, **minutes | options)
        if not made.says:
            raise ConfigError(f"recipe {name}: its docstring holds no claim; add `Claim: ...`")
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
