"""Variants are functions of configurations, and each one changes what its name says."""

import math
from dataclasses import replace

import pytest
import torch
from lab.tests.support.runs import rows
from safetensors.torch import load_file

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.models import build_model, model_keywords
from wellposed.nn import OrthogonalLinear
from wellposed_lab.compare import variants
from wellposed_lab.compare.variants import (
    EMBEDDING,
    VARIANTS,
    apply_variant,
)
from wellposed_lab.training.config import RunConfig, StartOptions, TrainOptions
from wellposed_lab.training.loop.build import constrained_weights
from wellposed_lab.training.loop.penalties import build_penalty
from wellposed_lab.training.loop.train import train

BASE = RunConfig(task="listops")


def test_every_variant_gives_a_different_configuration():
    names = [name for name in VARIANTS if name != "plain"]
    configs = {name: replace(apply_variant(name, BASE), variant="") for name in names}
    pairs = [(a, b) for a in configs for b in configs if a < b and configs[a] == configs[b]]
    assert pairs == []
    base = replace(BASE, model=ModelOptions(hidden_size=48, num_hidden_layers=5))
    ours = [
        name for name in VARIANTS if VARIANTS.get(name).__module__.startswith(variants.__name__)
    ]
    models = [apply_variant(name, base).model for name in ours]
    assert {(model.hidden_size, model.num_hidden_layers) for model in models} == {(48, 5)}


