"""DT-Fixup: mu is the largest norm of a real token at the door of the new layers, and the factor
follows from it."""

import math

import pytest
import torch
from tests.support.initialized import batch_for, bert
from torch import nn
from torch.distributed.fsdp import fully_shard

from wellposed.errors import ConfigError, ConvergenceError, DataError, RoleNotFoundError
from wellposed.initialize import dt_fixup_, t_fixup_
from wellposed.models import build_model


class OnTop(nn.Module):
    """A pretrained encoder and new layers."""

    def __init__(self, layers=3, pretrained=None):
        super().__init__()
        self.body = bert() if pretrained is None else pretrained
        new = [nn.TransformerEncoderLayer(16, 4, 24, batch_first=True) for _ in range(layers)]
        self.new = nn.ModuleList(new)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask)[0]
        for layer in self.new:
            hidden = layer(hidden)
        return hidden


def state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(first, second):
    equal = (torch.equal(first[key], second[key]) for key in first if key in second)
    return first.keys() == second.keys() and all(equal)


def stack(layers, width=4):
    layer = nn.TransformerEncoderLayer(width, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("mu", "layers", "factor"), [(10.0, 24, 0.009937), (10.0, 8, 0.017211), (1.0, 8, 0.125)]
)
def test_values_of_the_formula_from_data(mu, layers, factor):
    tokens = torch.zeros(2, 3, 4)
    tokens[1, 2, 3] = mu
    tokens[0, 0, 0] = mu / 2
    report = dt_fixup_(stack(layers), [tokens[:1], tokens[1:]])
    assert report.mu == pytest.approx(mu)
    assert report.tokens == 6
    assert report.factors["new layers"] == pytest.approx(factor, abs=5.1e-7)
    scaled = [row for row in report.rows if row.role not in ("query", "key")]
    assert len(scaled) == 4 * layers
    assert all(row.drawn for row in report.rows)
    assert all(row.factor == 1.0 for row in report.rows if row not in scaled)
    assert all(row.std_after / row.std_before == pytest.approx(factor, abs=1e-6) for row in scaled)


@pytest.mark.parametrize("exclude", [(), ("query", "key")])
def test_only_the_new_layers_change_their_biases_and_what_exclude_names_do_not(exclude):
    model = OnTop()
    body = state(model.body)
    new = state(model.new)
    report = dt_fixup_(model, [batch_for(model.body)], layers="new", exclude=exclude)
    assert same(body, state(model.body))
    after = state(model.new)
    assert len(report.norms_removed) == 6
    names = (*report.norms_removed, *(row.name for row in report.rows))
    assert all(name.startswith("new.") for name in names)
    assert not any("norm" in key for key in after)
    for index in range(3):
        fused = f"{index}.self_attn.in_proj_weight"
        assert torch.equal(new[fused][:32], after[fused][:32]) == bool(exclude)
        width = after[fused].shape[1]
        if not exclude:  # Xavier normal of each projection, not of the fused matrix; 5 standard errors of a variance
            variance = after[fused][:width].double().square().mean().item()
            assert variance == pytest.approx(1 / width, rel=5 * (2 / width**2) ** 0.5)
        assert not torch.equal(new[fused][32:], after[fused][32:])
    assert all(torch.equal(new[key], value) for key, value in after.items() if key.endswith("bias"))


def test_it_is_idempotent_and_seeded():
    model = OnTop()
    loader = [batch_for(model.body) for _ in range(2)]
    rng = torch.get_rng_state()
    first = dt_fixup_(model, loader, layers="new")
    weights = state(model)
    second = dt_fixup_(model, loader, layers="new")
    assert torch.equal(torch.get_rng_state(), rng)
    assert first.mu == second.mu
    assert same(weights, state(model))
    dt_fixup_(model, loader, layers="new", seed=7)
    assert not same(weights, state(model))


