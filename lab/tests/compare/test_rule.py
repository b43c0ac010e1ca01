"""Every factor of the papers, against numbers worked by hand and against the equations they
solve; and the variant t_fixup beside its baseline."""

import math

import pytest

from wellposed.errors import ConfigError
from wellposed.initialize import (
    dt_fixup_factor,
    t_fixup_decoder_factor,
    t_fixup_encoder_factor,
    t_fixup_factor,
)
from wellposed.models import build_model, model_keywords
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig, TrainOptions

# N -> 0.67 N^-1/4, (9N)^-1/4, to five digits, as the public code gives them
TABLE = {
    1: (0.67, 0.57735),
    6: (0.42809, 0.36889),
    12: (0.35998, 0.31020),
    20: (0.31682, 0.27301),
    24: (0.30271, 0.26085),
}


@pytest.mark.parametrize("layers", TABLE)
def test_factors_of_the_table(layers):
    encoder, decoder = TABLE[layers]
    # the table has five digits; roots of roots are the exact values by another route
    factors = (t_fixup_encoder_factor(layers), t_fixup_decoder_factor(layers))
    root = layers**0.5
    assert factors == pytest.approx((encoder, decoder), abs=5.1e-6)
    assert factors == pytest.approx((0.67 / root**0.5, 1 / math.sqrt(3 * root)), abs=1e-15)


def test_factor_solves_its_equation():
    for blocks in (1, 2, 12, 40, 3000):
        assert 3 * blocks * t_fixup_factor(blocks) ** 4 == pytest.approx(1.0, rel=1e-12)


def test_values_without_meaning_are_refused():
    for factor, *values in (
        (t_fixup_encoder_factor, 0),
        (t_fixup_factor, math.nan),
        (dt_fixup_factor, 1, math.inf),
    ):
        with pytest.raises(ConfigError, match="expected"):
            factor(*values)


KEPT = {name: name for name in ("constant", "cosine", "inverse_sqrt")}
KEPT |= dict.fromkeys(("inverse_sqrt_warmup", "kim2021"), "inverse_sqrt")


@pytest.mark.parametrize(("schedule", "resulting"), KEPT.items())
def test_there_is_no_warm_up_under_any_schedule(schedule, resulting):
    base = RunConfig("listops", train=TrainOptions(schedule=schedule, warmup_steps=40, steps=100))
    train = apply_variant("t_fixup", base).train
    assert (train.schedule, train.warmup_steps) == (resulting, 0)
    assert train.learning_rate == base.train.learning_rate


def test_the_variant_has_no_norms_and_its_own_weights():
    configs = (apply_variant(name, RunConfig("listops")) for name in ("post_ln", "t_fixup"))
    plain, fixed = (config.model for config in configs)
    assert (fixed.norm, fixed.init) == ("none", "t_fixup")
    models = (build_model("wellposed", "causal_lm", **model_keywords(m)) for m in (plain, fixed))
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes[0] - sizes[1] == 2 * 2 * fixed.num_hidden_layers * fixed.hidden_size  # LayerNorms


def test_other_variants_do_not_inherit_the_initialisation():
    after = apply_variant("post_ln", apply_variant("t_fixup", RunConfig("listops")))
    assert (after.model.init, after.model.norm) == ("xavier", "post")
