"""A key without weight is closed by any number that a mask adds. `Monitor`'s counts and maxima, QK-clip's maxima and
trial, and the weights of each call are those of -inf, and cost no launch more than before."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, CodeGenConfig, GPT2Config, LlamaConfig, OPTConfig

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError
from wellposed.functional import mask_limit
from wellposed.hooks import AttentionWatcher, MultiheadCall, largest_logits
from wellposed.measurement import Monitor
from wellposed.roles import find_roles

LOWEST = torch.finfo(torch.float32).min
MASKED = {
    "-inf": -math.inf,
    "lowest": LOWEST,
    "-65504": -65504.0,
    "-1e9": -1e9,
    "-1e4": -1e4,
    "bool": None,
}
REAL = 5
TOKENS = 8
WIDTH = 8
HEADS = 2


class Attention(nn.Module):
    """One layer of attention that masks in one of the ways that models do."""

    def __init__(self, way):
        super().__init__()
        self.num_heads = HEADS
        self.way = way
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def heads(self, x):
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]

    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        mixed = WAYS[self.way](q, k, v, mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def added(logits, mask):
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask


def eager(q, k, v, mask):
    return added(q @ k.mT / 2, mask).softmax(-1) @ v


def before_scaling(q, k, v, mask):
    """As CodeGen: the mask is divided, too."""
    return (added(q @ k.mT, mask) / 2).softmax(-1) @ v


def far_before_scaling(q, k, v, mask):
    """As wide heads: -1e4 becomes -1,250."""
    return (added(q @ k.mT * 4, mask) / 8).softmax(-1) @ v


def replaced(q, k, v, mask):
    """As GPT-2's causal mask: closed logits are replaced, not lowered."""
    logits = q @ k.mT / 2
    if mask is None or mask.dtype == torch.bool:
        return added(logits, mask).softmax(-1) @ v
    return torch.where(mask == 0, logits, mask).softmax(-1) @ v


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


WAYS = {way.__name__: way for way in (sdpa, eager, before_scaling, far_before_scaling, replaced)}


def open_keys(left, causal):
    """Return (1, 1, queries, keys): which keys are real, and not later."""
    real = torch.arange(TOKENS) < REAL
    keep = (real.flip(0) if left else real).expand(1, 1, TOKENS, TOKENS)
    return keep.tril() if causal else keep


def mask_of(keep, kind):
    return keep if MASKED[kind] is None else torch.where(keep, 0.0, MASKED[kind])


def batch():
    return 2 * torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def expected_numbers(model, x, keep):
    """Return the largest logit and the entropy share of each head, over open pairs, in float64."""
    q, k, _ = (part.double() for part in model.heads(x))
    logits = q @ k.mT / 2
    keep = keep.expand_as(logits)
    numbers = {}
    for head in range(HEADS):
        rows = zip(logits[:, head].flatten(0, 1), keep[:, head].flatten(0, 1), strict=True)
        rows = [row[keys] for row, keys in rows if keys.any()]
        entropy = sum(torch.special.entr(row.softmax(-1)).sum().item() for row in rows)
        numbers[f"vital/encoder.0.head{head}/logit_max"] = max(row.max().item() for row in rows)
        numbers[f"vital/encoder.0.head{head}/entropy"] = entropy / sum(
            math.log(len(row)) for row in rows
        )
    return numbers


def monitored(model, *inputs):
    with Monitor(model, every=1, weights=False) as monitor:
        model(*inputs)
        numbers = monitor.step()
    return {name: numbers[name] for name in numbers if name.endswith(("/logit_max", "/entropy"))}


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("way", WAYS)
def test_counts_and_maxima_are_those_of_open_keys(way, kind, left, causal):
    if way.endswith("before_scaling") and kind == "-1e4" and left and causal:
        pytest.skip("a row that is masked as a whole by more than -5,000 is even, as in the model")
    torch.manual_seed(0)
    model = Attention(way)
    x = batch()
    keep = open_keys(left, causal)
    expected = expected_numbers(model, x, keep)
    numbers = monitored(model, x, mask_of(keep, kind))
    assert numbers == pytest.approx(expected, rel=1e-4)

    noted_calls = []
    watcher = AttentionWatcher(
        model, find_roles(model).attention, lambda _, calls: noted_calls.extend(calls)
    )
    model(x, mask_of(keep, kind))
    watcher.remove()
    ((call, output),) = noted_calls
    largest = [expected[f"vital/encoder.0.head{head}/logit_max"] for head in range(HEADS)]
    assert largest_logits(call, output).tolist() == pytest.approx(largest, rel=1e-4)
    closed = ~keep.expand_as(call.logits())
    assert torch.equal(call.logits().isneginf(), closed)


