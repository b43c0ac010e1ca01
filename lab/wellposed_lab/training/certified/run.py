"""Measure certified accuracy of a finished run, and write the file that the report reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from wellposed.certification import Certificate, certify
from wellposed.errors import ConfigError
from wellposed.finite_json import to_json
from wellposed.head_kind import check_single_label
from wellposed.models import embedding_radius
from wellposed.version import __version__
from wellposed.words import WordAccuracy
from wellposed_lab.tasks.data.splits import Split
from wellposed_lab.training.certified import record
from wellposed_lab.training.certified.accuracy import CertifiedAccuracy, certified_accuracy
from wellposed_lab.training.certified.record import TOKEN_SHARES, CertifiedRun, read_certified
from wellposed_lab.training.folder import atomic
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.loop.build import load_run_model

if TYPE_CHECKING:
    from wellposed_lab.tasks.task import Task

BALL = 1.5
"""Radius of the ball, in units of the longest embedded token: large enough for TOKEN_SHARES."""


def has_certified_accuracy(model: nn.Module) -> bool:
    """Return whether ``model`` labels a text or a pair, or predicts next tokens. A classifier whose
    head does not choose one label is a `ConfigError`."""
    kinds = ("ForSequenceClassification", "ForSequencePairClassification", "ForCausalLM")
    check_single_label(model, "certified accuracy")
    return type(model).__name__.endswith(kinds)


def first_batches(
    task: Task, split: Split, examples: int, batch_size: int = 32
) -> list[dict[str, Tensor]]:
    """Return the first ``examples`` (or next tokens) of a split, or all of it, in batches."""
    dataset = task.dataset(split)
    chosen = 0
    counted = 0
    while chosen < len(dataset) and counted < examples:
        counted += len(dataset[chosen]["input_ids"]) - 1 if task.kind == "causal_lm" else 1
        chosen += 1
    return [
        task.collate([dataset[member] for member in range(start, min(start + batch_size, chosen))])
        for start in range(0, chosen, batch_size)
    ]


def best_certificate(model: Any, seq_len: int) -> Certificate:
    """Return the certificate in norm tok on all inputs; if that is infinite, on a ball."""
    everywhere = certify(model, seq_len=seq_len)
    if math.isfinite(everywhere.total):
        return everywhere
    return certify(model, seq_len=seq_len, radius=BALL * embedding_radius(model))


def certify_runs(
    folders: Sequence[Path],
    task: Task,
    *,
    examples: int = 256,
    announce: Callable[[str], None],
    attack_steps: int = 20,
    shares: Sequence[float] = TOKEN_SHARES,
) -> list[CertifiedRun]:
    """Measure certified and attacked accuracy of runs on *test* into ``certified.json`` of each
    folder. An equal earlier measurement is read instead.

    Status: certified <= robust <= attacked, see `certified_accuracy`. Every embedded token moves by
    up to a multiple of the median token norm, which makes models comparable.

    Args:
        folders: Folders of finished runs.
        task: The task of these runs.
        examples: Number of examples from the start of *test* (next tokens for a language model).
        announce: Called with one line before a run is measured.
        attack_steps: Gradient steps of the attack for each radius.
        shares: Radii in units of the median token norm, increasing.

    Raises:
        ConfigError: a run that has not finished, or whose model has no certified accuracy.

    Cost: ``attack_steps x len(shares)`` float64 forward and backward passes per run and example.
    """
    measured = []
    for folder in folders:
        record = read_certified(folder, run_date=_date(folder))
        made_by = key(folder, task, examples=examples, attack_steps=attack_steps)
        if record is None or record.made_by != made_by or record.shares != list(shares):
            announce(f"certified accuracy of {folder}")
            model, _ = load_run_model(folder)
            if not has_certified_accuracy(model):
                raise ConfigError(
                    f"{folder}: certified accuracy is defined for labels of texts or pairs and for"
                    f" next tokens, received the run of a {type(model).__name__}"
                )
            batches = first_batches(task, "test", examples)
            names = ("input_ids", "input_ids_pair")
            longest = max(b[name].shape[-1] for b in batches for name in names if name in b)
            bound = best_certificate(model, longest)
            asked = {"radii": shares, "in_tokens": True, "attack_steps": attack_steps}
            curve = certified_accuracy(model, batches, bound, **asked)
            record = keep(folder, curve, shares, made_by)
        measured.append(record)
    return measured


def key(
    folder: Path,
    task: Task,
    *,
    examples: int,
    attack_steps: int,
    split: Split = "test",
    restarts: int = 1,
    certificate: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the inputs of a measurement: model, data, certificate and attack. Without keywords of
    a ``certificate``: `best_certificate` on the longest example."""
    described = to_json(task.description())
    return {
        "run_date": _date(folder),
        "data": sha256(described).hexdigest(),
        "split": split,
        "examples": examples,
        "certificate": dict(certificate or {}),
        "attack_steps": attack_steps,
        "restarts": restarts,
        "version": __version__,
    }


def keep(
    folder: Path, curve: CertifiedAccuracy, shares: Sequence[float], made_by: Mapping[str, Any]
) -> CertifiedRun:
    """Write a curve over ``shares`` of the median token norm into its run folder, atomically."""
    run = CertifiedRun(
        run_date=made_by["run_date"],
        split=made_by["split"],
        examples=curve.predictions or curve.examples,
        norm=curve.norm,
        attack=curve.attack,
        total=curve.lipschitz if math.isfinite(curve.lipschitz) else None,
        median_token=curve.median_token,
        median_radius=curve.median_radius,
        shares=list(shares),
        certified=curve.certified,
        attacked=curve.attacked,
        made_by=dict(made_by),
    )
    data = to_json({"format": record.FORMAT, **asdict(run)}, indent=2)
    atomic.replace_file(folder / record.NAME, data)

    return run


def keep_words(folder: Path, accuracy: WordAccuracy, split: Split) -> None:
    """Write the accuracy under replaced words into the run folder, atomically, if there is any."""
    rows = zip(accuracy.counts, accuracy.certified, accuracy.attacked, strict=True)
    rows = [(0, accuracy.clean, accuracy.clean), *rows]
    counts, certified, attacked = (list(column) for column in zip(*rows, strict=True))
    if accuracy.reason:
        certified[1:] = [0.0] * (len(certified) - 1)

    if len(counts) > 1:
        run = record.CertifiedWords(
            run_date=_date(folder),
            split=split,
            examples=accuracy.texts,
            counts=counts,
            certified=certified,
            attacked=attacked,
            first_texts=accuracy.first_texts,
        )
        data = to_json({"format": record.FORMAT, **asdict(run)}, indent=2)
        atomic.replace_file(folder / record.WORDS_NAME, data)


def _date(folder: Path) -> str:
    result = read_result(folder)
    if result is None:
        problem = "the run has not finished (no result.json)"
        raise ConfigError(f"{folder}: {problem}; finish it with --resume auto first")
    return str(result.result["date"])
