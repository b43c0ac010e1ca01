"""``examples.json`` of a run folder: what its final model answers to, or makes of, the first texts of
*test*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellposed.finite_json import to_json
from wellposed.tasks.kinds.classification import LabelTask
from wellposed.tasks.task import Task
from wellposed.training.folder import durable_files
from wellposed.training.loop.batches import forward, to_device

NAME = "examples.json"
COUNTED, BATCH, SHOWN = 512, 32, 48
"""Examples whose answers are counted, those of one pass, and texts that are kept."""
UNKNOWN = "\u2612"
"""Stands for a word that the tokenizer does not know."""
SAMPLES, PROMPT, WRITTEN, LONGEST = 3, 16, 48, 300
"""Texts that are written, tokens given and added, and characters kept of a text."""


@torch.no_grad()
def save_examples(folder: Path, model: nn.Module, task: Task) -> None:
    """Write the answers of a classifier, counted by label, and its first texts; of a language model
    how it goes on from some texts, sampled at temperature .5.

    Exact; random states are left as they are. Other tasks leave no file. Cost: passes over `COUNTED` examples.
    """
    found: dict[str, Any] = {}
    was_training = model.training
    model.eval()
    try:
        if isinstance(task, LabelTask):
            found = _answers(model, task)
        elif task.kind == "causal_lm" and hasattr(model, "generate"):
            found = {"samples": [_sample(model, task, k) for k in range(SAMPLES)]}
    finally:
        model.train(was_training)
    if found:
        durable_files.replace_file(folder / NAME, to_json({"format": 1, **found}, indent=1))


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
                text = " | ".join(_text(task, ids) for ids in sides)
                texts.append({"text": text, "label": label, "answer": answer})
    return {"labels": list(task.labels), "counts": counts, "texts": texts}


def _sample(model: Any, task: Task, number: int) -> dict[str, str]:
    dataset = task.dataset("test")
    ids = list(dataset[number * (len(dataset) - 1) // SAMPLES]["input_ids"])
    given = ids[: max(1, min(PROMPT, len(ids) // 2))]
    prompt = torch.tensor([given], device=next(model.parameters()).device)
    more = max(1, min(WRITTEN, len(ids) - len(given)))
    how = {"max_new_tokens": more, "do_sample": True, "temperature": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(number)
        out = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **how)
    return {"prompt": _text(task, given), "text": _text(task, out[0, len(given) :].tolist())}


def _text(task: Task, ids: list[int]) -> str:
    """Return the text of tokens, a word that is not known by a sign of its own."""
    tokenizer: Any = task.tokenizer
    left_out = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    text = tokenizer.decode([number for number in ids if number not in left_out])
    return text.replace(tokenizer.unk_token or UNKNOWN, UNKNOWN)[:LONGEST]
