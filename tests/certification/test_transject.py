"""TransJect: no attack beats its bounds; both statements of B8 computed by hand."""

import math

import pytest
import torch
from tests.support.certificates import rows
from tests.support.transject import Adapter
from torch import nn

from wellposed.certification import certify
from wellposed.errors import NotLipschitzError
from wellposed.nn import OrthogonalFeedForward, TransJectStack

D = 4
L = 2
N = 4


def make(alpha=0.9, **options):
    torch.manual_seed(3)
    stack = TransJectStack(D, L, **options).double().eval()
    with torch.no_grad():
        for layer in stack.layers:
            layer.residual.weight.fill_(math.atanh(alpha))
    return stack


CERTIFIED = [
    {"spectrum_norm": "trace"},
    {"spectrum_norm": "max"},
    {"spectrum": "random"},
    {"spectrum_norm": "trace", "num_experts": 2, "gating": "normalized"},
]


def name_of(options):
    return "-".join(map(str, options.values()))


FOLLOWS = {"spectrum": "random", "num_experts": 2, "gating": "normalized"}


@pytest.mark.parametrize("norm", ["tok", 2])
@pytest.mark.parametrize("options", [CERTIFIED[0], CERTIFIED[1], FOLLOWS], ids=name_of)
def test_padded_outputs_are_left_out_and_the_table_says_so(options, norm):
    stack = make(alpha=0.97, **options)
    for layer in stack.layers:
        if "num_experts" in options:
            layer.attention.gate.weight.data.mul_(4)
    certificate = certify(stack, seq_len=2, norm=norm)
    x = torch.randn(1, 2, D, dtype=torch.float64)
    moved = torch.zeros(1, 2, D, dtype=torch.float64)
    x[0, 1] *= 1e4
    moved[0, 0] = 1e-4 * torch.randn(D, dtype=torch.float64)
    padding = torch.tensor([[False, True]])
    both = stack(torch.cat([x, x + moved]), key_padding_mask=padding.expand(2, -1))
    first, second = both.last_hidden_state
    change = (second - first).norm(dim=-1)[None] / moved.norm()
    assert change[0, 0] <= certificate.total < change[0, 1]
    (note,) = certificate.notes
    assert "padded positions are not covered" in note
    for certified in (certificate, certify(nn.Sequential(stack), seq_len=2, norm=norm)):
        assert certified.table().count(note) == 1
    assert certificate.to_dict()["notes"] == [note]


def test_where_nothing_follows_the_input_padding_is_bounded_too():
    assert certify(make(spectrum="random"), seq_len=N).notes == ()
    two = nn.Sequential(make(spectrum_norm="trace"), make(spectrum_norm="trace"))
    assert certify(two, seq_len=N).table().count("not covered") == 1


WRAPPED = ["layers.0.attention.experts.0.left", "layers.1.feedforward.up_proj"]


@pytest.mark.parametrize("part", WRAPPED)
@pytest.mark.parametrize("wrapper", ["adapter", "forward"])
def test_a_part_that_is_wrapped_has_no_bound_by_its_weights(part, wrapper):
    stack = make(spectrum="random")
    parent, _, name = part.rpartition(".")
    wrapped = stack.get_submodule(part)
    if wrapper == "adapter":
        setattr(stack.get_submodule(parent), name, Adapter(wrapped))
    else:
        wrapped.forward = lambda x: 100 * x
    reasons = {"adapter": "weights do not say what it computes", "forward": "was replaced"}
    with pytest.raises(NotLipschitzError, match=rf"{part}.*{reasons[wrapper]}"):
        certify(stack, seq_len=N).require()


TURN = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)


def stack(**options):
    """Steps r are 0.4 and 0.2 (the second negative); |U||V| 3 and 2.5; |W1||W2| 1.5 and 2."""
    module = TransJectStack(2, 2, **options).double().eval()
    experts = options.get("num_experts", 1)
    norms = [((1.5, 2.0), (0.5, 3.0)), ((0.5, 5.0), (1.0, 2.0))]
    with torch.no_grad():
        layers = zip(module.layers, (0.8, -0.4), norms, strict=True)
        for layer, alpha, ((left, right), (up, down)) in layers:
            layer.residual.weight.fill_(math.atanh(alpha))
            # The last expert has the largest product, the others have 1.
            for index, expert in enumerate(layer.attention.experts):
                is_last = index == experts - 1
                expert.left.weight.copy_(TURN * (left if is_last else 1.0))
                expert.right.weight.copy_(TURN * (right if is_last else 1.0))
            layer.feedforward.up_proj.weight.copy_(up * TURN)
            layer.feedforward.down_proj.weight.copy_(down * TURN)
    return module


