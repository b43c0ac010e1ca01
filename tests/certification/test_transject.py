"""TransJect's certificates: the whole map against an attack, distances between tokens, and what is
refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wellposed.certification import certify, lipschitz_lower_bound, token_distance_bounds
from wellposed.errors import NotLipschitzError
from wellposed.nn import OrthogonalFeedForward, TransJectStack

D, L, N = 4, 2, 4


def make(alpha: float = 0.9, **options: Any) -> TransJectStack:
    torch.manual_seed(3)
    stack = TransJectStack(D, L, **options).double().eval()
    with torch.no_grad():
        for layer in stack.layers:
            layer.residual.weight.fill_(math.atanh(alpha))
    return stack


class Hidden(nn.Module):
    def __init__(self, stack: TransJectStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x).last_hidden_state


CERTIFIED: list[dict[str, Any]] = [
    {"spectrum_norm": "trace"},
    {"spectrum_norm": "max"},
    {"spectrum": "random"},
    {"spectrum_norm": "trace", "num_experts": 2, "gating": "normalized"},
    {"spectrum": "random", "num_experts": 2, "gating": "fixed"},
]


@pytest.mark.parametrize("norm", ["tok", 2])
@pytest.mark.parametrize(
    "options", CERTIFIED, ids=lambda options: "-".join(map(str, options.values()))
)
def test_certificate_holds_under_attack(options: dict[str, Any], norm: Any) -> None:
    stack = make(**options)
    certificate = certify(stack, seq_len=N, norm=norm).require()
    assert certificate.label == "certified"
    attack = lipschitz_lower_bound(Hidden(stack), (N, D), norm=norm, restarts=3, steps=20)
    assert 0.02 < attack.ratio(certificate) <= 1


def test_certificate_of_random_pairs_far_apart() -> None:
    stack = make(spectrum_norm="trace", num_experts=3, gating="normalized", eps=1e-3)
    total = certify(stack, seq_len=N, norm=2).total
    for seed in range(20):
        torch.manual_seed(seed)
        x, y = (
            10.0 ** torch.randint(-3, 3, (1,)) * torch.randn(1, N, D, dtype=torch.float64)
            for _ in range(2)
        )
        moved = (stack(x).last_hidden_state - stack(y).last_hidden_state).norm()
        assert moved <= total * (x - y).norm()


def test_fixed_spectrum_and_one_expert_multiply_token_by_token() -> None:
    # sigma = tanh(w) <= s: prod (1 + r s)(1 + r).
    stack = make(spectrum="random")
    sigma = float(stack.get_parameter("spectrum.weight").detach().tanh().abs().max())
    expected = ((1 + 0.45 * sigma) * 1.45) ** 2
    for norm in ("tok", 2):
        assert certify(stack, seq_len=N, norm=norm).total == pytest.approx(expected, rel=1e-5)


def test_the_maximum_costs_sqrt_d_and_says_so() -> None:
    certificate = certify(make(spectrum_norm="max"), seq_len=N, norm=2)
    assert certificate.total > 1.5 * certify(make(spectrum_norm="trace"), seq_len=N, norm=2).total
    assert "sqrt d" in certify(nn.Sequential(make(spectrum_norm="max")), seq_len=N, norm=2).table()


FOLLOWS: list[dict[str, Any]] = [
    {"spectrum_norm": "trace"},
    {"spectrum_norm": "max"},
    {"spectrum": "random", "num_experts": 2, "gating": "normalized"},
]


@pytest.mark.parametrize("norm", ["tok", 2])
@pytest.mark.parametrize(
    "options", FOLLOWS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_padded_outputs_are_left_out_and_the_table_says_so(
    options: dict[str, Any], norm: Any
) -> None:
    stack = make(alpha=0.97, **options)
    for layer in stack.layers:
        if "num_experts" in options:
            layer.attention.gate.weight.data.mul_(4)
    certificate = certify(stack, seq_len=2, norm=norm)
    x, moved = torch.randn(1, 2, D, dtype=torch.float64), torch.zeros(1, 2, D, dtype=torch.float64)
    x[0, 1] *= 1e4
    moved[0, 0] = 1e-4 * torch.randn(D, dtype=torch.float64)
    padding = torch.tensor([[False, True]])
    first, second = (
        stack(part, key_padding_mask=padding).last_hidden_state for part in (x, x + moved)
    )
    change = (second - first).norm(dim=-1) / moved.norm()
    assert change[0, 0] <= certificate.total < change[0, 1]
    (note,) = certificate.notes
    assert "padded positions are left out" in note
    for printed in (
        certificate.table(),
        certify(nn.Sequential(stack), seq_len=2, norm=norm).table(),
    ):
        assert printed.count(note) == 1
    assert certificate.to_dict()["notes"] == [note]


def test_where_nothing_follows_the_input_padding_is_bounded_too() -> None:
    for options in (CERTIFIED[2], CERTIFIED[4]):
        assert certify(make(**options), seq_len=N).notes == ()
    two = nn.Sequential(make(spectrum_norm="trace"), make(spectrum_norm="trace"))
    assert certify(two, seq_len=N).table().count("left out") == 1


def test_identity_at_the_start() -> None:
    stack = TransJectStack(D, L, num_experts=2, gating="normalized")
    assert certify(stack.eval(), seq_len=N).total == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "norm", "reason"),
    [
        ({"num_experts": 2}, "tok", "gating='normalized'"),
        ({"is_causal": True}, "tok", "causal"),
        ({"spectrum_norm": "trace"}, "inf", "norm 'tok'"),
    ],
)
def test_no_certificate_and_why(options: dict[str, Any], norm: Any, reason: str) -> None:
    certificate = certify(make(**options), seq_len=N, norm=norm)
    assert certificate.label == "uncertified"
    with pytest.raises(NotLipschitzError, match=reason):
        certificate.require()


def test_active_dropout_has_no_certificate() -> None:
    for module in (make(dropout=0.1).train(), OrthogonalFeedForward(D, dropout=0.1)):
        assert "dropout" in certify(module, seq_len=N).table()
        assert certify(module.eval(), seq_len=N).label == "certified"


def test_a_basis_far_from_orthogonal_is_named() -> None:
    stack = make(spectrum_norm="trace")
    with torch.no_grad():
        stack.spectrum.basis.weight.mul_(2)
    with pytest.raises(NotLipschitzError, match=r"\*\.basis"):
        certify(stack, seq_len=N).require()


def test_inexact_weights_are_paid_for() -> None:
    stack = make(spectrum_norm="trace")
    before = certify(stack, seq_len=N).total
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.05)
    assert certify(stack, seq_len=N).total > before * 1.05
    attack = lipschitz_lower_bound(Hidden(stack), (N, D), norm=2, restarts=2, steps=10)
    assert attack.value <= certify(stack, seq_len=N, norm=2).total


def ratios(stack: TransJectStack, x: Tensor) -> list[Tensor]:
    states = stack(x, output_hidden_states=True).hidden_states
    first = (states[0][:, 0] - states[0][:, 1]).norm(dim=-1)
    return [(state[:, 0] - state[:, 1]).norm(dim=-1) / first for state in states[1:]]


@pytest.mark.parametrize(
    "options", [{}, {"num_experts": 3}, {"num_experts": 2, "spectrum": "random"}]
)
def test_token_distances_stay_within_bounds_on_ascended_pairs(options: dict[str, Any]) -> None:
    stack = make(**options)
    bounds = token_distance_bounds(stack)
    if options.get("spectrum") != "random":
        assert bounds[-1] == pytest.approx((0.55**4, 1.45**4), rel=1e-5)
    for direction in (1, -1):
        torch.manual_seed(4)
        x = torch.randn(6, N, D, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=0.1)
        start = ratios(stack, x)[-1].mean()
        for _ in range(25):
            optimizer.zero_grad()
            found = ratios(stack, x)
            for ratio, (lower, upper) in zip(found, bounds, strict=True):
                assert (ratio >= lower * (1 - 1e-9)).all()
                assert (ratio <= upper * (1 + 1e-9)).all()
            (-direction * found[-1].log().sum()).backward()
            optimizer.step()
        # The ascent did move.
        assert direction * (ratios(stack, x)[-1].mean() - start) > 0.05


def test_token_distances_of_a_non_contractive_layer_have_no_lower_bound() -> None:
    stack = make(alpha=0.99)
    with torch.no_grad():
        stack.layers[0].feedforward.up_proj.weight.mul_(3)
    assert token_distance_bounds(stack)[0][0] == 0


class Adapter(nn.Module):
    """`x -> W x + B A x`, as low-rank adapters add it; `weight` is W alone."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.update = nn.Linear(D, D, bias=False).double()

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.update(x)


