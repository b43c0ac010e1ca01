"""Comparisons as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.text_table import format_number, text_table

if TYPE_CHECKING:
    from wellposed.report._aggregate import TaskComparison
    from wellposed.statistics import PairedComparison


def task_table(task: TaskComparison) -> str:
    """Return the table of one task, and what it says in words."""
    reference = ""
    if task.reference_value is not None:
        reference = (
            f"; learned: {task.reference_metric} better than {format_number(task.reference_value)}"
        )
    direction = "higher is better" if task.higher_is_better else "lower is better"
    others = [m for m in task.metrics if m != task.metric and m.endswith(",test")]
    columns = ["variant", "seeds", task.metric, *others, "learned", "difference", "p", "p (Holm)"]
    rows = [
        [
            result.variant,
            f"{len(result.seeds)} of {len(result.seeds) + len(result.failed)}"
            if result.failed
            else str(len(result.seeds)),
            *(
                str(result.metrics[m]) if m in result.metrics else "-"
                for m in (task.metric, *others)
            ),
            {True: "yes", False: "NO", None: "-"}[result.learned],
            *_difference_cells(result.comparison),
        ]
        for result in task.variants
    ]
    title = f"{task.task}: {task.metric}, mean ± standard error ({direction}{reference})"
    return "\n".join([text_table(title, columns, rows), *conclusions(task)])


def conclusions(task: TaskComparison) -> list[str]:
    """Return one sentence per variant against the first, then what a reader must know about the
    comparison."""
    first = task.variants[0].variant
    verdicts = [
        f"{r.variant} against {first}: {r.comparison.verdict}"
        for r in task.variants
        if r.comparison
    ]
    return [*verdicts, *(f"note: {note}" for note in task.notes)]


def _difference_cells(c: PairedComparison | None) -> list[str]:
    if c is None:
        return ["-", "-", "-"]
    difference = "-" if c.mean_difference is None else f"{c.mean_difference:+.4g}"
    return [difference, format_number(c.p_value, 3), format_number(c.p_holm, 3)]
