"""Weights chosen by the roles they play, in models of Hugging Face: fused parts, adapters, what is refused."""

import logging

import pytest
import torch
from tests.support.constrained import constrained, descend, distance
from tests.support.zoo import PLAIN, ZOO, V
from torch import nn

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError, RoleNotFoundError

transformers = pytest.importorskip("transformers")


def cut(model, part):
    """A part of a fused weight in (out, in) orientation, cut by hand."""
    weight = model.get_parameter(part.parameter)
    rows = slice(*part.rows) if part.rows else slice(None)
    return (weight.T if part.transposed else weight)[rows]


def sgd(model, rate=0.3):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train(kind, model, optimizer, steps):
    """Drive the outputs of a model of the zoo to one."""

    def loss():
        torch.manual_seed(1)
        return (ZOO[kind].run(model) - 1.0).square().mean()

    return descend(loss, optimizer, steps)


def in_set(weight, to):
    return distance(weight, to) <= {"orthogonal": 1e-5, "columns": 1e-6}.get(to, 0.0)


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "torch encoder"])
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_parts_of_fused_weights_are_held_each_by_itself(kind, to):
    entry = ZOO[kind]
    model = ZOO[kind].build()
    query, key, value = (entry.weights[role] for role in ("query", "key", "value"))
    fused = model.get_parameter(query.parameter)
    with torch.no_grad():
        fused.mul_(20.0)
    before = cut(model, value).detach().clone()
    optimizer = sgd(model, 0.1)
    handle = constrain_(model, optimizer, where=("query", "key"), to=to)
    assert sum(path.startswith(f"{query.parameter}[") for path in handle.paths) == 2
    assert torch.equal(cut(model, value), before), "the value part is not held, so it is not moved"
    losses = []
    for _ in range(6):
        losses += train(kind, model, optimizer, 1)
        assert in_set(cut(model, query), to)
        assert in_set(cut(model, key), to)
    assert losses[-1] < losses[0]
    assert not in_set(fused, to)
    assert not torch.equal(cut(model, value), before), "and it trains freely"
    assert handle.error().worst <= 1e-5


def test_ignored_decay_is_left_out_of_the_held_part_alone():
    results = []
    for decay in (0.0, 0.3):
        torch.manual_seed(0)
        model = ZOO["gpt2"].build().double()
        fused = model.get_parameter("h.0.attn.c_attn.weight")
        optimizer = torch.optim.AdamW([fused], lr=1e-2, weight_decay=decay)
        constrain_(model, optimizer, "h.0.attn.c_attn.weight[0:16]")
        for _ in range(5):
            fused.grad = torch.ones_like(fused) + fused.detach()
            optimizer.step()
        results.append(fused.detach().clone())
    assert torch.allclose(results[0][:, :16], results[1][:, :16], atol=1e-12)
    assert not torch.allclose(results[0][:, 16:], results[1][:, 16:], atol=1e-3)


def test_roles_that_nothing_plays_are_refused():
    model = ZOO["gpt2"].build()
    with pytest.raises(RoleNotFoundError, match=r"role feedforward_gate; it has query, key, value"):
        constrain_(model, sgd(model), where=("query", "feedforward_gate"))
    with pytest.raises(RoleNotFoundError, match=r"'querry' is no role, .* nearest: query"):
        constrain_(model, sgd(model), where="querry")
    plain = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RoleNotFoundError, match="no attention or feed-forward weight"):
        constrain_(plain, sgd(plain), where="query")


def test_two_calls_may_hold_two_parts_but_not_the_same():
    model = ZOO["gpt2"].build()
    optimizer = sgd(model)
    first = constrain_(model, optimizer, where="query")
    second = constrain_(model, optimizer, where="key", to="spectral", bound=0.5)
    with pytest.raises(ConfigError, match=r"c_attn\.weight\[16:32\]: constrained already"):
        constrain_(model, optimizer, where=("key", "value"))
    train("gpt2", model, optimizer, 3)
    assert first.error().worst <= 1e-5
    assert second.error().worst == 0.0


