"""Bounds with multipliers (B18, B19): proofs against a search for counter-examples, and bad input."""

import math

import pytest
import torch
from tests.support.multipliers import ADVERSARIAL, adversarial, attained, network, vertices

from wellposed.certification.bounds import (
    Matrix,
    Slopes,
    SortedPairs,
    branch_bound,
    chain_bound,
    network_of,
    tightest_bound,
)
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.linalg import proves_definite

ACTIVATIONS = {
    "relu": Slopes(0.0, 1.0),
    "leaky": Slopes(0.1, 1.0),
    "gelu": Slopes(-0.128905, 1.128905),
    "abs": Slopes(-1.0, 1.0),
    "steep": Slopes(-3.0, 1.0),
    "dyt": Slopes(torch.tensor([-0.5] * 3 + [0.0] * 5), torch.tensor([0.0] * 3 + [2.0] * 5)),
    "maxmin": SortedPairs(),
}
# The attack stops short of the supremum by its own rounding.
ROUNDING = 1 + 1e-9


FEW = ("plain", "mixed", "rank one", "zero rows")


def _cases():
    for name in ACTIVATIONS:
        for kind in ADVERSARIAL:
            fast = name in ("relu", "gelu", "maxmin") and kind in FEW
            yield pytest.param(name, kind, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [*_cases()])
def test_no_choice_of_slopes_reaches_the_bound_of_a_branch(name, kind):
    """The search covers every diagonal of slopes, more than the activation itself has."""
    for skip, scale in ((0.0, 1.0), (1.0, 1.0), (0.3, -0.7), (1.0, 1e-4)):
        made = network(adversarial(kind, (5, 8, 5)), ACTIVATIONS[name])
        bound = branch_bound([made], [skip], [scale])[0]
        if skip == 1.0:
            bound = min(bound, chain_bound(made, skip, scale))
        attack = attained(made, skip, scale)
        assert attack <= bound * ROUNDING
        if kind in ("plain", "rank one") and scale > 1e-3:
            assert bound <= (abs(skip) + abs(scale) * _product(made)) * (1 + 1e-5)


@pytest.mark.parametrize(("name", "kind"), [*_cases()])
def test_no_choice_of_slopes_reaches_the_bound_of_a_chain(name, kind):
    made = network(adversarial(kind, (4, 8, 8, 8, 3)), ACTIVATIONS[name])
    bound = chain_bound(made)
    assert attained(made, 0.0, 1.0) <= bound * ROUNDING
    if kind == "plain" and name in ("relu", "leaky", "gelu"):
        assert bound < 0.95 * _product(made)


def _product(made):
    norms = math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in made.weights)
    return norms * math.prod(float((mid.abs() + half).max()) for mid, half in made.slopes)


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_a_branch_is_exact_if_all_slopes_can_be_tried(skip):
    """Seven units have 128 vertices; LipSDP is at most a few percent above their largest norm."""
    made = network(adversarial("plain", (4, 7, 4)), ACTIVATIONS["relu"])
    exact = max(vertices(made, skip))
    bound = branch_bound([made], [skip], [1.0])[0]
    assert exact <= bound <= 1.1 * exact


def test_two_engines_agree_on_one_hidden_layer():
    for name in ("relu", "gelu", "leaky"):
        made = network(adversarial("plain", (6, 8, 6)), ACTIVATIONS[name])
        pair = branch_bound([made], [1.0], [0.5])[0], chain_bound(made, 1.0, 0.5)
        assert pair[0] == pytest.approx(pair[1], rel=2e-3)


def test_layers_of_one_shape_are_bounded_together_as_apart():
    made = [network(adversarial("plain", (6, 8, 6)), ACTIVATIONS["relu"]) for _ in range(3)]
    together = branch_bound(made, [1.0, 0.5, 0.0], [1.0, 2.0, 1.0])
    apart = [
        branch_bound([one], [skip], [scale])[0]
        for one, skip, scale in zip(made, (1.0, 0.5, 0.0), (1.0, 2.0, 1.0), strict=True)
    ]
    assert together == pytest.approx(apart, rel=5e-3)


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_wide_branches_are_searched_in_float32_and_proved(kind):
    """From width 256 on; sizes up to 1e50 leave the range of float32."""
    torch.manual_seed(ADVERSARIAL.index(kind))
    weights = [weight.double() for weight in adversarial(kind, (256, 260, 256))]
    for size, skip in ((1.0, 1.0), (1e50, 0.0), (1e-50, 0.0)):
        made = network([weights[0], size * weights[1]], ACTIVATIONS["gelu"])
        bound = branch_bound([made], [skip], [1.0])[0]
        assert attained(made, skip, 1.0, restarts=1, steps=3) <= bound * ROUNDING
        if kind == "plain":
            assert bound <= 0.8 * (skip + _product(made))


