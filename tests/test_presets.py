"""Presets are the papers' settings, and refuse what the papers do not have."""

import subprocess
import sys

import pytest

from wellposed.errors import ConfigError
from wellposed.presets import mcgrath2024, zhang2021


def test_zhang2021_adds_one_term_at_a_time():
    terms = ["affinity", "attention", "feedforward"]
    for count, variant in enumerate(("I", "II", "III"), 1):
        keywords = zhang2021(variant, 1e-6)
        assert keywords == zhang2021(f"VAR-{variant}", 1e-6)
        assert [name for name, value in keywords.items() if value == 1e-6] == terms[:count]
        assert (keywords["form"], keywords["attention_mode"]) == ("gram_squared", "joint")


def test_zhang2021_as_printed_leaves_only_the_feedforward_norm_unsquared():
    assert zhang2021("III", 1e-6, as_printed=True)["form"] == {"feedforward": "gram"}


def test_mcgrath2024_chooses_key_and_query():
    assert mcgrath2024(key=False, query=True, strength=1e-2) == {"query": 1e-2, "form": "gram"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zhang2021("IIII"), "expected 'I', 'II', 'III', 'VAR-I', 'VAR-II' or 'VAR-III'"),
        (lambda: zhang2021("I", 0.0), "strength = 0.0, expected a finite number > 0"),
        (
            lambda: mcgrath2024(strength=float("nan")),
            "strength = nan, expected a finite number > 0",
        ),
        (lambda: mcgrath2024(key=False), "both False"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_presets_do_not_import_torch():
    code = "import sys, wellposed.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