def test_the_printed_form_leaves_the_feedforward_norms_unsquared():
    """Against the penalty by hand: ``|M^T M - I|_F`` where oc3 has its square, and everything else
    alike."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    penalties = {}
    for name in ("oc3", "oc3_printed"):
        options = replace(apply_variant(f"{name}:0.5", BASE).penalty, affinity=0.0)
        penalty = build_penalty(options, encoder)
        penalties[name] = float(penalty().detach())
    squared = 0.0
    plain = 0.0
    for name, parameter in encoder.named_parameters():
        if ".linear" in name and parameter.ndim == 2:
            weight = parameter.detach().double()
            distance = float((weight.mT @ weight - torch.eye(weight.shape[1])).square().sum())
            squared = squared + 0.5 * distance
            plain = plain + 0.5 * math.sqrt(distance)
    assert penalties["oc3"] - penalties["oc3_printed"] == pytest.approx(squared - plain, rel=1e-4)


STARTED = replace(BASE, start=StartOptions("some-model"))
SCRATCH = replace(BASE, start=StartOptions("some-model", from_scratch=True))


def test_variants_of_a_model_to_start_from_leave_its_architecture_alone():
    names = ("plain", "oc1", "key", "query", "orthogonal", "l2", "embedding", "dt_fixup")
    configs = {name: apply_variant(name, STARTED) for name in names}
    for config in configs.values():
        assert (config.model, config.start.model) == (BASE.model, "some-model")
    assert configs["plain"] == replace(STARTED, variant="plain")
    assert configs["oc1"].penalty == apply_variant("oc1", BASE).penalty
    assert configs["key"].penalty == apply_variant("key", BASE).penalty
    assert configs["orthogonal"].constrain.where == "query,key"
    assert configs["l2"].start.attention == "l2"


def test_variants_with_an_architecture_of_their_own_name_those_that_work():
    expected = "variant 'pre_ln' makes its own architecture, but some-model"
    with pytest.raises(ConfigError, match=expected) as caught:
        apply_variant("pre_ln", STARTED)
    named = str(caught.value).partition("such a model: ")[2].split(", ")
    assert {"plain", "oc3", "key", "orthogonal", "l2"} <= set(named)
    assert not {"pre_ln", "rezero", "lipschitz", "t_fixup", "post_ln"} & set(named)
    for name in named:
        apply_variant(name, STARTED)


def test_t_fixup_is_for_models_from_scratch(tmp_path):
    with pytest.raises(ConfigError, match="removes the LayerNorms that pretrained weights need"):
        apply_variant("t_fixup", STARTED)
    warm = replace(SCRATCH, train=replace(SCRATCH.train, warmup_share=0.1))
    config = apply_variant("t_fixup", warm)
    assert config.start.init == "t_fixup"
    assert (config.train.warmup_share, config.train.warmup_steps) == (0.0, 0)
    (tmp_path / "config.json").write_text("{}")
    from_file = replace(BASE, start=StartOptions(str(tmp_path / "config.json")))
    assert apply_variant("t_fixup", from_file).start.init == "t_fixup"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("oc3:inf", "variant 'oc3:inf': .* must be a finite number"),
        ("post_ln_warmup:2.5", "expected a whole number of steps"),
        ("post_ln_warmup:-3", "expected a whole number of steps"),
        ("value:-1", "value:-1: expected a number above 0; write value:1e-2"),
        ("vlaue:1e-2", "unknown variant 'vlaue'; nearest: value"),
        ("dt_fixup:1.5", "dt_fixup:1.5: expected a whole number; write dt_fixup:20"),
        ("lipschitz:0", "budget = 0.0, expected a finite number, 1"),
        ("lipschitz:0.5", "budget = 0.5, expected a finite number, 1 or more"),
    ],
)
def test_bad_variants_are_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        apply_variant(spec, BASE)


def test_a_variant_takes_a_text_however_its_annotation_is_written(monkeypatch):
    def labelled(base, text: str = "a"):
        return replace(base, task_options={"text": text})

    monkeypatch.setattr(VARIANTS, "_entries", {"labelled": labelled})
    assert apply_variant("labelled:a:b", BASE).task_options == {"text": "a:b"}


TEXTS = RunConfig(task="translation", train=TrainOptions(steps=700, schedule="inverse_sqrt"))


@pytest.mark.parametrize(
    ("spec", "base", "steps", "schedule"),
    [
        ("post_ln_warmup", {}, 70, "inverse_sqrt_warmup"),
        ("post_ln_warmup:30", {}, 30, "inverse_sqrt_warmup"),
        ("post_ln_warmup", {"steps": 90_000}, 4000, "inverse_sqrt_warmup"),
        ("post_ln_warmup", {"schedule": "cosine", "warmup_steps": 12}, 12, "cosine"),
    ],
)
def test_warmup(spec, base, steps, schedule):
    train = apply_variant(spec, replace(TEXTS, train=replace(TEXTS.train, **base))).train
    assert (train.warmup_steps, train.schedule) == (steps, schedule)
    assert apply_variant("post_ln", TEXTS).train.warmup_steps == 0


def test_the_value_of_transject_scales_the_learning_rate():
    base = RunConfig("listops", train=TrainOptions(learning_rate=0.002))
    assert apply_variant("transject", base).train.learning_rate == pytest.approx(0.1)
    assert apply_variant("transject_random:1", base).train == base.train


KWARGS = {"vocab_size": 11, "hidden_size": 8}


SPECTRA = {
    "gram": "transject",
    "random": "transject_random",
    "redrawn": "transject_redrawn",
}


@pytest.mark.parametrize(("spectrum", "variant"), SPECTRA.items())
def test_every_orthogonal_weight_of_a_model_is_held(spectrum, variant):
    config = apply_variant(variant, RunConfig("listops"))
    model = build_model("transject", "causal_lm", spectrum=spectrum, num_experts=2, **KWARGS)
    assert set(config.constrain.patterns) == {*model.orthogonal_patterns(), *EMBEDDING}
    constrained = {id(weight) for weight in constrained_weights(config.constrain, model)}
    maps = {id(part.weight) for part in model.modules() if isinstance(part, OrthogonalLinear)}
    assert constrained == {*maps, id(model.get_input_embeddings().weight)}
    assert config.constrain.embeddings == "fit"


def test_every_matrix_of_attention_and_feed_forward_is_held_in_the_orthogonal_transformer():
    config = apply_variant("orthogonal", RunConfig("listops"))
    sizes = {"num_attention_heads": 2, "num_hidden_layers": 2, **KWARGS}
    model = build_model("wellposed", "causal_lm", **sizes)
    constrained = {id(weight) for weight in constrained_weights(config.constrain, model)}
    layers = [weight for path, weight in model.named_parameters() if ".layers." in path]
    assert constrained == {id(weight) for weight in layers if weight.ndim == 2}
    assert len(constrained) == 12
    clipped = apply_variant("qk_clip", RunConfig("listops")).constrain
    assert (clipped.bound, constrained_weights(clipped, model)) == (100.0, [])  # which may decay


BASES = [
    ModelOptions(),
    ModelOptions(hidden_size=30, num_attention_heads=3),
    ModelOptions(norm="none", activation="relu", attention_dropout=0.1, intermediate_size=7),
    ModelOptions(attention="l2_contractive", contractive=0.5, lipschitz_norm="inf", qk_norm=True),
    ModelOptions(norm="none", init="t_fixup", num_experts=3, spectrum_norm="trace"),
]


def test_a_run_learns_and_says_how_orthogonal_it_stayed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the north wind and the sun were disputing which was the stronger " * 60)
    base = RunConfig(
        "char_lm",
        {"data": str(text), "seq_len": 16},
        model=ModelOptions(hidden_size=16, num_hidden_layers=2, num_experts=2),
        train=TrainOptions(steps=40, batch_size=8, learning_rate=4e-4, eval_every=40, log_every=20),
    )
    config = replace(apply_variant("transject", base), variant="transject")
    result = train(config, tmp_path / "run", progress=False, command=[])
    assert result.status == "success", result.message
    values = result.result["results"]["char_lm"]
    assert values["nats_per_char,valid"] < result.result["reference"]["nats_per_char"]
    logged = rows(tmp_path / "run", "train")
    assert all(0.0 < row["auxiliary_loss"] < 0.01 for row in logged)  # at most the default weight
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    kinds = ("left", "right", "up_proj", "basis")
    constrained = [weights[name].double() for name in weights if name.split(".")[-2] in kinds]
    worst = max(float((weight.T @ weight - torch.eye(16)).abs().max()) for weight in constrained)
    assert worst <= result.result["train_info"]["isometry_error"] * (1 + 1e-6) <= 1e-5


def test_ngpt_has_about_the_parameters_of_the_baseline_and_unit_weights_after_training(tmp_path):
    counts = {}
    for name in ("post_ln", "ngpt"):
        keywords = model_keywords(apply_variant(name, BASE).model)
        counts[name] = sum(
            p.numel() for p in build_model("wellposed", "causal_lm", **keywords).parameters()
        )
    assert counts["ngpt"] == pytest.approx(counts["post_ln"], rel=0.2)

    task = {"data": "builtin", "max_length": 6, "limit_train": 40}
    sizes = ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    steps = TrainOptions(steps=4, batch_size=4, eval_every=2, warmup_steps=2)
    warm = RunConfig("text_classification", task, model=sizes, train=steps)
    config = apply_variant("ngpt:0.1", warm)
    assert (config.train.warmup_steps, config.model.ngpt_alpha) == (0, 0.1)
    train(config, tmp_path / "run", progress=False)
    weights = load_file(tmp_path / "run/final/model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2 and "classifier" not in name:
            along = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            lengths = weight.double().norm(dim=along)
            assert float((lengths - 1).abs().max()) <= 1e-6, name


def test_sigma_reparam_resumes_bit_for_bit_and_saves_plain_weights(tmp_path):
    task = {"data": "builtin", "max_length": 6, "limit_train": 40}
    sizes = ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    steps = TrainOptions(
        steps=4, batch_size=4, eval_every=2, checkpoint_every=2, schedule="constant"
    )
    base = RunConfig("text_classification", task, model=sizes, train=steps)
    config = apply_variant("sigma_reparam", base)
    result = train(config, tmp_path / "whole", progress=False)
    half = replace(config, train=replace(config.train, steps=2))
    train(half, tmp_path / "resumed", progress=False)
    train(config, tmp_path / "resumed", progress=False, resume="auto", longer=True)
    files = [load_file(tmp_path / run / "final/model.safetensors") for run in ("whole", "resumed")]
    assert result.status == "success"
    assert not any("parametrizations" in name for name in files[0])
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    plain = train(replace(base, variant="plain"), tmp_path / "plain", progress=False)
    assert plain.result["train_info"]["parameters"] == result.result["train_info"]["parameters"]
    for option in ("compile", "gradient_checkpointing"):
        with pytest.raises(ConfigError, match=f"start.sigma_reparam with train.{option}"):
            replace(config, train=replace(config.train, **{option: True}))