def test_mu_is_the_largest_norm_of_a_real_token():
    model = OnTop()
    batches = [batch_for(model.body) for _ in range(3)]
    for index, batch in enumerate(batches):
        batch["attention_mask"][0, 3 + index :] = 0
    norms = []
    model.body.eval()
    with torch.no_grad():
        for batch in batches:
            hidden = model.body(**batch)[0]
            norms += [
                hidden[row, column].double().norm().item()
                for row in range(2)
                for column in range(6)
                if batch["attention_mask"][row, column]
            ]
    report = dt_fixup_(model.train(), batches, layers="new")
    assert report.tokens == len(norms)
    assert report.mu == pytest.approx(max(norms), rel=1e-6)
    assert model.training
    assert model.new.training


def test_no_gradient_is_kept():
    model = OnTop()
    report = dt_fixup_(model, [batch_for(model.body)], layers="new")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert f"mu = {report.mu:.4g}" in report.table()


def test_a_whole_bert_keeps_its_embeddings_and_mu_is_read_without_the_norms_that_go():
    model = bert()
    tables = state(model.embeddings)
    batch = batch_for(bert())
    report = dt_fixup_(model, [batch])
    same = {row.name for row in report.rows if not row.drawn}
    assert same == {f"embeddings.{name}" for name in tables if name.endswith("embeddings.weight")}
    assert all(torch.equal(tables[key], value) for key, value in state(model.embeddings).items())
    assert len(report.norms_removed) == 5
    with torch.no_grad():
        entering = model.eval().embeddings(batch["input_ids"]).norm(dim=-1)
    assert report.mu == pytest.approx(entering.max().item(), rel=1e-6)
    assert dt_fixup_(model, [batch]).mu == report.mu


def test_each_text_of_a_pair_is_read_by_its_own_mask():
    """The padding of the second text is the longest vector, at a place that is real in the first."""
    model = build_model("wellposed", "sequence_pair_classification", vocab_size=9, hidden_size=8)
    model.get_input_embeddings().weight.detach()[4] = 100.0
    values = {"input_ids": [1, 2, 3], "input_ids_pair": [1, 2, 4]}
    values |= {"attention_mask": [1, 1, 1], "attention_mask_pair": [1, 1, 0]}
    report = dt_fixup_(model, [{name: torch.tensor([row]) for name, row in values.items()}])
    assert (report.tokens, report.mu < 50) == (5, True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": "head"}, "has no module 'head'"),
        ({"layers": None}, "one stack"),
        ({"layer": "new"}, "keyword of dt_fixup_ 'layer'; nearest: layers"),
        ({"layers": "new", "exclude": "nothing"}, "'nothing'; nearest"),
        ({"layers": "new", "exclude": "qery"}, "'qery'; nearest: query"),
    ],
)
def test_unusable_arguments(options, match):
    model = OnTop()
    before = state(model)
    with pytest.raises(ConfigError, match=match):
        dt_fixup_(model, [batch_for(model.body)], **options)
    assert same(before, state(model))


def test_unusable_data_and_models():
    with pytest.raises(DataError, match="no token entered"):
        dt_fixup_(stack(2), [])
    with pytest.raises(ConfigError, match="loader: received int"):
        dt_fixup_(stack(2), 3)
    with pytest.raises(ConvergenceError, match="input of the new layers"):
        dt_fixup_(stack(2), [torch.full((1, 2, 4), math.nan)])
    odd = stack(2)
    odd.layers[0].extra = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RoleNotFoundError, match=r"layers\.0\.extra"):
        dt_fixup_(odd, [torch.ones(1, 2, 4)])
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2)
    with pytest.raises(ConfigError, match="cross-attention"):
        dt_fixup_(decoder, [(torch.ones(1, 2, 4), torch.ones(1, 2, 4))])


@pytest.mark.parametrize("is_gathered", [False, True])
def test_weights_in_shards_are_refused_before_anything_is_drawn(is_gathered, mesh):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fully_shard(model, mesh=mesh)
    tokens = torch.randn(2, 3, 16)
    if is_gathered:
        model(tokens)  # the root keeps its whole weights until backward
    before = [weight.detach().clone() for weight in model.parameters()]
    for verb in (t_fixup_, lambda net: dt_fixup_(net, [tokens])):
        with pytest.raises(ConfigError, match="before fully_shard"):
            verb(model)
    for weight, old in zip(model.parameters(), before, strict=True):
        assert bool((weight == old).all())
