"""The gradient of a penalty: added in place, of frozen weights, and through LoRA factors."""

import copy
import warnings

import pytest
import torch
from tests.support.penalized import after_forward, batch, bert
from tests.support.zoo import ZOO
from torch import nn

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty

WEIGHTS = {"attention": 0.5, "feedforward": 0.25, "key": 2.0, "form": "gram_squared"}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model, **options):
    """Both ways, in addition to gradients on every second parameter."""
    runs = []
    for alone in (False, True):
        model.zero_grad()
        for index, parameter in enumerate(model.parameters()):
            if parameter.requires_grad and index % 2:
                parameter.grad = torch.full_like(parameter, 0.5)
        penalty = OrthogonalityPenalty(model, **options)
        value = penalty.accumulate_() if alone else penalty()
        if not alone:
            value.backward()
        runs.append((value.detach(), penalty.terms(), penalty.step, gradients(model)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", WEIGHTS),
        ("gpt2", {"key": 2.0, "feedforward": 0.5, "form": "gram"}),
        ("llama", {"attention": 1.0, "attention_mode": "separate", "every": 3}),
        ("gpt2", {"embedding": 1.0, "value": lambda step: 0.5 + step, "form": "paper"}),
        ("t5", {"key": 1.0, "value": 1.0, "form": {"key": "qr", "value": "gram"}}),
    ],
)
def test_same_gradients_as_backward(family, options):
    compare(ZOO[family].build().double(), **options)


def test_left_out_steps_add_nothing():
    model = ZOO["bert"].build()
    penalty = OrthogonalityPenalty(model, key=1.0, every=2, form="paper")
    assert penalty.accumulate_() > 0
    before = gradients(model)
    assert penalty.accumulate_() == 0.0
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


def test_affinities_and_removed_penalties_are_refused():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    affine = OrthogonalityPenalty(module, affinity=1.0, key=1.0, form="paper")
    with pytest.raises(ConfigError, match=r"affinities need.*backward"):
        affine.accumulate_()
    affine.remove()
    with pytest.raises(ConfigError, match="removed"):
        affine()
    assert module.in_proj_weight.grad is None


RANK = 2
SCALE = 1.5


class LoraLinear(nn.Module):
    """A linear layer under LoRA, with the names that PEFT's has."""

    def __init__(self, base, out_features, in_features):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, out_features, bias=False)})
        self.scaling = {"default": SCALE}
        self.use_dora = {"default": False}
        self.active_adapters = ["default"]
        self.merged = self.disable_adapters = False

    def forward(self, x):
        return self.base_layer(x) + SCALE * self.lora_B["default"](self.lora_A["default"](x))


def factors(layer):
    """A and B of the active adapter."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def adapted(model, name):
    """Freeze a model and put LoRA on all its layers called ``name``."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        base = getattr(parent, name, None)
        if base is not None:
            shape = base.weight.shape
            rows, columns = shape if isinstance(base, nn.Linear) else shape[::-1]
            setattr(parent, name, LoraLinear(base, rows, columns))
    return model


def merged(model):
    """The same model with every adapter added to a trained weight: the slow, obvious reference."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, LoraLinear):
                base = layer.base_layer
                a, b = factors(layer)
                delta = SCALE * (b @ a).detach()
                base.weight.data += delta if isinstance(base, nn.Linear) else delta.T
                setattr(parent, name, base.requires_grad_(True))
    return twin


@pytest.mark.parametrize(
    ("family", "name", "strengths"),
    [
        ("bert", "key", {"key": 1.0, "form": "paper"}),
        ("gpt2", "c_attn", {"key": 1.0, "query": 0.5, "form": "gram_squared"}),
        ("gpt2", "c_attn", {"attention": 1.0}),
        ("llama", "q_proj", {"query": 1.0, "form": "gram"}),
        ("llama", "up_proj", {"feedforward": 1.0}),
    ],
)
def test_the_penalty_is_that_of_the_merged_weight(family, name, strengths):
    """Value of the merged model; gradients of the factors by the chain rule: s B^T G and s G
    A^T."""
    model = adapted(ZOO[family].build(), name).double()
    twin = merged(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the weights beside the adapters are frozen
        value = OrthogonalityPenalty(model, **strengths)()
        expected = OrthogonalityPenalty(twin, **strengths)()
    # The call sums in float32 at least.
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    value.backward()
    expected.backward()
    layers = {path: part for path, part in model.named_modules() if isinstance(part, LoraLinear)}
    assert layers
    for path, layer in layers.items():
        base = twin.get_submodule(path)
        gradient = base.weight.grad if isinstance(base, nn.Linear) else base.weight.grad.T
        a, b = factors(layer)
        torch.testing.assert_close(a.grad, SCALE * b.T @ gradient, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b.grad, SCALE * gradient @ a.T, rtol=1e-9, atol=1e-9)
        assert layer.base_layer.weight.grad is None


def test_frozen_weights_are_an_error_that_names_them():
    model = bert().requires_grad_(False)
    penalty = OrthogonalityPenalty(model, key=1.0, form="paper")
    message = r"(?s)frozen.*layer\.2\.attention\.self\.key\.weight.*adapters"
    with pytest.raises(ConfigError, match=message):
        penalty()
    with pytest.raises(ConfigError, match="frozen"):
        penalty.accumulate_()
    with torch.no_grad():
        assert penalty().item() > 0
    model = adapted(bert(), "key")
    query = OrthogonalityPenalty(model, query=1.0, key=1.0, form="paper")
    with pytest.raises(ConfigError, match=r"query of encoder\.0") as caught:
        query()
    assert "key of" not in str(caught.value)


def test_freezing_after_the_penalty_was_made_is_noticed():
    model = bert()
    penalty = OrthogonalityPenalty(model, key=1.0, form="paper")
    assert penalty().item() > 0
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        penalty()


def test_some_frozen_weights_are_warned_of_once():
    model = bert()
    model.encoder.layer[0].requires_grad_(False)
    penalty = OrthogonalityPenalty(model, key=1.0, form="paper")
    message = r"layer\.0\.attention\.self\.key\.weight: key of encoder\.0$"
    with pytest.warns(UserWarning, match=message):
        penalty()
    penalty()  # warnings are errors in these tests


def test_affinities_train_the_adapters_and_are_refused_where_nothing_is_trained():
    model = adapted(bert(), "key")
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    after_forward(model, penalty, inputs).backward()
    layers = [part for part in model.modules() if isinstance(part, LoraLinear)]
    assert all(factors(layer)[1].grad.abs().sum() > 0 for layer in layers)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"(?s)no gradient.*layer\.0\.attention.*frozen"):
        after_forward(model, penalty, inputs)


def test_inactive_adapters_do_not_count():
    model = adapted(bert(), "key").double()
    layer = model.get_submodule("encoder.layer.1.attention.self.key")
    plain = merged(model)
    layer.lora_A["other"] = nn.Linear(16, RANK).double()
    layer.lora_B["other"] = nn.Linear(RANK, 16).double()
    layer.scaling["other"] = 9.0
    penalty = OrthogonalityPenalty(model, key=1.0, form="paper")
    expected = OrthogonalityPenalty(plain, key=1.0, form="paper")()
    assert penalty().item() == pytest.approx(expected.item(), rel=1e-6)
    compare(model, key=1.0, form="gram")