def test_any_positive_multipliers_give_a_bound_and_others_are_refused():
    made = network(adversarial("plain", (5, 8, 5)), ACTIVATIONS["relu"])
    attack = attained(made, 1.0, 1.0)
    for _ in range(20):
        multipliers = torch.rand(1, 8, dtype=torch.float64) * 10 ** (4 * torch.rand(1, 8) - 2)
        assert branch_bound([made], [1.0], [1.0], multipliers=multipliers)[0] >= attack / ROUNDING
        assert chain_bound(made, 1.0, 1.0, multipliers=multipliers) >= attack / ROUNDING
    for value in (0.0, -1.0, math.nan, math.inf):
        wrong = torch.ones(1, 8, dtype=torch.float64)
        wrong[0, 3] = value
        with pytest.raises(ConfigError, match="1 of 8 multipliers"):
            branch_bound([made], [1.0], [1.0], multipliers=wrong)
        with pytest.raises(ConfigError, match="1 of 8 multipliers"):
            chain_bound(made, multipliers=wrong)
    with pytest.raises(ConfigError, match=r"expected multipliers \(1, 8\)"):
        branch_bound([made], [1.0], [1.0], multipliers=wrong[0])
    with pytest.raises(ConfigError, match="expected multipliers of widths"):
        chain_bound(made, multipliers=[wrong[0, :3]])


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 0.0), (-math.inf, 1.0), (0.0, math.nan), (0.0, math.inf)]
)
def test_slopes_that_are_unknown_are_refused(low, high):
    with pytest.raises(ConfigError, match="finite numbers low <= high"):
        Slopes(low, high)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_matrix_that_is_not_finite_or_overflows_has_no_bound(bad):
    weights = adversarial("plain", (5, 8, 5))
    weights[0][2, 3] = bad
    links = [Matrix(weight) for weight in weights]
    if math.isfinite(bad):
        assert network(weights, ACTIVATIONS["relu"]) is None
        assert math.isinf(tightest_bound(links).value)
    else:
        with pytest.raises(NotLipschitzError, match=r"matrix 0 of 2, \(8, 5\), holds 1 entries"):
            tightest_bound(links)
    made = network(adversarial("plain", (5, 8, 5)), ACTIVATIONS["relu"])
    made.weights[0][2, 3] = bad
    assert branch_bound([made], [1.0], [1.0]) == [math.inf]
    assert math.isinf(chain_bound(made))


def test_links_that_make_no_network():
    eye = Matrix(torch.eye(4))
    relu = Slopes(0.0, 1.0)
    for links in ([eye], [eye, relu], [SortedPairs(), eye, eye], [eye, SortedPairs(), relu, eye]):
        assert network_of(links) is None
        assert math.isinf(tightest_bound(links).value)


def test_linear_maps_in_sequence_are_multiplied_and_activations_joined():
    first, second = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))
    links = [Matrix(first), Matrix(second), Slopes(0.0, 1.0), Slopes(0.0, 2.0), Matrix(first)]
    made = network_of(links)
    assert torch.equal(made.weights[0], second @ first)
    (mid, half) = made.slopes[0]
    assert float((mid - half).max()) == pytest.approx(0.0, abs=1e-12)
    assert float((mid + half).max()) == pytest.approx(2.0)
    assert 0 < made.excess < 1e-12
    # The two halves of the rows, first turned into sums and differences, and back.
    paired = network_of([Matrix(first), SortedPairs(), Matrix(second)])
    x = torch.randn(4, dtype=torch.float64)
    middle = paired.weights[0] @ x
    middle[2:] = middle[2:].abs()
    z = first @ x
    sorted_ = torch.cat((torch.maximum(z[:2], z[2:]), torch.minimum(z[:2], z[2:])))
    torch.testing.assert_close(paired.weights[1] @ middle, second @ sorted_)


