"""The watcher sees the same attention weights by every route, and changes nothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wellposed.hooks import AttentionWatcher, MultiheadCall, ScaledDotProductCall, SoftmaxCall
from wellposed.roles import find_roles

BATCH = 2
HEADS = 2
TOKENS = 5
WIDTH = 8
ROUTES = {
    "softmax function": (lambda logits: F.softmax(logits, dim=-1), SoftmaxCall),
    "softmax of torch": (lambda logits: torch.softmax(logits, -1), SoftmaxCall),
    "softmax method": (lambda logits: logits.softmax(dim=-1), SoftmaxCall),
    "special softmax": (lambda logits: torch.special.softmax(logits, -1), SoftmaxCall),
    "softmax module": (nn.Softmax(dim=-1), SoftmaxCall),
    "softmax over merged heads": (
        lambda logits: logits.flatten(0, 1).softmax(-1).unflatten(0, (-1, HEADS)),
        SoftmaxCall,
    ),
}


class Mixer(nn.Module):
    """Attention written out by hand; ``mix`` makes (batch, heads, tokens, head width) of query, key
    and value."""

    def __init__(self, mix):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.mix = mix

    def heads(self, x):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return [layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in layers]

    def forward(self, x):
        return self.o_proj(self.mix(*self.heads(x)).transpose(1, 2).flatten(2))

    @torch.no_grad()
    def reference(self, x):
        """The weights, one number at a time."""
        query, key, _ = self.heads(x)
        weights = torch.empty(BATCH, HEADS, TOKENS, TOKENS, dtype=x.dtype)
        for b in range(BATCH):
            for h in range(HEADS):
                for i in range(TOKENS):
                    powers = [
                        math.exp(float(query[b, h, i] @ k) / math.sqrt(WIDTH / HEADS))
                        for k in key[b, h]
                    ]
                    weights[b, h, i] = torch.tensor(powers, dtype=x.dtype) / sum(powers)
        return weights


def watched(model, *inputs):
    """Return the calls that a watcher receives of one pass, whose result it does not change."""
    received = []
    plain = model(*inputs)
    watcher = AttentionWatcher(
        model,
        find_roles(model).attention,
        lambda role, calls: received.append((role, [call for call, _ in calls])),
    )
    output = model(*inputs)
    watcher.remove()
    assert torch.equal(output, plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._C._len_torch_function_stack() == 0
    return received


def by_scaled_dot_product(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def by_merged_heads(query, key, value):
    merged = F.scaled_dot_product_attention(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    )
    return merged.unflatten(0, (-1, HEADS))


def by_softmax(softmax):
    return lambda query, key, value: softmax(query @ key.mT / math.sqrt(WIDTH / HEADS)) @ value


def both(query, key, value):
    gate = (query @ key.mT).softmax(-1).mean()  # a softmax beside the attention is not attention
    return gate * F.scaled_dot_product_attention(query, key, value)


MIXES = {
    "scaled dot product": (by_scaled_dot_product, ScaledDotProductCall),
    "scaled dot product over merged heads": (by_merged_heads, ScaledDotProductCall),
    "beside another softmax": (both, ScaledDotProductCall),
    **{name: (by_softmax(softmax), kind) for name, (softmax, kind) in ROUTES.items()},
}


@pytest.mark.parametrize("name", MIXES)
def test_weights_by_every_route_against_loops(name):
    mix, kind = MIXES[name]
    model = Mixer(mix).double()
    x = torch.randn(BATCH, TOKENS, WIDTH).double()
    ((role, (call,)),) = watched(model, x)
    assert isinstance(call, kind)
    assert role.num_heads == HEADS
    assert call.attends_to_itself
    torch.testing.assert_close(call.weights(), model.reference(x), rtol=1e-12, atol=1e-13)


def test_masks_of_scaled_dot_product_attention():
    """Boolean, additive and causal masks, grouped heads and a scale: the product of the weights
    with the values."""
    query = torch.randn(2, 4, 5, 3)
    key = torch.randn(2, 2, 5, 3)
    value = torch.randn(2, 2, 5, 3)
    query = query.double()
    key = key.double()
    value = value.double()
    role = find_roles(nn.MultiheadAttention(8, 4)).attention[0]
    keep = torch.rand(2, 1, 5, 5) > 0.3
    keep |= torch.eye(5, dtype=torch.bool)
    options = [
        {"attn_mask": keep},
        {"attn_mask": torch.randn(5, 5).double()},
        {"is_causal": True},
        {"scale": 0.1},
    ]
    for option in options:
        call = ScaledDotProductCall.read(None, role, query, key, value, enable_gqa=True, **option)
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **option)
        torch.testing.assert_close(
            call.weights() @ value.repeat_interleave(2, 1), expected, rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}]
)
def test_torch_attention_with_every_option(options):
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, **options)}
    ).double()
    attention = model["attention"]
    x = torch.randn(2, 5, 8).double()
    noted = []
    watcher = AttentionWatcher(
        model, find_roles(model).attention, lambda _, calls: noted.extend(call for call, _ in calls)
    )
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    attention(x, x, x, key_padding_mask=padding, need_weights=False)
    watcher.remove()
    (call,) = noted
    assert isinstance(call, MultiheadCall)
    attention.eval()
    expected = attention(
        x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False
    )[1]
    torch.testing.assert_close(call.weights(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 5, 5), 1), ((4, 5, 3), -1), ((3, 5, 5), -1), ((5, 5), -1)],
    ids=["over queries", "a router", "heads do not divide it", "one matrix"],
)  # fmt: skip
def test_other_softmaxes_are_not_taken_for_attention(shape, dim):
    role = find_roles(Mixer(by_scaled_dot_product)).attention[0]
    assert SoftmaxCall.read(None, role, torch.randn(shape), dim) is None