def with_gates(first, second):
    module = stack(spectrum_norm="trace", num_experts=2, gating="normalized")
    with torch.no_grad():
        for layer, weight in zip(module.layers, (first, second), strict=True):
            layer.attention.gate.weight.copy_(torch.tensor([weight]))
    return module


def test_one_expert_whose_sigma_is_a_trace():
    """With b = r |U||V| and f = r |W1||W2|: |X| grows by (1 + b)(1 + f); |dX| too, plus b |X|
    before f."""
    # Growth: 2.2 x 1.6 = 3.52. First |dX|: (2.2 + 1.2) x 1.6 = 5.44. In norm tok, with sqrt N = 2:
    # (2.2 + 2 x 1.2) x 1.6 = 7.36. Second: 1.5 x 5.44 + 0.5 x 3.52 = 9.92, times 1.4. In norm tok:
    # 1.5 x 7.36 + 2 x 0.5 x 3.52 = 14.56.
    module = stack(spectrum_norm="trace")
    for norm, first, total in ((2, 5.44, 9.92 * 1.4), ("tok", 7.36, 14.56 * 1.4)):
        certificate = certify(module, seq_len=4, norm=norm)
        assert certificate.total == pytest.approx(total, rel=1e-5)
        assert [layer.path for layer in certificate.layers] == ["layers.0", "layers.1"]
        factors = [layer.lipschitz for layer in certificate.layers]
        assert factors == pytest.approx([first, total / first], rel=1e-5)


def test_the_spread_of_sigma_multiplies_what_the_second_term_adds():
    """k = 2 sqrt(2 d) = 4 for the maximum; for an inexact basis 1 by its condition, sqrt((1 +
    0.6)/(1 - 0.6)) = 2."""
    inexact = stack(spectrum_norm="trace")
    with torch.no_grad():
        inexact.spectrum.basis.weight.copy_(math.sqrt(1.6) * TURN)
    for module, spread in ((stack(spectrum_norm="max"), 4.0), (inexact, 2.0)):
        first = (2.2 + 1.2 * spread) * 1.6
        second = (1.5 * first + 0.5 * spread * 3.52) * 1.4
        assert certify(module, seq_len=4, norm=2).total == pytest.approx(second, rel=1e-5)


def test_gates_that_follow_the_input():
    """|w| = 5, then 1/2: gates add b |w| (2 (1 + b) |dX| + b |X|) to b |X|."""
    # First gates: 1.2 x 5 x (2 x 2.2 + 1.2) = 33.6, so |dX| <= 2.2 + 1.2 + 33.6 = 37. In tok: (2.2
    # + 2 x 34.8 = 71.8) x 1.6. Second gates: 0.5 x 0.5 x (2 x 1.5 x 59.2 + 1.76) = 44.84. So 88.8 +
    # 1.76 + 44.84 = 135.4, times 1.4. In tok: 1.5 x 114.88 + 2 x 46.6 = 265.52, times 1.4.
    module = with_gates((3.0, 4.0), (0.3, -0.4))
    assert certify(module, seq_len=4, norm=2).total == pytest.approx(189.56, rel=1e-5)
    assert certify(module, seq_len=4, norm="tok").total == pytest.approx(371.728, rel=1e-5)
    # One token, and constant gates: the bound of one expert.
    silent = with_gates((0.0, 0.0), (0.0, 0.0))
    for norm in (2, "tok"):
        assert certify(silent, seq_len=1, norm=norm).total == pytest.approx(9.92 * 1.4, rel=1e-5)


