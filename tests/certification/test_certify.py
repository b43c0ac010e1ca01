"""certify: composition, tables, radii, refusals, and extensions."""

import copy
import json
import math
import re
from functools import partial

import pytest
import torch
from tests.support.layers import plain_stack, stack_config
from tests.support.multipliers import vertices
from torch import nn

from wellposed.certification import LayerBound, certify, inherit_rule, register_rule
from wellposed.certification.bounds import Matrix, Slopes, network_of, tightest_bound
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.linalg import L2Layer, certified_spectral_norm, l2_constants
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import Block, InvertibleResidual, L2SelfAttention
from wellposed.nn.attention import UnitWeights

NORMS = ("tok", "inf", 2)


_config = partial(stack_config, attention="l2_tied", norm="none", dropout=0.1, layer_norm_eps=0.1)


@pytest.mark.parametrize("norm", NORMS)
def test_composition_is_the_product_written_by_hand(norm):
    net = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3)).eval()
    certificate = certify(net, seq_len=5, norm=norm)
    size = partial(torch.linalg.matrix_norm, ord=math.inf if norm == "inf" else 2)
    first, last = (net[index].weight.detach().double() for index in (0, 3))
    by_hand = float(size(first) * 1.128905 * size(last))
    if norm == "inf":
        assert certificate.total == pytest.approx(by_hand, rel=3e-6)
        assert certificate.total >= by_hand * (1 - 1e-12)
    else:
        # Below the product by multipliers, and above every choice of slopes.
        made = network_of([Matrix(first), Slopes(-0.128905, 1.128905), Matrix(last)])
        assert max(vertices(made, 0.0)) <= certificate.total < 0.98 * by_hand
        assert certificate.form == "multipliers (B18)"
        assert "multipliers (B18)" in certificate.table()
    assert certificate.label == "certified"
    assert [layer.path for layer in certificate.layers] == ["0", "1", "3"]
    assert [layer.label for layer in certificate.layers] == ["exact"] * 3


def test_residuals_and_norm_placements_by_hand():
    """pre: 1 + LN f; post: LN (1 + f); rezero: 1 + |a| f; with f from the children's own
    certificates."""
    gain = 1 / math.sqrt(0.1)
    for norm, before, after in (("none", 1, 1), ("pre", gain, 1), ("post", 1, gain)):
        block = Block(_config(norm=norm)).eval()
        parts = (block, block.attention, block.feedforward)
        total, attention, feedforward = (certify(part, seq_len=9).total for part in parts)
        first = (1 + before * attention) * after
        assert total <= first * (1 + before * feedforward) * after
        if norm != "pre":
            # The skip is inside the bound of the feed-forward.
            up = block.feedforward.up_proj
            down = block.feedforward.down_proj
            links = [Matrix(up.weight), Slopes(-0.128905, 1.128905), Matrix(down.weight)]
            inside = tightest_bound(links, 1.0, 1.0)
            assert total == pytest.approx(first * inside.value * after, rel=1e-9)
            assert f"{inside.form} with the skip" in certify(block, seq_len=9).table()
    block = Block(_config(residual="rezero")).eval()
    assert certify(block, seq_len=9).total == 1.0
    block.attention_residual.scale.data.fill_(-0.5)
    attention = certify(block.attention, seq_len=9).total
    assert certify(block, seq_len=9).total == pytest.approx(1 + 0.5 * attention, rel=1e-9)


def test_a_branch_scaled_by_zero_needs_no_bound():
    block = Block(_config(residual="rezero", attention="dot_product")).eval()
    certificate = certify(block, seq_len=4)
    assert certificate.total == 1.0
    assert certificate.label == "certified"
    assert certificate.layers[0].label == "uncertified"


