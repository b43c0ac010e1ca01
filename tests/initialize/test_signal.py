"""The signal keeps its size at any depth; that of plain Xavier grows."""

import pytest
import torch
from tests.support.initialized import bart, batch_for, bert, plain_xavier_
from torch import nn

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.initialize import remove_norms_, signal_propagation, t_fixup_, t_fixup_gated_factor


def encoder(layers, width, inner):
    layer = nn.TransformerEncoderLayer(width, 8, inner, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


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
