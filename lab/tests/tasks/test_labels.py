"""Labels and separators of files as people write them: right, said in a remark, or refused with
file and line."""

import pytest

from wellposed.errors import DataError
from wellposed_lab.tasks.data.labels import label_notes, label_problem, mixed_spellings, spelling
from wellposed_lab.tasks.data.separators import find_separator

ONE_CLASS = {
    "number": ("1", "1.0"),
    "leading zero": ("1", "01"),
    "full width": ("1", "\uff11"),
    "quotes": ("pos", '"pos"'),
    "no-break space inside": ("very good", "very\u00a0good"),
}
TWO_CLASSES = {
    "case": ("True", "true"),
    "sign": ("1", "-1"),
    "fraction": ("1", "1.5"),
    "accent": ("pate", "pat\u00e9"),
    "word": ("good", "very good"),
}


@pytest.mark.parametrize("name", ONE_CLASS)
def test_two_spellings_of_one_class_are_named_with_both_places(name):
    first, second = ONE_CLASS[name]
    (problem,) = mixed_spellings([(first, "a.csv:1"), (second, "a.csv:2"), (second, "a.csv:3")])
    assert problem.startswith("a.csv:2: ")
    assert "a.csv:1" in problem


@pytest.mark.parametrize("name", TWO_CLASSES)
def test_other_labels_stay_apart(name):
    first, second = TWO_CLASSES[name]
    assert spelling(first) != spelling(second)
    assert mixed_spellings([(first, "a.csv:1"), (second, "a.csv:2")]) == []


@pytest.mark.parametrize(
    ("label", "is_problem"),
    [
        (float("nan"), True),
        (float("inf"), True),
        ("nan", True),
        ("NaN ", True),
        ("", True),
        ("\u00a0", True),
        (1, False),
        (1.0, False),
        ("None", False),
        ("pos", False),
    ],
)
def test_values_that_are_no_label(label, is_problem):
    assert (label_problem(label) is not None) is is_problem


def test_labels_that_may_be_meant_are_said():
    notes = label_notes(
        {"train": ["True", "true", "None"], "valid": ["True"], "test": ["true", "None"]}
    )
    assert notes["labels_that_differ_in_case"] == [["True", "true"]]
    assert notes["labels_like_a_missing_value"] == ["None"]
    assert notes["labels_of_train_alone"] == {"valid": ["None", "true"], "test": ["True"]}


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_separator_is_the_one_that_cuts_all_lines_alike(mark):
    others = "".join(other for other in ",;|" if other != mark)
    rows = [f"pos{mark}a good film{others}", f"neg{mark}a long one", f"pos{mark}fine{others[:1]}"]
    assert find_separator("\n".join(rows) + "\n", "a.csv") == mark


def test_separators_that_fit_equally_well_are_refused_with_the_line():
    rows = [f"word{k};text{k}, more{k}" for k in range(6)]
    with pytest.raises(DataError, match=r"a\.csv:1: .*a comma or a semicolon"):
        find_separator("\n".join(rows), "a.csv")
