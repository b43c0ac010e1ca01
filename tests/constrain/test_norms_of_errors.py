"""Errors of a constraint in both norms, against singular values in float64; and the tolerance that the
docstring of `constrain_` promises in both."""

import pytest
import torch
from tests.support.public_models import STYLES, TOKENS
from torch import nn

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError
from wellposed.linalg import isometry_error, rotate


def reference(weight, gain):
    values = torch.linalg.svdvals(weight.detach().double().cpu())
    return float((values / gain - 1).abs().max())


def near_isometry(rows, columns, size, dtype):
    torch.manual_seed(rows + columns)
    left, _, right = torch.linalg.svd(torch.randn(rows, columns).double(), full_matrices=False)
    values = 1 + size * torch.randn(min(rows, columns)).double()
    return ((left * values) @ right).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 1e-5, 0.1, 2.0])
@pytest.mark.parametrize("shape", [(6, 6), (24, 6), (6, 24)])
def test_the_spectral_error_is_that_of_singular_values(shape, size, dtype):
    weight = near_isometry(*shape, size, dtype)
    for gain in (1.0, 2.5):
        error = float(isometry_error(gain * weight.double(), gain=gain, norm="spectral"))
        assert error == pytest.approx(reference(weight, 1.0), rel=1e-6, abs=1e-14)
    entries = float(isometry_error(weight))
    assert float(isometry_error(weight, norm="spectral")) <= min(shape) * entries + 1e-14


def test_each_matrix_of_a_stack_has_its_own_error_and_gain():
    stack = torch.stack([near_isometry(5, 3, 0.01, torch.float64) * gain for gain in (1.0, 3.0)])
    gains = torch.tensor([1.0, 3.0]).double()[:, None, None]
    errors = isometry_error(stack, gain=gains, norm="spectral")
    pairs = zip(stack, gains.flatten(), strict=True)
    expected = [reference(weight, float(gain)) for weight, gain in pairs]
    torch.testing.assert_close(
        errors, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0
    )
    zero = isometry_error(torch.zeros(4, 2), norm="spectral")
    assert float(zero) == 1.0


def trained(where, steps=3, dtype=torch.float32, **options):
    model = STYLES["x-transformers"].build().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle = constrain_(model, optimizer, where, **options)
    for _ in range(steps):
        model(TOKENS).square().mean().backward()
        optimizer.step()
    return model, handle


@pytest.mark.parametrize("options", [{}, {"gain": 0.5}, {"gain": "fit"}, {"dtype": torch.float64}])
def test_the_handle_measures_orthogonal_weights_by_singular_values(options):
    model, handle = trained(("query", "feedforward_in"), **options)
    gains = {row.path: row.size for row in handle.report.rows}
    errors = handle.error(norm="spectral")
    assert errors.by_path.keys() == handle.error().by_path.keys() == gains.keys()
    for path, error in errors.by_path.items():
        assert error == pytest.approx(
            reference(model.get_parameter(path), gains[path]), rel=1e-6, abs=1e-14
        )
    assert errors.worst == max(errors.by_path.values()) <= 1e-5


def test_heads_are_measured_one_by_one():
    model, handle = trained("query", per="head")
    queries = [layer.attn.to_q.weight for layer in model.layers]
    heads = [query[start : start + 4] for query in queries for start in range(0, 16, 4)]
    values = sorted(handle.error(norm="spectral").by_path.values())
    assert len(values) == 8
    assert values == pytest.approx(
        sorted(reference(head, 1.0) for head in heads), rel=1e-6, abs=1e-14
    )


def test_sets_without_singular_values_refuse_that_norm():
    _, capped = trained("layers", to="spectral", bound=0.1)
    assert capped.error(norm="spectral").by_path == capped.error().by_path
    for to, where in (("columns", "value"), ("logits", "query")):
        _, handle = trained(where, to=to, batch=TOKENS)
        with pytest.raises(
            ConfigError, match=rf"norm='spectral'.*set {to.capitalize()}.*leave norm= out"
        ):
            handle.error(norm="spectral")
        assert handle.error(norm="max").worst >= 0.0
        with pytest.raises(ConfigError, match="norm = 'frobenius', expected"):
            handle.error(norm="frobenius")
    with pytest.raises(ConfigError, match="norm = 2, expected"):
        isometry_error(torch.eye(2), norm=2)


@pytest.mark.parametrize("kind", ["identity", "permutation", "nearly diagonal", "random"])
def test_rounding_of_many_steps_stays_below_a_quarter_of_the_tolerance(kind):
    """The sums of W (I + A) would round each term to the precision of the entry near 1: 6.6e-6 after these steps."""
    torch.manual_seed(0)
    width = 256
    noise = torch.randn(width, width).double()
    start = {
        "identity": torch.eye(width).double(),
        "permutation": torch.eye(width).double()[torch.randperm(width)],
        "nearly diagonal": torch.linalg.qr(torch.eye(width) + 0.02 * (noise - noise.T))[0],
        "random": torch.linalg.qr(noise)[0],
    }[kind]
    point = start.float()
    drift = None
    corrected = 0
    out = torch.empty_like(point)
    for _ in range(60):
        taken = rotate(point, 1e-3 * torch.randn(width, width), out=out, drift=drift)
        corrected += taken.method == "corrected"
        drift = taken.drift
        assert float(isometry_error(out)) <= 2.5e-6
        point, out = out, point
    assert 3 <= corrected <= 15  # so most steps are not measured


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the slower exact retraction")
@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.AdamW(p, lr=1e-3), lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), lambda p: torch.optim.SGD(p, lr=30.0, momentum=0.9),
], ids=["adamw 1e-3", "adamw 1e-2", "sgd 1", "sgd 30"])  # fmt: skip
@pytest.mark.parametrize("start", ["identity", "random"])
@pytest.mark.parametrize("columns", [256, 128])
def test_the_tolerance_is_kept_in_both_norms_at_width_256(columns, start, optimizer):
    torch.manual_seed(0)
    layer = nn.Linear(columns, 256, bias=False)
    if start == "identity":
        nn.init.eye_(layer.weight)
    stepping = optimizer(layer.parameters())
    handle = constrain_(layer, stepping, "weight")
    for step in range(80):
        x = torch.randn(64, columns)
        aim = x.roll(1, 1).repeat(1, 256 // columns)
        (layer(x) - aim).square().mean().backward()
        stepping.step()
        stepping.zero_grad()
        if step % 5 == 4:
            weight = layer.weight.detach().double()
            assert (weight.T @ weight - torch.eye(columns).double()).abs().max() <= 1e-5
            assert reference(layer.weight, 1.0) <= 1e-4
    assert handle.error(norm="spectral").worst == pytest.approx(
        reference(layer.weight, 1.0), rel=1e-5
    )
    handle.remove()