def _symmetric(values):
    size = len(values)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    return (basis * torch.tensor(values, dtype=torch.float64)) @ basis.mT


@pytest.mark.parametrize("size", [1, 2, 9, 60])
def test_the_smallest_eigenvalue_decides_up_to_rounding(size):
    none = torch.zeros(size, dtype=torch.float64)
    for smallest, expected in ((1e-3, True), (1e-9, True), (-1e-12, False), (-1e-3, False)):
        matrix = _symmetric([smallest] + [1.0] * (size - 1))
        matrix = (matrix + matrix.mT) / 2
        assert bool(proves_definite({(0, 0): matrix}, [none])) is expected
    # A perturbation of that size may make the matrix singular.
    matrix = _symmetric([1e-3] + [1.0] * (size - 1))
    error = torch.full((size,), math.sqrt(2e-3), dtype=torch.float64)
    assert not bool(proves_definite({(0, 0): matrix}, [error]))


def test_blocks_are_the_whole_matrix():
    matrix = _symmetric([0.1, 1.0, 2.0, 3.0, 1.0, 0.2])
    cuts = [slice(0, 2), slice(2, 5), slice(5, 6)]
    for shift, expected in ((0.0, True), (-0.0999, True), (-0.1001, False)):
        moved = matrix + shift * torch.eye(6, dtype=torch.float64)
        blocks = {(i, j): moved[cuts[i], cuts[j]] for i in range(3) for j in range(i + 1)}
        errors = [torch.zeros(cut.stop - cut.start, dtype=torch.float64) for cut in cuts]
        assert bool(proves_definite(blocks, errors)) is expected


@pytest.mark.parametrize("depth", [2, 5, 12])
def test_absent_blocks_save_slack_and_prove_nothing_singular(depth):
    """A path's Laplacian times the identity is singular; its smallest other eigenvalue is known."""
    width = 3
    one = torch.eye(width, dtype=torch.float64)
    none = [torch.zeros(width, dtype=torch.float64)] * depth
    for shift, expected in ((1e-11, True), (1e-17, False), (-1e-11, False)):
        ends = [1 + (0 < index < depth - 1) for index in range(depth)]
        blocks = {(index, index): (end + shift) * one for index, end in enumerate(ends)}
        blocks |= {(index, index - 1): -one for index in range(1, depth)}
        assert bool(proves_definite(blocks, none)) is expected


@pytest.mark.parametrize(("depth", "width"), [(3, 16), (8, 64)])
def test_orthogonal_chains_have_the_norm_of_their_product(depth, width):
    """It is the slope where every unit is on, so no bound lies below it."""
    torch.manual_seed(depth)
    weights = [torch.nn.init.orthogonal_(torch.empty(width, width)) for _ in range(depth)]
    product = torch.linalg.multi_dot([weight.double() for weight in reversed(weights)])
    links = [link for weight in weights for link in (Matrix(weight, 1 + 1e-5), Slopes(0.0, 1.0))]
    for scale in (1.0, -0.3):
        exact = abs(scale) * float(torch.linalg.svdvals(product)[0])
        tight = tightest_bound(links[:-1], 0.0, scale)
        assert exact * (1 - 1e-13) <= tight.value <= exact * (1 + 2e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_not_definite_or_not_finite_is_not_proved(value):
    matrix = torch.eye(3, dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.float64)
    matrix[1, 1] = value
    assert not bool(proves_definite({(0, 0): matrix}, [none]))
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[2, 0] = matrix[0, 2] = 2.0 if value in (0.0, -1.0) else value
    assert not bool(proves_definite({(0, 0): matrix}, [none]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_the_caller_change_no_bound(device):
    """A slope rounded to bfloat16 would be another one."""
    torch.manual_seed(0)
    links = [Matrix(torch.randn(6, 4)), Slopes(-0.128905, 1.128905), Matrix(torch.randn(4, 6))]
    expected = branch_bound([network_of(links)], [1.0], [1.0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            assert branch_bound([network_of(links)], [1.0], [1.0]) == expected
    finally:
        torch.set_default_dtype(torch.float32)
