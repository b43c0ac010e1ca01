"""The adapters of the engines log the vital signs that a `Monitor` of the same step gives."""

import math

import pytest
import torch
from tests.integrations.test_hf_trainer import bert, hook_count, trainer_of
from torch import nn
from transformers import TrainerCallback

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.integrations import ConditionCallback
from wellposed.measurement import worst_vitals


def named(numbers):
    """What ``train --monitor`` writes of the numbers of a Monitor."""
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return worst_vitals(finite) | finite


class Plain(TrainerCallback):
    """A Monitor in a loop of one's own, inside the Trainer's."""

    def __init__(self):
        self.rows = {}

    def on_train_begin(self, args, state, control, **now):
        self.monitor = wp.Monitor(now["model"], now["optimizer"], every=2, weights=False)

    def on_step_end(self, args, state, control, **now):
        if numbers := self.monitor.step():
            self.rows[state.global_step] = named(numbers)

    def on_train_end(self, args, state, control, **now):
        self.monitor.remove()


def test_the_trainer_logs_each_measured_step_and_is_left_without_hooks(tmp_path, caplog):
    model, plain = bert(), Plain()
    hooks = hook_count(model)
    callback = ConditionCallback(details=True, vitals=2)
    trainer = trainer_of(
        tmp_path, model, callbacks=[plain, callback], max_steps=5, logging_steps=100,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    assert list(plain.rows) == [1, 3, 5]
    logged = {row["step"]: row for row in trainer.state.log_history if "logit_max" in row}
    assert list(logged) == [1, 3, 5]
    for step, numbers in plain.rows.items():
        assert "vital/encoder.1.head1/entropy" in numbers
        assert "vital/encoder.0.key/update" in numbers
        assert "loss" in logged[step]
        assert numbers.items() <= logged[step].items()
    assert callback.monitor.alarms == plain.monitor.alarms != []  # the rate is large
    assert str(callback.monitor.alarms[0]) in caplog.messages
    assert hook_count(model) == hooks


def test_without_details_the_worst_alone_are_logged(tmp_path):
    trainer = trainer_of(tmp_path, bert(), max_steps=2, logging_steps=100)
    ConditionCallback(vitals=10).attach(trainer)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert {"logit_max", "entropy", "kurtosis", "grad_norm", "update"} <= row.keys()
    assert not any(name.startswith("vital/") for name in row)


def test_a_resumed_training_counts_on(tmp_path):
    how = {"logging_steps": 100, "save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path, bert(), max_steps=3, **how).train()
    callback = ConditionCallback(vitals=2)
    trainer = trainer_of(tmp_path, bert(), callbacks=[callback], max_steps=6, **how)
    trainer.train(resume_from_checkpoint=True)
    logged = [row["step"] for row in trainer.state.log_history if "logit_max" in row]
    assert logged == [5]  # of 1, 3, 5
    assert callback.monitor.steps == 6


def test_a_loop_of_accelerate_calls_a_monitor_as_any_loop_does():
    accelerate = pytest.importorskip("accelerate")
    rows = []
    for accelerator in (None, accelerate.Accelerator(cpu=True)):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        monitor = wp.Monitor(model, optimizer, every=1, weights=False)
        for _ in range(2):
            loss = model(torch.randn(2, 5, 16)).square().mean()
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            rows.append(monitor.step())
            optimizer.zero_grad()
        monitor.remove()
    assert "vital/encoder.0.key/update" in rows[0]
    assert rows[:2] == rows[2:]


def test_an_optimizer_that_runs_no_hooks_is_refused():
    class Flat(torch.optim.Optimizer):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="Flat runs no hooks around its step; give"):
        wp.Monitor(nn.TransformerEncoderLayer(16, 2, 24), Flat())
