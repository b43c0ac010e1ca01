"""Certified accuracy against radius: plain Transformers, the variant lipschitz, and its control without blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from wellposed.charts import Panel, Row, Series, Style
from wellposed.recipes.frontier.texts import Sizes, find_texts, text_run
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.runs import FinishedRun, PlannedRun, train_grid
from wellposed.recipes.variants import apply_variant
from wellposed.training.certified_file import CertifiedRun
from wellposed.training.config import RunConfig

RADII = {"ag_news": 0.1, "imdb": 0.03}
"""The radius at which models are compared, in units of the median token norm."""


@dataclass(frozen=True)
class Model:
    """One line of the figure: a variant, and what is changed in it."""

    variant: str
    temperature: float = 1.0
    blocks: bool = True
    norm: str | None = None

    def config(self, base: RunConfig) -> RunConfig:
        """Return the run of this model."""
        base = replace(base, train=replace(base.train, temperature=self.temperature))
        config = apply_variant(self.variant, base)
        changes = {} if self.norm is None else {"norm": self.norm}
        return replace(config, model=config.model.with_parts(**changes, **({} if self.blocks else _NO_BLOCKS)))


_NO_BLOCKS = {"num_hidden_layers": 0}
MODELS: Mapping[str, Model] = {
    "post_ln": Model("post_ln"),
    "rezero": Model("rezero"),
    "l2_contractive, no norm": Model("l2_contractive", norm="none"),
    **{f"lipschitz, T = {t:g}": Model("lipschitz", t) for t in (5.0, 10.0, 20.0)},
    **{f"no blocks, T = {t:g}": Model("lipschitz", t, blocks=False) for t in (5.0, 10.0, 20.0)},
}


@dataclass(frozen=True)
class Measured:
    """A run and what it was certified for; None where training diverged."""

    corpus: str
    label: str
    run: FinishedRun
    certified: CertifiedRun | None


def accuracy(request: Request) -> Reproduction:
    """Clean, certified and attacked accuracy of every model on every corpus found, mean over seeds."""
    sizes = request.pick(
        toy=Sizes(3, 1, width=8, batch_size=4, examples=4, options={"max_words": 50}),
        mini=Sizes(300, 3, batch_size=64),
        paper=Sizes(6000, 3, width=256, layers=4, heads=4, batch_size=128, examples=2000),
    )
    measured = [
        found for corpus, data in find_texts(request).items() for found in _measure(request, corpus, data, sizes)
    ]
    rows = [row for found in measured for row in _rows(found)]
    summaries = _summaries(measured)
    said = "; ".join(
        f"{row['corpus']}, {row['model']}: {row['clean']:.3f} clean, {row['certified']:.3f} certified at "
        f"{row['radius']:g}"
        for row in summaries
    )
    return Reproduction(
        rows,
        [_panel(corpus, rows) for corpus in dict.fromkeys(found.corpus for found in measured)],
        got=f"{said}; {sizes.seeds} seeds, {sizes.steps} steps, width {sizes.width}, {sizes.layers} blocks",
        holds=None,
        notes=(
            "radii are in units of the median norm of an embedded token; every token moves by up to the radius",
            f"the first {sizes.examples} examples of test; the attack is projected gradient descent in eval mode",
            "no verdict: lipschitz runs at 20 x the rate of the others, and sides tuned unequally are no comparison",
        ),
    )


def _measure(request: Request, corpus: str, data: str, sizes: Sizes) -> Iterator[Measured]:
    from wellposed.tasks import build_task
    from wellposed.training.certified_run import certify_runs

    names = list(itertools.product(range(sizes.seeds), MODELS.items()))
    planned = [
        PlannedRun(
            request.runs("frontier-accuracy") / corpus / f"{_folder(label)}-seed{seed}",
            f"{corpus}, {label}, seed {seed}",
            model.config(text_run(corpus, data, sizes, seed)),
        )
        for seed, (label, model) in names
    ]
    task = build_task(planned[0].config.task, planned[0].config.task_options)
    for (_, (label, _)), run in zip(names, train_grid(request, planned, task=task), strict=True):
        folders = [] if run.failure else [run.folder]
        found = certify_runs(folders, task, examples=sizes.examples, announce=request.announce)
        yield Measured(corpus, label, run, found[0] if found else None)


def _folder(label: str) -> str:
    return label.replace(", ", "-").replace(" ", "").replace("=", "")


def _rows(found: Measured) -> list[Row]:
    fixed = {"corpus": found.corpus, "model": found.label, "seed": found.run.seed}
    if found.certified is None:
        return [{**fixed, "error": found.run.failure}]
    curve = found.certified
    points = zip(curve.shares, curve.certified, curve.attacked, strict=True)
    return [
        {
            **fixed,
            "clean_test": found.run.metric("accuracy,test"),
            "total": curve.total,
            "radius": radius,
            "certified": certified,
            "attacked": attacked,
        }
        for radius, certified, attacked in points
    ]


def _summaries(measured: Sequence[Measured]) -> list[Row]:
    """Return the means over seeds at the radius of each corpus."""
    rows = []
    for corpus, label in dict.fromkeys((found.corpus, found.label) for found in measured):
        runs = [found for found in measured if (found.corpus, found.label) == (corpus, label)]
        radius = RADII[corpus]
        held = [dict(zip(r.certified.shares, r.certified.certified, strict=True)) for r in runs if r.certified]
        clean = fmean(found.run.metric("accuracy,test", missing=0.0) for found in runs)
        certified = sum(found[radius] for found in held) / len(runs)
        rows.append({"corpus": corpus, "model": label, "radius": radius, "clean": clean, "certified": certified})
    return rows


def _panel(corpus: str, rows: Sequence[Row]) -> Panel:
    series = []
    styles: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}
    for colour, label in enumerate(MODELS):
        mine = [row for row in rows if (row["corpus"], row["model"]) == (corpus, label) and "radius" in row]
        radii = sorted({row["radius"] for row in mine})
        for column, style in styles.items():
            means = [fmean(row[column] for row in mine if row["radius"] == radius) for radius in radii]
            series.append(Series(label if column == "certified" else f"{label}, attacked", radii, means, style, colour))
    return Panel(f"{corpus}: certified, dashed: attacked", "radius / token norm", "accuracy", series, x_scale="symlog")
