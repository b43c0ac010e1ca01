"""The texts of a constraint, compared whole."""

from __future__ import annotations

from wellposed.constrain import ConstrainedWeight, ConstraintReport, OrthogonalityErrors

ROWS = (
    ConstrainedWeight(
        "a.weight", (4, 12), 0.98765, 0.123, 0.0456, 0.0, 1.23e-7, ("head.weight", "tail.weight")
    ),
    ConstrainedWeight("b", (16, 2), 1.0, 0.0, 0.0, 123.0, 0.0),
)


def test_the_table_of_a_report() -> None:
    report = ConstraintReport(ROWS)
    assert report.table() == str(report)
    assert [line.rstrip() for line in report.table().splitlines()] == [
        (
            "weight                                shape   gain  moved F  moved 2  error before "
            " error after"
        ),
        (
            "a.weight = head.weight = tail.weight   4x12  0.988     0.12    0.046             0    "
            "  1.2e-07"
        ),
        (
            "b                                      16x2      1        0        0       1.2e+02    "
            "        0"
        ),
    ]


def test_the_table_of_errors_begins_with_the_largest() -> None:
    errors = OrthogonalityErrors({"a": 1e-7, "b": 2e-6, "c": 5e-7})
    assert errors.worst == 2e-6
    assert errors.table().split() == ["weight", "error", "b", "2e-06", "c", "5e-07", "a", "1e-07"]