class Adapted(nn.Module):
    """A linear layer as adapters leave it: the frozen layer inside, and two low-rank factors, the
    last one zero."""

    def __init__(self, base, rank=3):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.fixture
def adapted():
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**PLAIN))
    for layer in model.bert.encoder.layer:
        for name in ("query", "value"):
            setattr(layer.attention.self, name, Adapted(getattr(layer.attention.self, name)))
    return model


def test_a_frozen_weight_is_refused_and_says_what_to_do(adapted):
    message = r"query\.base_layer\.weight: frozen.*where='\*\.lora_A"
    for selection in ({"where": "query"}, {"where": "*.query"}):
        with pytest.raises(ConfigError, match=message):
            constrain_(adapted, sgd(adapted), **selection)


@pytest.mark.parametrize(
    ("where", "to"), [("*.query.lora_A.*", "orthogonal"), ("*.lora_?.*", "spectral")]
)
def test_the_factors_of_an_adapter_are_held_by_their_names(adapted, where, to):
    optimizer = sgd(adapted)
    handle = constrain_(adapted, optimizer, where=where, to=to)
    ids = torch.randint(0, 30, (8, 5))
    labels = torch.randint(0, 2, (8,))
    descend(lambda: adapted(input_ids=ids, labels=labels).loss, optimizer, 5)
    assert {"lora_A", "lora_B"} >= {path.split(".")[-3] for path in handle.paths}
    assert all(in_set(adapted.get_parameter(path), to) for path in handle.paths)


def tiny_bert():
    sizes = PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def test_bert_trains_saves_and_loads_as_a_plain_model(tmp_path):
    model = tiny_bert()
    keys = list(model.state_dict())
    names = ["*.attention.self.*", "*.attention.output.dense", "re:.*output.dense"]
    _, optimizer, handle = constrained("adamw", names, model=model)
    # 2 layers of query, key, value, attention output and the second feed-forward weight.
    assert len(handle.paths) == 10
    tokens = torch.randint(1, V, (8, 6))
    labels = torch.randint(0, 2, (8,))
    losses = descend(lambda: model(input_ids=tokens, labels=labels).loss, optimizer, 20)
    assert losses[-1] < losses[0]
    assert handle.error().worst <= 1e-5

    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    model.eval()
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)
    report = constrained("adamw", list(handle.paths), model=loaded)[2].report
    assert max(row.moved_frobenius for row in report.rows) == 0.0


def test_the_gain_of_a_pretrained_model_is_fitted_and_its_moves_are_said(tmp_path, caplog):
    tiny_bert().save_pretrained(tmp_path)
    moved = {}
    for gain in (None, 1.0):
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
        with caplog.at_level(logging.INFO):
            _, optimizer, handle = constrained("adamw", "key", model=model, gain=gain)
        row = handle.report.rows[0]
        moved[gain] = row.moved_frobenius
        record = caplog.records[-1]
        assert record.levelname == "WARNING"
        assert "constrain_: 2 weights in the set orthogonal of size" in record.getMessage()
        assert f"{row.size:.3g}" in record.getMessage()
        assert "2 of 2 by more than a tenth" in record.getMessage()
        with caplog.at_level(logging.INFO):
            handle.remove()
            constrain_(model, optimizer, where="key", gain=gain)
        assert caplog.records[-1].levelname == "INFO"
        assert caplog.records[-1].getMessage().endswith("none moved")
    assert 0.1 < moved[None] < 0.8 * moved[1.0]
    rows = constrained("sgd", "key", model=tiny_bert())[2].report.rows
    assert {row.size for row in rows} == {1.0}


def test_accelerate_wrapper_is_looked_through():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.GradientState._reset_state()  # another test may have left its data loader there
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(plain, adamw)
    handle = constrain_(model, optimizer, where="0")
    start = plain[0].weight.detach().clone()
    moved = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(3, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(float((plain[0].weight.detach() - start).norm()))
    assert moved[0] == 0.0 < moved[1] == moved[2] < moved[3]
    assert handle.error().worst <= 1e-5
