"""`constrain_`: weights stay orthogonal under any optimizer, from the nearest start, and leave no trace."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain import Constraint, ConstraintWarning, constrain_
from wellposed.errors import ConvergenceError

WIDTH = 12


class Mixed(nn.Module):
    """A square, a tall and a wide weight, and a free read-out."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.square = nn.Linear(width, width)
        self.tall = nn.Linear(width, 2 * width)
        self.wide = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(nn.functional.elu(self.tall(nn.functional.elu(self.square(x))))))


NAMES = ["square", "tall", "wide"]


def isometry_error(weight: Tensor) -> float:
    """The slow reference: max |W^T W - I| on the smaller side, in float64, entry by entry from column products."""
    matrix = weight.detach().double()
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    worst = 0.0
    for i in range(matrix.shape[1]):
        for j in range(matrix.shape[1]):
            worst = max(worst, abs(float((matrix[:, i] * matrix[:, j]).sum()) - (i == j)))
    return worst


def errors(model: nn.Module) -> dict[str, float]:
    return {name: isometry_error(getattr(model, name).weight) for name in NAMES}


def problem(width: int = WIDTH, rows: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)


def train(model: nn.Module, optimizer: Optimizer, steps: int, *, width: int = WIDTH) -> list[float]:
    x, y = problem(width)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=2e-2, weight_decay=0.0),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_stays_orthogonal_and_learns(kind: str) -> None:
    steps = 300 if kind == "adamw" else 80
    model = Mixed()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    handle = constrain_(model, optimizer, where=NAMES)
    start = {name: getattr(model, name).weight.detach().clone() for name in NAMES}
    losses = train(model, optimizer, steps)
    assert max(errors(model).values()) <= 1e-5
    assert handle.error().worst == pytest.approx(max(errors(model).values()), rel=1e-2, abs=1e-8)
    assert losses[-1] < 0.9 * losses[0]
    for name in NAMES:
        assert (getattr(model, name).weight - start[name]).norm() > 1e-2, name