def test_the_kim_bracket_is_in_the_l2_bound():
    attention = L2SelfAttention(4, 1, bias=False).eval()
    with torch.no_grad():
        attention.q_proj.weight.copy_(torch.eye(4))
        attention.v_proj.weight.copy_(2 * torch.eye(4))  # R = W^T W_V / 2
        attention.o_proj.weight.copy_(torch.eye(4))
    for norm in NORMS:
        expected = l2_constants(512).bracket(norm, head_dim=4)
        assert certify(attention, seq_len=512, norm=norm).total == pytest.approx(expected, rel=5e-6)
    for mask in ("full", "causal", "any"):
        certificate = certify(attention, seq_len=512, norm=2, mask=mask)
        assert certificate.total == pytest.approx(l2_constants(512, mask=mask).bracket(2), rel=5e-6)
        assert certificate.mask == mask


def _body(*, is_causal):
    config = WellposedConfig(is_causal=is_causal, hidden_size=8, num_attention_heads=2)
    return WellposedModel(config).eval()


def test_the_stack_fixes_the_mask_unless_told_otherwise():
    encoder, decoder = (_body(is_causal=causal) for causal in (False, True))
    assert certify(encoder, seq_len=4).mask == "full"
    assert certify(decoder, seq_len=4).mask == "causal"
    assert certify(decoder, seq_len=4, mask="any").mask == "any"


@pytest.mark.parametrize(("is_causal", "asked"), [(True, "full"), (False, "causal")])
def test_a_mask_that_the_module_does_not_run_is_refused(is_causal, asked):
    """With mask="full" a causal stack was once certified 1.6 times too small in norm 2."""
    stack = _body(is_causal=is_causal)
    runs = "causal" if is_causal else "full"
    with pytest.raises(ConfigError, match=f"mask='{asked}', but the module runs {runs}"):
        certify(stack, seq_len=8, norm=2, radius=1.0, mask=asked)


def test_dot_product_needs_a_ball_and_says_so():
    stack = plain_stack(**_config(attention="dot_product").__dict__).eval()
    certificate = certify(stack, seq_len=6)
    assert certificate.total == math.inf
    assert certificate.label == "uncertified"
    refused = [f"layers.{index}.attention" for index in range(2)]
    assert [layer.path for layer in certificate.uncertified] == refused
    message = r"layers\.1\.attention \(DotProductAttention\).*pass radius="
    with pytest.raises(NotLipschitzError, match=message):
        certificate.require()
    ball = certify(stack, seq_len=6, radius=1.5)
    assert ball.require() is ball
    assert ball.label == "certified"
    assert ball.domain == "tokens with |x_i| <= 1.5"
    radii = [layer.radius for layer in ball.layers]
    assert radii[0] == 1.5
    assert max(radii) > 1.5, "the ball grows through residual layers"


def test_a_module_without_a_rule_is_named():
    certificate = certify(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.LSTM(3, 3))), seq_len=2)
    assert certificate.label == "uncertified"
    (layer,) = certificate.uncertified
    assert layer.path == "1.0"
    assert "torch.nn.modules.rnn.LSTM" in layer.reason
    assert "register_rule" in layer.reason
    assert "1.0 (LSTM)" in certificate.table()
    assert float(certificate.radius(torch.tensor([3.0, 1.0]))) == 0.0


def test_a_compiled_module_with_another_forward_is_refused():
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    assert certify(compiled, seq_len=1).label == "exact"
    compiled.forward = lambda x: 1e6 * x
    assert "OptimizedModule" in certify(compiled, seq_len=1).uncertified[0].reason


def test_a_rule_is_for_its_very_class_and_the_last_one_wins():
    class Twice(nn.Linear):
        pass

    (layer,) = certify(nn.Sequential(Twice(2, 2)), seq_len=1).uncertified
    assert "Twice is a subclass of Linear and may compute something else" in layer.reason
    inherit_rule(Twice)
    assert certify(Twice(2, 2, bias=False), seq_len=1).label == "exact"

    @register_rule(Twice)
    def rule(module: Twice, site) -> LayerBound:
        return LayerBound(site.operator_norm(module.weight), "measured", "empirical")

    twice = Twice(2, 2)
    assert certify(nn.Sequential(twice, nn.ReLU()), seq_len=1).label == "empirical"
    assert certify(twice, seq_len=1).total == float(certified_spectral_norm(twice.weight.detach()))
    for kind in (int, "torch.nn.Linear"):
        with pytest.raises(ConfigError, match="subclass"):
            register_rule(kind)


