"""The model card of ``final/``: task, data, results, how to load the model, and how it was trained."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder.run_folder import leaves
from wellposed_lab.training.folder.state import Evaluation


def model_card(
    config: RunConfig,
    model: nn.Module,
    task: Task,
    evaluations: Mapping[str, Evaluation],
    command: Sequence[str] | None,
) -> str:
    """Return ``README.md``. Local paths are replaced by names, and the licence is left to the user."""
    from huggingface_hub import ModelCardData

    named = config.task_options.get("data")
    paths = [value for keys, value in leaves(task.description()) if keys[-1:] == ("path",)]
    data = [_name(str(named))] if named else []
    data += [Path(path).name for path in paths if isinstance(path, str)]
    facts = {
        "task": config.task,
        "data": ", ".join(dict.fromkeys(data)),
        "started from": f"`{_name(config.start.model)}`" if config.start.model else "",
        "variant": f"`{config.variant}`",
        "seed": str(config.train.seed),
    }
    header = ModelCardData(library_name="transformers", tags=["wellposed"]).to_yaml()
    parts = [
        f"---\n{header}\n---\n# {config.task}, {config.variant}",
        "\n".join(f"- {name}: {value}" for name, value in facts.items() if value),
        _results(task, evaluations),
        *_loading(model),
    ]
    if command:
        parts += ["## How it was made", f"```\n{shlex.join(_word(word) for word in command)}\n```"]
    return "\n\n".join(parts) + "\n"


def _results(task: Task, evaluations: Mapping[str, Evaluation]) -> str:
    rows = ["| split | examples | metric | value |", "|---|---|---|---|"]
    for split, entry in evaluations.items():
        headlines = (task.report_headline, task.headline)
        first = [name for name in headlines if name in entry.metrics]
        names = dict.fromkeys([*first, *sorted(entry.metrics)])
        rows += [f"| {split} | {entry.examples} | {n} | {entry.metrics[n]:.6g} |" for n in names]
    return "\n".join(rows)


def _loading(model: nn.Module) -> list[str]:
    if not hasattr(model, "save_pretrained"):
        return []
    from wellposed.models import loading_lines

    return loading_lines(model, "FOLDER")


def _word(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={_name(value)}" if equals else _name(word)


def _name(text: str) -> str:
    """Return ``text``, or the last part of a local path."""
    is_path = Path(text).is_absolute() or (os.sep in text and Path(text).exists())
    return Path(text).name if is_path else text
