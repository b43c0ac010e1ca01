"""`to="spectral"` and `to="columns"`: the stored weight is in its set after every step, by a
float64 SVD."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from tests.support.constrained import NAMES, OPTIMIZERS, WIDTH, Mixed, train
from torch import Tensor, nn
from torch.optim import Optimizer

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, Set, constrain_
from wellposed.errors import ConfigError, ConvergenceError

SHAPES = [(8, 8), (12, 5), (5, 12), (1, 7), (7, 1)]


def spectral_norm(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.detach().double())[0])


def column_error(weight: Tensor, length: float) -> float:
    return max(abs(float(column.double().norm()) / length - 1.0) for column in weight.detach().T)


class TestSpectral:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_every_optimizer_stays_below_the_bound_and_learns(self, kind: str) -> None:
        torch.manual_seed(0)
        model = Mixed()
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        handle = constrain_(model, optimizer, where=NAMES, to="spectral", bound=0.7)
        losses = []
        for _ in range(60):
            losses += train(model, optimizer, 1)
            assert max(spectral_norm(getattr(model, name).weight) for name in NAMES) <= 0.7
        assert handle.error().worst == 0.0
        assert losses[-1] < 0.97 * losses[0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("bound", [1e-3, 0.3, 1.0, 1e3])
    def test_steps_of_any_size_end_inside(self, dtype: torch.dtype, bound: float) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList(
            nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES
        )
        optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
        handle = constrain_(layers, optimizer, where=nn.Linear, to="spectral", bound=bound)
        for size in [1e-4, 1e-2, 0.05, 0.1, 0.3, 1.0, 30.0, 1e3] * 3:
            for weight in layers.parameters():
                noise = torch.randn_like(weight, dtype=torch.float64)
                weight.grad = (noise / torch.linalg.matrix_norm(noise, 2) * (size * bound)).to(
                    dtype
                )
            optimizer.step()
            for weight in layers.parameters():
                # a bound in float64 is exact, so the certificate is held to it without any slack
                assert spectral_norm(weight) <= bound, (size, weight.shape)
                assert float(wp.linalg.certified_spectral_norm(weight.detach())) <= bound
        assert handle.error().worst == 0.0

    def test_a_huge_learning_rate_of_adamw_and_muon_stays_inside(self) -> None:
        for kind in ("adamw", "muon"):
            torch.manual_seed(0)
            model = Mixed(48)
            optimizer = OPTIMIZERS[kind](list(model.parameters()))
            constrain_(model, optimizer, where=NAMES, to="spectral")
            for group in optimizer.param_groups:
                group["lr"] = 10.0
            for _ in range(8):
                train(model, optimizer, 1, width=48)
                assert max(spectral_norm(getattr(model, name).weight) for name in NAMES) <= 1.0

    def test_attaching_caps_the_singular_values_and_leaves_the_others(self) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(20, 20, bias=False)
        left, _, right = torch.linalg.svd(layer.weight.detach().double())
        values = torch.linspace(0.0, 4.0, 20, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_((left * values) @ right)
        before = layer.weight.detach().double().clone()
        report = constrain_(
            layer, torch.optim.SGD(layer.parameters(), lr=0.1), where="weight", to="spectral"
        ).report
        nearest = (left * values.clamp(max=1.0)) @ right
        # 3e-6 below the bound, and the rounding of float32
        assert float((layer.weight.detach().double() - nearest).abs().max()) <= 1e-5
        row = report.rows[0]
        assert row.moved_frobenius == pytest.approx(
            float((nearest - before).norm() / before.norm()), rel=1e-4
        )
        assert row.moved_spectral == pytest.approx(3.0 / 4.0, rel=1e-4)
        assert row.error_before == pytest.approx(3.0, rel=1e-5)
        assert row.error_after == 0.0

    def test_a_weight_that_stays_inside_is_trained_as_without_the_constraint(self) -> None:
        states = []
        for is_held in (False, True):
            torch.manual_seed(0)
            model = Mixed()
            optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
            if is_held:
                constrain_(model, optimizer, where=NAMES, to="spectral", bound=50.0)
            train(model, optimizer, 10)
            states.append(model.state_dict())
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_weight_decay_is_no_offence(self) -> None:
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        constrain_(model, optimizer, where=NAMES, to="spectral")
        train(model, optimizer, 5)
        assert max(spectral_norm(getattr(model, name).weight) for name in NAMES) <= 1.0

    def test_certify_measures_the_weights_and_not_the_handle(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = constrain_(model, optimizer, where=nn.Linear, to="spectral")
        assert wp.certify(model, seq_len=4).total <= 1.0
        with torch.no_grad():
            model.get_parameter("0.weight").mul_(5.0)
        assert handle.active
        pushed = spectral_norm(model.get_parameter("0.weight")) * spectral_norm(
            model.get_parameter("2.weight")
        )
        assert wp.certify(model, seq_len=4).total == pytest.approx(pushed, rel=1e-5)
        assert handle.error().worst == pytest.approx(
            spectral_norm(model.get_parameter("0.weight")) - 1.0, rel=1e-4
        )

    def test_a_step_that_is_not_finite_is_named(self) -> None:
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        constrain_(model, optimizer, where=NAMES, to="spectral")
        model.tall.weight.grad = torch.full_like(model.tall.weight, torch.nan)
        with pytest.raises(ConvergenceError, match=r"tall\.weight.*not finite"):
            optimizer.step()


class TestColumns:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
    def test_columns_have_their_length_after_every_step(
        self, kind: str, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        model = Mixed().to(dtype)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        handle = constrain_(model, optimizer, where=NAMES, to="columns", bound=0.5)
        # every entry is rounded by at most half an eps of itself, and so is the length; measuring
        # adds its own rounding
        tolerance = torch.finfo(dtype).eps + 4 * WIDTH * torch.finfo(torch.float64).eps
        start = model.tall.weight.detach().clone()
        for _ in range(20):
            train(model, optimizer, 1)
            assert (
                max(column_error(getattr(model, name).weight, 0.5) for name in NAMES) <= tolerance
            )
        assert handle.error().worst <= tolerance
        assert float((model.tall.weight.detach() - start).norm()) > 1e-2

    def test_the_columns_of_an_embedding_are_its_vectors_and_padding_stays_zero(self) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"words": nn.Embedding(30, 6, padding_idx=2), "head": nn.Linear(6, 3)}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        handle = constrain_(model, optimizer, where=nn.Embedding, to="columns")
        words = model.get_parameter("words.weight")
        for _ in range(5):
            ids = torch.randint(0, 20, (16, 4))
            nn.functional.cross_entropy(
                model["head"](model["words"](ids).mean(1)), ids[:, 0] % 3
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        lengths = words.detach().double().norm(dim=1)
        assert float(lengths[2]) == 0.0
        lengths[2] = 1.0
        assert float((lengths - 1.0).abs().max()) <= 1e-6
        assert handle.error().worst <= 1e-6

    def test_zero_columns_are_refused_before_anything_moves(self) -> None:
        model = Mixed()
        with torch.no_grad():
            model.tall.weight[:, 4] = 0.0
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ConfigError, match=r"tall\.weight: 1 zero columns, the first at 4"):
            constrain_(
                model, torch.optim.SGD(model.parameters(), lr=0.1), where=NAMES, to="columns"
            )
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_decay_is_refused(self) -> None:
        model = Mixed()
        with pytest.raises(ConfigError, match="parameter_groups"):
            constrain_(model, torch.optim.AdamW(model.parameters()), where="square", to="columns")


def muon_and_adamw(model: nn.Module) -> Optimizer:
    return MuonAndAdamW(model, lr=2e-2, adamw_lr=1e-2, adamw="head")


BUILT: dict[str, Callable[[nn.Module], Optimizer]] = {
    **{
        kind: lambda model, kind=kind: OPTIMIZERS[kind](list(model.parameters()))
        for kind in ("adamw", "sgd")
    },
    "muon and adamw": muon_and_adamw,
}


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(to: Set, kind: str, dtype: torch.dtype) -> None:
    def fresh() -> tuple[Mixed, Optimizer]:
        torch.manual_seed(5)
        model = Mixed().to(dtype)
        return model, BUILT[kind](model)

    model, optimizer = fresh()
    constrain_(model, optimizer, where=NAMES, to=to)
    train(model, optimizer, 5)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    reference = train(model, optimizer, 5)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, other = fresh()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    handle = constrain_(resumed, other, where=NAMES, to=to)
    assert max(row.moved_frobenius for row in handle.report.rows) == 0.0
    assert train(resumed, other, 5) == reference
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in resumed.state_dict().items()
    )


class TestOptions:
    @pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
    def test_a_bound_is_above_zero_and_finite(self, bound: float) -> None:
        model = Mixed()
        with pytest.raises(ConfigError, match="bound must be above 0"):
            constrain_(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                where="square",
                to="spectral",
                bound=bound,
            )

    def test_an_unknown_set_lists_the_known_ones(self) -> None:
        model = Mixed()
        with pytest.raises(ConfigError, match=r"set \(to=\) 'spectrum'; nearest: spectral"):
            constrain_(
                model, torch.optim.SGD(model.parameters(), lr=0.1), where="square", to="spectrum"
            )

    @pytest.mark.parametrize(
        "options",
        [
            {"to": "spectral", "gain": 0.5},
            {"to": "spectral", "weight_decay": "ignore"},
            {"to": "columns", "embeddings": "fit"},
            {"to": "orthogonal", "bound": 0.5},
        ],
        ids=str,
    )
    def test_an_option_of_another_set_is_refused(self, options: dict[str, object]) -> None:
        model = Mixed()
        with pytest.raises(ConfigError, match=r"to='"):
            constrain_(
                model, torch.optim.SGD(model.parameters(), lr=0.1), where="square", **options
            )

    def test_two_sets_on_one_weight_are_refused_and_on_two_weights_live_together(self) -> None:
        model = Mixed(WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = constrain_(model, optimizer, where="square")
        with pytest.raises(ConfigError, match=r"square\.weight: constrained already"):
            constrain_(model, optimizer, where="square", to="spectral")
        second = constrain_(model, optimizer, where="tall", to="spectral", bound=0.5)
        train(model, optimizer, 5)
        assert first.error().worst <= 1e-5
        assert spectral_norm(model.tall.weight) <= 0.5
        second.remove()
        assert not second.active
        assert first.active