def test_a_rule_is_not_inherited_by_a_class_with_another_forward():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ConfigError, match="its forward is not Linear's"):
        inherit_rule(Doubled)
    with pytest.raises(ConfigError, match="none of its ancestors has a rule"):
        inherit_rule(nn.Conv1d)


def test_a_bound_that_was_vouched_for_is_called_empirical():
    block = InvertibleResidual(nn.LSTM(2, 2), lipschitz=0.4)
    certificate = certify(block, seq_len=3)
    assert certificate.total == pytest.approx(1.4)
    assert certificate.label == "empirical"
    assert certify(block, seq_len=3, norm=2).total == math.inf


def test_a_rule_that_returns_nonsense_is_refused():
    class Odd(nn.Module):
        pass

    register_rule(Odd)(lambda module, site: LayerBound(math.nan, "nonsense"))
    with pytest.raises(ConfigError, match=r"certify: 1 \(Odd\): a rule returned .* nan"):
        certify(nn.Sequential(nn.ReLU(), Odd()), seq_len=1)


@pytest.mark.parametrize("attention", ["l2_tied", "l2_contractive", "dot_product", "cosine"])
def test_zero_weights_give_a_finite_certificate(attention):
    block = Block(_config(attention=attention)).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    certificate = certify(block, seq_len=8, radius=1.0)
    assert 1.0 <= certificate.total < 1.9 * 1.9 + 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weights_are_all_named(bad):
    stack = plain_stack(**_config().__dict__).eval()
    stack.layers[0].feedforward.up_proj.weight.data[0, 0] = bad
    stack.layers[1].attention.q_proj.bias.data[1] = bad
    with pytest.raises(NotLipschitzError) as caught:
        certify(stack, seq_len=4)
    assert "layers.0.feedforward.up_proj.weight (16, 8): 1 of 128" in str(caught.value)
    assert "layers.1.attention.q_proj.bias" in str(caught.value)


def test_half_precision_says_that_rounding_is_not_covered():
    certificate = certify(nn.Linear(4, 4).bfloat16(), seq_len=2)
    assert certificate.dtype == "bfloat16"
    assert "rounding of the half-precision forward pass is not covered" in certificate.table()
    assert not certify(nn.Linear(4, 4), seq_len=2).notes
    byte = nn.Linear(4, 4, bias=False).to(torch.float8_e4m3fn)
    expected = float(certified_spectral_norm(byte.weight.detach()))
    assert certify(byte, seq_len=2).total == pytest.approx(expected, rel=1e-6)


def test_a_contractive_layer_certifies_its_constant_up_to_its_length():
    layer = L2SelfAttention(8, 2, contractive=0.7, max_tokens=10).eval()
    # It divides by the bound of B3, which is up to a fifth above that of B24.
    assert 0.56 < certify(layer, seq_len=10).total < 0.6
    assert math.isfinite(certify(layer, seq_len=10, norm=2).total)
    over = certify(layer, seq_len=11)
    assert over.total == math.inf
    assert "max_tokens=10" in over.uncertified[0].reason


def test_bad_arguments():
    net = nn.Linear(2, 2)
    for changes, error, match in (
        ({"seq_len": 0}, ShapeError, "seq_len"),
        ({"seq_len": 2.0}, ShapeError, "seq_len"),
        ({"seq_len": 2, "min_tokens": 3}, ShapeError, "min_tokens=3"),
        ({"seq_len": 2, "norm": "l2"}, ConfigError, "unknown norm"),
        ({"seq_len": 2, "mask": "casual"}, ConfigError, "nearest: causal"),
        ({"seq_len": 2, "radius": 0.0}, ConfigError, "radius"),
        ({"seq_len": 2, "radius": math.nan}, ConfigError, "radius"),
        ({"seq_len": 2, "radius": "2"}, ConfigError, "radius"),
        ({"seq_ln": 2}, ConfigError, "nearest: seq_len"),
    ):
        with pytest.raises(error, match=match):
            certify(net, **changes)
    with pytest.raises(ConfigError, match=r"from_pretrained\('bert'\)"):
        certify("bert", seq_len=2)


