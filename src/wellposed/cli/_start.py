"""What ``--from`` means before the other options are parsed: how its texts or images are read, and
fine-tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from wellposed.cli.load import start_source
from wellposed.errors import ConfigError
from wellposed.tasks import TASKS
from wellposed.tasks.data.pixel_values import PROCESSOR_FILES, has_processor
from wellposed.tasks.text.tokenizers import has_tokenizer
from wellposed.training.config import RunConfig, StartOptions, TrainOptions

FINE_TUNING = TrainOptions(
    epochs=3,
    learning_rate=3e-5,
    schedule="linear",
    warmup_share=0.1,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
)
"""How a pretrained model is trained where nothing else is asked for (Devlin et al. 2019, appendix
A.3)."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """The model that ``--from`` names."""

    name: str
    """What is loaded: a folder, a ``config.json``, or a name of the hub."""
    folder: Path
    """Where files beside it are; no folder for a name of the hub."""
    random: bool
    """Whether its weights are drawn."""


def start_config(
    task: str, name: str, *, from_scratch: bool, given: Sequence[str] = ()
) -> RunConfig:
    """Return what a run that starts from the model ``name`` does by default: reads as the model
    does, and fine-tunes.

    ``given`` are those of `READ_BY` that the user says.
    """
    from wellposed.models import check_start

    is_config = Path(name).is_file()
    loaded = start_source(name)
    if (kind := getattr(TASKS.get(task).build, "kind", None)) is not None:
        check_start(loaded, kind)
    source = _Source(
        loaded, Path(name).parent if is_config else Path(loaded), random=from_scratch or is_config
    )
    known = {item.name for item in dataclasses.fields(TASKS.get(task).options)}
    found = {
        option: find(source)
        for option, find in READ_BY.items()
        if option in known and option not in given
    }
    train = TrainOptions() if source.random else FINE_TUNING
    task_options = {option: value for option, value in found.items() if value}
    start = StartOptions(source.name, from_scratch=from_scratch)
    return RunConfig(task, task_options, variant="plain", train=train, start=start)


def _tokenizer(source: _Source) -> str:
    folder = source.folder
    if not folder.is_dir() or has_tokenizer(folder):
        return f"hf:{folder}"
    if source.random:
        return ""
    raise ConfigError(
        f"{folder}: the folder has no tokenizer, and the weights are those of its tokens; save it"
        " there with tokenizer.save_pretrained(FOLDER), name it with --tokenizer hf:FOLDER, or"
        " give --from-scratch"
    )


def _processor(source: _Source) -> str:
    folder = source.folder
    if source.random:
        return f"config:{source.name}"
    if not folder.is_dir() or has_processor(folder):
        return f"hf:{folder}"
    raise ConfigError(
        f"{folder}: no {PROCESSOR_FILES[0]}, which says how the images of its weights became"
        " numbers; copy it from where the model came from, name a folder that has one with"
        f" --processor hf:FOLDER, or give --processor config:{folder} for its size with mean and"
        " deviation of your images"
    )


READ_BY: dict[str, Callable[[_Source], str]] = {"tokenizer": _tokenizer, "processor": _processor}
"""Options of tasks that say how inputs are read, and what finds them beside a model."""
