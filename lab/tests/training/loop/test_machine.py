"""Devices, precision, memory: refused in one line if they are missing. The numbers are the same if
they only save time or memory."""

import pytest
import torch
from accelerate import Accelerator
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import rows
from torch._dynamo import OptimizedModule
from transformers import Trainer, TrainingArguments

from wellposed.errors import ConfigError, WellposedError
from wellposed.model_options import ModelOptions
from wellposed_lab.training.config import PenaltyOptions, RunConfig, TrainOptions
from wellposed_lab.training.loop.machine import build_accelerator, one_line_failures
from wellposed_lab.training.loop.run import Parts
from wellposed_lab.training.loop.train import train

SMALL = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, dropout=0.1)
DATA = {"limit_chars": 9000, "seq_len": 32}


def losses(out, **options):
    values = {"steps": 3, "batch_size": 16, "eval_batches": 1, "log_every": 1, **options}
    penalty = PenaltyOptions(affinity=1e-3, key=1e-2)
    settings = {"model": SMALL, "penalty": penalty, "train": TrainOptions(**values)}
    train(RunConfig("char_lm", DATA, **settings), out, progress=False)
    names = ("loss", "penalty", "grad_norm")
    return [row[name] for row in rows(out) for name in names if name in row]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1"])
def test_an_unknown_device(device):
    with pytest.raises(ConfigError, match=r"device = .*expected auto, cpu, cuda, cuda:N or mps"):
        TrainOptions(device=device)


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        ({"device": "cuda:64"}, "1", "'cuda:64' is not on this machine, which has: cpu"),
        ({"device": "cuda:0"}, "2", "one GPU each"),
        ({"precision": "fp16"}, "1", "give --precision bf16"),
        ({"margin_loss": "hinge", "margin_radius": 0.1}, "1", "give --margin-loss certified"),
    ],
)
def test_unusable_devices(monkeypatch, options, world, message):
    if world != "1":
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match=message):
        build_accelerator(TrainOptions(**options))


def test_checkpointing_changes_no_number(tmp_path):
    """Dropout is drawn again as it was, so only the order of sums could differ."""
    plain = losses(tmp_path / "plain")
    saving = losses(tmp_path / "saving", gradient_checkpointing=True)
    assert saving == pytest.approx(plain, rel=1e-5)


def test_a_model_that_cannot_recompute_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="StubModel cannot recompute its activations"):
        stub.run(stub.make_config(gradient_checkpointing=True), tmp_path)


@pytest.mark.slow
def test_a_compiled_trainer_of_this_process_compiles_no_run(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], **compiled)
    Trainer(torch.nn.Linear(2, 2), arguments)
    assert isinstance(Accelerator().prepare(torch.nn.Linear(2, 2)), OptimizedModule)
    prepared = build_accelerator(TrainOptions()).prepare(torch.nn.Linear(2, 2))
    assert type(prepared) is torch.nn.Linear


def test_a_compiled_model_is_what_trains(tmp_path, monkeypatch):
    """With a backend that computes as Python does, the numbers are the same; the inner model is
    what is saved."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="eager"))
    config = stub.make_config(steps=3)
    compiled = stub.make_config(steps=3, compile=True)
    model = stub.make_model(compiled, None)
    accelerator = build_accelerator(compiled.train)
    parts = Parts(compiled, stub.StubTask(), model, accelerator)
    assert isinstance(parts.prepared, torch._dynamo.OptimizedModule)
    pairs = ((config, "a"), (compiled, "b"))
    one, two = (stub.run(setup, tmp_path / name).result["results"] for setup, name in pairs)
    assert two["stub"] == pytest.approx(one["stub"], rel=1e-5)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("can't allocate memory")],
)
def test_memory_ends_in_one_line(tmp_path, error):
    config = RunConfig("char_lm", {"seq_len": 64})
    failing = one_line_failures(tmp_path, config, Accelerator())
    message = "out of memory on cpu with batch_size = 32; give a smaller --batch-size"
    with pytest.raises(WellposedError, match=message) as caught, failing:
        raise error
    assert "\n" not in str(caught.value)
