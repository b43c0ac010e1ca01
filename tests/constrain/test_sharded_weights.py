"""Sharded weights step as plain ones do: on a mesh of one process, and as DDP and FSDP2 on two."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.one_mesh import one_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError

SHAPES = [(6, 6), (9, 4), (4, 9)]
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, foreach=False),
    "decayed": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
}


class Trained:
    """Three weights, plain or sharded, that take the steps of given gradients."""

    def __init__(self, kind, dtype, mesh, **options):
        torch.manual_seed(0)
        self.mesh = mesh
        matrices = (nn.Linear(n, m, bias=False, dtype=dtype) for m, n in SHAPES)
        self.layers = nn.ModuleList(matrices)
        for layer in self.layers:
            layer.weight = nn.Parameter(self.cut(layer.weight.detach()))
        self.optimizer = OPTIMIZERS[kind](self.layers.parameters())
        self.handle = constrain_(self.layers, self.optimizer, where=nn.Linear, **options)

    def cut(self, matrix):
        copy = matrix.clone()
        return copy if self.mesh is None else distribute_tensor(copy, self.mesh, [Shard(0)])

    def step(self, gradients):
        for layer, gradient in zip(self.layers, gradients, strict=True):
            layer.weight.grad = self.cut(gradient.to(layer.weight.dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)  # of steps that are large
            self.optimizer.step()

    def weights(self):
        local = [layer.weight.detach() for layer in self.layers]
        return [w.full_tensor() if hasattr(w, "full_tensor") else w for w in local]


CASES = [
    ("adamw", torch.float32, {}),
    ("adamw", torch.float32, {"batched": True}),
    ("adamw", torch.float64, {"gain": 0.5}),
    ("sgd", torch.float32, {"gain": "fit"}),
    ("adamw", torch.bfloat16, {}),
    ("decayed", torch.float32, {}),
    ("decayed", torch.bfloat16, {}),
    ("adamw", torch.float32, {"to": "spectral", "bound": 0.3}),
    ("adamw", torch.float32, {"to": "columns", "bound": 0.3}),
]


@pytest.mark.parametrize(("kind", "dtype", "options"), CASES, ids=str)
def test_shards_take_the_steps_of_plain_weights(kind, dtype, options, mesh):
    plain = Trained(kind, dtype, None, **options)
    sharded = Trained(kind, dtype, mesh, **options)
    for first, second in zip(plain.handle.report.rows, sharded.handle.report.rows, strict=True):
        assert first == second
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 8e-3}[dtype]
    generator = torch.Generator().manual_seed(1)
    start = [weight.clone() for weight in plain.weights()]
    for step in range(4):
        gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        plain.step(gradients)
        sharded.step(gradients)
        pairs = zip(plain.weights(), sharded.weights(), strict=True)
        for name, (first, second) in zip(["square", "tall", "wide"], pairs, strict=True):
            assert float((first - second).float().abs().max()) <= tolerance, (step, name)
        assert sharded.handle.error().worst <= tolerance
        exact = plain.handle.error().by_path
        assert sharded.handle.error().by_path == pytest.approx(exact, abs=tolerance)
    pairs = zip(sharded.weights(), start, strict=True)
    assert all(float((now - before).norm()) > 1e-2 for now, before in pairs)
    sharded.handle.remove()
    keys = [str(key) for state in sharded.optimizer.state.values() for key in state]
    assert not any("wellposed" in key for key in keys)


def test_a_half_weight_that_was_loaded_over_is_taken_up(mesh):
    trained = Trained("sgd", torch.bfloat16, mesh)
    trained.step([torch.zeros(shape) for shape in SHAPES])
    other = torch.linalg.qr(torch.randn(6, 6))[0].to(torch.bfloat16)
    with torch.no_grad():
        trained.layers[0].weight.copy_(trained.cut(other))
    trained.step([torch.zeros(shape) for shape in SHAPES])
    assert float((trained.weights()[0] - other).float().abs().max()) <= 8e-3


@pytest.mark.parametrize("batched", [None, True])
@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
def test_an_edit_between_steps_is_followed(to, batched, mesh):
    options = {"to": to, "batched": batched}
    both = [Trained("sgd", torch.float64, where, **options) for where in (None, mesh)]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    for trained in both:
        trained.step(gradients)
        with torch.no_grad():
            trained.layers[0].weight.copy_(trained.cut(torch.linalg.qr(gradients[0])[0]))
        trained.step(gradients)
        assert trained.handle.error().worst <= 1e-11
    for first, second in zip(*(trained.weights() for trained in both), strict=True):
        assert float((first - second).abs().max()) <= 1e-12


def test_guesses_of_what_travels_apart_are_checked(mesh):
    """A weight of another dtype travels, and is retracted, first."""
    layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
    for layer, dtype in zip(layers, (torch.float32, torch.float64), strict=True):
        cut = distribute_tensor(layer.weight.detach().to(dtype), mesh, [Shard(0)])
        layer.weight = nn.Parameter(cut)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=False)
    handle = constrain_(layers, optimizer, where=nn.Linear, batched=True)
    for step in range(4):
        for layer in layers:
            layer.weight.grad = torch.ones_like(layer.weight)
        if step == 3:
            with torch.no_grad():
                layers[1].weight.mul_(1.001)
        optimizer.step()
    assert handle.error().by_path["1.weight"] <= 1e-11


def test_owners_work_on_weights_of_one_shape_at_once(mesh):
    layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
    for layer in layers:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=False)
    handle = constrain_(layers, optimizer, where=nn.Linear)
    kind = type(handle.weights[0].set)
    sizes = []
    for name in ("state", "retract"):
        real = getattr(kind, name)

        def counted(self, matrices, work, real=real):
            sizes.append(len(matrices))
            return real(self, matrices, work)

        patch = mock.patch.object(kind, name, counted)
        patch.start()
    for layer in layers:
        layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    mock.patch.stopall()
    assert sizes == [3, 3]


def test_moments_are_gathered_in_one_order_whatever_that_of_a_file(mesh):
    """A file's order differs in every process: a gather of one would meet another of the next."""
    orders = [], []
    for turn, order in zip((1, -1), orders, strict=True):
        trained = Trained("adamw", torch.float32, mesh)
        ones = [torch.ones(s) for s in SHAPES]
        trained.step(ones)
        state = trained.optimizer.state_dict()
        state["state"] = {n: dict([*old.items()][::turn]) for n, old in state["state"].items()}
        trained.optimizer.load_state_dict(state)
        moments = trained.optimizer.state[trained.layers[0].weight]
        names = {moments[name].to_local().data_ptr(): name for name in ("exp_avg", "exp_avg_sq")}
        usual = DTensor.full_tensor
        with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=usual) as gather:
            trained.step(ones)
        order += [names.get(call.args[0].to_local().data_ptr()) for call in gather.mock_calls]
    assert orders[0] == orders[1]
    assert {"exp_avg", "exp_avg_sq"} <= {*orders[0]}


