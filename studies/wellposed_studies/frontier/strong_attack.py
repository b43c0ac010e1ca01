"""What a certificate is worth on many examples, and whether those with least to spare stand a long
attack.

Both take minutes, so a run folder keeps what was found for the same question.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wellposed.finite_json import from_json
from wellposed.tasks import Task
from wellposed.training import load_run_model, read_result
from wellposed.training.certified.accuracy import certified_accuracy
from wellposed.training.certified.run import best_certificate, first_batches
from wellposed.training.folder import durable_files


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


@dataclass(frozen=True)
class Attacked:
    """How many certified examples were attacked, and how many of them an attack made wrong."""

    examples: int
    fallen: int


def certified_share(folder: Path, task: Task, *, share: float, examples: int) -> float:
    """Return the share of the first ``examples`` of *test* certified at ``share`` of the median
    token norm."""

    def measure() -> float:
        model, _ = load_run_model(folder)
        batches = first_batches(task, "test", examples)
        certificate = best_certificate(
            model, max(batch["input_ids"].shape[-1] for batch in batches)
        )
        curve = certified_accuracy(
            model, batches, certificate, radii=[share], in_tokens=True, attack_steps=1
        )
        return curve.certified[0]

    return _kept(folder, "certified-share.json", {"share": share, "examples": examples}, measure)


def attack_certified(folder: Path, task: Task, *, radius: float, attack: Attack) -> Attacked:
    """Attack the examples that are certified at ``radius`` with least to spare: an unsound
    certificate shows there."""
    asked = {"radius": radius, **asdict(attack)}
    return Attacked(
        **_kept(
            folder,
            "strong-attack.json",
            asked,
            lambda: asdict(_attack(folder, task, radius, attack)),
        )
    )


def _attack(folder: Path, task: Task, radius: float, attack: Attack) -> Attacked:
    model, _ = load_run_model(folder)
    singles = first_batches(task, "test", attack.among, batch_size=1)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in singles))
    reaches = [
        certified_accuracy(model, [batch], certificate, radii=[0.0]).median_radius
        for batch in singles
    ]
    least = sorted((reach, member) for member, reach in enumerate(reaches) if reach > radius)[
        : attack.count
    ]
    if not least:
        return Attacked(0, 0)
    dataset = task.dataset("test")
    batch = task.collate([dataset[member] for _, member in least])
    curve = certified_accuracy(
        model,
        [batch],
        certificate,
        radii=[radius],
        attack_steps=attack.steps,
        restarts=attack.restarts,
    )
    return Attacked(len(least), round((1 - curve.attacked[0]) * len(least)))


def _read(path: Path) -> dict[str, Any]:
    """Return what was kept; a file that cannot be read is as good as none."""
    try:
        return dict(from_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _kept(folder: Path, name: str, question: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """Return the answer kept for this question about this training, or measure and keep it."""
    result = read_result(folder)
    asked = {"run_date": result.result["date"] if result else None, **question}
    path = folder / name
    known = _read(path)
    if known.get("asked") != asked or "found" not in known:
        known = {"asked": asked, "found": measure()}
        durable_files.replace_file(path, json.dumps(known).encode())
    return known["found"]
