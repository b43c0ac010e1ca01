"""Sharded weights step as plain ones do: on a mesh of one process, and as DDP and FSDP2 on two."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
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

    def cut(self, whole):
        own = whole.clone()
        return own if self.mesh is None else distribute_tensor(own, self.mesh, [Shard(0)])

    def step(self, gradients):
        for layer, gradient in zip(self.layers, gradients, strict=True):
            layer.weight.grad = self.cut(gradient.to(layer.weight.dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)  # of steps that are large
            self.optimizer.step()

    def weights(self):
        found = [layer.weight.detach() for layer in self.layers]
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


CASES = [
    ("adamw", torch.float32, {}),
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
    plain, sharded = Trained(kind, dtype, None, **options), Trained(kind, dtype, mesh, **options)
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


def test_moments_are_gathered_in_one_order_whatever_that_of_a_file(mesh):
    """A file's order differs in every process: a gather of one would meet another of the next."""
    orders = [], []
    for turn, order in zip((1, -1), orders, strict=True):
        trained, ones = Trained("adamw", torch.float32, mesh), [torch.ones(s) for s in SHAPES]
        trained.step(ones)
        state = trained.optimizer.state_dict()
        state["state"] = {n: dict([*own.items()][::turn]) for n, own in state["state"].items()}
        trained.optimizer.load_state_dict(state)
        moments = trained.optimizer.state[trained.layers[0].weight]
        names = {moments[name].to_local().data_ptr(): name for name in ("exp_avg", "exp_avg_sq")}
        whole = DTensor.full_tensor
        with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=whole) as gather:
            trained.step(ones)
        order += [names.get(call.args[0].to_local().data_ptr()) for call in gather.mock_calls]
    assert orders[0] == orders[1]
    assert {"exp_avg", "exp_avg_sq"} <= {*orders[0]}


def test_a_part_of_a_sharded_fused_weight_is_refused(mesh):
    attention = nn.MultiheadAttention(4, 2, bias=False)
    cut = distribute_tensor(attention.in_proj_weight.detach(), mesh, [Shard(0)])
    attention.in_proj_weight = nn.Parameter(cut)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="a part of a fused weight that is sharded"):
        constrain_(attention, optimizer, roles="query")


def test_sharded_weights_are_not_watched_for_another_optimizer(mesh):
    trained = Trained("sgd", torch.float32, mesh)
    other = torch.optim.SGD(trained.layers.parameters(), lr=0.1, foreach=False)
    for _ in range(5):
        for layer in trained.layers:
            layer.weight.full_tensor().square().sum().backward()
        other.step()  # a warning would be an error


@pytest.mark.slow
def test_ddp_and_fsdp2_train_as_one_process_does(tmp_path):
    command = [sys.executable, "-m", "tests.support.constrain_worker", str(tmp_path)]
    how = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True}
    done = subprocess.run(command, **how, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    pairs = [("ddp", "single"), ("fsdp2", "single")]
    pairs += [(f"fsdp2 {how}", f"single {how}") for how in ("bf16", "decay")]
    for to in ("spectral", "columns"):
        pairs += [(f"{way} {to}", f"single {to}") for way in ("ddp", "fsdp2")]
    pairs += [("ddp logits", "single logits")]
    for kind, reference in pairs:
        half = "bf16" in kind
        # moments of gradients that are rounding alone turn it into steps of the whole rate
        rel = 0.03 if half else 1e-4 if "logits" in kind else 1e-5
        for found in ranks:
            losses = ranks[0][reference]["losses"]
            assert found[kind]["losses"] == pytest.approx(losses, rel=rel)
            if kind == "ddp logits":  # by how much the first passes of either process were above
                errors = ranks[0][reference]["errors"]
                assert found[kind]["errors"] == pytest.approx(errors, rel=1e-3)
                assert found[kind]["errors"]["layer.self_attn"] > 0.01
            else:
                assert max(found[kind]["errors"].values()) <= (4e-3 if half else 1e-5)
                assert len(found[kind]["errors"]) == 3
            if not half:
                for name, value in found[kind]["weights"].items():
                    expected = torch.tensor(ranks[0][reference]["weights"][name])
                    assert torch.allclose(torch.tensor(value), expected, atol=2 * rel), (kind, name)
        assert ranks[0][kind]["weights"] == ranks[1][kind]["weights"], kind
    # The mark of Lie coordinates travels with a sharded optimizer checkpoint: one square weight has
    # it.
    assert ranks[0]["fsdp2"]["marks"] == 1