@pytest.mark.parametrize("kind", MASKED)
def test_roles_see_a_causal_mask_of_any_number(kind):
    torch.manual_seed(0)
    model = Attention("sdpa")
    for causal, stack in ((True, "decoder"), (False, "encoder")):
        mask = mask_of(
            open_keys(left=False, causal=causal).roll(TOKENS - REAL, -1)
            if not causal
            else torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril(),
            kind,
        )
        (role,) = find_roles(model, (batch(), mask)).attention
        assert role.stack == stack


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("way", WAYS)
def test_qk_clip_takes_every_mask(way, kind):
    """Its trial scales heads: closed keys need not follow."""
    torch.manual_seed(0)
    model = Attention(way)
    x = batch()
    keep = open_keys(left=False, causal=True)
    mask = mask_of(keep, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = constrain_(model, optimizer, to="logits", bound=0.01, batch=(x, mask))
    largest = max(
        value for name, value in expected_numbers(model, x, keep).items() if "max" in name
    )
    model(x, mask).square().mean().backward()
    optimizer.step()
    assert handle.error().worst == pytest.approx(largest / 0.01 - 1, rel=1e-4)


def test_qk_clip_still_refuses_a_bias_that_closes_nothing():
    x = batch()
    places = torch.arange(TOKENS)
    bias = -20.0 * (places[:, None] - places).abs().float()
    model = Attention("eager")
    with pytest.raises(ConfigError, match="does not scale its logits"):
        constrain_(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            to="logits",
            bound=1.0,
            batch=(x, bias),
        )


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_sharp_attention_is_no_mask(way):
    """Differences above 104 leave keys without weight in float32, and no mask closes them."""
    torch.manual_seed(0)
    model = Attention(way)
    x = 7 * batch()
    q, k, _ = model.heads(x)
    logits = q @ k.mT / 2
    assert 104 < (logits.amax(-1) - logits.amin(-1)).max() < 700
    keep = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    for mask in (None, torch.zeros(TOKENS, TOKENS)):
        assert monitored(model, x, mask) == pytest.approx(
            expected_numbers(model, x, keep), rel=1e-3
        )


def test_logits_of_minus_6000_without_a_mask_are_no_mask():
    model = Attention("sdpa")
    x = torch.ones(1, 3, WIDTH)
    with torch.no_grad():
        model.q_proj.weight.fill_(-10.0)
        model.k_proj.weight.fill_(10.0)
    keep = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert monitored(model, x) == pytest.approx(expected_numbers(model, x, keep), rel=1e-4)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_nan_is_noticed(way):
    torch.manual_seed(0)
    model = Attention(way)
    x = batch()
    noted_calls = []
    watcher = AttentionWatcher(
        model, find_roles(model).attention, lambda _, calls: noted_calls.extend(calls)
    )
    model(
        x.index_fill(1, torch.tensor(0), math.nan),
        mask_of(open_keys(left=False, causal=False), "-1e4"),
    )
    watcher.remove()
    ((call, output),) = noted_calls
    assert call.weights().isnan().any(-1).all()
    assert largest_logits(call, output).isnan().all()


def test_a_limit_is_that_of_the_softmax():
    """At the limit a weight is zero, a little above it is not."""
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[0.0, 0.0]], dtype=dtype)
        limit = mask_limit(logits, dtype)
        for offset, is_zero in ((-0.1, True), (1.5, False)):
            row = torch.cat([logits[:, :1], limit + offset], -1)
            assert bool((row.softmax(-1)[0, 1] == 0.0) == is_zero)


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "codegen": CodeGenConfig(vocab_size=30, n_embd=16, n_layer=1, n_head=4, rotary_dim=4, n_ctx=32),
    "gpt2": GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2),
    "opt": OPTConfig(ffn_dim=16, word_embed_proj_dim=16, **SIZES),
    "llama": LlamaConfig(intermediate_size=16, num_key_value_heads=2, **SIZES),
}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_of_a_family_are_those_of_its_weights(family, left):
    """The share of entropy, from the weights that the model itself returns."""
    torch.manual_seed(0)
    model = AutoModel.from_config(FAMILIES[family])
    if family != "codegen":
        model.set_attn_implementation("eager")
    model.eval()
    keep = open_keys(left, causal=True)
    real = keep[0, 0, -1].long()[None]
    inputs = {"input_ids": torch.randint(3, 30, (1, TOKENS)), "attention_mask": real}
    with Monitor(model, every=1, weights=False) as monitor:
        (weights,) = model(**inputs, output_attentions=True).attentions
        numbers = monitor.step()
    stack = next(name for name in numbers if name.endswith("head0/entropy")).partition(".head0")[0]
    rows = keep[0, 0].any(-1)
    for head, of_head in enumerate(weights[0].detach().double()):
        entropy = torch.special.entr(of_head[rows]).sum()
        most = keep[0, 0][rows].sum(-1).double().log().sum()
        assert numbers[f"{stack}.head{head}/entropy"] == pytest.approx(
            (entropy / most).item(), rel=1e-4
        )


