"""``wellposed reproduce NAME``: a table or figure of a paper again, with what the paper says beside
what we got."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from wellposed.errors import ConfigError, DataError
from wellposed.text_table import aligned
from wellposed_lab.cli.parser import Positional, parse_words
from wellposed_lab.compare.runs import check_jobs, say_nothing
from wellposed_lab.training.folder.durable_files import replace_file
from wellposed_lab.training.loop.processes import run_until_stopped
from wellposed_studies.recipe import RECIPES, SCALES, Given, Request, recipe_names
from wellposed_studies.reproduce import check_data, reproduce
from wellposed_studies.reproduction_page import finished, is_stale, reproduction_page


@dataclass(frozen=True)
class ReproduceArguments:
    """Make tables and figures of the papers: CSV, SVG and a row "paper says / we got" each."""

    names: Annotated[tuple[str, ...], Positional] = ()
    """Recipes, for instance kim2021/figure-2; a paper's name (kim2021) takes all of its recipes,
    each with what it reads of --data, --encoder, --vectors and --languages; and "all" every one:
    those that are finished in --out, at this scale or a larger one, are kept, and those whose data
    is missing are named and left out."""
    list: bool = False
    """List every recipe with the minutes it takes, and stop."""
    plan: bool = False
    """Say what the named recipes would take and could see at --scale: seeds, the smallest
    difference that would be seen, and what counts as levelled off; and stop."""
    scale: Literal["mini", "medium", "paper", "toy"] = "mini"
    """mini: minutes on two CPU cores; medium: sized so that the claim can be seen or refuted, at
    most 10 hours on two cores or 45 minutes on one large GPU; paper: the paper's sizes on a large
    GPU; toy: seconds, shows nothing."""
    out: Path = Path("runs/reproduce")
    """Folder for the files; training recipes keep their runs inside and go on with them when called again."""
    data: str | None = None
    """Data of recipes that read some: a file, a folder, a folder of data sets in which each recipe
    finds its own, or hf:name. --plan says which do, and what is read otherwise."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, for recipes that fine-tune one (mcgrath2024) in
    place of the one of the scale, or that score replies with it (zhang2021/table-4)."""
    vectors: str | None = None
    """File of word vectors (GloVe, word2vec), for recipes that score replies with them (zhang2021/table-4)."""
    languages: str | None = None
    """Source and target, as en,fr, for recipes that translate the data given. If not given: the
    recipe's own, or the first two of a folder that has others."""
    jobs: int | None = None
    """Processes that train independent runs at the same time; one where not given, but as many as
    there are cores for mcgrath2024."""
    page: Path = Path("docs/reproduction.md")
    """The page that "all" writes: what each paper says, what we got, the verdict and how sure it is."""
    quiet: bool = False
    """Print the rows only."""
    strict: bool = False
    """Exit with status 1 where a paper's claim does not hold; a negative result is a success otherwise."""


def run(words: Sequence[str]) -> int:
    """Make the recipes and print their rows; with ``--strict``, exit status 1 where a claim did not
    hold."""
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
        held = [_run_all(options)]
    else:
        held = [_make(name, options, given) for name, given in _requested(options)]
    return 0 if all(held) or not options.strict else 1


def _given(options: ReproduceArguments, to: Collection[str] = get_args(Given)) -> dict[str, str]:
    """Return what the user gives for recipes to read, of the options named ``to``."""
    given = {option: getattr(options, option) for option in to}
    return {option: value for option, value in given.items() if value is not None}


def _requested(options: ReproduceArguments) -> list[tuple[str, dict[str, str]]]:
    """Return the named recipes with what each is given: those of a paper what they read, and
    another one everything."""
    given = _given(options)
    requested = []
    for name in options.names:
        recipes = _expand(name)
        if recipes == [name]:
            requested.append((name, given))
            continue
        some = [(recipe, _given(options, RECIPES.get(recipe).takes)) for recipe in recipes]
        if unread := [option for option in given if not any(option in read for _, read in some)]:
            raise ConfigError(
                f"{name}: none of its recipes reads --{', --'.join(unread)}; leave it out"
            )
        requested += some
    return requested


def _run_all(options: ReproduceArguments) -> bool:
    """Make every recipe that is not finished in the folder, or was under other numbers, then the
    page."""
    if set(_given(options)) - {"data"}:
        raise ConfigError(
            '--encoder, --vectors or --languages with "all": name the recipes that read it, for'
            " instance mcgrath2024"
        )
    check_data(options.data)
    held = True
    for name in recipe_names():
        done = finished(options.out, name)
        large = done and SCALES.index(done["scale"]) >= SCALES.index(options.scale)
        if done and large and not is_stale(done):
            held = held and done["holds"] in (True, None)
            continue
        try:
            held = _make(name, options, _given(options, RECIPES.get(name).takes)) and held
        except (ConfigError, DataError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.page, reproduction_page(options.out).encode())
    print(f"page: {options.page}")
    return held


def _make(name: str, options: ReproduceArguments, given: Mapping[str, str]) -> bool:
    """Make one recipe and print its row; return whether nothing speaks against the claim."""
    if not options.quiet and options.scale in RECIPES.get(name).minutes:
        print(f"{name}: {RECIPES.get(name).time(options.scale)}", file=sys.stderr, flush=True)
    say = partial(print, " ", file=sys.stderr, flush=True)
    announce = say_nothing if options.quiet else say
    done = reproduce(
        name, scale=options.scale, out=options.out, announce=announce, jobs=options.jobs, **given
    )
    print(done.row())
    print(f"  files:      {', '.join(map(str, done.files))}", flush=True)
    return done.result.holds in (True, None)


def _plan(name: str, options: ReproduceArguments) -> str:
    recipe = RECIPES.get(name)
    lines = [
        f"{name} (scale {options.scale}): {recipe.time(options.scale)}",
        f"  claim:        {recipe.says}",
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
    return [of for of in recipe_names() if name == "all" or of.startswith(f"{name}/")] or [name]


def _listing() -> str:
    lines = [["recipe", "mini", "medium", "paper", "what"]]
    for name in recipe_names():
        recipe = RECIPES.get(name)
        times = [recipe.time(scale) for scale in ("mini", "medium", "paper")]
        lines.append([name, *times, recipe.summary])
    return (
        f"{aligned(lines, 'lrrrl')}\nmeasured, or ~ estimated; mini, medium: two CPU cores; paper:"
        " one large GPU, - more than a day, see docs/paper_scale.md; --plan says what each could see"
    )
