"""The variant t_fixup beside its baseline."""

import pytest

from wellposed.compare.variants import apply_variant
from wellposed.models import build_model, model_keywords
from wellposed.training.config import RunConfig, TrainOptions


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        ("constant", "constant"),
        ("cosine", "cosine"),
        ("inverse_sqrt", "inverse_sqrt"),
        ("inverse_sqrt_warmup", "inverse_sqrt"),
        ("kim2021", "inverse_sqrt"),
    ],
)
def test_there_is_no_warm_up_under_any_schedule(schedule, kept):
    base = RunConfig("listops", train=TrainOptions(schedule=schedule, warmup_steps=40, steps=100))
    train = apply_variant("t_fixup", base).train
    assert (train.schedule, train.warmup_steps) == (kept, 0)
    assert train.learning_rate == base.train.learning_rate


def test_the_variant_has_no_norms_and_its_own_weights():
    plain, fixed = (
        apply_variant(name, RunConfig("listops")).model for name in ("post_ln", "t_fixup")
    )
    assert (fixed.norm, fixed.init) == ("none", "t_fixup")
    sizes = [
        sum(
            p.numel()
            for p in build_model("wellposed", "causal_lm", **model_keywords(each)).parameters()
        )
        for each in (plain, fixed)
    ]
    assert sizes[0] - sizes[1] == 2 * 2 * fixed.num_hidden_layers * fixed.hidden_size  # LayerNorms


def test_other_variants_do_not_inherit_the_initialisation():
    after = apply_variant("post_ln", apply_variant("t_fixup", RunConfig("listops")))
    assert (after.model.init, after.model.norm) == ("xavier", "post")
