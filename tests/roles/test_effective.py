"""Every wrapper of a weight: each verb reads what the layer computes with, or names the wrapper."""

import pytest
import torch
from tests.support.wrappers import LAYERS, WRAPPED, Model, batch, layers_of, matrix_of

import wellposed as wp
from wellposed.errors import ConfigError

pytestmark = pytest.mark.slow  # the whole table

WRITABLE = {"plain", "saved"}
IDLE = {"lora merged", "lora off"}
UNREADABLE = {
    "lora merged and off": r"(?s)unmerge_adapter.*q_proj|q_proj.*unmerge_adapter",
    "packed": r"q_proj\.weight is a TwoTensor.*quantised",
    "int8": r"q_proj \(Linear\) holds a quantised weight",
}
ROUGH = {"dora", "fourier"}
"""Their own backward takes a norm for a constant, or their own product is in float32."""


@pytest.fixture(params=[name for name in WRAPPED if name not in UNREADABLE])
def wrapper(request):
    return request.param


@pytest.fixture
def model(wrapper):
    torch.manual_seed(0)
    return WRAPPED[wrapper](Model())


def effective(model):
    """Role -> matrix of each of the model's layers, by calling it."""
    called = layers_of(model)
    return {role: matrix_of(called[path]) for role, path in LAYERS.items()}


@pytest.mark.parametrize("with_batch", [None, "batch"])
def test_views_are_of_the_weights_that_layers_compute_with(model, with_batch):
    expected = effective(model)
    roles = wp.find_roles(model, with_batch and batch())
    weights = [weight for weight in roles.weights() if weight.role in expected]
    assert [weight.role for weight in weights] == [*expected]
    for weight in weights:
        actual = weight.view.tensor().detach()
        torch.testing.assert_close(actual, expected[weight.role], rtol=1e-4, atol=1e-5)
    assert not [name for name in roles.unnamed if "base_layer" in name or "_orig" in name]


def test_measured_and_monitored_numbers_are_of_these_weights(model):
    expected = {role: torch.linalg.matrix_norm(w, 2).item() for role, w in effective(model).items()}
    rows = wp.measure(model, batch()).rows
    largest = {row["role"]: row["sigma_max"] for row in rows if row["role"] in expected}
    assert largest == pytest.approx(expected, rel=1e-4)
    monitor = wp.Monitor(model, vitals=False)
    numbers = monitor.step()
    monitor.remove()
    watched = {role: numbers[f"cond/encoder.0.{role}/sigma_max"] for role in expected}
    assert watched == pytest.approx(expected, rel=2e-3)


@pytest.mark.filterwarnings("ignore:these weights are frozen:UserWarning")
def test_a_penalty_is_of_these_weights_and_trains_what_they_are_computed_from(model, wrapper):
    model = model.double()
    strengths = {"query": 1.0, "feedforward": 0.5}
    penalty = wp.OrthogonalityPenalty(model, **strengths, form="gram_squared")
    if wrapper in IDLE:
        with pytest.raises(ConfigError, match=r"(?s)frozen.*q_proj"):
            penalty()
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = None
    value = penalty()
    value.backward()
    total = torch.zeros((), dtype=torch.float64)
    for role, factor in (("query", 1.0), ("feedforward_in", 0.5), ("feedforward_out", 0.5)):
        matrix = effective(model)[role]
        gram = matrix @ matrix.T if role == "query" else matrix.T @ matrix
        total += factor * (gram - torch.eye(len(gram), dtype=torch.float64)).square().sum()
    assert value.item() == pytest.approx(total.item(), rel=1e-6)
    if wrapper in ROUGH:
        assert sum(parameter.grad is not None for parameter in trained) >= len(trained) // 2
        return
    moves = [torch.randn_like(parameter) for parameter in trained]
    slope = sum(
        (parameter.grad * move).sum().item()
        for parameter, move in zip(trained, moves, strict=True)
        if parameter.grad is not None
    )
    sides = []
    with torch.no_grad():
        for sign in (1, -2):
            torch._foreach_add_(trained, moves, alpha=sign * 1e-6)
            sides.append(penalty().item())
    # A difference has the rounding of the values, 1e-15 of about 10.
    assert slope == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-8)


def test_a_constraint_holds_these_weights_or_names_them(model, wrapper):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if wrapper not in WRITABLE:
        with pytest.raises(ConfigError, match=r"(?s)cannot keep.*q_proj"):
            wp.constrain_(model, optimizer, where="query")
        return
    wp.constrain_(model, optimizer, where="query")
    model(batch()).square().mean().backward()
    optimizer.step()
    matrix = effective(model)["query"]
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(len(matrix)), rtol=0, atol=1e-5)


def test_initial_weights_are_drawn_where_they_are_stored_or_refused(model, wrapper):
    before = effective(model)
    if wrapper != "plain":
        with pytest.raises(ConfigError, match=r"cannot be drawn|frozen"):
            wp.t_fixup_(model, batch=batch())
        return
    wp.t_fixup_(model, batch=batch())
    assert all(not torch.equal(before[role], matrix) for role, matrix in effective(model).items())


def test_attack_and_certificate_are_of_the_layer_as_it_is_called(model):
    layer = layers_of(model)[LAYERS["query"]].eval()
    largest = torch.linalg.matrix_norm(matrix_of(layer), 2).item()
    bound = wp.lipschitz_lower_bound(layer, (3, 16), norm=2, restarts=2, steps=10)
    assert bound.value == pytest.approx(largest, rel=1e-3)
    certificate = wp.certify(layer, seq_len=3, norm=2)
    assert certificate.total == pytest.approx(largest, rel=1e-3) or certificate.total == float(
        "inf"
    )


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("with_batch", [None, "batch"])
def test_what_cannot_be_read_is_refused_by_name(name, with_batch):
    model = WRAPPED[name](Model())
    batch_of = with_batch and batch()
    for verb in (
        wp.measure,
        lambda model, batch: wp.OrthogonalityPenalty(model, query=1.0, batch=batch, form="gram"),
    ):
        with pytest.raises(ConfigError, match=UNREADABLE[name]):
            verb(model, batch_of)