def test_a_learnt_sigma_adds_nothing_and_its_largest_entry_counts():
    module = stack(spectrum="random")
    with torch.no_grad():
        module.spectrum.weight.copy_(torch.tensor([-math.atanh(0.5), math.atanh(0.25)]))
    expected = (1 + 1.2 * 0.5) * 1.6 * (1 + 0.5 * 0.5) * 1.4
    for norm in (2, "tok"):
        certificate = certify(module, seq_len=4, norm=norm)
        assert certificate.total == pytest.approx(expected, rel=1e-5)
        assert certificate.notes == ()


def test_the_room_that_tokens_need_grows_with_the_stack():
    """Tokens of norm 0.5 leave with at most 0.5 times the growth, (2.2 x 1.6)(1.5 x 1.4), which is
    the next part's ball."""
    model = nn.Sequential(stack(spectrum_norm="trace"), nn.Linear(2, 2).double())
    assert rows(model, radius=0.5)["1"].radius == pytest.approx(0.5 * 3.52 * 2.1, rel=1e-5)
    forward = OrthogonalFeedForward(2).double().eval()
    with torch.no_grad():
        forward.up_proj.weight.copy_(0.5 * TURN)
        forward.down_proj.weight.copy_(8.0 * TURN)
    by_path = rows(nn.Sequential(forward, nn.Linear(2, 2).double()), radius=0.5)
    assert by_path["0"].lipschitz == pytest.approx(4.0, rel=1e-5)
    assert by_path["1"].radius == pytest.approx(2.0, rel=1e-5)
    up = float(torch.linalg.matrix_norm(forward.up_proj.weight.detach(), 2))
    assert by_path["0.down_proj"].radius == pytest.approx(0.5 * up, rel=1e-5)


def test_biases_of_the_feedforward_cost_nothing_but_the_ball_beside_a_fixed_spectrum():
    plain, biased = (stack(spectrum="random", feedforward_bias=has) for has in (False, True))
    after = nn.Linear(2, 2).double()
    with torch.no_grad():
        biased.spectrum.weight.copy_(plain.spectrum.weight)
        for layer in biased.layers:
            layer.feedforward.up_proj.bias.fill_(3.0)
    ways = [rows(nn.Sequential(module, after), radius=0.5) for module in (plain, biased)]
    assert ways[0]["0"].lipschitz == ways[1]["0"].lipschitz
    assert ways[0]["1"].radius < ways[1]["1"].radius == math.inf
    for options in ({}, {"spectrum": "random", "num_experts": 2, "gating": "normalized"}):
        certificate = certify(stack(feedforward_bias=True, **options), seq_len=4)
        with pytest.raises(NotLipschitzError, match="feedforward_bias has a bound with"):
            certificate.require()


@pytest.mark.parametrize("follower", [0, 1])
def test_one_layer_with_gates_that_follow_the_input_is_enough(follower):
    """Padding is not covered; causal stacks are refused, and pooled gates in any layer."""
    for gating in ("normalized", "pooled"):
        module = stack(spectrum="random")
        donor = stack(spectrum="random", num_experts=2, gating=gating)
        module.layers[follower] = donor.layers[follower]
        certificate = certify(module, seq_len=4)
        if gating == "pooled":
            with pytest.raises(NotLipschitzError, match="pooled gates"):
                certificate.require()
            continue
        assert len(certificate.notes) == 1
        module.is_causal = True
        with pytest.raises(NotLipschitzError, match="causal"):
            certify(module, seq_len=4).require()


def test_dropout_in_one_layer_alone_is_seen():
    module = stack(spectrum="random").train()
    assert certify(module, seq_len=4).label == "certified"
    module.layers[1].feedforward.dropout = 0.1
    with pytest.raises(NotLipschitzError, match="dropout"):
        certify(module, seq_len=4).require()
    module.eval().layers[1].feedforward.train()
    assert math.isinf(certify(module, seq_len=4).total)


def test_a_basis_whose_gram_matrix_is_off_by_one_has_no_condition():
    module = stack(spectrum_norm="trace")
    for scale, is_refused in ((math.sqrt(1.99), False), (math.sqrt(2.0), True)):
        with torch.no_grad():
            module.spectrum.basis.weight.copy_(scale * TURN)
        if is_refused:
            with pytest.raises(NotLipschitzError, match=r"\*\.basis"):
                certify(module, seq_len=4).require()
        else:
            assert math.isfinite(certify(module, seq_len=4).total)
