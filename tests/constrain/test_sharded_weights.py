"""Sharded weights step as plain ones do: the same gradients, the same weights; on a mesh of one
process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.one_mesh import one_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError

SHAPES = [(6, 6), (9, 4), (4, 9)]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, foreach=False),
    "decayed": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_mesh() as found:
        yield found


class Trained:
    """Three weights, plain or sharded, that take the steps of given gradients."""

    def __init__(
        self, kind: str, dtype: torch.dtype, mesh: DeviceMesh | None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.layers = nn.ModuleList(
            nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES
        )
        for layer in self.layers:
            layer.weight = nn.Parameter(self.cut(layer.weight.detach()))
        self.optimizer = OPTIMIZERS[kind](self.layers.parameters())
        self.handle = constrain_(self.layers, self.optimizer, where=nn.Linear, **options)

    def cut(self, whole: Tensor) -> Tensor:
        return (
            whole.clone()
            if self.mesh is None
            else distribute_tensor(whole.clone(), self.mesh, [Shard(0)])
        )

    def step(self, gradients: list[Tensor]) -> None:
        for layer, gradient in zip(self.layers, gradients, strict=True):
            layer.weight.grad = self.cut(gradient.to(layer.weight.dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)  # of steps that are large
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        found = [layer.weight.detach() for layer in self.layers]
        return [
            weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in found
        ]


CASES = [
    ("adamw", torch.float32, {}),
    ("adamw", torch.float64, {"gain": 0.5}),
    ("sgd", torch.float32, {"gain": "fit"}),
    ("adamw", torch.bfloat16, {}),
    ("decayed", torch.float32, {"weight_decay": "ignore"}),
    ("decayed", torch.bfloat16, {"weight_decay": "ignore"}),
    ("adamw", torch.float32, {"to": "spectral", "bound": 0.3}),
    ("adamw", torch.float32, {"to": "columns", "bound": 0.3}),
]


@pytest.mark.parametrize(("kind", "dtype", "options"), CASES, ids=str)
def test_shards_take_the_steps_of_plain_weights(
    kind: str, dtype: torch.dtype, options: dict[str, Any], mesh: DeviceMesh
) -> None:
    plain, sharded = Trained(kind, dtype, None, **options), Trained(kind, dtype, mesh, **options)
    for first, second in zip(plain.handle.report.rows, sharded.handle.report.rows, strict=True):
        assert first == second
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 8e-3}[dtype]
    generator = torch.Generator().manual_seed(1)
    start = plain.weights()
    start = [weight.clone() for weight in start]
    for step in range(4):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        plain.step(gradients)
        sharded.step(gradients)
        for name, first, second in zip(
            ["square", "tall", "wide"], plain.weights(), sharded.weights(), strict=True
        ):
            assert float((first - second).float().abs().max()) <= tolerance, (step, name)
        assert sharded.handle.error().worst <= tolerance
        assert sharded.handle.error().by_path == pytest.approx(
            plain.handle.error().by_path, abs=tolerance
        )
    assert all(
        float((now - before).norm()) > 1e-2
        for now, before in zip(sharded.weights(), start, strict=True)
    )
    sharded.handle.remove()
    assert not any(
        "wellposed" in str(key) for state in sharded.optimizer.state.values() for key in state
    )


def test_a_half_weight_that_was_loaded_over_is_taken_up(mesh: DeviceMesh) -> None:
    trained = Trained("sgd", torch.bfloat16, mesh)
    trained.step([torch.zeros(shape) for shape in SHAPES])
    other = torch.linalg.qr(torch.randn(6, 6))[0].to(torch.bfloat16)
    with torch.no_grad():
        trained.layers[0].weight.copy_(trained.cut(other))
    trained.step([torch.zeros(shape) for shape in SHAPES])
    assert float((trained.weights()[0] - other).float().abs().max()) <= 8e-3


def test_a_part_of_a_sharded_fused_weight_is_refused(mesh: DeviceMesh) -> None:
    attention = nn.MultiheadAttention(4, 2, bias=False)
    attention.in_proj_weight = nn.Parameter(
        distribute_tensor(attention.in_proj_weight.detach(), mesh, [Shard(0)])
    )
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a part of a fused weight that is sharded"):
        constrain_(attention, optimizer, roles="query")


def test_sharded_weights_are_not_watched_for_another_optimizer(mesh: DeviceMesh) -> None:
    trained = Trained("sgd", torch.float32, mesh)
    other = torch.optim.SGD(trained.layers.parameters(), lr=0.1, foreach=False)
    for _ in range(5):
        for layer in trained.layers:
            layer.weight.full_tensor().square().sum().backward()
        other.step()  # a warning would be an error
