"""Public scripts (llama2.c) run ``self.attention.forward(...)``, which runs no hook of the attention:
each verb that watches attention names the modules and the line to write, or measures as before."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError

WIDTH = 8
HEADS = 2
ADVICE = "write attention(...) there"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        heads = [layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in layers]
        return self.o_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Direct(nn.Module):
    """A layer as llama2.c has it."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention.forward(x)


class Called(Direct):
    """The same layer, with the line that the advice names."""

    def forward(self, x):
        return x + self.attention(x)


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for layer in layers))


def penalised(model, x, _caplog):
    penalty = wp.OrthogonalityPenalty(model, affinity=1e-2, batch=x)
    output = model(x)
    (output.sum() + penalty()).backward()


def measured(model, x, _caplog):
    return wp.measure(model, x).table()


def monitored(model, x, caplog):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = wp.Monitor(model, optimizer, every=1, batch=x)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        numbers = monitor.step()
    assert caplog.text.count(ADVICE) <= 1
    heads = sum("logit_max" in name for name in numbers)
    assert heads == HEADS * sum(type(layer) is Called for layer in model)
    return caplog.text


def bounded(model, x, _caplog):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wp.constrain_(model, optimizer, to="logits", bound=5.0, batch=x)


SAID = {"measure": measured, "Monitor": monitored}
REFUSED = {"affinity": penalised, "logits": bounded}


@pytest.mark.parametrize("verb", SAID)
@pytest.mark.parametrize("second", [Direct, Called])
def test_a_direct_forward_is_said_aloud(verb, second, caplog):
    text = SAID[verb](model_of(Direct, second), torch.randn(2, 4, WIDTH), caplog)
    [line] = [line for line in text.splitlines() if ADVICE in line]
    assert "0.attention" in line
    assert ("1.attention" in line) == (second is Direct)


@pytest.mark.parametrize("verb", REFUSED)
@pytest.mark.parametrize("second", [Direct, Called])
def test_a_direct_forward_is_refused_by_name(verb, second, caplog):
    with pytest.raises(ConfigError, match=re.escape(ADVICE)):
        REFUSED[verb](model_of(Direct, second), torch.randn(2, 4, WIDTH), caplog)


@pytest.mark.parametrize("verb", SAID | REFUSED)
def test_modules_that_are_called_are_read(verb, caplog):
    verbs = SAID | REFUSED
    text = verbs[verb](model_of(Called, Called), torch.randn(2, 4, WIDTH), caplog)
    assert ADVICE not in (text or "") + caplog.text


def test_a_module_that_did_not_run_is_no_direct_forward(caplog):
    model = model_of(Called, Called)
    monitor = wp.Monitor(model, every=1, batch=torch.randn(2, 4, WIDTH))
    model[0](torch.randn(2, 4, WIDTH)).sum().backward()
    monitor.step()
    assert ADVICE not in caplog.text
