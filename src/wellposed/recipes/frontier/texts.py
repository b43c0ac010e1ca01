"""The classification tasks of our studies and how every model is trained on them; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError
from wellposed.recipes.recipe import Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

FOLDERS = ("ag_news", "imdb")
LENGTHS = {"ag_news": 48, "imdb": 96}


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
    examples: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, beside its data and length."""


def find_texts(request: Request) -> dict[str, str]:
    """Return the folder of each corpus found in the data of ``request``, which may be the folder of one of them.

    Raises:
        ConfigError: no data was given.
        DataError: it holds neither corpus.
    """
    if request.data is None:
        raise ConfigError(
            f"this study needs data: give --data FOLDER that holds {' or '.join(FOLDERS)} (label and text in tsv, csv "
            "or jsonl files), or that is one of these folders"
        )
    root = Path(request.data)
    found = {name: str(root / name) for name in FOLDERS if (root / name).is_dir()}
    if root.name in FOLDERS and root.is_dir():
        found[root.name] = str(root)
    if not found:
        raise DataError(f"{root}: expected a folder that holds {' or '.join(FOLDERS)}, found neither")
    return found


def text_run(corpus: str, data: str, sizes: Sizes, seed: int) -> RunConfig:
    """Return what every variant starts from."""
    return RunConfig(
        task="text_classification",
        task_options={"data": data, "max_length": LENGTHS[corpus], **sizes.options},
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
            eval_every=max(1, sizes.steps // 2),
            checkpoint_every=sizes.steps,
            eval_batches=20,
            seed=seed,
        ),
    )
