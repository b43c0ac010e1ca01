"""Variants are functions of configurations, and each one changes what its name says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wellposed.compare.variants import VARIANTS, apply_variant, summary, variant_folder
from wellposed.errors import ConfigError
from wellposed.training.config import ModelOptions, PenaltyOptions, RunConfig, StartOptions
from wellposed.training.loop.build import build_penalty

BASE = RunConfig(task="listops")


def test_every_variant_gives_a_different_configuration() -> None:
    configs = {
        name: replace(apply_variant(name, BASE), variant="") for name in VARIANTS if name != "plain"
    }
    pairs = [(a, b) for a in configs for b in configs if a < b and configs[a] == configs[b]]
    assert pairs == []


def test_a_variant_keeps_the_sizes_of_the_base() -> None:
    base = replace(BASE, model=ModelOptions(hidden_size=48, num_hidden_layers=5))
    for name in VARIANTS:
        model = apply_variant(name, base).model
        assert (model.hidden_size, model.num_hidden_layers) == (48, 5)


def test_mcgrath_penalizes_one_role_by_the_norm_itself() -> None:
    for role in ("key", "query"):
        penalty = apply_variant(f"{role}:0.02", BASE).penalty
        assert penalty == replace(PenaltyOptions(form="gram"), **{role: 0.02})


def test_the_printed_form_leaves_the_feedforward_norms_unsquared() -> None:
    """Against the penalty by hand: ``|M^T M - I|_F`` where oc3 has its square, and everything else
    alike."""
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    )
    found = {}
    for name in ("oc3", "oc3_printed"):
        options = replace(apply_variant(f"{name}:0.5", BASE).penalty, affinity=0.0)
        penalty = build_penalty(options, encoder)
        assert penalty is not None
        found[name] = float(penalty().detach())
    squared, plain = 0.0, 0.0
    for name, parameter in encoder.named_parameters():
        if ".linear" in name and parameter.ndim == 2:
            weight = parameter.detach().double()
            distance = float((weight.mT @ weight - torch.eye(weight.shape[1])).square().sum())
            squared, plain = squared + 0.5 * distance, plain + 0.5 * math.sqrt(distance)
    assert found["oc3"] - found["oc3_printed"] == pytest.approx(squared - plain, rel=1e-4)


STARTED = replace(BASE, start=StartOptions("some-model"))
SCRATCH = replace(BASE, start=StartOptions("some-model", from_scratch=True))


def test_variants_of_a_model_to_start_from_leave_its_architecture_alone() -> None:
    found = {
        name: apply_variant(name, STARTED)
        for name in ("plain", "oc1", "key", "query", "orthogonal", "l2")
    }
    assert all(
        config.model == BASE.model and config.start.model == "some-model"
        for config in found.values()
    )
    assert found["plain"] == replace(STARTED, variant="plain")
    assert found["oc1"].penalty == apply_variant("oc1", BASE).penalty
    assert found["key"].penalty == apply_variant("key", BASE).penalty
    assert found["orthogonal"].constrain.where == "query,key"
    assert found["l2"].start.attention == "l2"


def test_variants_with_an_architecture_of_their_own_name_those_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"variant 'pre_ln' makes an architecture of its own, and some-model"
    ) as told:
        apply_variant("pre_ln", STARTED)
    named = str(told.value).partition("such a model: ")[2].split(", ")
    assert {"plain", "oc3", "key", "orthogonal", "l2"} <= set(named)
    assert not {"pre_ln", "rezero", "lipschitz", "t_fixup", "post_ln"} & set(named)
    for name in named:
        apply_variant(name, STARTED)


def test_t_fixup_is_for_models_from_scratch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without which pretrained weights are of no use"):
        apply_variant("t_fixup", STARTED)
    warm = replace(SCRATCH, train=replace(SCRATCH.train, warmup_share=0.1))
    config = apply_variant("t_fixup", warm)
    assert (config.start.init, config.train.warmup_share, config.train.warmup_steps) == (
        "t_fixup",
        0.0,
        0,
    )
    (tmp_path / "config.json").write_text("{}")
    from_file = replace(BASE, start=StartOptions(str(tmp_path / "config.json")))
    assert apply_variant("t_fixup", from_file).start.init == "t_fixup"


def test_orthogonality_levels_are_nested() -> None:
    one, two, three = (apply_variant(f"oc{level}:0.01", BASE).penalty for level in (1, 2, 3))
    assert (one.affinity, one.attention, one.feedforward) == (0.01, 0.0, 0.0)
    assert (two.affinity, two.attention, two.feedforward) == (0.01, 0.01, 0.0)
    assert (three.affinity, three.attention, three.feedforward) == (0.01, 0.01, 0.01)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("post_nl", "nearest: post_ln"),
        ("post_ln:3", "takes no value"),
        ("oc3:much", "must be a finite number"),
    ],
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
    contractive, cosine = (
        apply_variant("l2_contractive", base).model,
        apply_variant("cosine", base).model,
    )
    assert (contractive.contractive, contractive.l2_init_scale, contractive.cosine_eps) == (
        0.5,
        0.2,
        0.01,
    )
    assert (cosine.contractive, cosine.l2_init_scale, cosine.cosine_eps) == (None, None, 0.1)
