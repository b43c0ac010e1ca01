"""The model card of ``final/``: what was trained on what, how good it is, how to load it, and how
to make it again; and ``examples.json``: what the model answers to, or makes of, the first texts of *test*."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellposed.config_record import attention_of, recorded
from wellposed.errors import WellposedError
from wellposed.finite_json import to_json
from wellposed.tasks import Task
from wellposed.tasks.kinds.classification import LabelTask
from wellposed.training.config import RunConfig
from wellposed.training.folder import durable_files
from wellposed.training.folder.run_folder import leaves
from wellposed.training.folder.save import is_ours
from wellposed.training.loop.batches import forward, to_device
from wellposed.training.loop.state import Evaluation

EXAMPLES = "examples.json"
COUNTED, BATCH, SHOWN = 512, 32, 48
"""Examples whose answers are counted, those of one pass, and texts that are kept."""
UNKNOWN = "\u2612"
"""Stands for a word that the tokenizer does not know."""
SAMPLES, PROMPT, WRITTEN, LONGEST = 3, 16, 48, 300
"""Texts that are written, tokens given and added, and characters kept of a text."""
WITH_OUR_CLASSES = """import wellposed.models
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
AS_IT_IS = WITH_OUR_CLASSES.removeprefix("import wellposed.models\n")
WITH_OUR_LOADER = AS_IT_IS.replace(
    "import {auto}, AutoTokenizer",
    "import AutoTokenizer\nfrom wellposed.models import load_saved_model",
).replace("{auto}.from_pretrained", "load_saved_model", 1)
NOTE_ON_CLASSES = (
    "Both calls with `trust_remote_code=True` need no import, where `wellposed` is installed:"
    " `modeling_wellposed.py` imports the classes. Tokens alone need neither:"
    ' `PreTrainedTokenizerFast.from_pretrained("FOLDER")` of transformers reads them, where'
    " `AutoTokenizer` would first ask about the classes of the model."
)
NOTE_ON_LOADER = (
    "**A plain `from_pretrained` gives another model**, without a warning: it puts back {lost}"
    " LayerNorms, with fresh weights. `config.json` notes the change under `wellposed`, and the"
    " loader above makes it again."
)
NOTE_ON_ATTENTION = (
    "`config.json` names its attention, which `wellposed` makes known; without the import"
    " `from_pretrained` refuses the name."
)


