"""Certified and attacked accuracy over radius; a long attack on the weakest certified examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed_lab.charts import Panel, Row, Style, where
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.certified.accuracy import certified_accuracy
from wellposed_lab.training.certified.record import CertifiedRun
from wellposed_lab.training.certified.run import best_certificate, first_batches
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.build import load_run_model
from wellposed_studies.recipe import Request
from wellposed_studies.study import Sizes, mean_series, run_config
from wellposed_studies.tuning import Tuned


@dataclass(frozen=True)
class Model:
    """A model to compare, drawn as one line: a variant and the options changed in it."""

    variant: str
    logit_scale: float = 1.0
    blocks: bool = True
    norm: str | None = None
    usual_rate: float = 1e-3
    """Middle of the learning rates to try."""

    def config(self, base: RunConfig) -> RunConfig:
        base = replace(base, train=replace(base.train, logit_scale=self.logit_scale))
        config = apply_variant(self.variant, base)
        changes = {} if self.norm is None else {"norm": self.norm}
        changes |= {} if self.blocks else {"num_hidden_layers": 0}
        return replace(config, model=config.model.with_parts(**changes))


@dataclass(frozen=True)
class Corpus:
    """Place of a task's texts in a folder of many data sets, and the length to read."""

    max_length: int
    folder: str
    train: str = ""
    """File in the folder, if the folder has more than one task."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of the task."""


CORPORA: Mapping[str, Corpus] = {
    "ag_news": Corpus(48, "ag_news"),
    "imdb": Corpus(96, "imdb"),
    "sst": Corpus(
        32,
        "minbert",
        "ids-sst-train.csv.gz",
        {"label_column": "sentiment", "text_column": "sentence"},
    ),
    "trec": Corpus(24, "trec"),
}


def find_texts(request: Request) -> dict[str, str]:
    """Return the data of each corpus in ``request.data``; `DataError` if it has none."""
    folders = ", ".join(corpus.folder for corpus in CORPORA.values())
    if request.data is None:
        raise ConfigError(
            f"this study needs data: give --data FOLDER that holds one or more of {folders} (label"
            " and text in tsv, csv or jsonl files), or that is one of these folders"
        )

    root = Path(request.data)
    places = {
        name: root if root.name == corpus.folder else root / corpus.folder
        for name, corpus in CORPORA.items()
    }
    paths = {name: places[name] / corpus.train for name, corpus in CORPORA.items()}
    available = {name: str(path) for name, path in paths.items() if path.exists()}
    if not available:
        raise DataError(
            f"{root}: expected a folder that holds one or more of {folders}, found none of them"
        )

    return available


def text_run(corpus: str, data: str, sizes: Sizes, seed: int) -> RunConfig:
    """Return the base run of every variant; corpora outside `CORPORA` belong to one study."""
    layout = CORPORA.get(corpus, Corpus(48, corpus))
    extra = {**layout.options, **sizes.options}
    options = {"data": data, "max_length": layout.max_length, **extra}
    return run_config("text_classification", options, replace(sizes, eval_batches=20), seed=seed)


STYLES: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}


@dataclass(frozen=True)
class Curves:
    """Runs of one model on one task at its best rate, and their certificates."""

    task: str
    label: str
    tuned: Tuned
    certified: Sequence[CertifiedRun | None]
    """None if training diverged."""

    @classmethod
    def certified_at_best_rate(
        cls, name: str, label: str, tuned: Tuned, task: Any, **options: Any
    ) -> Curves:
        """Certify every run; keywords go to `certify_runs`."""
        from wellposed_lab.training.certified.run import certify_runs

        certified = tuned.for_each_run(lambda run: certify_runs([run.folder], task, **options)[0])
        return cls(name, label, tuned, certified)

    def column(self, metric: str) -> list[float]:
        return [run.metric(metric) for run in self.tuned.runs]

    def at(self, radius: float) -> list[float]:
        """Return certified accuracy at a radius for every seed; 0 if training diverged."""
        return [
            dict(zip(run.shares, run.certified, strict=True))[radius] if run else 0.0
            for run in self.certified
        ]

    def half_radius(self) -> float | None:
        """Return the first radius with at most half of the clean accuracy certified, on average."""
        shares = next((run.shares for run in self.certified if run), [])
        means = {radius: fmean(self.at(radius)) for radius in shares}
        return next((radius for radius in shares if means[radius] <= means[0.0] / 2), None)


def points_of(run: CertifiedRun) -> list[Row]:
    """Return radius, certified and attacked accuracy at each radius."""
    points = zip(run.shares, run.certified, run.attacked, strict=True)
    return [dict(zip(("radius", "certified", "attacked"), point, strict=True)) for point in points]


def curves_panel(title: str, rows: Sequence[Row], labels: Iterable[str]) -> Panel:
    """Return a panel of means over seeds with standard errors, from rows of `points_of` and model."""
    series = []
    for colour, label in enumerate(labels):
        mine = [{**row, "radius": float(row["radius"])} for row in where(rows, model=label)]
        for column, style in STYLES.items():
            as_numbers = [{**row, column: float(row[column])} for row in mine]
            # Labels that start with "_" are left out of the legend.
            name = label if style == "solid" else f"_{label}"
            series.append(mean_series(as_numbers, "radius", column, name, style, colour))
    heading = f"{title}: certified, dashed: attacked"
    return Panel(heading, "radius / token norm", "accuracy", series, x_scale="symlog")


@dataclass(frozen=True)
class Attack:
    """Settings of the attack on certified examples."""

    among: int
    """Number of first *test* examples to choose from."""
    count: int = 50
    """Number of attacked examples: those whose certified radius is closest above that of the attack."""
    steps: int = 200
    restarts: int = 10


def certified_share(folder: Path, task: Task, *, share: float, examples: int) -> float:
    """Return the certified share of the first *test* examples, at a share of the token norm."""
    model, _ = load_run_model(folder)
    batches = first_batches(task, "test", examples)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in batches))
    options: Any = {"radii": [share], "in_tokens": True, "attack_steps": 1}
    return certified_accuracy(model, batches, certificate, **options).certified[0]


def attack_certified(folder: Path, task: Task, *, radius: float, attack: Attack) -> tuple[int, int]:
    """Attack the certified examples closest to ``radius``; return how many, and changed answers."""
    model, _ = load_run_model(folder)
    singles = first_batches(task, "test", attack.among, batch_size=1)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in singles))
    reaches = [
        (certified_accuracy(model, [batch], certificate, radii=[0.0]).median_radius, member)
        for member, batch in enumerate(singles)
    ]
    closest = sorted(reach for reach in reaches if reach[0] > radius)[: attack.count]
    if not closest:
        return 0, 0

    dataset = task.dataset("test")
    batch = task.collate([dataset[member] for _, member in closest])
    options: Any = {"attack_steps": attack.steps, "restarts": attack.restarts}
    curve = certified_accuracy(model, [batch], certificate, radii=[radius], **options)
    return len(closest), round((1 - curve.attacked[0]) * len(closest))
