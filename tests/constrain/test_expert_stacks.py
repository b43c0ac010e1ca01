"""Odd stacks of experts: one expert, shared by layers, of two dtypes, frozen, without a token, cut
unevenly. Each matrix is in its set after each step, or one line says why not."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.penalize.test_experts import edited, gpt_oss, half_frozen, mixtral, qwen, shared
from tests.support.expert_parallel_worker import ROLES, cut_experts
from tests.support.one_mesh import one_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError

STACKS = ("gate_up_proj", "down_proj")


def mixed(model):
    """Float32 experts in the first layer, bfloat16 ones in the second."""
    model.layers[1].mlp.experts.bfloat16()


# Name -> (model, matrices that are constrained).
MODELS = {
    "one expert": (lambda: mixtral(experts=1), 6),
    "shared by layers": (edited(mixtral, shared), 12),
    "of two dtypes": (edited(mixtral, mixed), 24),
    "interleaved, transposed": (gpt_oss, 24),
    "qwen": (qwen, 24),
}


def stacks(model):
    """The stacks of experts by name; a shared one once."""
    return {path: weight for path, weight in model.named_parameters() if path.endswith(STACKS)}


def slow_distance(weight, to):
    """How far a matrix is from its set, in float64 and by its definition."""
    weight = weight.detach().double()
    if to == "spectral":
        return float(torch.linalg.svdvals(weight)[0] - 1.0)
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    return float((tall.T @ tall - torch.eye(tall.shape[1], dtype=tall.dtype)).abs().max())


def matrices(handle):
    return [weight.slice.matrix_in(weight.parameter.detach()) for weight in handle.weights]


def descend(model, optimizer, steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in stacks(model).values():
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
        optimizer.step()


@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_is_in_its_set_after_steps(name, to, caplog):
    torch.manual_seed(0)
    build, count = MODELS[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with caplog.at_level(logging.INFO, logger="wellposed"):
        handle = constrain_(model, optimizer, where=ROLES, to=to)
    assert len(handle.paths) == count
    start = [matrix.clone() for matrix in matrices(handle)]
    descend(model, optimizer)
    moved = [not torch.equal(*pair) for pair in zip(start, matrices(handle), strict=True)]
    assert all(moved)
    for matrix in matrices(handle):
        limit = 1e-5 if to == "spectral" or matrix.dtype == torch.float32 else 8e-3
        assert slow_distance(matrix, to) <= limit
    tied = [line for line in caplog.messages if "tied" in line]
    assert len(tied) == (2 if name == "shared by layers" else 0), "one line a stack"


@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
def test_frozen_experts_are_refused_by_name(to):
    model = edited(mixtral, half_frozen)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts.*frozen"):
        constrain_(model, optimizer, where=ROLES, to=to)


def test_experts_that_no_token_reached_stay_where_they_are():
    """Their gradients are zeros in a stack that has some, and so are their steps."""
    torch.manual_seed(0)
    model = mixtral(experts=8, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    handle = constrain_(model, optimizer, where="feedforward_out")
    before = [matrix.clone() for matrix in matrices(handle)]
    model(torch.ones(1, 1, dtype=torch.long))[0].square().sum().backward()
    reached = model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1)
    assert 0 < reached.sum() <= 2
    optimizer.step()
    for index, pair in enumerate(zip(before, matrices(handle), strict=True)):
        change = float((pair[0] - pair[1]).abs().max())
        assert (change > 1e-4) == bool(reached[index])
        assert change > 1e-4 or change <= 1e-6
    assert max(slow_distance(matrix, "orthogonal") for matrix in matrices(handle)) <= 1e-5


@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
def test_experts_cut_along_their_axis_take_the_steps_of_plain_ones(to):
    """Expert parallelism: a `DTensor` that is cut along the axis of the experts."""
    results = []
    for is_cut in (False, True):
        with one_mesh() as mesh:
            torch.manual_seed(0)
            model = mixtral(experts=3)
            if is_cut:
                cut_experts(model, mesh)
            optimizer = torch.optim.AdamW(stacks(model).values(), lr=1e-2, weight_decay=0.0)
            handle = constrain_(model, optimizer, where=ROLES, to=to)
            generator = torch.Generator().manual_seed(1)
            for _ in range(3):
                for weight in stacks(model).values():
                    gradient = torch.randn(weight.shape, generator=generator)
                    weight.grad = (
                        distribute_tensor(gradient, mesh, [Shard(0)]) if is_cut else gradient
                    )
                optimizer.step()
            assert len(handle.paths) == 18
            values = [weight.detach() for weight in stacks(model).values()]
            results.append([w.full_tensor() if is_cut else w for w in values])
    for plain, cut in zip(*results, strict=True):
        assert float((plain - cut).abs().max()) <= 1e-5


@pytest.mark.slow
def test_two_processes_with_experts_of_their_own_equal_one(tmp_path):
    """Three experts, so that one process has two of each stack and the other one."""
    out = tmp_path / "distances.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launch, "tests.support.expert_parallel_worker", str(out)]
    options = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    distances = json.loads(out.read_text("utf-8"))
    assert distances.keys() == {"orthogonal", "spectral"}
    for several in distances.values():
        *entries, _ = several
        assert len(entries) == 8
        assert max(entries) <= 1e-5
        assert several[-1] <= 1e-3  # of a value near 100
