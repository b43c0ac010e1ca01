"""The signal keeps its size at any depth, one step moves the output alike at any depth; plain
Xavier does neither."""

import pytest
import torch
from tests.support.initialized import bart, batch_for, bert
from torch import nn
from transformers import LlamaConfig, LlamaModel

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.initialize import (
    remove_norms_,
    signal_propagation,
    step_change,
    t_fixup_,
    t_fixup_gated_factor,
)
from wellposed.models import WellposedConfig, WellposedModel, WellposedSeq2SeqModel


def encoder(layers, width, inner):
    layer = nn.TransformerEncoderLayer(width, 8, inner, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def plain_xavier_(model):
    """Xavier on every matrix, N(0, 1/d) embeddings, no norm: T-Fixup without its factors."""
    remove_norms_(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2:
                    nn.init.xavier_uniform_(parameter)


OF_A_DECODER = (9 * 6) ** -0.25
SIGNALS = [
    pytest.param(6, 512, None, 1.1, id="6 layers"),
    pytest.param(6, 512, OF_A_DECODER, 1.1, id="in front of a decoder"),
    pytest.param(100, 512, (9 * 100) ** -0.25, 1.1, id="100 layers", marks=pytest.mark.slow),
    pytest.param(100, 32, None, 1.15, id="100 narrow layers, which fluctuate"),
]


@pytest.mark.parametrize(("layers", "width", "input_scale", "most"), SIGNALS)
def test_the_signal_keeps_its_size(layers, width, input_scale, most):
    model = encoder(layers, width, 2 * width)
    t_fixup_(model, input_scale=input_scale, zero_biases=True)
    assert 1.0 <= signal_propagation(model, torch.randn(2, 16, width)).ratios()[-1] <= most


@pytest.mark.parametrize(("layers", "width", "least"), [(6, 512, 4), (40, 32, 1e3)])
def test_the_signal_of_plain_xavier_grows(layers, width, least):
    model = encoder(layers, width, 2 * width)
    plain_xavier_(model)
    assert signal_propagation(model, torch.randn(2, 16, width)).ratios()[-1] > least


def test_rows_are_the_hidden_states_of_the_model():
    model = bert(3)
    t_fixup_(model)
    batch = batch_for(model)
    batch["attention_mask"][0, 4:] = 0
    rows = signal_propagation(model, batch).rows
    with torch.no_grad():
        states = model.eval()(**batch, output_hidden_states=True).hidden_states
    real = batch["attention_mask"].bool()
    sizes = [state[real].square().sum(-1).mean().sqrt().item() for state in states]
    assert [row.norm_in for row in rows] == pytest.approx(sizes[:-1], rel=1e-5)
    assert [row.norm_out for row in rows] == pytest.approx(sizes[1:], rel=1e-5)
    ratios = [size / sizes[0] for size in sizes[1:]]
    assert [row.ratio for row in rows] == pytest.approx(ratios, rel=1e-5)
    places = [(f"encoder.layer.{i}", i + 1) for i in range(3)]
    assert [(row.path, row.depth) for row in rows] == places


def test_encoder_and_decoder_are_told_apart_and_the_model_is_left_as_it_was():
    model = bart(2, 3).train()
    model.model.encoder.eval()
    signal = signal_propagation(model, batch_for(model))
    assert (len(signal.ratios("encoder")), len(signal.ratios("decoder"))) == (2, 3)
    assert (model.training, model.model.encoder.training) == (True, False)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert signal.table().splitlines()[1].startswith("model.encoder.layers.0")


def test_overflow_names_the_layer_and_a_batch_its_type():
    model = encoder(3, 16, 16).double()
    model.layers[1].linear2.bias.data.fill_(float("inf"))
    remove_norms_(model)
    with pytest.raises(ConvergenceError, match=r"output of layers\.1"):
        signal_propagation(model, torch.randn(1, 2, 16, dtype=torch.float64))
    with pytest.raises(ConfigError, match="received int"):
        signal_propagation(model, 3)
    model.forward = lambda x: model.layers[2](x)
    with pytest.raises(ConfigError, match=r"never went through.*\n.*layers\.0\n.*layers\.1"):
        signal_propagation(model, torch.ones(1, 2, 16, dtype=torch.float64))


def change_per_step(model_class, layers, *, fixup):
    """Return the change of the output over lr of one step on the matrices, in float64."""
    torch.manual_seed(layers)
    config = WellposedConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=8, norm="none", scale_embeddings=False, init="t_fixup" if fixup else "xavier",
    )  # fmt: skip
    model = model_class(config).double().eval()
    batch = {"input_ids": torch.randint(0, 40, (2, 6))}
    if model_class is WellposedSeq2SeqModel:
        batch["decoder_input_ids"] = torch.randint(0, 40, (2, 6))
    return step_change(model, batch, lr=1e-5 if fixup else 1e-11)


BODIES = [WellposedModel, WellposedSeq2SeqModel]


@pytest.mark.parametrize("model_class", BODIES)
def test_one_step_moves_the_output_alike_at_every_depth(model_class):
    sizes = [change_per_step(model_class, layers, fixup=True) for layers in (2, 8, 32)]
    assert max(sizes) <= 2 * min(sizes), sizes


@pytest.mark.parametrize("model_class", BODIES)
def test_one_step_of_plain_xavier_grows_with_depth(model_class):
    shallow, deep = (change_per_step(model_class, layers, fixup=False) for layers in (2, 8))
    assert deep > 100 * shallow


def test_a_step_is_measured_and_taken_back():
    # f = W x and <f, u> has the gradient u x^T, so the step moves f by lr u |x|^2
    model = nn.Linear(3, 2).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)
    assert step_change(model, x) == pytest.approx(9.0, rel=1e-6)
    assert step_change(model, [x], biases=True) == pytest.approx(10.0, rel=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None
    with pytest.raises(ConfigError, match="lr = 0"):
        step_change(model, x, lr=0)
    with pytest.raises(ConfigError, match="no floating tensor"):
        step_change(nn.Flatten(), torch.ones(2, 2, dtype=torch.long))


def test_the_limit_of_small_rates_is_the_norm_of_j_jt_u():
    first, last = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
    model = nn.Sequential(first, nn.Tanh(), last).double()
    x = 3 * torch.randn(1, 3, dtype=torch.float64)
    weights = dict(model.named_parameters())
    call = torch.func.functional_call
    jacobians = torch.func.jacrev(lambda given: call(model, given, (x,))[0])(weights)
    dense = torch.cat([each.detach().flatten(1) for each in jacobians.values()], 1)
    torch.manual_seed(1)
    direction = torch.randn(1, 2, dtype=torch.float64)[0]
    torch.manual_seed(1)
    expected = float((dense @ dense.mT @ direction / direction.norm()).norm())
    assert step_change(model, x, lr=None) == pytest.approx(expected, rel=1e-6)
    assert step_change(nn.Linear(3, 2).double(), torch.zeros_like(x), lr=None) == 0.0
    with pytest.raises(ConfigError, match="needs float64"):
        step_change(model.float(), x.float(), lr=None)


def gated(layers):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=50, pad_token_id=0,
    )  # fmt: skip
    return LlamaModel(config).double().eval()


