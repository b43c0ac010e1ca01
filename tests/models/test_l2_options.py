"""The options of the Lipschitz attentions: each reaches its layer, and a model that does not read
it refuses it."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import refused
from tests.support.tiny import options

from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import CosineSelfAttention, L2SelfAttention

SIZES = options(
    "hidden_size=16 num_attention_heads=2 num_hidden_layers=1 max_position_embeddings=12"
)


def attention(**changes):
    torch.manual_seed(0)
    return WellposedModel(WellposedConfig(**SIZES, **changes)).layers[0].attention


def test_contractive_and_its_norm_reach_the_layer_and_hold():
    for norm, expected in (("tok", "tok"), ("inf", "inf"), ("2", 2)):
        layer = attention(attention="l2_contractive", contractive=0.37, lipschitz_norm=norm)
        assert isinstance(layer, L2SelfAttention)
        assert (layer.contractive, layer.norm, layer.max_tokens) == (0.37, expected, 12)
        certificate = certify(layer.eval(), seq_len=12, norm=layer.norm)
        assert 0 < certificate.total <= 0.37
        x = torch.randn(4, 12, 16)
        y = x + 1e-3 * torch.randn_like(x)
        moved, change = layer(x) - layer(y), x - y
        size = {
            "tok": lambda t: t.norm(dim=-1).amax(-1),
            "inf": lambda t: t.abs().flatten(1).amax(-1),
        }.get(norm, lambda t: t.flatten(1).norm(dim=-1))
        assert bool((size(moved) <= 0.37 * size(change) * (1 + 1e-3)).all())
    assert attention(attention="l2_contractive").contractive == 0.9


@pytest.mark.parametrize("name", ["l2", "l2_tied", "l2_contractive"])
def test_query_width_gives_the_tied_layer_the_size_of_the_untied_one(name):
    one, two = attention(attention=name), attention(attention=name, query_width=2)
    assert two.q_proj.weight.shape == (2 * one.q_proj.weight.shape[0], 16)
    if name == "l2_tied":
        size = sum(parameter.numel() for parameter in two.parameters())
        assert size == sum(
            parameter.numel() for parameter in attention(attention="l2").parameters()
        )


def test_cosine_eps_reaches_the_layer_and_its_bound():
    layers = [attention(attention="cosine", cosine_eps=eps).eval() for eps in (0.01, 0.04)]
    assert [layer.eps for layer in layers if isinstance(layer, CosineSelfAttention)] == [0.01, 0.04]
    totals = [certify(layer, seq_len=12).total for layer in layers]
    # The bound is proportional to eps^-1/2 (theory note B6).
    assert totals[0] / totals[1] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(None, 2.0**-4), (0.5, 0.5)])
@pytest.mark.parametrize("name", ["l2", "l2_tied", "l2_contractive"])
def test_init_kim2021_draws_from_the_scale_and_leaves_the_rest_to_xavier(name, scale, expected):
    options = {} if scale is None else {"l2_init_scale": scale}
    model = WellposedModel(WellposedConfig(**SIZES, attention=name, init="kim2021", **options))
    bound = expected / math.sqrt(16)
    layer = model.layers[0]
    for projection in (layer.attention.q_proj, layer.attention.v_proj, layer.attention.o_proj):
        largest = float(projection.weight.detach().abs().max())
        assert 0.9 * bound < largest <= bound
    glorot = math.sqrt(6 / (16 + 64))
    assert 0.9 * glorot < float(layer.feedforward.up_proj.weight.detach().abs().max()) <= glorot


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_nothing_in_norm_2_whose_bound_depends_on_the_mask(is_causal):
    options = {"attention": "l2_contractive", "lipschitz_norm": "2", "is_causal": is_causal}
    model = WellposedModel(WellposedConfig(**SIZES, **options)).double().eval()
    alone = model(input_ids=torch.tensor([[3, 1, 4]])).last_hidden_state
    ids, mask = torch.tensor([[0, 3, 1, 4, 0]]), torch.tensor([[0, 1, 1, 1, 0]])
    padded = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 1:4]
    within(padded, alone, 1e-11)


READ = "contractive: received 0.5, which only attention 'l2_contractive' reads"
SCALE = "l2_init_scale: received 0.5, which only"
UNREAD = [
    ("contractive=0.5", READ),
    ("contractive=0.5 attention=l2_tied", "contractive: received 0.5"),
    ("lipschitz_norm=inf attention=l2", "lipschitz_norm: received 'inf'"),
    ("query_width=2", "received 2, which only attention 'l2' or 'l2_tied' or 'l2_contractive'"),
    ("cosine_eps=0.5 attention=l2_tied", "received 0.5, which only attention 'cosine' reads"),
    ("l2_init_scale=0.5 attention=l2", f"{SCALE} init 'kim2021' reads"),
    ("l2_init_scale=0.5 init=kim2021", f"{SCALE} attention 'l2' or"),
]


@pytest.mark.parametrize(("given", "part"), UNREAD)
def test_an_option_that_nothing_reads_is_refused(given, part):
    with refused(part, "leave it", kind=ConfigError):
        WellposedConfig(**SIZES, **options(given))
