"""Ranges of the configuration: every field out of range is named at once, and no valid one is
refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from wellposed.errors import ConfigError
from wellposed.training import PenaltyOptions, RunConfig, TrainOptions, config_difference, ranges


def test_all_problems_of_a_section_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainOptions(steps=0, learning_rate=-1.0, adam_beta2=1.0, max_grad_norm=float("nan"))
    message = str(caught.value)
    for part in ("steps = 0", "learning_rate = -1.0", "adam_beta2 = 1.0", "max_grad_norm = nan"):
        assert part in message


def test_all_problems_of_all_sections_of_a_file_are_in_one_error() -> None:
    values = {
        "task": "listops",
        "model": {"hidden_size": 30, "num_attention_heads": 4},
        "train": {"steps": 0, "stepz": 1},
    }
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(values, where="run.toml")
    message = str(caught.value)
    assert (
        "run.toml: [model]: hidden_size = 30 is not divisible by num_attention_heads = 4" in message
    )
    assert "unknown option 'stepz'; nearest: steps" in message


@pytest.mark.parametrize(
    ("options", "rules"),
    [(PenaltyOptions, ranges.PENALTY_RULES), (TrainOptions, ranges.TRAIN_RULES)],
)
def test_every_number_has_a_range(options: Any, rules: dict[str, Any]) -> None:
    numbers = {
        field.name
        for field in dataclasses.fields(options)
        if any(kind in str(field.type) for kind in ("int", "float"))
        and "Literal" not in str(field.type)
    }
    assert numbers == set(rules)
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name} = -1"):
            options(**{name: -1})


def test_a_valid_configuration_survives_the_way_through_plain_values() -> None:
    config = RunConfig(
        "listops", {"data": "x"}, train=TrainOptions(patience=3, schedule="kim2021", warmup_steps=5)
    )
    again = RunConfig.from_dict(config.to_dict())
    assert again == config
    assert config_difference(config, again) == []
