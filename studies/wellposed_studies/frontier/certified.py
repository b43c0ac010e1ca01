"""What certificates are worth: certified and attacked accuracy over radius, as numbers and as a panel,
on many examples, and whether those with least to spare stand a long attack."""

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
    """A model to compare, drawn as one line: a variant, and the options changed in it."""

    variant: str
    temperature: float = 1.0
    blocks: bool = True
    norm: str | None = None
    usual_rate: float = 1e-3
    """The middle of the learning rates that it tries."""

    def config(self, base: RunConfig) -> RunConfig:
        """Return the run of this model."""
        base = replace(base, train=replace(base.train, temperature=self.temperature))
        config = apply_variant(self.variant, base)
        changes = {} if self.norm is None else {"norm": self.norm}
        changes |= {} if self.blocks else {"num_hidden_layers": 0}
        return replace(config, model=config.model.with_parts(**changes))


@dataclass(frozen=True)
class Corpus:
    """Where the texts of a task lie in a folder of many data sets, and how much of each text is
    read."""

    max_length: int
    folder: str
    train: str = ""
    """File in the folder, where the folder holds more than one task."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, beside its data and length."""


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
    """Return the data of each corpus found in the data of ``request``, which may be the folder of
    one of them.

    Raises:
        ConfigError: no data was given.
        DataError: it holds none of the corpora.
    """
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
    found = {name: str(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise DataError(
            f"{root}: expected a folder that holds one or more of {folders}, found none of them"
        )
    return found


def text_run(corpus: str, data: str, sizes: Sizes, seed: int) -> RunConfig:
    """Return what every variant starts from; a corpus that is none of `CORPORA` is a study's own."""
    found = CORPORA.get(corpus, Corpus(48, corpus))
    own = {**found.options, **sizes.options}
    options = {"data": data, "max_length": found.max_length, **own}
    return run_config("text_classification", options, replace(sizes, eval_batches=20), seed=seed)


STYLES: Mapping[str, Style] = {"certified": "solid", "attacked": "dashed"}


@dataclass(frozen=True)
class Curves:
    """One model on one task: its runs at the rate it kept, and what each is certified for."""

    task: str
    label: str
    tuned: Tuned
    certified: Sequence[CertifiedRun | None]
    """None where training diverged."""

    @classmethod
    def of(cls, name: str, label: str, tuned: Tuned, task: Any, **how: Any) -> Curves:
        """Certify every run; ``how`` goes to `certify_runs`."""
        from wellposed_lab.training.certified.run import certify_runs

        found = tuned.each(lambda run: certify_runs([run.folder], task, **how)[0])
        return cls(name, label, tuned, found)

    def column(self, metric: str) -> list[float]:
        """Return a metric of every seed; nan where training diverged."""
        return [run.metric(metric) for run in self.tuned.runs]

    def at(self, radius: float) -> list[float]:
        """Return certified accuracy at a radius, seed by seed; 0 where training diverged."""
        return [
            dict(zip(run.shares, run.certified, strict=True))[radius] if run else 0.0
            for run in self.certified
        ]

    def half_radius(self) -> float | None:
        """Return the first radius at which at most half of the clean accuracy is certified, in the
        mean over seeds."""
        shares = next((run.shares for run in self.certified if run), [])
        means = {radius: fmean(self.at(radius)) for radius in shares}
        return next((radius for radius in shares if means[radius] <= means[0.0] / 2), None)


def points_of(run: CertifiedRun) -> list[Row]:
    """Return radius, certified and attacked accuracy at each radius."""
    points = zip(run.shares, run.certified, run.attacked, strict=True)
    return [dict(zip(("radius", "certified", "attacked"), point, strict=True)) for point in points]


def curves_panel(title: str, rows: Sequence[Row], labels: Iterable[str]) -> Panel:
    """Return the means over seeds with their standard errors; rows have model, radius, certified
    and attacked."""
    series = []
    for colour, label in enumerate(labels):
        mine = [{**row, "radius": float(row["radius"])} for row in where(rows, model=label)]
        for column, style in STYLES.items():
            known = [{**row, column: float(row[column])} for row in mine]
            # A label that starts with "_" has no line in the legend.
            name = label if style == "solid" else f"_{label}"
            series.append(mean_series(known, "radius", column, name, style, colour))
    heading = f"{title}: certified, dashed: attacked"
    return Panel(heading, "radius / token norm", "accuracy", series, x_scale="symlog")


@dataclass(frozen=True)
class Attack:
    """How certified examples are attacked."""

    among: int
    """The first examples of *test* that may be taken."""
    count: int = 50
    """How many of them are, those whose certified radius is the least above the radius of the
    attack."""
    steps: int = 200
    restarts: int = 10


def certified_share(folder: Path, task: Task, *, share: float, examples: int) -> float:
    """Return the share of the first ``examples`` of *test* certified at ``share`` of the median
    token norm."""
    model, _ = load_run_model(folder)
    batches = first_batches(task, "test", examples)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in batches))
    how: Any = {"radii": [share], "in_tokens": True, "attack_steps": 1}
    return certified_accuracy(model, batches, certificate, **how).certified[0]


def attack_certified(folder: Path, task: Task, *, radius: float, attack: Attack) -> tuple[int, int]:
    """Attack the examples that are certified at ``radius`` with least to spare, and return how many
    they are and how many fell: an unsound certificate shows there."""
    model, _ = load_run_model(folder)
    singles = first_batches(task, "test", attack.among, batch_size=1)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in singles))
    reaches = [
        (certified_accuracy(model, [batch], certificate, radii=[0.0]).median_radius, member)
        for member, batch in enumerate(singles)
    ]
    least = sorted(each for each in reaches if each[0] > radius)[: attack.count]
    if not least:
        return 0, 0
    dataset = task.dataset("test")
    batch = task.collate([dataset[member] for _, member in least])
    how: Any = {"attack_steps": attack.steps, "restarts": attack.restarts}
    curve = certified_accuracy(model, [batch], certificate, radii=[radius], **how)
    return len(least), round((1 - curve.attacked[0]) * len(least))
