"""The classification tasks of our studies and how every model is trained on them; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed.recipes.recipe import Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions


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


@dataclass(frozen=True)
class Sizes:
    """What is trained at a scale."""

    steps: int
    seeds: int
    width: int = 64
    layers: int = 1
    heads: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-3
    evaluations: int = 2
    """On valid, evenly over the steps."""
    examples: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, beside its data and length."""


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
    """Return what every variant starts from."""
    return RunConfig(
        task="text_classification",
        task_options={
            "data": data,
            "max_length": CORPORA[corpus].max_length,
            **CORPORA[corpus].options,
            **sizes.options,
        },
        model=ModelOptions(
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=2 * sizes.width,
        ),
        train=TrainOptions(
            steps=sizes.steps,
            batch_size=sizes.batch_size,
            learning_rate=sizes.learning_rate,
            eval_every=max(1, sizes.steps // sizes.evaluations),
            checkpoint_every=sizes.steps,
            eval_batches=20,
            seed=seed,
        ),
    )
