"""Features of the package wellposed-studies are refused without it, in one line that names it."""

import pytest
from tests.support.words import commands
from tests.support.words import words as typed

WITHOUT = """
from wellposed import registry
found = registry.entry_points
registry.entry_points = lambda group: [
    each for each in found(group=group) if not each.value.startswith("wellposed_studies")
]
"""


@pytest.mark.slow
def test_what_is_missing_is_named_with_its_package(tmp_path):
    model = tmp_path / "model"
    config = tmp_path / "run.toml"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "wellposed_lstm"}')
    config.write_text('schema_version = 1\ntask = "char_lm"\n[model]\narchitecture = "lstm"\n')
    calls = [
        (typed("reproduce --list"), "command 'reproduce'"),
        (typed("train char_lm --preset ptb-mini"), "--preset ptb-mini"),
        (typed("train char_lm --variant lstm"), "variant 'lstm'"),
        (
            typed("train char_lm --out", [tmp_path / "a"], "--config", [config]),
            "architecture 'lstm'",
        ),
        (typed("measure", [model]), "architecture 'lstm'"),
    ]
    results, _ = commands([words for words, _ in calls], WITHOUT)
    for (words, expected), (status, message) in zip(calls, results, strict=True):
        assert status in {1, 2}, words
        assert expected in message
        assert "pip install " in message
        assert "studies" in message
        assert message.count("\n") == 1, message