def _linear_certificate(weight, norm):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear, certify(linear, seq_len=1, norm=norm)


def test_radius_is_margin_over_sqrt_two_l_and_cannot_be_beaten():
    """On a linear two-class map sqrt(2) L is exact if the rows are opposite."""
    linear, certificate = _linear_certificate(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 2)
    logits = linear(torch.tensor([[0.5, 3.0]]))
    radius = float(certificate.radius(logits))
    assert radius == pytest.approx(1.0 / (math.sqrt(2) * math.sqrt(2)), rel=1e-5)
    assert radius <= 0.5
    wrong = certificate.radius(logits, torch.tensor([1]))
    assert float(wrong) == 0.0
    both = certificate.radius(torch.stack([logits, -logits]), torch.tensor([[0], [1]]))
    assert both.shape == (2, 1)
    assert torch.allclose(both, torch.full_like(both, radius))


def test_half_precision_l2_weights_are_multiplied_exactly():
    """R_h = W_h^T W_V,h / sqrt d is computed in float64 from the stored weights, not rounded to
    bfloat16."""
    layer = L2SelfAttention(8, 2).eval().bfloat16()
    exact = certify(copy.deepcopy(layer).double(), seq_len=4)
    assert certify(layer, seq_len=4).total == exact.total
    rounded = L2Layer(*layer.head_weights()).bound(l2_constants(4)).value.detach()
    # The rounded product differs, so the test can fail.
    assert abs(float(rounded) / exact.total - 1) > 1e-4


# A vacuous total names the responsible parts, with the numbers of their rows.
def _encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=True, activation=nn.GELU(), **options
    )  # fmt: skip
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_the_kinds_of_parts_are_told_with_what_the_rows_give():
    certificate = certify(_encoder(), seq_len=6)
    assert re.match(r"vacuous \(\S+\): 4 LayerNorm of 316, 2 Multi", certificate.reason)
    assert "parts of the variant lipschitz" in certificate.reason
    assert certificate.table().splitlines()[-1] == certificate.reason
    assert json.loads(json.dumps(certificate.to_dict()))["reason"] == certificate.reason


def test_a_total_that_no_kind_of_part_makes_is_said_to_be_of_no_use():
    identity = nn.Linear(4, 4)
    nn.init.eye_(identity.weight)
    deep = nn.Sequential(*[InvertibleResidual(identity) for _ in range(11)])
    certificate = certify(deep, seq_len=2)
    assert certificate.total == pytest.approx(2**11, rel=1e-4)
    assert certificate.reason.startswith("vacuous (2.05e+03): no kind of layer alone")


def test_a_rule_is_asked_once_and_what_a_layer_divides_by_is_made_once(monkeypatch):
    asked = []
    made = []

    class Counted(nn.Linear):
        pass

    @register_rule(Counted)
    def counted(module: Counted, site) -> LayerBound:
        asked.append(site.path)
        return LayerBound(1.0, "counted", out_radius=site.radius)

    layer = UnitWeights.layer
    monkeypatch.setattr(
        UnitWeights, "layer", lambda weights, method: made.append(method) or layer(weights, method)
    )
    attention = L2SelfAttention(8, 2, contractive=0.9, max_tokens=4)
    model = nn.Sequential(nn.LayerNorm(8, eps=1e-12), Counted(8, 8), attention).eval()
    nn.init.zeros_(model[1].weight)
    certificate = certify(model, seq_len=4)
    assert "1 LayerNorm of" in certificate.reason
    assert certificate.cross_check.startswith("5 pairs through 4 modules")
    assert (asked, sorted(made)) == (["1"], ["cholesky", "gram"])