def test_one_step_moves_the_output_of_gated_networks_alike_at_every_depth():
    """Llama: with the rule within a fifth from 2 to 32 layers."""
    ids = torch.randint(1, 50, (4, 8))
    moves = {True: [], False: []}
    for layers in (2, 32):
        for fixup, found in moves.items():
            torch.manual_seed(0)
            model = gated(layers)
            report = t_fixup_(model, dry_run=not fixup)
            assert {r.factor for r in report.rows if r.role == "feedforward_gate"} == {1.0}
            assert report.factors["gated feed-forward"] == 1.0
            if not fixup:
                remove_norms_(model)
                plain_xavier_(model)
            found.append(step_change(model, {"input_ids": ids}, lr=None))
    assert moves[True][1] == pytest.approx(moves[True][0], rel=0.2)
    assert not moves[False][1] < 100 * moves[False][0]  # without it, no step is small enough


@pytest.mark.parametrize(("phi", "slope"), [("silu", 0.5), ("gelu", 0.5), ("relu", 0.5**0.5)])
def test_the_factor_of_a_gated_network_gives_it_its_share_of_the_step(phi, slope):
    """The squared gradient of a network of width 8, over draws, against the equation: a share of 1 / K."""
    blocks, width, hidden, scale, draws = 1000, 8, 8, 1.0, 2000
    v = t_fixup_gated_factor(blocks, width, hidden, scale, slope)
    assert v < 1
    bound = v * (6 / (width + hidden)) ** 0.5
    weights = [torch.empty(draws, 8, 8).double().uniform_(-bound, bound) for _ in range(3)]
    x = nn.functional.normalize(torch.randn(draws, 8, 1).double(), dim=1)
    direction = nn.functional.normalize(torch.randn(draws, 8, 1).double(), dim=1)
    small = 1e-3  # so that phi is its slope: the network is of degree 2 in its input
    given = [each.requires_grad_() for each in (*weights, x)]
    up, gate, down = given[:3]
    inner = (up @ (small * x)) * getattr(nn.functional, phi)(gate @ (small * x))
    gradients = torch.autograd.grad((direction * (down @ inner)).sum() / small**2, given)
    share = sum(each.square().sum() for each in gradients) / draws
    assert share.item() == pytest.approx(1 / blocks, rel=0.15)
    # Of large tokens v^2 x^2 alone counts.
    far = [x * t_fixup_gated_factor(blocks, width, hidden, x, slope) for x in (1e5, 1e9)]
    assert far[0] == pytest.approx(far[1], rel=1e-6)
