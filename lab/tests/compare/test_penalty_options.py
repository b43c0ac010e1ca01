"""The effect of each option of the penalty (schedules, forms, cross-attention), and refusals."""

import pytest
import torch
from tests.support.penalized import bert
from tests.support.zoo import ZOO
from torch import nn

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.penalize import OrthogonalityPenalty
from wellposed.presets import mcgrath2024
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import PenaltyOptions, RunConfig
from wellposed_lab.training.loop.penalties import build_penalty


def test_a_strength_means_the_form_of_its_paper_in_python_and_on_the_command_line():
    """Both said 1e-2 of McGrath's, and gave 529.95 and 5.48 on one model."""
    model = bert()
    by_variant = apply_variant("key:1e-2", RunConfig("listops")).penalty
    by_option = PenaltyOptions(key=1e-2)
    plain = OrthogonalityPenalty(model, key=1e-2)
    paper = OrthogonalityPenalty(model, **mcgrath2024(strength=1e-2))
    values = {
        penalty().item()
        for penalty in (plain, paper, *(build_penalty(o, model) for o in (by_variant, by_option)))
    }
    assert len(values) == 1
    weights = [layer.attention.self.key.weight.detach().double() for layer in model.encoder.layer]
    norms = [(weight @ weight.T - torch.eye(16)).norm() for weight in weights]
    assert values.pop() == pytest.approx(1e-2 * float(sum(norms)), rel=1e-6)
    zhang = {"attention": 1e-2, "feedforward": 1e-2}
    squared = OrthogonalityPenalty(model, form="gram_squared", **zhang)()
    assert OrthogonalityPenalty(model, **zhang)().item() == squared.item()


def test_a_weight_in_two_roles_is_counted_once_and_said_so():
    model = bert()
    inner = model.encoder.layer[0].attention.self
    inner.key = inner.query
    warning = r"layer\.0\.attention\.self\.key\.weight.*counted once as query"
    with pytest.warns(UserWarning, match=warning):
        penalty = OrthogonalityPenalty(model, query=1.0, key=1.0, form="paper")
    penalty()
    assert "query.encoder.0" in penalty.terms()
    assert "key.encoder.0" not in penalty.terms()
    assert len(penalty.notes) == 1
    with pytest.warns(UserWarning, match="counted once"):
        joint = OrthogonalityPenalty(model, attention=1.0)
    joint()
    output = model.encoder.layer[0].attention.output.dense
    parts = [layer.weight for layer in (inner.query, inner.value, output)]
    stacked = torch.cat(parts).detach().double()
    expected = (stacked.T @ stacked - torch.eye(16)).square().sum().item()
    assert joint.terms()["attention.encoder.0"] == pytest.approx(expected, rel=1e-5)


def test_cross_attention_only_on_request():
    model = ZOO["bart"].build()
    inside = OrthogonalityPenalty(model, key=1.0, form="paper")
    across = OrthogonalityPenalty(model, key=1.0, cross_attention=True, form="paper")
    inside()
    across()
    only = {f"key.decoder.{layer}.cross" for layer in (0, 1)}
    assert set(across.terms()) - set(inside.terms()) == only


def test_bad_input_is_refused_before_training():
    model = bert()

    def attach(to=model, **options):
        return lambda: OrthogonalityPenalty(to, **options)

    words = {
        r"(?s)attention = -1.*key = nan": attach(attention=-1.0, key=float("nan"), form="paper"),
        "Penalty has no strength above zero; set one of affinity": attach(),
        "gram_squared": attach(key=1.0, form="gram_square"),
        "feedforward": attach(key=1.0, form={"feed_forward": "gram"}),
        r"keyword of OrthogonalityPenalty 'qury'; nearest: query": attach(qury=1.0),
        r"received str; load it first.*from_pretrained\('bert'\)": attach("bert", key=1.0),
        r"(?s)query\.weight.*float16": attach(bert().half(), query=1.0, form="paper"),
    }
    bad = {"attention_mode": "both", "estimator": "all", "qr_method": "x", "every": 0}
    for option, value in {**bad, "num_probes": 0}.items():
        words[option] = attach(key=1.0, form="paper", **{option: value})
    for message, call in words.items():
        with pytest.raises(ConfigError, match=message):
            call()
    for strength in ("1e-2", None, [1.0]):
        with pytest.raises(ConfigError, match="OrthogonalityPenalty: strengths"):
            OrthogonalityPenalty(model, key=strength)
    linear = nn.Sequential(nn.Linear(4, 4))
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    nothing = {"query": "*.nothing_like_it.weight"}
    roles = {
        "attention": attach(linear, key=1.0, form="paper"),
        "embedding": attach(layer, embedding=1.0, form="paper"),
        "affinity": attach(linear, affinity=1.0, where={"feedforward_in": "0.weight"}),
        "nothing_like_it": attach(query=1.0, where=nothing, form="paper"),
    }
    for message, call in roles.items():
        with pytest.raises(RoleNotFoundError, match=message):
            call()


def test_quantised_weights_are_refused_by_name():
    model = bert()
    query = model.encoder.layer[0].attention.self.query
    query.weight = nn.Parameter(query.weight.detach().mul(100).to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"layer\.0\.attention\.self\.query .*quantised"):
        OrthogonalityPenalty(model, query=1.0, form="paper")
