"""Plans: what a step of a verb costs, held against steps."""

import importlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError, ConvergenceError
from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty
from wellposed.plan import Meter

WHERE = ("*.out_proj", "*.linear1", "*.linear2")
STRENGTHS = {"attention": 1e-2, "feedforward": 1e-2, "attention_mode": "separate"}


def model_on(device="cpu", mesh=None):
    torch.manual_seed(0)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def planned_and_counted(mesh, *forgiven):
    """Return the numbers of collectives of each verb: planned, and counted in a step."""
    result = {}

    def hold(verb, plan, step):
        with CommDebugMode() as calls, suppress(*forgiven):
            step()
        result[verb] = sum(plan.collectives.values()), calls.get_total_counts()

    for to in ("orthogonal", "spectral"):
        model = model_on(mesh=mesh)
        optimizer = optimizer_of(model)
        plan = constrain_(model, optimizer, WHERE, to=to, dry_run=True).plan
        constrain_(model, optimizer, WHERE, to=to)
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 1e-2)
        hold(to, plan, optimizer.step)
    model = model_on(mesh=mesh)
    plan = OrthogonalityPenalty(model, **STRENGTHS, dry_run=True).plan
    penalty = OrthogonalityPenalty(model, **STRENGTHS)
    hold("penalty", plan, lambda: penalty().backward())
    plan = Monitor(model, vitals=False, dry_run=True).plan
    hold("Monitor", plan, Monitor(model, vitals=False).step)
    return result


def check(result):
    for verb, (planned, counted) in result.items():
        assert planned == counted > 0, verb


# Fake collectives deliver other numbers, which an owner may report to be far from the set, or broken.
@pytest.mark.filterwarnings("ignore::wellposed.constrain.ConstraintWarning")
@pytest.mark.parametrize("ranks", [8, 256, 1024])
def test_collectives_on_fake_ranks(ranks):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        result = planned_and_counted(init_device_mesh("cpu", (ranks,)), ConvergenceError)
    finally:
        dist.destroy_process_group()
    check(result)


def worker(rank, world, store, out):
    torch.set_num_threads(1)
    wait = timedelta(seconds=200)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait
    )
    result = planned_and_counted(init_device_mesh("cpu", (world,)))
    if rank == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_collectives_of_processes(world, tmp_path):
    files = str(tmp_path / "store"), str(tmp_path / "out.pt")
    mp.spawn(worker, args=(world, *files), nprocs=world)
    check(torch.load(files[1]))


@pytest.mark.parametrize("size", [{"to": "orthogonal"}, {"to": "spectral", "bound": 0.2}])
def test_flops_of_a_step(size):
    model = model_on()
    optimizer = optimizer_of(model)
    plan = constrain_(model, optimizer, WHERE, **size, dry_run=True).plan
    handle = constrain_(model, optimizer, WHERE, **size, batched=True)
    turns = {path: 0.1 * torch.randn_like(model.get_parameter(path)) for path in handle.paths}
    for _ in range(2):
        for path, turn in turns.items():  # every singular value leaves the ball, and a turn
            weight = model.get_parameter(path)
            weight.grad = -20.0 * weight.detach() + turn
        with Meter() as meter:
            optimizer.step()
    assert meter.flops == pytest.approx(plan.flops_by_rank[0], rel=1e-2)


def test_weights_without_values(capsys):
    """The plan of a model on the meta device is that of the same model with values; it alone is shown."""
    plans = []
    for device in ("cpu", "meta"):
        model = model_on(device)
        before = list(model.parameters())
        optimizer = optimizer_of(model)
        handle = constrain_(model, optimizer, WHERE, dry_run=True)
        assert not handle.active
        penalty = OrthogonalityPenalty(model, **STRENGTHS, dry_run=True)
        monitor = Monitor(model, dry_run=True)
        plans.append((handle.plan, penalty.plan, monitor.plan))
        assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
        assert not any(part._forward_hooks for part in model.modules())
        printed = capsys.readouterr().out
        assert ("would move" in printed) == (device == "cpu")
        assert all(plan.summary() in printed for plan in plans[-1])
    assert plans[0] == plans[1]
    assert sum(plans[0][0].matrices.values()) == 9
    with Meter() as meter:
        OrthogonalityPenalty(model_on(), **STRENGTHS)().backward()
    assert meter.flops == plans[0][1].flops_by_rank[0] > 0
    with pytest.raises(ConfigError, match="meta device"):
        constrain_(model, optimizer, WHERE)


def test_the_page_is_what_its_maker_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    scale = importlib.import_module("benchmarks.scale")
    page = scale.PAGE.read_text("utf-8")
    assert page.startswith(scale.HEAD)
    rows = scale.plans("Llama-3 8B", 8, ("constrain_ orthogonal", "constrain_ spectral", "penalty"))
    for name, plan in rows:
        assert scale.line(8, name, plan) in page, "run python -m benchmarks.scale"
