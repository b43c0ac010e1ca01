"""What the scores of McGrath (2024) decide: a penalty on key or query, on both, and the QR loss;
see `results`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wellposed.statistics import PairedComparison
from wellposed_studies.verdicts import every, within


def judge_alone(tests: Sequence[PairedComparison]) -> bool | None:
    """Say whether some penalty on key or query alone is better; False where every one of them is
    worse."""
    gains = [test.mean_difference or 0 for test in tests if test.significant]
    if any(gain > 0 for gain in gains):
        return True
    return False if gains and len(gains) == len(tests) else None


def judge_table_1(tests: Mapping[str, PairedComparison]) -> bool | None:
    """Say whether key and query gain alone and lose together; None where the seeds cannot tell."""
    signs = {"key": 1, "query": 1, "key+query": -1}
    agree = [
        (test.mean_difference or 0) * signs[group] > 0 if test.significant else None
        for group, test in tests.items()
    ]
    return every([*agree, *(None for group in signs if group not in tests)])


def judge_shares(shares_of_methods: Sequence[Sequence[float]]) -> bool | None:
    """Say whether the score with the QR loss is less than half of the baseline's with every
    method."""
    return every(within(shares, high=0.5) for shares in shares_of_methods)
