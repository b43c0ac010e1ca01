"""The model card of ``final/``: task, data, results, how to load the model, and how it was trained."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from wellposed.model_edits import attention_of, recorded
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder.run_folder import leaves
from wellposed_lab.training.folder.save import is_ours
from wellposed_lab.training.folder.state import Evaluation

AS_IT_IS = """from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
WITH_OUR_LOADER = """from transformers import AutoTokenizer
from wellposed.models import load_saved_model

model = load_saved_model("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
NOTE = "Without this import, a plain `from_pretrained` refuses the `wellposed` entries of `config.json`."
NOTE_ON_NORMS = (
    "**A plain `from_pretrained` gives another model**, without a warning: it adds {lost} LayerNorms"
    " with fresh weights. `config.json` records their removal under `wellposed`, and the loader"
    " above repeats it."
)


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
    from wellposed.models import auto_class, reads_images

    code = AS_IT_IS
    note = ""
    norms = recorded(model.config).get("removed_norms")
    if norms:
        code = WITH_OUR_LOADER
        note = NOTE_ON_NORMS.format(lost=len(norms))
    elif is_ours(model) or attention_of(model.config) is not None:
        code = WITH_OUR_LOADER
        note = NOTE
    if reads_images(model):
        code = code.replace("AutoTokenizer", "AutoImageProcessor").replace("tokenizer", "processor")
    auto = getattr(auto_class(type(model).__name__), "__name__", type(model).__name__)
    lines = ["## How to load it", f"```python\n{code.format(auto=auto)}\n```"]
    return [*lines, note] if note else lines


def _word(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={_name(value)}" if equals else _name(word)


def _name(text: str) -> str:
    """Return ``text``, or the last part of a local path."""
    is_path = Path(text).is_absolute() or (os.sep in text and Path(text).exists())
    return Path(text).name if is_path else text