@pytest.mark.parametrize("size", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_steps_of_any_size_stay_orthogonal_and_on_their_component(size: float) -> None:
    model = Mixed(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = constrain_(model, optimizer, where=NAMES)
    sign = float(torch.linalg.det(model.square.weight.detach().double()))
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstraintWarning)
        for _ in range(300 if size == 0.1 else 60):
            for name in NAMES:
                noise = torch.randn(getattr(model, name).weight.shape, generator=generator)
                getattr(model, name).weight.grad = noise / torch.linalg.matrix_norm(noise, 2) * size
            optimizer.step()
    assert handle.error().worst <= 1e-5
    assert max(isometry_error(getattr(model, name).weight) for name in ("tall", "wide")) <= 1e-5
    assert float(torch.linalg.det(model.square.weight.detach().double())) == pytest.approx(sign, abs=1e-4)


def test_a_large_step_is_said_once() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    constrain_(model, optimizer, where="square")
    model.square.weight.grad = 20 * torch.randn(WIDTH, WIDTH)
    with pytest.warns(ConstraintWarning, match=r"square\.weight.*lower the learning rate"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error
    assert isometry_error(model.square.weight) <= 1e-5


def test_attaching_moves_to_the_polar_factor_and_says_how_far() -> None:
    model = Mixed()
    before = {name: getattr(model, name).weight.detach().double().clone() for name in NAMES}
    handle = constrain_(model, torch.optim.SGD(model.parameters(), lr=0.1), where=NAMES)
    for row in handle.report.rows:
        name = row.path.removesuffix(".weight")
        left, values, right = torch.linalg.svd(before[name], full_matrices=False)
        after = getattr(model, name).weight.detach().double()
        assert torch.allclose(after, left @ right, atol=1e-6)
        assert row.moved_frobenius == pytest.approx(
            float((after - before[name]).norm() / before[name].norm()), rel=1e-5
        )
        assert row.moved_spectral == pytest.approx(
            float(torch.linalg.matrix_norm(after - before[name], 2) / values.max()), rel=1e-5
        )
        assert row.error_before == pytest.approx(isometry_error(before[name]), rel=1e-6)
        assert row.error_after <= 1e-5
    assert "square.weight" in handle.report.table()


def test_attaching_again_does_not_touch_the_weights() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constrain_(model, optimizer, where=NAMES).remove()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle = constrain_(model, optimizer, where=NAMES)
    assert all(row.moved_frobenius == 0.0 for row in handle.report.rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gain_scales_the_isometry_and_fit_moves_least() -> None:
    model = Mixed()
    before = model.square.weight.detach().double().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    handle = constrain_(model, optimizer, where=NAMES, gain="fit")
    row = handle.report.rows[0]
    values = torch.linalg.svdvals(before)
    assert row.gain == pytest.approx(float(values.mean()), rel=1e-6)
    assert row.moved_frobenius < float((values - 1).norm() / values.norm())
    train(model, optimizer, 50)
    assert isometry_error(model.square.weight / row.gain) <= 1e-5
    assert handle.error().worst <= 1e-5


def test_dry_run_prints_the_plan_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    handle = constrain_(model, optimizer, where=NAMES, dry_run=True)
    assert "tall.weight" in capsys.readouterr().out
    assert not handle.active
    assert not optimizer._optimizer_step_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_remove_leaves_no_trace() -> None:
    model = Mixed()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    handle = constrain_(model, optimizer, where=NAMES)
    train(model, optimizer, 3)
    handle.remove()
    assert not handle.active
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any("wellposed" in str(key) for state in optimizer.state.values() for key in state)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    x, _ = problem()
    assert torch.equal(model(x), plain(x))
    # And the optimizer is an ordinary one again: the next step leaves the manifold.
    train(model, optimizer, 20)
    assert max(errors(model).values()) > 1e-3


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_state_survives_save_and_load_and_training_goes_on_bit_for_bit(kind: str) -> None:
    def fresh() -> tuple[Mixed, Optimizer]:
        torch.manual_seed(5)
        model = Mixed()
        return model, OPTIMIZERS[kind](list(model.parameters()))

    model, optimizer = fresh()
    constrain_(model, optimizer, where=NAMES)
    train(model, optimizer, 5)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    reference = train(model, optimizer, 5)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, other = fresh()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    constrain_(resumed, other, where=NAMES)
    assert train(resumed, other, 5) == reference
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in resumed.state_dict().items())


def test_moments_from_before_attaching_restart_and_that_is_said() -> None:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    train(model, optimizer, 3)
    fresh = copy.deepcopy(model)
    handle = constrain_(model, optimizer, where="square")
    new = torch.optim.AdamW(fresh.parameters(), lr=1e-2, weight_decay=0.0)
    constrain_(fresh, new, where="square")
    with pytest.warns(ConstraintWarning, match="other coordinates"):
        train(model, optimizer, 1)
    train(fresh, new, 1)
    assert torch.equal(model.square.weight, fresh.square.weight)
    assert handle.error().worst <= 1e-5


def test_accumulated_gradients_are_the_gradients_of_the_sum() -> None:
    weights = []
    x, y = problem()
    for parts in (1, 4):
        torch.manual_seed(0)
        model = Mixed().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        constrain_(model, optimizer, where=NAMES)
        for _ in range(3):
            optimizer.zero_grad()
            for a, b in zip(x.double().chunk(parts), y.double().chunk(parts), strict=True):
                (nn.functional.mse_loss(model(a), b) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert max(errors(model).values()) <= 1e-11
        weights.append(model.state_dict())
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-10) for name in weights[0])


def test_clipping_limits_the_step_that_is_taken() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    constrain_(model, optimizer, where="square")
    before = model.square.weight.detach().clone()
    model.square.weight.grad = 1e3 * torch.randn(WIDTH, WIDTH)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    moved = float((model.square.weight.detach() - before).norm())
    assert 1e-3 < moved <= 1e-2 * (1 + 1e-3)


def test_a_closure_is_projected_after_it_ran() -> None:
    x, y = problem()
    results = []
    for positional in (None, True, False):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        constrain_(model, optimizer, where=NAMES)

        def closure(model: Mixed = model, optimizer: Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            if positional is None:
                closure()
                optimizer.step()
            elif positional:
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_bfloat16_weights_reach_their_own_tolerance_and_learn(kind: str) -> None:
    model = Mixed().to(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    handle = constrain_(model, optimizer, where=NAMES)
    losses = train(model, optimizer, 40)
    assert max(errors(model).values()) <= 4e-3
    assert losses[-1] < 0.9 * losses[0]
    for weight in handle.weights:
        assert weight.master is not None
        assert isometry_error(weight.master) <= 1e-5
        assert torch.equal(weight.master.to(torch.bfloat16), weight.parameter)


def test_bfloat16_steps_smaller_than_its_spacing_are_kept() -> None:
    model = Mixed().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    constrain_(model, optimizer, where="square")
    before = model.square.weight.detach().clone()
    gradient = torch.randn(WIDTH, WIDTH).to(torch.bfloat16)
    for _ in range(200):
        model.square.weight.grad = (before.float() @ (gradient.float() - gradient.float().T)).to(torch.bfloat16)
        optimizer.step()
    assert float((model.square.weight.detach() - before).float().norm()) > 0.1


def test_weights_loaded_over_bfloat16_ones_are_taken_up() -> None:
    model = Mixed().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    constrain_(model, optimizer, where="square")
    other = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0].to(torch.bfloat16)
    model.load_state_dict({**model.state_dict(), "square.weight": other})
    train(model, optimizer, 1)
    assert float((model.square.weight.detach() - other).float().abs().max()) < 0.02


@pytest.mark.parametrize("seen", [True, False])
def test_weights_spoiled_from_outside_come_back(seen: bool) -> None:
    """At once where torch counts the change; a change through ``.data`` is seen when the error is next measured."""
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    constrain_(model, optimizer, where=NAMES)
    train(model, optimizer, 3)
    with torch.no_grad():
        for name in NAMES:
            weight = getattr(model, name).weight
            (weight if seen else weight.data).add_(0.05 * torch.randn_like(weight))
    train(model, optimizer, 1 if seen else 18)
    assert max(errors(model).values()) <= 1e-5


def test_autocast_and_low_matmul_precision_do_not_reach_the_retraction() -> None:
    model = Mixed(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    constrain_(model, optimizer, where=NAMES)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        x, y = problem(64)
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x).float(), y).backward()
                optimizer.step()
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert max(isometry_error(getattr(model, name).weight) for name in ("square", "wide")) <= 1e-5


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_ignored_weight_decay_is_exactly_no_weight_decay(kind: str) -> None:
    results = []
    for decay in (0.0, 0.3):
        torch.manual_seed(0)
        model = Mixed().double()
        chosen = [getattr(model, name).weight for name in NAMES]
        if kind == "adamw":
            optimizer: Optimizer = torch.optim.AdamW(chosen, lr=1e-2, weight_decay=decay)
        else:
            optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9, weight_decay=decay)
        constrain_(model, optimizer, where=NAMES, weight_decay="ignore")
        train(model, optimizer, 10)
        results.append(model.state_dict())
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-12) for name in results[0])


