"""Experts in one tensor are penalised as one batch: the numbers of each expert by itself, few launches at
any number of experts, and gradients that cost no more than one product of all."""

from dataclasses import replace

import pytest
import torch
import transformers as hf
from tests.penalize.test_launches import launches_and_reads
from torch import nn

from wellposed.errors import WellposedError
from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import find_roles

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "pad_token_id": 0,
}


def mixtral(experts=4, layers=2):
    config = hf.MixtralConfig(
        num_hidden_layers=layers, num_local_experts=experts, intermediate_size=24,
        num_experts_per_tok=min(2, experts), **SIZES,
    )  # fmt: skip
    return hf.MixtralModel(config)


def gpt_oss(experts=4, layers=2):
    config = hf.GptOssConfig(
        num_hidden_layers=layers, num_local_experts=experts, intermediate_size=24,
        num_experts_per_tok=2, head_dim=4, attn_implementation="eager", **SIZES,
    )  # fmt: skip
    model = hf.GptOssModel(config)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)
    return model


def qwen(experts=4, layers=2):
    config = hf.Qwen3MoeConfig(
        num_hidden_layers=layers, num_experts=experts, moe_intermediate_size=12,
        num_experts_per_tok=2, head_dim=4, intermediate_size=24, **SIZES,
    )  # fmt: skip
    return hf.Qwen3MoeModel(config)


def edited(build, edit):
    def make():
        model = build()
        edit(model)
        return model

    return make


def shared(model):
    model.layers[1].mlp.experts = model.layers[0].mlp.experts


def half_frozen(model):
    model.layers[0].mlp.experts.requires_grad_(False)


MODELS = {
    "mixtral": mixtral,
    "interleaved, transposed": gpt_oss,
    "qwen": qwen,
    "one expert": lambda: mixtral(experts=1),
    "shared by layers": edited(mixtral, shared),
    "frozen in one layer": edited(mixtral, half_frozen),
    "bfloat16": lambda: mixtral().to(torch.bfloat16),
}
FORMS = {"paper": {}, "norm": {"form": "gram"}, "qr": {"form": "qr"}}


def slow_value(weight, form):
    """Return the penalty of one weight, by its definition, in float64."""
    weight = weight.double()
    if form == "qr":
        tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
        return (torch.linalg.qr(tall)[0] - tall).norm()
    gram = weight.T @ weight
    distance = (gram - torch.eye(len(gram), dtype=gram.dtype)).square().sum()
    return distance.sqrt() if form == "norm" else distance


@pytest.mark.filterwarnings("ignore:these weights are frozen")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_each_expert_costs_what_its_own_matrix_costs(name, form):
    torch.manual_seed(0)
    model = MODELS[name]()
    ids = torch.randint(1, 20, (2, 6))
    penalty = OrthogonalityPenalty(model, feedforward=0.5, batch=ids, **FORMS[form])
    roles = penalty.roles
    penalty().backward()
    terms = penalty.terms()
    slopes = {key: weight.grad for key, weight in model.named_parameters()}

    copy = {
        key: weight.detach().double().requires_grad_() for key, weight in model.named_parameters()
    }
    total = 0.0
    counted = set()
    for network in roles.feedforward:
        for part in ("up", "gate", "down"):
            view = getattr(network, part, None)
            if view is None or view.key in counted:
                continue
            counted.add(view.key)
            value = 0.5 * slow_value(view.matrix_in(copy[view.parameter_name]), form)
            total = total + value
            label = f"feedforward.{network.stack}.{network.layer}.{part}"
            assert any(key.startswith(label[: label.rfind(".")]) for key in terms)
    rtol = 2e-2 if name == "bfloat16" else 1e-5
    assert sum(terms.values()) == pytest.approx(total.item(), rel=rtol)
    total.backward()
    for key, weight in model.named_parameters():
        expected = copy[key].grad
        if not weight.requires_grad or expected is None:
            assert slopes[key] is None
            continue
        error = (slopes[key].double() - expected).abs().max()
        assert error <= rtol * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("build", [mixtral, gpt_oss, qwen])
def test_launches_of_a_layer_are_few_at_any_number_of_experts(build):
    """Per layer: two products a matrix of the feed-forward, one gradient for each parameter."""
    counts = {}
    for experts in (2, 8, 32):
        more = []
        for layers in (2, 6):
            model = build(experts, layers)
            before, _ = launches_and_reads(model)
            penalty = OrthogonalityPenalty(model, attention=1.0, feedforward=1.0)
            after, reads = launches_and_reads(model, penalty)
            assert reads == 0
            more.append(after - before)
        counts[experts] = (more[1] - more[0]) / 4
    assert len(set(counts.values())) == 1, counts
    assert counts[8] <= 14


def test_a_part_of_the_experts_is_penalised_alone(monkeypatch):
    """Gradients of the others are zeros, and one tensor holds all."""
    torch.manual_seed(0)
    model = mixtral()
    experts = model.layers[0].mlp.experts
    roles = find_roles(model)
    some = tuple(n for n in roles.feedforward if n.layer == 0 and n.down.expert in (1, 3))
    assert len(some) == 2
    chosen = replace(roles, feedforward=some)
    monkeypatch.setattr("wellposed.penalize._penalty.find_roles_for", lambda *_, **__: chosen)
    OrthogonalityPenalty(model, feedforward=1.0)().backward()
    slopes = experts.down_proj.grad
    assert torch.equal(slopes[[0, 2]], torch.zeros_like(slopes[[0, 2]]))
    weight = experts.down_proj.detach().double().requires_grad_()
    sum(slow_value(weight[expert], "paper") for expert in (1, 3)).backward()
    torch.testing.assert_close(slopes.double(), weight.grad, rtol=1e-5, atol=1e-6)


def test_frozen_experts_alone_are_refused():
    model = mixtral()
    for layer in model.layers:
        layer.mlp.experts.requires_grad_(False)
    penalty = OrthogonalityPenalty(model, feedforward=1.0)
    with pytest.raises(WellposedError, match="frozen"):
        penalty()


def test_experts_that_no_token_reached_get_the_gradient_of_the_penalty():
    torch.manual_seed(0)
    model = mixtral(experts=8, layers=1)
    penalty = OrthogonalityPenalty(model, feedforward=1.0)
    loss = model(torch.ones(1, 1, dtype=torch.long))[0].square().sum()  # two experts at most
    loss.backward()
    reached = model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1)
    assert 0 < reached.sum() <= 2
    penalty().backward()
    assert model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1).all()
