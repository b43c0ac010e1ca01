"""Variants are functions of configurations, and each one changes what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wellposed.errors import ConfigError
from wellposed.recipes.variants import VARIANTS, apply_variant, summary, variant_folder
from wellposed.training.config import ModelOptions, PenaltyOptions, RunConfig

BASE = RunConfig(task="listops")


def test_every_variant_gives_a_different_configuration() -> None:
    configs = {name: replace(apply_variant(name, BASE), variant="") for name in VARIANTS}
    pairs = [(a, b) for a in configs for b in configs if a < b and configs[a] == configs[b]]
    assert pairs == []


def test_a_variant_does_not_depend_on_the_variant_before_it() -> None:
    for first in VARIANTS:
        for second in VARIANTS:
            assert apply_variant(second, apply_variant(first, BASE)).model == apply_variant(second, BASE).model


def test_a_variant_keeps_the_sizes_of_the_base() -> None:
    base = replace(BASE, model=ModelOptions(hidden_size=48, num_hidden_layers=5))
    for name in VARIANTS:
        model = apply_variant(name, base).model
        assert (model.hidden_size, model.num_hidden_layers) == (48, 5)


def test_plain_variants_keep_a_penalty_the_user_asked_for() -> None:
    base = replace(BASE, penalty=PenaltyOptions(query=1e-3))
    assert apply_variant("pre_ln", base).penalty.query == 1e-3


def test_orthogonality_levels_are_nested() -> None:
    one, two, three = (apply_variant(f"oc{level}:0.01", BASE).penalty for level in (1, 2, 3))
    assert (one.affinity, one.attention, one.feedforward) == (0.01, 0.0, 0.0)
    assert (two.affinity, two.attention, two.feedforward) == (0.01, 0.01, 0.0)
    assert (three.affinity, three.attention, three.feedforward) == (0.01, 0.01, 0.01)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("post_nl", "nearest: post_ln"), ("post_ln:3", "takes no value"), ("oc3:much", "must be a number")],
)
def test_bad_variants_are_refused(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        apply_variant(spec, BASE)


def test_folder_and_summary() -> None:
    assert variant_folder("oc3:1e-4") == "oc3-1e-4"
    assert all(summary(name).endswith(".") for name in VARIANTS)


def test_options_of_one_attention_reach_only_the_variants_that_read_them() -> None:
    base = replace(BASE, model=ModelOptions(contractive=0.5, cosine_eps=0.1, l2_init_scale=0.2))
    assert apply_variant("post_ln", base).model == apply_variant("post_ln", BASE).model
    contractive, cosine = apply_variant("l2_contractive", base).model, apply_variant("cosine", base).model
    assert (contractive.contractive, contractive.l2_init_scale, contractive.cosine_eps) == (0.5, 0.2, 0.01)
    assert (cosine.contractive, cosine.l2_init_scale, cosine.cosine_eps) == (None, None, 0.1)
