"""Warm-up put back, and T-Fixup with orthogonality constraints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wellposed.compare.named import NAMED
from wellposed.compare.variants import apply_variant
from wellposed.errors import ConfigError
from wellposed.training.config import RunConfig, TrainOptions

BASE = RunConfig(task="translation", train=TrainOptions(steps=700, schedule="inverse_sqrt"))


@pytest.mark.parametrize(
    ("spec", "base", "steps", "schedule"),
    [
        ("post_ln_warmup", {}, 70, "inverse_sqrt_warmup"),
        ("post_ln_warmup:30", {}, 30, "inverse_sqrt_warmup"),
        ("post_ln_warmup", {"steps": 90_000}, 4000, "inverse_sqrt_warmup"),
        ("post_ln_warmup", {"schedule": "cosine", "warmup_steps": 12}, 12, "cosine"),
    ],
)
def test_warmup(spec: str, base: dict[str, object], steps: int, schedule: str) -> None:
    train = apply_variant(spec, replace(BASE, train=replace(BASE.train, **base))).train
    assert (train.warmup_steps, train.schedule) == (steps, schedule)
    assert apply_variant("post_ln", BASE).train.warmup_steps == 0


@pytest.mark.parametrize("value", ["2.5", "-3"])
def test_warmup_of_no_whole_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of steps"):
        apply_variant(f"post_ln_warmup:{value}", BASE)


def test_t_fixup_with_constraints_is_both() -> None:
    both, plain = apply_variant("t_fixup_oc3:1e-8", BASE), apply_variant("t_fixup", BASE)
    assert both.model == plain.model
    assert (both.model.norm, both.model.init) == ("none", "t_fixup")
    assert both.penalty == apply_variant("oc3:1e-8", BASE).penalty
    assert both.train == plain.train


def test_the_preset_is_a_translation() -> None:
    config = NAMED.get("multi30k-mini")()
    assert (config.task, config.task_options["src"]) == ("translation", "de")
    assert RunConfig.from_dict(config.to_dict()) == config
