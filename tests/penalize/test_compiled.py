"""A loss with penalties compiles to one graph, and trains as a plain one does."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters

from wellposed.penalize import OrthogonalityPenalty

IDS = torch.arange(10).reshape(2, 5)


class Padded(nn.Module):
    """Two layers with padding masks of their own."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers

    def forward(self, x, paddings):
        for layer, padding in zip(self.layers, paddings, strict=True):
            x = layer(x, src_key_padding_mask=padding)
        return x


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20, "num_attention_heads": 4}
    config = hf.LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes)
    model = hf.LlamaModel(config)
    return model, lambda: model(input_ids=IDS)[0].square().mean()


def padded():
    model = Padded()
    x = torch.ones(2, 5, 16)
    last = torch.arange(5) > torch.tensor([[3], [2]])
    return model, lambda: model(x, (last, last & (torch.arange(5) > 3))).square().mean()


def losses_and_weights(build, strengths, *, is_compiled, steps=4):
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model, loss = build()
    penalty = OrthogonalityPenalty(model, **strengths)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def total():
        return loss() + penalty()

    penalised = torch.compile(total, backend="aot_eager") if is_compiled else total
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = penalised()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses), torch.cat(
        [weight.detach().flatten() for weight in model.parameters()]
    )


WEIGHTS = {"attention": 0.01, "feedforward": 0.01, "key": 0.1}
# Penalised parts -> (model, strengths, graphs at most: one more if the step is read).
CASES = {
    "weights": (llama, WEIGHTS, 1),
    "weights and affinities": (llama, {"affinity": 0.1, **WEIGHTS}, 1),
    "schedule": (llama, {"value": lambda step: min(0.1, step / 30)}, 3),
    "every": (llama, {"attention": 0.01, "every": 2}, 3),
    "masks that differ": (padded, {"affinity": 0.1}, 1),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile inside
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_loss_has_no_graph_break_and_the_same_numbers(name):
    expected = losses_and_weights(*CASES[name][:2], is_compiled=False)
    compiled = losses_and_weights(*CASES[name][:2], is_compiled=True)
    assert sum(counters["graph_break"].values()) == 0
    assert counters["stats"]["unique_graphs"] <= CASES[name][2]
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