@pytest.mark.parametrize(
    "part", ["layers.0.attention.experts.0.left", "layers.1.feedforward.up_proj"]
)
@pytest.mark.parametrize("how", ["adapter", "forward"])
def test_a_part_that_is_wrapped_has_no_bound_by_its_weights(part: str, how: str) -> None:
    stack = make(spectrum="random")
    parent, _, name = part.rpartition(".")
    wrapped = stack.get_submodule(part)
    if how == "adapter":
        setattr(stack.get_submodule(parent), name, Adapter(wrapped))
    else:
        wrapped.forward = lambda x: 100 * x
    reason = (
        "whose weights do not say what it computes"
        if how == "adapter"
        else "its forward was replaced"
    )
    with pytest.raises(NotLipschitzError, match=rf"{part}.*{reason}"):
        token_distance_bounds(stack)
    with pytest.raises(NotLipschitzError, match=rf"{part}.*{reason}"):
        certify(stack, seq_len=N, norm="tok").require()


def test_a_parametrised_weight_is_its_value() -> None:
    import wellposed as wp

    stack = make(spectrum="random")
    plain = token_distance_bounds(stack)
    wp.orthogonal(stack.get_submodule("layers.0.feedforward.up_proj"))
    for found, expected in zip(token_distance_bounds(stack), plain, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
