"""Digests of a result: numbers of the measurement and rules of the judge are two things."""

import pytest

from wellposed_studies.protocol import judge_digest, measurement_digest, numbers_of, split_module

MODULE = '''
from rules import within
"""Words with 7."""
STEPS = 100
LIMIT = 0.5
TEST = f"below {LIMIT:g}"
BOTH = 3
BATCHES = 6

@recipe("a/b")
def table(request):
    """Words. Claim: 5 is small."""
    values = measure(STEPS + BOTH)
    return done(values, judge_table(values))

@recipe("a/c")
def figure(request):
    return judge_figure(measure(BATCHES))

def measure(steps):
    return steps * 2

def judge_table(values):
    """Judges by 8."""
    return within(values, high=_limit()) or BOTH

def judge_figure(values):
    return values > 9

def _limit():
    return LIMIT
'''
RULES = """
GATE = f"words {1}"
CLOSE = 0.01

def within(values, high):
    return max(values) < high

def unsettled(losses):
    return losses[-1] < CLOSE
"""


def digests(module=MODULE, rules=RULES, recipe="table", trained=True):
    return measurement_digest(module, recipe, [1]), judge_digest(
        module, rules, recipe, trained=trained
    )


@pytest.mark.parametrize(
    ("old", "new", "measured", "judged"),
    [
        ("STEPS = 100", "STEPS = 101", True, False),
        ("BATCHES = 6", "BATCHES = 7", False, False),  # of another recipe
        ("steps * 2", "steps * 4", True, False),
        ("BOTH = 3", "BOTH = 4", True, False),  # the measurement reads it too
        ("LIMIT = 0.5", "LIMIT = 0.6", False, True),
        ("high=_limit()", "low=_limit()", False, True),
        ("values > 9", "values > 10", False, False),  # the judge of another recipe
        ("Judges by 8", "Decides by 80", False, False),
        ("below {LIMIT", "under {LIMIT", False, False),
        ("Words with 7", "Words with 70", False, False),
    ],
)
def test_a_change_dates_the_measurement_or_the_judge(old, new, measured, judged):
    assert old in MODULE
    before = digests()
    after = digests(MODULE.replace(old, new))
    assert [a != b for a, b in zip(before, after, strict=True)] == [measured, judged]


@pytest.mark.parametrize(
    ("old", "new", "trained", "judged"),
    [
        ("max(values)", "min(values)", False, True),
        ("CLOSE = 0.01", "CLOSE = 0.02", True, True),
        ("CLOSE = 0.01", "CLOSE = 0.02", False, False),
        ("words {1}", "words {2}", True, False),
    ],
)
def test_shared_rules_date_the_judges_that_reach_them(old, new, trained, judged):
    before, after = (
        digests(rules=rules, trained=trained) for rules in (RULES, RULES.replace(old, new))
    )
    assert before[0] == after[0]
    assert (before[1] != after[1]) is judged


def test_judges_are_found_by_what_only_they_read():
    import ast

    names = [ast.unparse(one).partition("\n")[0] for one in split_module(MODULE).judges]
    assert names == [
        "LIMIT = 0.5", "def judge_table(values):", "def judge_figure(values):", "def _limit():"
    ]  # fmt: skip
    assert numbers_of("x = 1.5 # 7\ny = 'a 3' + f(2)") == [1.5, 2]
