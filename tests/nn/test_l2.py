"""`L2SelfAttention` against explicit float64 sums with an N x N weight matrix."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.layers import built, draw, stack_config
from tests.support.refusal import bad_config, bad_shape
from tests.support.tiny import options
from tests.support.words import words

from wellposed.nn import ATTENTIONS, L2SelfAttention, attention_mask

D, H = 8, 2


def reference(layer, x, allowed=None):
    """Heads one at a time, distances one pair at a time. `allowed`: bool, broadcasts to (batch, N,
    N)."""
    state = {name: weight.detach().double() for name, weight in layer.state_dict().items()}
    x = x.double()
    n, d = x.shape[-2], layer.embed_dim // layer.num_heads
    allowed = torch.ones(n, n, dtype=torch.bool) if allowed is None else allowed
    zero = torch.zeros(layer.query_width * layer.embed_dim, dtype=torch.float64)

    def project(name):
        full = x @ state[f"{name}.weight"].T + state.get(
            f"{name}.bias", zero[: len(state[f"{name}.weight"])]
        )
        return list(full.chunk(layer.num_heads, -1))

    queries = project("q_proj")
    keys = queries if layer.tied else project("k_proj")
    heads = []
    for h in range(layer.num_heads):
        logits = -(queries[h][..., :, None, :] - keys[h][..., None, :, :]).square().sum(
            -1
        ) / math.sqrt(d)
        weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
        if layer.values == "plain":
            heads.append(weights @ project("v_proj")[h])
        elif layer.values == "free":
            heads.append(weights @ queries[h] @ state["mix"][h])
        else:
            w_query = state["q_proj.weight"].chunk(layer.num_heads)[h].T
            w_value = state["v_proj.weight"].chunk(layer.num_heads)[h].T
            bias = state.get("v_proj.bias", zero[: layer.embed_dim]).chunk(layer.num_heads)[h]
            heads.append(weights @ queries[h] @ w_query.T @ w_value / math.sqrt(d) + bias)
    return torch.cat(heads, -1) @ state["o_proj.weight"].T + state.get(
        "o_proj.bias", zero[: layer.embed_dim]
    )


def build(**changes):
    return built(L2SelfAttention, D, H, **changes)


def tokens(batch=2, n=6, **how):
    return draw(batch, n, D, **how)


FORMS = [
    *map(options, ["", *words("values=free values=plain tied=False query_width=2 bias=False")]),
    *map(options, ["query_width=2 values=free", "query_width=2 tied=False"]),
]
PADDING = torch.tensor([[False] * 4 + [True] * 2, [True] * 3 + [False] * 3])


def allowed_pairs(padding, is_causal):
    """Real tokens see real tokens (earlier ones where causal), padding sees itself."""
    batch, n = padding.shape
    allowed = torch.zeros(batch, n, n, dtype=torch.bool)
    for b in range(batch):
        for i in range(n):
            for j in range(n):
                both_real = not padding[b, i] and not padding[b, j]
                allowed[b, i, j] = i == j or (both_real and (j <= i or not is_causal))
    return allowed


@pytest.mark.parametrize("form", FORMS)
def test_matches_reference(form):
    layer, x = build(**form), tokens()
    within(layer(x), reference(layer, x), 1e-11)
    causal = torch.ones(6, 6).tril().bool()
    within(layer(x, is_causal=True), reference(layer, x, causal), 1e-11)


@pytest.mark.parametrize("form", [{}, {"values": "free"}, {"tied": False}])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("finished", [False, True])
def test_padding_matches_reference(form, is_causal, finished):
    layer, x = build(**form), tokens()
    mask = attention_mask(PADDING, is_causal, 6, 6, x.device) if finished else PADDING
    out = layer(x, key_padding_mask=mask, is_causal=is_causal)
    within(out, reference(layer, x, allowed_pairs(PADDING, is_causal)), 1e-11)


def test_a_fully_padded_sequence_is_finite_in_both_directions():
    layer, x = build(), tokens().requires_grad_()
    mask = torch.tensor([[True] * 6, [False] * 6])
    for is_causal in (False, True):
        out = layer(x, key_padding_mask=mask, is_causal=is_causal)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert out.isfinite().all()
        assert gradient.isfinite().all()
        within(out, reference(layer, x, allowed_pairs(mask, is_causal)), 1e-11)


ARGUMENTS = (
    "tied=False values=free values=plain query_width=2 bias=False contractive=0.5 dropout=0.4"
    " init_scale=0.1"
)
OF_CONTRACTIONS = "norm=inf norm=2 max_tokens=40"


@pytest.mark.parametrize(
    ("base", "change"),
    [*(("", one) for one in words(ARGUMENTS))]
    + [("contractive=0.5", one) for one in words(OF_CONTRACTIONS)],
)
def test_every_argument_changes_something(base, change):
    outputs = []
    for given in (base, f"{base} {change}"):
        torch.manual_seed(0)
        layer = L2SelfAttention(D, H, **options(given))
        for name, bias in layer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.constant_(bias, 0.5)
        torch.manual_seed(1)
        outputs.append(layer(tokens().float()))
    assert not torch.allclose(outputs[0], outputs[1], rtol=1e-3)


def test_num_heads_changes_the_output():
    outputs = []
    for heads in (1, 2, 4):
        torch.manual_seed(0)
        outputs.append(L2SelfAttention(D, heads)(tokens().float()))
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[1], outputs[2])


@pytest.mark.parametrize("values", ["paper", "free"])
def test_initial_weights(values):
    torch.manual_seed(0)
    glorot = L2SelfAttention(64, 4, values=values)
    scaled = L2SelfAttention(64, 4, values=values, init_scale=0.25)
    limit = math.sqrt(6 / 128)
    assert 0.98 * limit < float(glorot.q_proj.weight.detach().abs().max()) <= limit
    for projection in (scaled.q_proj, scaled.o_proj, scaled.v_proj):
        if projection is not None:
            largest = float(projection.weight.detach().abs().max())
            assert 0.98 * 0.25 / 8 < largest <= 0.25 / 8
            assert not projection.bias.any()


def test_one_token_and_nan():
    layer = build()
    x = tokens(n=1)
    within(layer(x), reference(layer, x), 1e-12)
    x[0, 0, 0] = math.nan
    assert layer(x)[0].isnan().all()
    assert layer(x)[1].isfinite().all()


def test_registered_builders():
    untied, tied, contractive = (
        ATTENTIONS.get(name)(stack_config()) for name in ("l2", "l2_tied", "l2_contractive")
    )
    assert isinstance(untied, L2SelfAttention)
    assert isinstance(tied, L2SelfAttention)
    assert isinstance(contractive, L2SelfAttention)
    assert (untied.tied, tied.tied, tied.contractive) == (False, True, None)
    assert (contractive.contractive, contractive.norm, contractive.max_tokens) == (0.9, "tok", 16)
    other = ATTENTIONS.get("l2_contractive")(stack_config(contractive=0.5, lipschitz_norm="inf"))
    assert isinstance(other, L2SelfAttention)
    assert (other.contractive, other.norm) == (0.5, "inf")
    with bad_config(match="qk_norm"):
        ATTENTIONS.get("l2_tied")(stack_config(qk_norm=True))


def test_bad_options_are_named():
    with bad_config(match="values='paper' with tied=False"):
        L2SelfAttention(8, 2, tied=False, values="paper")
    with bad_shape(match="padding"):
        build()(tokens(), key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
