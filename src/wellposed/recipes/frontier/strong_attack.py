"""What a certificate is worth on many examples, and whether those with least to spare stand a long attack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wellposed.tasks import Task
from wellposed.training import load_run_model
from wellposed.training.certified_accuracy import certified_accuracy
from wellposed.training.certified_run import best_certificate, first_batches

STEPS, RESTARTS = 200, 10


def certified_share(folder: Path, task: Task, *, share: float, examples: int) -> float:
    """Return the share of the first ``examples`` of *test* certified at ``share`` of the median token norm."""
    model, _ = load_run_model(folder)
    batches = first_batches(task, "test", examples)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in batches))
    curve = certified_accuracy(model, batches, certificate, radii=[share], in_tokens=True, attack_steps=1)
    return curve.rows[0].certified


@dataclass(frozen=True)
class Attacked:
    """How many certified examples were attacked, and how many of them an attack made wrong."""

    examples: int
    fallen: int


def attack_certified(
    folder: Path, task: Task, *, radius: float, among: int, count: int, steps: int = STEPS, restarts: int = RESTARTS
) -> Attacked:
    """Attack ``count`` of the first ``among`` examples of *test* that are certified at ``radius``.

    Taken are those whose own certified radius is the least above ``radius``, where an unsound certificate shows first.
    """
    model, _ = load_run_model(folder)
    singles = first_batches(task, "test", among, batch_size=1)
    certificate = best_certificate(model, max(batch["input_ids"].shape[-1] for batch in singles))
    reaches = [certified_accuracy(model, [batch], certificate, radii=[0.0]).median_radius for batch in singles]
    least = sorted((reach, member) for member, reach in enumerate(reaches) if reach > radius)[:count]
    if not least:
        return Attacked(0, 0)
    dataset = task.dataset("test")
    batch = task.collate([dataset[member] for _, member in least])
    (row,) = certified_accuracy(model, [batch], certificate, radii=[radius], attack_steps=steps, restarts=restarts).rows
    return Attacked(len(least), round((1 - row.attacked) * len(least)))