def test_a_step_that_is_not_finite_is_named_and_square_weights_stay() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constrain_(model, optimizer, where=NAMES)
    before = model.square.weight.detach().clone()
    for name in NAMES:
        getattr(model, name).weight.grad = torch.full_like(getattr(model, name).weight, math.nan)
    with pytest.raises(ConvergenceError, match=r"square\.weight(.|\n)*tall\.weight"):
        optimizer.step()
    assert torch.equal(model.square.weight, before)


def test_weights_without_gradient_are_left_alone() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constrain_(model, optimizer, where=NAMES)
    before = copy.deepcopy(model.state_dict())
    model.head(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    assert all(torch.equal(model.state_dict()[f"{name}.weight"], before[f"{name}.weight"]) for name in NAMES)


def test_two_optimizers_share_the_weights() -> None:
    model = Mixed()
    matrices = [model.square.weight, model.tall.weight]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0)
    handle = constrain_(model, [muon, adamw], where=NAMES)
    x, y = problem()
    for _ in range(10):
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert max(errors(model).values()) <= 1e-5
    handle.remove()
    assert not muon._optimizer_step_pre_hooks
    assert not adamw._optimizer_step_post_hooks


def test_trains_a_teacher_as_well_as_a_parametrisation() -> None:
    """Student and teacher of orthogonal layers: the same loss as torch's Cayley parametrisation, or better."""
    generator = torch.Generator().manual_seed(0)
    width = 24
    teacher = [torch.linalg.qr(torch.randn(width, width, generator=generator))[0] for _ in range(2)]
    x = torch.randn(256, width, generator=generator)
    y = nn.functional.elu(x @ teacher[0].T) @ teacher[1].T

    def fit(*, parametrised: bool) -> float:
        torch.manual_seed(1)
        student = nn.Sequential(nn.Linear(width, width, bias=False), nn.ELU(), nn.Linear(width, width, bias=False))
        for index in (0, 2):
            nn.init.orthogonal_(student[index].weight)
            if parametrised:
                nn.utils.parametrizations.orthogonal(student[index], orthogonal_map="cayley")
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, weight_decay=0.0)
        if not parametrised:
            constrain_(student, optimizer, where=nn.Linear)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=120)
        loss = torch.tensor(0.0)
        for _ in range(120):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(student(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
        return float(loss.detach())

    assert fit(parametrised=False) <= 1.1 * fit(parametrised=True)


def test_compiled_model_trains_to_the_same_losses() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        runs = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        handle = constrain_(runs, optimizer, where=NAMES)
        assert handle.paths == ("square.weight", "tall.weight", "wide.weight")
        losses.append(train(runs, optimizer, 5))
        assert max(errors(model).values()) <= 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_batched_products_give_the_same_training(gain: float) -> None:
    """The batch is what accelerators use; two weights of each shape, and one that its twin cannot be batched with."""

    def run(*, batched: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(*s) for s in [(8, 8), (8, 8), (8, 12), (12, 8), (8, 12), (12, 3)]]).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        handle = constrain_(model, optimizer, where=[str(index) for index in range(5)], gain=gain, batched=batched)
        losses = train(model, optimizer, 20, width=8)
        assert handle.error().worst <= 1e-11
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        with pytest.raises(ConvergenceError, match=r"0\.weight(.|\n)*1\.weight(.|\n)*4\.weight"):
            optimizer.step()
        return losses, model.get_parameter("0.weight").detach()

    looped, batched = run(batched=False), run(batched=True)
    assert batched[0] == pytest.approx(looped[0], rel=1e-9)
    assert torch.allclose(batched[1], looped[1])


def test_context_manager_lets_go() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with constrain_(model, optimizer, where="square") as handle:
        assert isinstance(handle, Constraint)
        assert "1 weights, active" in repr(handle)
    assert not optimizer._optimizer_step_pre_hooks
