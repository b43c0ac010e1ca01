"""A loss that a model has of its own: in the training gradient by the share of sequences, never in
an evaluation."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from wellposed.training import TrainOptions, read_metrics
from wellposed.training.loop.batches import MicroBatches
from wellposed.training.loop.step import compute_gradients

STRENGTH = 3.0


class WithAuxiliary(nn.Module):
    """A model whose own loss is the mean over sequences of (length * |w|)^2, so that sequences
    differ."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def own_loss(self, attention_mask: Tensor) -> Tensor:
        size = self.inner.blocks[0].inner.weight.square().sum()
        return STRENGTH * (attention_mask.sum(1) ** 2).to(size.dtype).mean() * size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        logits = self.inner(input_ids, attention_mask).logits
        return SimpleNamespace(logits=logits, auxiliary_loss=self.own_loss(attention_mask))


def test_its_gradient_does_not_depend_on_how_a_batch_is_cut(stub: ModuleType) -> None:
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    task, model = stub.StubTask(), WithAuxiliary(stub.StubModel()).double()
    batches = MicroBatches(task, 5, seed=0).take(5)  # 23 examples: the last micro-batch holds three
    options = TrainOptions(max_grad_norm=0.0)

    def gradient() -> Tensor:
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return torch.cat([part.reshape(-1) for part in found])

    compute_gradients(accelerator, model.inner, task, batches, options)
    plain = gradient()
    model.zero_grad()
    numbers = compute_gradients(accelerator, model, task, batches, options)
    added = gradient() - plain
    lengths = [int(length) for batch in batches for length in batch["attention_mask"].sum(1)]
    assert len(lengths) == 23
    expected = (
        STRENGTH
        * sum(length**2 for length in lengths)
        / 23
        * model.inner.blocks[0].inner.weight.square().sum()
    )
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(added, gradient(), rtol=1e-11, atol=1e-12)
    assert numbers.auxiliary == pytest.approx(float(expected.detach()), rel=1e-5)
    assert compute_gradients(accelerator, model.inner, task, batches, options).auxiliary is None


def test_it_is_logged_and_left_out_of_evaluations(stub: ModuleType, tmp_path: Path) -> None:
    def build(config: Any, task: Any) -> Any:
        return WithAuxiliary(stub.make_model(config, task))

    config = stub.make_config(learning_rate=1e-9)
    stub.run(config, tmp_path / "with", model=build)
    stub.run(config, tmp_path / "without")
    pairs = list(
        zip(read_metrics(tmp_path / "with"), read_metrics(tmp_path / "without"), strict=True)
    )
    for own, plain in pairs:
        assert own["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert ("auxiliary_loss" in own) == (own["split"] == "train")
        assert "auxiliary_loss" not in plain
    assert all(own["auxiliary_loss"] > 1.0 for own, _ in pairs if own["split"] == "train")


def test_one_that_is_not_finite_stops_the_run_by_name(stub: ModuleType, tmp_path: Path) -> None:
    class Broken(WithAuxiliary):
        def own_loss(self, attention_mask: Tensor) -> Tensor:
            return super().own_loss(attention_mask) * float("inf")

    result = stub.run(
        stub.make_config(), tmp_path / "run", model=lambda c, t: Broken(stub.make_model(c, t))
    )
    assert result.status == "failed"
    assert "auxiliary loss is inf" in result.result["failure"]["what"]
    assert result.result["failure"]["layer"] == "(the auxiliary loss)"
