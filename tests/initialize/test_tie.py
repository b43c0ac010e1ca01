"""Queries and keys that are one parameter: what the model computes, learns, saves and loads, and
what is refused."""

import copy

import pytest
import torch
from tests.support.zoo import HEADS, ZOO, D
from torch import nn
from torch.nn.utils import parametrizations

import wellposed as wp
from wellposed.errors import CheckpointError, ConfigError, ShapeError

GROUPED = ("llama", "phi3")
FUSED = ("gpt2", "timm look-alike", "torch encoder")
EVERY = ("bert", "t5", "bart", "ours, classifier", "llama, one key head a query head")


def build(family):
    name, *ungrouped = family.split(", one key")
    model = ZOO[name].build()
    if ungrouped:
        model.config.num_key_value_heads = HEADS
        model = type(model)(model.config)
    return model.eval()


def run(model, family):
    torch.manual_seed(1)
    return ZOO[family.split(", one key", maxsplit=1)[0]].run(model)


def self_attention(model):
    return [role for role in wp.find_roles(model).attention if role.kind == "self"]


def biases(role):
    return [view.owner.bias for view in (role.query, role.key)]


@pytest.mark.parametrize("family", EVERY)
def test_the_model_computes_what_one_with_copied_query_weights_computes(family):
    model = build(family)
    with torch.no_grad():
        for role in self_attention(model):
            for bias in biases(role):
                if bias is not None:
                    bias.normal_()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for role in self_attention(copied):
            role.key.tensor().copy_(role.query.tensor())
            query, key = biases(role)
            if query is not None and key is not None:
                key.copy_(query)
    values = {role.path: role.value.tensor().detach().clone() for role in self_attention(model)}
    cross = [role for role in wp.find_roles(model).attention if role.kind == "cross"]
    untouched = [role.key.parameter for role in cross]
    names = wp.tie_queries_and_keys_(model)
    assert len(names) == len(values)
    for role in self_attention(model):
        assert torch.equal(role.query.tensor(), role.key.tensor())
        assert torch.equal(role.value.tensor(), values[role.path])
    assert all(role.key.parameter is before for role, before in zip(cross, untouched, strict=True))
    torch.testing.assert_close(run(model, family), run(copied, family), rtol=0, atol=1e-6)
    assert wp.tie_queries_and_keys_(model) == ()
    torch.testing.assert_close(run(model, family), run(copied, family), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", EVERY)
def test_training_keeps_them_equal_and_counts_both_uses_in_the_gradient(family):
    model = build(family)
    wp.tie_queries_and_keys_(model)
    twice = copy.deepcopy(model)
    sizes = [sum(weight.numel() for weight in net.parameters()) for net in (build(family), model)]
    roles = self_attention(model)
    tied = [each for role in roles for each in (role.query.tensor(), biases(role)[0])]
    gone = sum(each.numel() for each in tied if each is not None)
    assert sizes[0] - sizes[1] == gone, "one parameter, not two"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    before = [role.query.tensor().detach().clone() for role in self_attention(model)]
    for _ in range(3):
        optimizer.zero_grad()
        run(model, family).square().sum().backward()
        optimizer.step()
    for role, old in zip(self_attention(model), before, strict=True):
        assert torch.equal(role.query.tensor(), role.key.tensor())
        assert not torch.equal(role.query.tensor(), old)
        query, key = biases(role)
        assert query is None or torch.equal(query, key)
    for role, old in zip(self_attention(twice), before, strict=True):
        assert torch.equal(role.query.tensor(), old), "a deep copy is a model of its own"
        assert torch.equal(role.query.tensor(), role.key.tensor())


@pytest.mark.parametrize("family", EVERY)
def test_its_state_dict_is_that_of_the_plain_model_and_loads_both_ways(family):
    model, plain = build(family), build(family)
    wp.tie_queries_and_keys_(model)
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    keys = (tensor for name, tensor in state.items() if "key" in name or "k_" in name)
    pointers = [tensor.data_ptr() for tensor in keys]
    assert len(set(pointers)) == len(pointers), "no key shares memory with anything"
    plain.load_state_dict(state)
    assert torch.equal(run(plain, family), run(model, family))
    other = build(family)
    wp.tie_queries_and_keys_(other)
    other.load_state_dict(state)
    assert torch.equal(run(other, family), run(model, family))
    wp.tie_queries_and_keys_(plain)
    assert torch.equal(run(plain, family), run(model, family))
    with pytest.raises(CheckpointError, match=r"they differ; load it into a new model first"):
        model.load_state_dict(build(family).state_dict())


def test_a_saved_model_loads_without_being_told(tmp_path, caplog):
    model = build("bert")
    wp.tie_queries_and_keys_(model)
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(run(again.eval(), "bert"), run(model, "bert"))
    fresh = type(model).from_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="wellposed"):
        wp.tie_queries_and_keys_(fresh)  # loaded equal: ties again, and nothing moves
    assert [each.levelname for each in caplog.records] == ["INFO"]
    said = caplog.records[0].getMessage()
    assert said.endswith("keys took the numbers of their queries; none moved")


GROUPS = r"grouped heads.*\n.*query \(16, 16\), key \(8, 16\)\n.*query \(16, 16\)"
REFUSED = [(family, ShapeError, GROUPS) for family in GROUPED]
REFUSED += [(family, ConfigError, "take the fused one apart") for family in FUSED]


@pytest.mark.parametrize(("family", "error", "match"), REFUSED)
def test_what_is_refused_changes_nothing(family, error, match):
    model = build(family)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=match):
        wp.tie_queries_and_keys_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_tied_is_named_and_nothing_is_changed():
    model = build("bert")
    first, second = (layer.attention.self for layer in model.encoder.layer)
    first.key.bias = None
    parametrizations.orthogonal(second.key)
    with pytest.raises(ConfigError) as caught:
        wp.tie_queries_and_keys_(model)
    first_problem, second_problem = str(caught.value).splitlines()[1:]
    assert "layer.0.attention: one of query and key has a bias and the other" in first_problem
    assert "1.attention: encoder.layer.1.attention.self.key.parametrizations" in second_problem
    assert first.key.weight is not first.query.weight


class Adapter(nn.Module):
    """A linear layer with a trainable product beside it, as adapter libraries put it in place of
    the layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.low, self.high = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, tokens):
        return self.base_layer(tokens) + self.high(self.low(tokens))


def test_tie_first_and_adapt_then():
    model, adapted = build("bert"), build("bert")
    wp.tie_queries_and_keys_(model)
    for net in (model, adapted):
        for layer in net.encoder.layer:
            layer.attention.self.key = Adapter(layer.attention.self.key)
    with pytest.raises(ConfigError, match=r"it carries adapters, .*; tie first, then add them"):
        wp.tie_queries_and_keys_(adapted)
    adapted.load_state_dict(model.state_dict())
    assert torch.equal(run(adapted, "bert"), run(model, "bert"))
