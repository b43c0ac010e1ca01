"""All runs of an artefact: the largest decides, a smaller one never replaces it; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wellposed_studies.evidence import Verdict
from wellposed_studies.run_order import order_of_runs, run_name

RUN_ENTRIES: Mapping[str, Any] = {
    "scale": str,
    "commit": str | None,
    "digest": str | None,
    "size": dict | None,
    "result": str,
}
"""Entries of a run, besides its verdict: the commit of its program, its protocol, its size (None if
it was not recorded, or nothing is trained), what it got."""
SEVERAL = 2


def run_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run that a row is of, as an entry of ``runs``."""
    made = values.get("made_with") or {}
    return {
        "scale": values["scale"],
        "commit": made.get("source"),
        "digest": values.get("protocol"),
        "size": values.get("size"),
        "result": values["we_got"],
        "verdict": values["holds"],
        **({"missing": values["missing"]} if values.get("missing") else {}),
    }


def with_history(earlier: Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an artefact after one more run: all runs, led by the largest.

    The new run replaces an earlier row that is not larger, see `order_of_runs`. A larger row stays as
    it is, with one run more. A repeated run (of one scale, digest and result) is kept once, as judged last,
    and so is one that was continued, as it ended.
    """
    run = run_of(values)
    if earlier is None:
        return {**values, "runs": [run]}
    past = earlier.get("runs") or [run_of(earlier)]
    runs = [one for one in past if not _same(one, run)]
    leading = values if leads(earlier, values) else earlier
    return {**leading, "runs": [*runs, run]}


def leads(earlier: Mapping[str, Any] | None, values: Mapping[str, Any]) -> bool:
    """Return whether a run decides the row, in place of the earlier one: it is not smaller."""
    return earlier is None or order_of_runs(values, earlier) >= 0


def disagreement(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, Verdict]]:
    """Return name and verdict of each decided run, if two differ; else nothing."""
    decided = [(run_name(run), run["verdict"]) for run in runs if run["verdict"] is not None]
    return decided if len({verdict for _, verdict in decided}) >= SEVERAL else []


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("scale", "digest") if one.get("missing") else ("scale", "digest", "result")
    return all(one.get(name) == other.get(name) for name in names)