def model_card(
    config: RunConfig,
    model: nn.Module,
    task: Task,
    evaluations: Mapping[str, Evaluation],
    command: Sequence[str] | None,
) -> str:
    """Return ``README.md``, with names in the place of paths of this machine; the licence is for
    the user to add."""
    from huggingface_hub import ModelCardData

    named = config.task_options.get("data")
    paths = [value for place, value in leaves(task.description()) if place[-1:] == ("path",)]
    data = [_name(str(named))] if named else []
    data += [Path(path).name for path in paths if isinstance(path, str)]
    facts = {
        "task": config.task,
        "data": ", ".join(dict.fromkeys(data)),
        "started from": f"`{_name(config.start.model)}`" if config.start.model else "",
        "variant": f"`{config.variant}`",
        "seed": str(config.train.seed),
        "certificate": _certificate(model),
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
    for split, found in evaluations.items():
        shown = (task.report_headline, task.headline)
        first = [name for name in shown if name in found.metrics]
        names = dict.fromkeys([*first, *sorted(found.metrics)])
        rows += [f"| {split} | {found.examples} | {n} | {found.metrics[n]:.6g} |" for n in names]
    return "\n".join(rows)


def _loading(model: nn.Module) -> list[str]:
    if not hasattr(model, "save_pretrained"):
        return []
    from wellposed.models import auto_class, reads_images

    norms = recorded(model.config).get("removed_norms")
    if norms:
        code, note = WITH_OUR_LOADER, NOTE_ON_LOADER.format(lost=len(norms))
    elif attention_of(model.config) is not None:
        code, note = WITH_OUR_CLASSES, NOTE_ON_ATTENTION
    else:
        code, note = (WITH_OUR_CLASSES, NOTE_ON_CLASSES) if is_ours(model) else (AS_IT_IS, "")
    if reads_images(model):
        code = code.replace("AutoTokenizer", "AutoImageProcessor").replace("tokenizer", "processor")
    auto = getattr(auto_class(type(model).__name__), "__name__", type(model).__name__)
    lines = ["## How to load it", f"```python\n{code.format(auto=auto)}\n```"]
    return [*lines, note.format(auto=auto)] if note else lines


def _certificate(model: Any) -> str:
    """Return the Lipschitz bound of a model of this package, where it has one at every length it
    takes."""
    if not is_ours(model):
        return ""
    from wellposed.certification import certify

    try:
        positions = model.config.max_position_embeddings
        bound = certify(model.eval(), seq_len=positions, norm="tok", cross_check=False).total
    except (WellposedError, AttributeError):
        return ""
    if math.isinf(bound):
        return ""
    return f"Lipschitz bound {bound:.4g} in the largest 2-norm of a token, up to {positions} tokens"


def _word(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option}={_name(value)}" if equals else _name(word)


def _name(text: str) -> str:
    """Return ``text``, and of a path of this machine its last part."""
    is_path = Path(text).is_absolute() or (os.sep in text and Path(text).exists())
    return Path(text).name if is_path else text


@torch.no_grad()
def save_examples(folder: Path, model: nn.Module, task: Task, scale: float = 1.0) -> None:
    """Write the answers of a classifier, counted by label, and its first texts; of a language model
    how it goes on from some texts, sampled at temperature .5 by ``scale`` times the logits.

    Exact; random states are left as they are. Other tasks leave no file. Cost: passes over `COUNTED` examples.
    """
    found: dict[str, Any] = {}
    was_training = model.training
    model.eval()
    try:
        if isinstance(task, LabelTask):
            found = _answers(model, task)
        elif task.kind == "causal_lm" and hasattr(model, "generate"):
            found = {"samples": [_sample(model, task, k, scale) for k in range(SAMPLES)]}
    finally:
        model.train(was_training)
    if found:
        durable_files.replace_file(folder / EXAMPLES, to_json({"format": 1, **found}, indent=1))


def _answers(model: nn.Module, task: LabelTask) -> dict[str, Any]:
    dataset, device = task.dataset("test"), next(model.parameters()).device
    counts = [[0] * len(task.labels) for _ in task.labels]
    texts: list[dict[str, Any]] = []
    for start in range(0, min(len(dataset), COUNTED), BATCH):
        rows = [dataset[k] for k in range(start, min(start + BATCH, len(dataset), COUNTED))]
        batch = task.collate(rows)
        answers = forward(model, to_device(batch, device)).argmax(-1).tolist()
        for row, label, answer in zip(rows, batch["labels"].tolist(), answers, strict=True):
            counts[label][answer] += 1
            if len(texts) < SHOWN and "input_ids" in row:
                sides = [row[name] for name in ("input_ids", "input_ids_pair") if name in row]
                text = " | ".join(_decoded(task, ids) for ids in sides)
                texts.append({"text": text, "label": label, "answer": answer})
    return {"labels": list(task.labels), "counts": counts, "texts": texts}


def _sample(model: Any, task: Task, number: int, scale: float) -> dict[str, str]:
    dataset = task.dataset("test")
    ids = list(dataset[number * (len(dataset) - 1) // SAMPLES]["input_ids"])
    given = ids[: max(1, min(PROMPT, len(ids) // 2))]
    prompt = torch.tensor([given], device=next(model.parameters()).device)
    more = max(1, min(WRITTEN, len(ids) - len(given)))
    how = {"max_new_tokens": more, "do_sample": True, "temperature": 0.5 / scale}
    with torch.random.fork_rng():
        torch.manual_seed(number)
        out = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)
    return {"prompt": _decoded(task, given), "text": _decoded(task, out[0, len(given) :].tolist())}


def _decoded(task: Task, ids: list[int]) -> str:
    """Return the text of tokens, a word that is not known by a sign of its own."""
    tokenizer: Any = task.tokenizer
    left_out = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    text = tokenizer.decode([number for number in ids if number not in left_out])
    return text.replace(tokenizer.unk_token or UNKNOWN, UNKNOWN)[:LONGEST]