def test_a_part_of_a_weight_that_is_cut_twice_is_refused():
    attention = nn.MultiheadAttention(4, 2, bias=False)
    with one_mesh(1, 1) as mesh:
        cut = distribute_tensor(attention.in_proj_weight.detach(), mesh, [Shard(0), Shard(1)])
        attention.in_proj_weight = nn.Parameter(cut)
        optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="a part of a weight that is cut along several dim"):
            constrain_(attention, optimizer, where="query")


def test_sharded_weights_are_not_watched_for_another_optimizer(mesh):
    trained = Trained("sgd", torch.float32, mesh)
    other = torch.optim.SGD(trained.layers.parameters(), lr=0.1, foreach=False)
    for _ in range(5):
        for layer in trained.layers:
            layer.weight.full_tensor().square().sum().backward()
        other.step()  # a warning would be an error


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_way_of_training_goes_as_one_process_does(processes, tmp_path):
    command = [sys.executable, "-m", "tests.support.constrain_worker", str(tmp_path)]
    options = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True}
    done = subprocess.run([*command, str(processes)], **options, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    paths = [tmp_path / f"rank{rank}.json" for rank in range(processes)]
    ranks = [json.loads(path.read_text()) for path in paths]
    for kind in ranks[0]:
        way, *rest = kind.split()
        reference = ranks[0][" ".join(["single", *rest])]
        half = "bf16" in kind
        # moments of gradients that are rounding alone turn it into steps of the whole rate
        rel = 0.03 if half else 1e-5
        for rank in ranks:
            assert rank[kind]["losses"] == pytest.approx(reference["losses"], rel=rel)
            assert max(rank[kind]["errors"].values()) <= (4e-3 if half else 1e-5)
            assert len(rank[kind]["errors"]) == 3
            if not half:
                for name, value in rank[kind]["weights"].items():
                    expected = torch.tensor(reference["weights"][name])
                    assert torch.allclose(torch.tensor(value), expected, atol=2 * rel), (kind, name)
            assert rank[kind]["weights"] == ranks[0][kind]["weights"], kind
            # There and back after the step, and before it if gradients are projected.
            count = 2 if "spectral" in kind or "columns" in kind else 4
            shared = {} if way in ("single", "ddp") else {"alltoall_base_": count}
            if way != "tp+fsdp2":
                assert rank[kind]["collectives"] == shared, kind
        if way in ("fsdp2", "tp+fsdp2"):  # every rank hears of a gradient that the last alone has
            counts = [len(rank[kind]["broken"]) for rank in ranks]
            # The second step is good, unless it reads moments of the first.
            assert counts in ([1] * processes, [2] * processes), (kind, counts)
            assert "sgd" not in kind or counts[0] == 1, (kind, counts)
    # The mark of Lie coordinates travels with a sharded optimizer checkpoint: one square weight has
    # it.
    assert ranks[0]["fsdp2"]["marks"] == 1