KEY_PADDING = {
    "none": None,
    "bool": torch.tensor([[False] * 6 + [True] * 2, [True] * 3 + [False] * 5]),
    "finite": torch.linspace(-3.0, 1.0, 2 * TOKENS).view(2, TOKENS),
    "mixed": torch.tensor(
        [[0.0, -1.5, 0.0, 2.0, -0.5, 0.0, -math.inf, -math.inf], [-1e9, -1e4, *[0.5] * 6]]
    ),
}
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
ATTENTION_MASKS = {
    "none": None,
    "bool": CAUSAL,
    "float": torch.zeros(TOKENS, TOKENS).masked_fill(CAUSAL, -math.inf),
    "by head": torch.randn(4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)),
}


def weights_of_torch(module, x, **masks):
    """Return torch's own weights, and the call that hooks see."""
    noted_calls = []
    role = find_roles(module, (x, x, x), run=False).attention
    watcher = AttentionWatcher(module, role, lambda _, calls: noted_calls.extend(calls))
    _, weights = module(x, x, x, average_attn_weights=False, **masks)
    watcher.remove()
    ((call, _),) = noted_calls
    return weights, call


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("attention", ATTENTION_MASKS)
@pytest.mark.parametrize("padding", KEY_PADDING)
def test_each_mask_of_torch_counts_as_in_its_own_weights(padding, attention):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    x = torch.randn(2, TOKENS, WIDTH)
    masks = {"key_padding_mask": KEY_PADDING[padding], "attn_mask": ATTENTION_MASKS[attention]}
    weights, call = weights_of_torch(module, x, **masks)
    assert isinstance(call, MultiheadCall)
    ours = call.scaled().weights()
    # A row without an open key has no weights here, and even ones or NaN there.
    has_key = ~ours.isnan().any(-1, keepdim=True)
    assert has_key.float().mean() > 0.5
    torch.testing.assert_close(ours.where(has_key, 0.0), weights.where(has_key, 0.0))


@pytest.mark.parametrize("kind", ["bool", "finite"])
def test_unbatched_padding_of_torch_counts(kind):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, 2)
    weights, call = weights_of_torch(
        module, torch.randn(TOKENS, WIDTH), key_padding_mask=KEY_PADDING[kind][0]
    )
    torch.testing.assert_close(call.scaled().weights()[0], weights)


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(way, mask, verb):
    torch.manual_seed(0)
    model = Attention(way)
    x = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, every=1, weights=False) if verb == "Monitor" else None
    if verb == "logits":
        constrain_(model, optimizer, to="logits", bound=1.0, batch=(x, mask))
    for _ in range(3):
        with Launches() as counted:
            model(x, mask).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step()
    return counted.count


MOST = {
    ("Monitor", "sdpa"): {"none": 63, "bool": 68, "-1e4": 67},
    ("Monitor", "eager"): {"none": 56, "bool": 56, "-1e4": 56},
    ("logits", "sdpa"): {"none": 48, "bool": 51, "-1e4": 51},
    ("logits", "eager"): {"none": 46, "bool": 46, "-1e4": 46},
}
"""Launches that a verb adds to a step of one layer: not more than a fixed threshold took."""


@pytest.mark.parametrize(("verb", "way"), MOST)
def test_a_mask_costs_no_launch_more_than_a_threshold_did(verb, way):
    keep = open_keys(left=False, causal=True)
    masks = {"none": None, "bool": keep, "-1e4": mask_of(keep, "-1e4")}
    added = {
        kind: launches(way, mask, verb) - launches(way, mask, None) for kind, mask in masks.items()
    }
    assert all(added[kind] <= most for kind, most in MOST[verb, way].items()), added
