"""Gradients added in place equal those of backward, on every family, and what needs a graph is
refused."""

import pytest
import torch
from tests.support.zoo import ZOO
from torch import nn
from torch.nn.utils import parametrizations

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty

WEIGHTS = {"attention": 0.5, "feedforward": 0.25, "key": 2.0}
WEIGHTS["form"] = "gram_squared"


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, rtol=1e-12, **options):
    """Both ways, on top of gradients that are there already on every second parameter."""
    found = []
    for in_place in (False, True):
        model.zero_grad()
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad and index % 2:
                parameter.grad = torch.full_like(parameter, 0.5)
        penalty = OrthogonalityPenalty(model, **options)
        if in_place:
            value = penalty.accumulate_()
        else:
            loss = penalty()
            loss.backward()
            value = loss.item()
        found.append((value, penalty.terms(), penalty.step, gradients(model)))
    # The call sums in the dtype of the weights.
    assert found[1][0] == pytest.approx(found[0][0], rel=max(rtol, 1e-6))
    assert found[1][1] == pytest.approx(found[0][1], rel=max(rtol, 1e-12))
    assert found[1][2] == found[0][2] == 1
    torch.testing.assert_close(found[1][3], found[0][3], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("family", ZOO)
def test_same_gradients_as_backward(family):
    compare(ZOO[family].build().double(), **WEIGHTS)


@pytest.mark.parametrize(
    "options",
    [
        {"key": 2.0, "feedforward": 0.5, "form": "gram"},
        {"attention": 1.0, "attention_mode": "separate", "every": 3},
        {"embedding": 1.0, "value": lambda step: 0.5 + step, "form": "paper"},
    ],
)
def test_forms_modes_and_schedules(options):
    compare(ZOO["llama"].build().double(), **options)
    compare(ZOO["gpt2"].build().double(), **options)


def test_low_precision_and_frozen_weights():
    compare(ZOO["bert"].build(), 1e-5, **WEIGHTS)
    compare(ZOO["bert"].build().bfloat16(), 2**-7, **WEIGHTS)
    compare(ZOO["bert"].build(), 2**-6, gram_dtype=torch.bfloat16, **WEIGHTS)
    model = ZOO["bert"].build().double()
    model.encoder.layer[0].attention.self.key.weight.requires_grad_(False)
    said = r"(?s)frozen.*layer\.0\.attention\.self\.key\.weight: key of encoder\.0$"
    with pytest.warns(UserWarning, match=said):
        compare(model, **WEIGHTS)
    assert model.encoder.layer[0].attention.self.key.weight.grad is None


def test_an_orthogonal_weight_gets_no_gradient_from_the_norm():
    module = nn.MultiheadAttention(4, 2).double()
    with torch.no_grad():
        module.in_proj_weight[4:8] = torch.eye(4)
    assert OrthogonalityPenalty(module, key=1.0, form="gram").accumulate_() == 0.0
    assert not module.in_proj_weight.grad.any()


def test_left_out_steps_add_nothing():
    model = ZOO["bert"].build()
    penalty = OrthogonalityPenalty(model, key=1.0, every=2, form="paper")
    assert penalty.accumulate_() > 0
    before = gradients(model)
    assert penalty.accumulate_() == 0.0
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


def test_what_needs_a_graph_is_refused():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    affine = OrthogonalityPenalty(module, affinity=1.0, key=1.0, form="paper")
    with pytest.raises(ConfigError, match=r"affinities need.*backward"):
        affine.accumulate_()
    affine.remove()
    forms = {"key": "qr", "value": "gram"}
    with pytest.raises(ConfigError, match=r"(?s)key: form 'qr'"):
        OrthogonalityPenalty(module, key=1.0, value=1.0, form=forms).accumulate_()
    removed = OrthogonalityPenalty(module, key=1.0, form="paper")
    removed.remove()
    with pytest.raises(ConfigError, match="removed"):
        removed.accumulate_()
    model = ZOO["bert"].build()
    parametrizations.weight_norm(model.encoder.layer[0].attention.self.key)
    with pytest.raises(ConfigError, match=r"layer\.0\.attention\.self\.key.*parametrised"):
        OrthogonalityPenalty(model, key=1.0, form="paper").accumulate_()
    assert gradients(model) == {}
    assert module.in_proj_weight.grad is None
