"""TransJect models that the tests share: sizes, settings, a batch, and layers that are not the
identity."""

import torch
from torch import nn
from torch.nn import functional as F

from wellposed.models import TransJectConfig, TransJectModel

SIZES = dict(vocab_size=13, max_position_embeddings=12, hidden_size=16, num_hidden_layers=3)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
MASK = (IDS > 0).long()
SETTINGS = [
    {"num_experts": 3},
    {"num_experts": 2, "spectrum_norm": "trace", "gating": "normalized", "position": "learned"},
    {"num_experts": 2, "spectrum": "random", "residual": "sigmoid"},
    {"tie_word_embeddings": True},
]
CONFIG = TransJectConfig(**SIZES, num_experts=2)


def blocks(model):
    body = model if isinstance(model, TransJectModel) else model.model
    return [*body.stack.layers]


def awake(model, weight=1.5):
    """Give every layer a residual weight, signs alternating, so that the model is far from the
    identity."""
    with torch.no_grad():
        for index, layer in enumerate(blocks(model)):
            layer.residual.weight.fill_(weight * (-1) ** index)
    return model.eval()


def slow_stack(stack, x):
    """One sample, (tokens, d), by the formulas."""
    if hasattr(stack.spectrum, "basis"):
        u0 = stack.spectrum.basis.weight.T
        g = torch.diag(u0.T @ x.T @ x @ u0)
        sigma = g / ((g.max() if stack.spectrum.normalization == "max" else g.sum()) + 1e-6)
    else:
        sigma = stack.spectrum.weight.tanh()
    for layer in stack.layers:
        r = torch.tanh(layer.residual.weight) / len(stack.layers)
        ways = []
        logits = []
        for expert in layer.attention.experts:
            f = F.elu(x @ expert.left.weight.T @ torch.diag(sigma) @ expert.right.weight.T)
            ways.append(x + r * f)
            if hasattr(layer.attention, "gate"):
                logits.append(ways[-1].max(0).values @ layer.attention.gate.weight[0])
        if layer.attention.gating == "normalized":
            logits = [value / (x.square().sum() + 1e-6).sqrt() for value in logits]
        gates = torch.stack(logits).softmax(0) if logits else torch.ones(1)
        x = sum((gate * way for gate, way in zip(gates, ways, strict=True)), torch.zeros_like(x))
        inner = x
        for part in (layer.feedforward.up_proj, layer.feedforward.down_proj):
            inner = inner @ part.weight.T
            inner = F.elu(inner if part.bias is None else inner + part.bias)
        x = x + r * inner
    return x


class Adapter(nn.Module):
    """`x -> W x + A x`, as an adapter library puts it in the place of a linear module."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(3)
        change = torch.randn(base.weight.shape, generator=generator, dtype=torch.float64)
        self.change = nn.Parameter(0.3 * change.to(base.weight.dtype))

    @property
    def weight(self):
        """The weight below, as peft has it."""
        return self.base.weight

    def forward(self, x):
        return self.base(x) + x @ self.change.mT
