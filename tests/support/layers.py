"""What tests of layers share: tokens, perturbed weights, heads one by one, a small stack."""

from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import nn

from wellposed.nn import Block, build_layers

STACK = dict(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    intermediate_size=16,
    norm="post",
    attention="dot_product",
    feedforward="mlp",
    residual="plain",
    activation="gelu",
    qk_norm=False,
    dropout=0.0,
    attention_dropout=0.0,
    layer_norm_eps=1e-05,
    max_position_embeddings=16,
)


def stack_config(**changes):
    return SimpleNamespace(**{**STACK, **changes})


def plain_stack(**changes):
    """Return two blocks and their norm, without a mask."""
    config = stack_config(**changes)
    layers, norm = build_layers(config, Block, config.num_hidden_layers)
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers), final_norm=norm))


def draw(*shape, seed=1, size=1.0, dtype=torch.float64):
    """Return the same normal numbers in every dtype, up to its rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


class Mapped(nn.Module):
    """A function as a module; what it closes over is no part of it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def built(kind, *sizes, **options):
    """Return a layer in float64 none of whose weights is as it starts."""
    torch.manual_seed(0)
    layer = kind(*sizes, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def gradients_are_right(layer, *inputs, **options):
    """Compare the gradients of inputs and weights with finite differences."""
    names = [name for name, _ in layer.named_parameters()]
    weights = [parameter.detach().requires_grad_() for parameter in layer.parameters()]

    def call(*tensors):
        state = dict(zip(names, tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(layer, state, tensors[: len(inputs)], options)

    return torch.autograd.gradcheck(call, (*inputs, *weights), fast_mode=True)


def allowed_by_loop(padding, is_causal, num_queries, num_keys):
    """The contract, pair by pair: both real and, if causal, not later; or the token itself."""
    offset = num_keys - num_queries
    rows = [
        [
            (not padding[i + offset] and not padding[j] and (not is_causal or j <= i + offset))
            or j == i + offset
            for j in range(num_keys)
        ]
        for i in range(num_queries)
    ]
    return torch.tensor(rows)
