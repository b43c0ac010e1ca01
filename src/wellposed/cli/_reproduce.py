"""``wellposed reproduce NAME``: a table or figure of a paper again, with what the paper says beside what we got."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wellposed.cli.parser import parse_words
from wellposed.errors import ConfigError, DataError
from wellposed.recipes.reproduce import RECIPES, check_data, data_of, reproduce
from wellposed.recipes.reproduction_page import finished, reproduction_page
from wellposed.training.durable_files import replace_file


@dataclass(frozen=True)
class ReproduceArguments:
    """Make tables and figures of the papers: CSV, SVG and a row "paper says / we got" each."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Recipes, for instance kim2021/figure-2; a paper's name (kim2021) takes all of its recipes, and "all" every one:
    those that are finished in --out are kept, and those whose data is missing are named and left out."""
    list: bool = False
    """List every recipe with the minutes it takes, and stop."""
    scale: Literal["mini", "paper", "toy"] = "mini"
    """mini: minutes on two CPU cores; paper: the paper's sizes on a large GPU; toy: seconds, shows nothing."""
    out: Path = Path("runs/reproduce")
    """Folder for the files; training recipes keep their runs inside and go on with them when called again."""
    data: str | None = None
    """Data of recipes that train: a text file, a folder or hf:name; English prose that ships with Python otherwise.
    With "all" a folder of data sets, in which each recipe finds its own."""
    encoder: str | None = None
    """Folder or hub name of a pretrained encoder, for recipes that fine-tune one (mcgrath2024) in place of the one of
    the scale."""
    page: Path = Path("docs/reproduction.md")
    """The page that "all" writes: what each paper says, what we got, the verdict and how sure it is."""
    quiet: bool = False
    """Print the rows only."""
    strict: bool = False
    """Exit with status 1 where a paper's claim does not hold; a negative result is a success otherwise."""


def run(words: Sequence[str]) -> int:
    """Make the recipes and print their rows; with ``--strict``, exit status 1 where a claim did not hold."""
    options = parse_words(ReproduceArguments, words, prog="wellposed reproduce", description=__doc__)
    if options.list:
        print(_listing())
        return 0
    if not options.names:
        raise ConfigError("name a recipe, for instance kim2021/figure-2; `wellposed reproduce --list` shows all")
    if "all" in options.names:
        return _run_all(options)
    names = [recipe for name in options.names for recipe in _expand(name)]
    for name in names:
        RECIPES.get(name)
    held = [_make(name, options, options.data) for name in names]
    return 0 if all(held) or not options.strict else 1


def _run_all(options: ReproduceArguments) -> int:
    """Make every recipe that is not finished in the folder, then the page."""
    if options.encoder is not None:
        raise ConfigError('--encoder with "all": name the recipes that fine-tune one, for instance mcgrath2024')
    check_data(options.data)
    held = True
    for name in RECIPES:
        done = finished(options.out, name)
        if done is not None and done["scale"] == options.scale:
            held = held and done["holds"] is not False
            continue
        try:
            held = _make(name, options, data_of(name, options.data)) and held
        except (ConfigError, DataError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.page, reproduction_page(options.out).encode())
    print(f"page: {options.page}")
    return 0 if held or not options.strict else 1


def _make(name: str, options: ReproduceArguments, data: str | None) -> bool:
    """Make one recipe and print its row; return whether nothing was contradicted."""
    minutes = RECIPES.get(name).minutes.get(options.scale)
    if not options.quiet and minutes is not None:
        print(f"{name}: about {_duration(minutes)}", file=sys.stderr, flush=True)
    announce = _ignore if options.quiet else _announce
    done = reproduce(name, scale=options.scale, out=options.out, data=data, announce=announce, encoder=options.encoder)
    print(done.row())
    print(f"  files:      {', '.join(map(str, done.files))}", flush=True)
    return done.result.holds is not False


def _expand(name: str) -> list[str]:
    inside = [recipe for recipe in RECIPES if recipe.startswith(f"{name}/")]
    return inside or [name]


def _listing() -> str:
    width = max(map(len, RECIPES))
    lines = [f"{'recipe':<{width}}  {'mini':>7}  {'paper':>9}  what"]
    for name in RECIPES:
        recipe = RECIPES.get(name)
        lines.append(
            f"{name:<{width}}  {_duration(recipe.minutes['mini']):>7}  {_duration(recipe.minutes['paper']):>9}  "
            f"{recipe.summary}"
        )
    lines.append("mini: on two CPU cores; paper: estimate for one large GPU, of the whole hyper-parameter grid")
    return "\n".join(lines)


def _duration(minutes: float) -> str:
    if minutes >= 2 * 60 * 24:
        return f"{minutes / (60 * 24):.0f} days"
    return f"{minutes / 60:.0f} h" if minutes >= 120 else f"{minutes:g} min"


def _announce(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    del line
