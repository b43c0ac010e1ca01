"""``wellposed reproduce NAME``: reproduce a table or figure and print it next to the claim."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from wellposed.errors import ConfigError, DataError
from wellposed.text_table import aligned
from wellposed_lab.cli.parser import Positional, parse_words
from wellposed_lab.compare.runs import check_jobs, say_nothing
from wellposed_lab.training.folder.atomic import replace_file
from wellposed_lab.training.loop.processes import run_until_stopped
from wellposed_studies.recipe import RECIPES, SCALES, Given, Request, recipe_names
from wellposed_studies.reproduce import check_data, reproduce
from wellposed_studies.reproduction_page import reproduction_page
from wellposed_studies.rows import finished, is_stale, judged_earlier, verdict_of


@dataclass(frozen=True)
class ReproduceArguments:
    """Make tables and figures of the papers: CSV, SVG and a row "paper says / we got" each."""

    names: Annotated[tuple[str, ...], Positional] = ()
    """Recipes, for instance kim2021/figure-2, or a paper (kim2021) for all of its recipes. The
    name "all" runs every recipe that is not finished in --out at this scale or a larger one; recipes
    without their data are skipped."""
    list: bool = False
    """List every recipe with the minutes it takes, and stop."""
    plan: bool = False
    """Print the cost of the named recipes at --scale, their seeds, the smallest difference they can
    detect and the rule for "levelled off", and stop."""
    scale: Literal["mini", "medium", "paper", "toy"] = "mini"
    """mini: minutes on two CPU cores. Medium: enough to confirm or refute the claim, at most 10 hours
    on two cores or 45 minutes on one large GPU. Paper: the paper's sizes on a large GPU. Toy:
    seconds, for tests."""
    out: Path = Path("runs/reproduce")
    """Folder for the files; training runs are kept inside and resumed by later calls."""
    data: str | None = None
    """Data: a file, a folder, a folder of data sets in which each recipe finds its own, or hf:name.
    --plan lists the recipes that read it, and their default."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, to fine-tune instead of the default (mcgrath2024)
    or to score replies (zhang2021/table-4)."""
    vectors: str | None = None
    """File of word vectors (GloVe, word2vec), to score replies (zhang2021/table-4)."""
    languages: str | None = None
    """Source and target, as en,fr, for recipes that translate --data. Default: those of the recipe, or
    the first two languages of the folder."""
    jobs: int | None = None
    """Processes that train independent runs in parallel. Default: one; for mcgrath2024 one per core."""
    minutes: float | None = None
    """Minutes after which no further training begins, for a study of many hours (frontier/methods,
    frontier/classifiers). Its row is partial then, and a later call completes it."""
    page: Path = Path("docs/reproduction.md")
    """Page that "all" writes: claim, result, verdict and uncertainty of each recipe."""
    quiet: bool = False
    """Print the rows only."""
    strict: bool = False
    """Exit with status 1 if a claim does not hold; without this, a negative result is a success."""


def run(words: Sequence[str]) -> int:
    """Run the recipes and print their rows; ``--strict`` exits with 1 if a claim does not hold."""
    again = shlex.join(["wellposed", "reproduce", *words])
    return run_until_stopped(partial(_reproduce, words), again)


def _reproduce(words: Sequence[str]) -> int:
    options = parse_words(ReproduceArguments, words, prog="wellposed reproduce")
    check_jobs(1 if options.jobs is None else options.jobs)
    if options.list:
        print(_listing())
        return 0
    if not options.names:
        raise ConfigError(
            "name a recipe, for instance kim2021/figure-2; `wellposed reproduce --list` shows all"
        )
    if options.plan:
        recipes = [recipe for name in options.names for recipe in _expand(name)]
        print("\n".join(_plan(recipe, options) for recipe in recipes))
        return 0

    if "all" in options.names:
        holds = [_run_all(options)]
    else:
        holds = [_make(name, options, inputs) for name, inputs in _requested(options)]
    return 0 if all(holds) or not options.strict else 1


def _typed_inputs(
    options: ReproduceArguments, to: Collection[str] = get_args(Given)
) -> dict[str, Any]:
    """Return the inputs that the user gives, among the options ``to``."""
    inputs = {option: getattr(options, option) for option in to}
    return {option: value for option, value in inputs.items() if value is not None}


def _requested(options: ReproduceArguments) -> list[tuple[str, dict[str, Any]]]:
    """Return the named recipes with their inputs; those named by their paper get what they read."""
    inputs = _typed_inputs(options)
    requested = []
    for name in options.names:
        recipes = _expand(name)
        if recipes == [name]:
            requested.append((name, inputs))
            continue
        some = [(recipe, _typed_inputs(options, RECIPES.get(recipe).takes)) for recipe in recipes]
        unread = [option for option in inputs if not any(option in read for _, read in some)]
        if unread:
            raise ConfigError(
                f"{name}: none of its recipes reads --{', --'.join(unread)}; leave it out"
            )
        requested += some

    return requested


def _run_all(options: ReproduceArguments) -> bool:
    """Run every recipe that is unfinished or stale in the folder, then write the page."""
    if set(_typed_inputs(options)) - {"data"}:
        raise ConfigError(
            '--encoder, --vectors, --languages or --minutes with "all": name the recipes that read it, for'
            " instance mcgrath2024"
        )

    check_data(options.data)
    holds = True
    for name in recipe_names():
        done = finished(options.out, name)
        large = done and SCALES.index(done["scale"]) >= SCALES.index(options.scale)
        if done and large and not (done.get("missing") or is_stale(done) or judged_earlier(done)):
            holds = holds and verdict_of(done) in (True, None)
            continue
        try:
            holds = _make(name, options, _typed_inputs(options, RECIPES.get(name).takes)) and holds
        except (ConfigError, DataError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)

    options.page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.page, reproduction_page(options.out).encode())
    print(f"page: {options.page}")
    return holds


def _make(name: str, options: ReproduceArguments, inputs: Mapping[str, Any]) -> bool:
    """Run one recipe and print its row; return whether nothing contradicts the claim."""
    if not options.quiet and options.scale in RECIPES.get(name).minutes:
        print(f"{name}: {RECIPES.get(name).time(options.scale)}", file=sys.stderr, flush=True)
    print_line = partial(print, " ", file=sys.stderr, flush=True)
    announce = say_nothing if options.quiet else print_line
    done = reproduce(
        name, scale=options.scale, out=options.out, announce=announce, jobs=options.jobs, **inputs
    )
    print(done.row())
    print(f"  files:      {', '.join(map(str, done.files))}", flush=True)
    return done.result.holds in (True, None)


def _plan(name: str, options: ReproduceArguments) -> str:
    recipe = RECIPES.get(name)
    lines = [
        f"{name} (scale {options.scale}): {recipe.time(options.scale)}",
        f"  claim:        {recipe.claim}",
    ]
    if "data" in recipe.takes:
        other = f", or {recipe.builtin}" if recipe.builtin else " is needed"
        lines.append(f"  data:         --data{other}")
    if recipe.power is None:
        return "\n".join([*lines, "  nothing is trained, so no seeds are compared"])

    plan = recipe.power(Request(options.scale, options.out))
    lines += [f"  seeds:        {plan['seeds']}", f"  can be seen:  {plan['words']}"]
    return "\n".join([*lines, f"  levelled off: {plan['levelled_off']}"])


def _expand(name: str) -> list[str]:
    return [
        recipe for recipe in recipe_names() if name == "all" or recipe.startswith(f"{name}/")
    ] or [name]


def _listing() -> str:
    lines = [["recipe", "mini", "medium", "paper", "what"]]
    for name in recipe_names():
        recipe = RECIPES.get(name)
        times = [recipe.time(scale) for scale in ("mini", "medium", "paper")]
        lines.append([name, *times, recipe.summary])
    return (
        f"{aligned(lines, 'lrrrl')}\nmeasured, or ~ estimated; mini, medium: two CPU cores; paper:"
        " one large GPU, - more than a day, see docs/paper_scale.md; --plan: smallest visible effect"
    )
