"""The real Trainer on a tiny BERT: the penalty is in the gradient, the numbers are logged, no trace
is left."""

import importlib
import math
import pickle
import sys
from typing import ClassVar

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.trainer_callback import TrainerCallback

import wellposed as wp
import wellposed.integrations as adapters
from wellposed.errors import ConfigError
from wellposed.integrations import MonitorCallback
from wellposed.measurement import worst_vitals

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8,
        "bos_token_id": 1, "eos_token_id": 1}  # fmt: skip
PINNED = {
    "cond/orthogonality_error/max",
    "cond/scale_free_orthogonality_error/max",
    "cond/sigma_max/max",
    "cond/stable_rank/min",
}
PARTS = {f"penalty/{part}" for part in ("key", "query", "affinity", "total")}


def bert():
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3))


def examples(count=24):
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 40, (count, 7), generator=draw).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 7, "labels": sum(row) % 3} for row in rows]


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 2, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False, "lr_scheduler_type": "constant", "seed": 3,
    }  # fmt: skip
    return hf.TrainingArguments(**{**settings, **changes})


def trainer_of(folder, model, penalty=None, **changes):
    """A Trainer of ``rows`` under the penalty, if one is given."""
    rows = changes.pop("rows", None) or examples()
    callbacks = changes.pop("callbacks", ())
    source = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    trainer = hf.Trainer(
        **source, args=arguments(folder, **changes), train_dataset=rows, eval_dataset=rows[:8],
        callbacks=list(callbacks),
    )  # fmt: skip
    if penalty is not None:
        penalty.attach(trainer)
    return trainer


def test_penalty_decreases_metrics_are_logged_and_the_model_round_trips(tmp_path):
    model = bert()
    keys = set(model.state_dict())
    hooks = hook_count(model)
    penalty = wp.OrthogonalityPenalty(model, key=0.1, query=0.1, affinity=1e-4, form="gram_squared")
    callback = MonitorCallback(penalty, every=2, vitals=False)
    options = {"callbacks": [callback], "max_steps": 12, "logging_steps": 4}
    trainer = trainer_of(tmp_path, model, penalty, **options)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 3
    assert all(row.keys() >= PINNED | PARTS for row in logged)
    assert not any("vital/" in name for row in logged for name in row)
    assert logged[-1]["penalty/total"] < 0.8 * logged[0]["penalty/total"]

    batch = {"input_ids": torch.tensor([row["input_ids"] for row in examples(3)])}
    model.eval()
    expected = model(**batch).logits
    trainer.save_model(str(tmp_path / "saved"))
    fresh = hf.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(fresh(**batch).logits, expected, rtol=0, atol=0)
    penalty.remove()
    assert set(model.state_dict()) == keys
    assert hook_count(model) == hooks


def test_the_callback_takes_a_batch_and_patterns_and_says_so(tmp_path):
    """A Trainer of a model without a configuration of transformers, and with names of its own."""
    from tests.support.public_models import STRANGE, TOKENS

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = STRANGE.build()

        def forward(self, input_ids, labels=None):
            logits = self.body(input_ids % 30).mean(1)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return {"loss": loss, "logits": logits}

    def trained(**options):
        callback = MonitorCallback(every=1, **options)
        trainer_of(tmp_path, Loss(), callbacks=[callback], max_steps=2, logging_steps=1).train()
        return callback

    with pytest.raises(wp.RoleNotFoundError) as caught:
        trained()
    assert str(caught.value).startswith("MonitorCallback: ")
    assert "Give a batch: MonitorCallback(..., batch=batch)" in str(caught.value)
    assert "body.layers.*.attn.alpha.weight (16, 16), 2 times" in str(caught.value)
    assert trained(batch=TOKENS).monitor.steps == 2
    assert trained(where={"query": "*.alpha.weight"}).monitor.steps == 2


def test_each_row_says_at_which_step_its_numbers_were_measured(tmp_path):
    callback = MonitorCallback(every=5)
    trainer = trainer_of(tmp_path, bert(), callbacks=[callback], max_steps=8, logging_steps=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    measured = {row["step"]: row.get("monitor/step") for row in rows}
    assert measured == {2: 1, 4: None, 6: 6, 8: None}
    for row in rows:
        names = {name.partition("/")[0] for name in row}
        assert ({"cond", "vital"} <= names) == (row.get("monitor/step") is not None)
        assert names.isdisjoint({"cond", "vital"}) == (row.get("monitor/step") is None)


def hook_count(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_evaluation_loss_holds_no_penalty(tmp_path):
    model = bert()
    penalty = wp.OrthogonalityPenalty(model, key=100.0, form="paper")
    rows = examples(8)
    loss = trainer_of(tmp_path, model, penalty, rows=rows).evaluate()["eval_loss"]
    ids, labels = (torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels"))
    expected = model.eval()(input_ids=ids, labels=labels).loss.item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert penalty.step == 0


def test_attach_puts_the_numbers_before_every_tracker(tmp_path):
    class Tracker(TrainerCallback):
        rows: ClassVar[list[dict[str, float]]] = []

        def on_log(self, args, state, control, **kwargs):
            self.rows.append(dict(kwargs["logs"]))

    trainer = trainer_of(tmp_path, bert(), callbacks=[Tracker()], max_steps=2)
    MonitorCallback().attach(trainer)
    trainer.train()
    assert {name for name in Tracker.rows[0] if "cond/" in name} == PINNED


def test_the_numbers_are_the_worst_of_all_weights(tmp_path):
    model = bert()
    penalty = wp.OrthogonalityPenalty(model, key=0.1, query=0.2, form="paper")
    callback = MonitorCallback(penalty, every=1, vitals=False)
    still = {"max_steps": 1, "logging_steps": 1, "learning_rate": 0.0}
    trainer = trainer_of(tmp_path, model, penalty, callbacks=[callback], **still)
    trainer.train()
    logged = trainer.state.log_history[0]
    total = float(penalty().detach())
    measured = wp.measure(model).rows
    worsts = {"sigma_max": max, "stable_rank": min}
    for number, worst in worsts.items():
        expected = worst(row[number] for row in measured)
        assert logged[f"cond/{number}/{worst.__name__}"] == pytest.approx(expected, rel=1e-2)
    parts = penalty.terms()
    for strength in ("key", "query"):
        expected = sum(value for name, value in parts.items() if name.startswith(strength))
        assert logged[f"penalty/{strength}"] == pytest.approx(expected, rel=1e-5)
    assert logged["penalty/total"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["ConditionCallback", "ConditionMetrics", "LightningConditionCallback"]
)
def test_names_of_before_are_refused_with_what_to_use(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*Monitor"):
        getattr(adapters, name)
    with pytest.raises(ConfigError, match="vitals"):
        MonitorCallback(vitals=10)


@pytest.mark.slow
def test_a_model_init_is_followed_and_conditioned(tmp_path):
    """The model made at construction is not the one that is trained; a second training makes a
    third, of other sizes."""
    first = bert()
    made = []

    def init():
        torch.manual_seed(len(made))
        config = hf.BertConfig(**{**SMALL, "num_hidden_layers": 2 + len(made) % 2}, num_labels=3)
        made.append(hf.BertForSequenceClassification(config))
        return made[-1]

    penalty = wp.OrthogonalityPenalty(first, key=1.0, affinity=1e-4, form="gram_squared")
    callback = MonitorCallback(penalty, every=1, vitals=False)
    trainer = trainer_of(tmp_path, init, penalty, callbacks=[callback], logging_steps=1)
    hooks = hook_count(first)
    for number in (1, 2):
        trainer.train()
        assert penalty._live.model is made[number]
        assert penalty.step == 6
        start, *_, end = (row for row in trainer.state.log_history if "loss" in row)
        assert end["penalty/key"] < 0.9 * start["penalty/key"]
        expected = max(row["sigma_max"] for row in wp.measure(made[number]).rows)
        assert end["cond/sigma_max/max"] == pytest.approx(expected, rel=1e-3)
    assert all(p.grad is None for p in first.parameters())
    assert (hooks, hook_count(first)) == (8, 0)
    penalty.remove()
    assert hook_count(made[2]) == 0


def test_attach_is_taken_back_and_refuses_what_it_cannot_follow(tmp_path):
    model = bert()
    trainer = trainer_of(tmp_path, model)
    penalty, other = (wp.OrthogonalityPenalty(model, key=1.0, form="paper") for _ in range(2))
    penalty.attach(trainer)
    strange = wp.OrthogonalityPenalty(hf.GPT2Model(hf.GPT2Config(**GPT2)), key=1.0, form="paper")
    with pytest.raises(ConfigError, match="this trainer has a penalty already"):
        penalty.attach(trainer)
    with pytest.raises(ConfigError, match=r"call remove.. on that one first"):
        other.attach(trainer)
    with pytest.raises(ConfigError, match=r"received Sequential.*write loss \+ penalty\(\)"):
        other.attach(nn.Sequential())
    with pytest.raises(ConfigError, match="does not hold the GPT2Model"):
        strange.attach(trainer_of(tmp_path, model))
    pickle.loads(pickle.dumps(penalty)).remove()  # a copy is attached to nothing
    batch = {name: torch.tensor([row[name] for row in examples(4)]) for name in examples(1)[0]}
    attached = trainer.compute_loss(model.train(), dict(batch))
    outer, trainer.compute_loss = (
        trainer.compute_loss,
        lambda *arguments, **named: outer(*arguments, **named),
    )
    penalty.remove()
    plain = trainer.compute_loss(model, dict(batch))
    assert (attached - plain).item() == pytest.approx(other().item(), rel=1e-5)
    trainer.compute_loss = outer
    other.attach(trainer)
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), attached)
    with pytest.raises(ConfigError, match="removed"):
        penalty.attach(trainer)


@pytest.mark.slow
def test_a_first_large_penalty_is_told(tmp_path, caplog):
    model = bert()
    for strength, lines_expected in ((1e-3, 0), (1e3, 1)):
        penalty = wp.OrthogonalityPenalty(model, key=strength, form="paper")
        trainer_of(tmp_path, model, penalty).train()
        lines = [row.message for row in caplog.records if "times the task loss" in row.message]
        assert len(lines) == lines_expected
        penalty.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_16_bits_are_named_as_the_penalty_is_attached(dtype, tmp_path, caplog):
    model = bert().to(dtype)
    penalty = wp.OrthogonalityPenalty(model, key=1e-2)
    with caplog.at_level("WARNING"):
        trainer_of(tmp_path, model, penalty)
    lines = [record.message for record in caplog.records if "rounded away" in record.message]
    assert len(lines) == (dtype is torch.bfloat16)
    count = len(list(model.parameters()))
    assert all(f"attach: {count} trained weights are bfloat16" in line for line in lines)
    assert all("Trainer: bf16=True" in line for line in lines)
    penalty.remove()


@pytest.mark.slow
def test_a_resumed_run_sets_the_step_of_the_penalty(tmp_path):
    model = bert()
    penalty = wp.OrthogonalityPenalty(model, key=0.1, every=2, form="paper")
    trainer = trainer_of(
        tmp_path, model, penalty, rows=examples(64), callbacks=[MonitorCallback(penalty)],
        save_strategy="steps", save_steps=2, max_steps=3, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert penalty.step == 6
    penalty.step = 999
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert penalty.step == 6


def test_a_missing_engine_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "wellposed.integrations._hf_trainer", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*\[hf\]'"):
        importlib.import_module("wellposed.integrations._hf_trainer")


# The vital signs that a `Monitor` of the same step gives.


class Plain(TrainerCallback):
    """A Monitor in a loop of one's own, inside the Trainer's."""

    def __init__(self):
        self.rows = {}

    def on_train_begin(self, args, state, control, **now):
        self.monitor = wp.Monitor(now["model"], now["optimizer"], every=2, weights=False)

    def on_step_end(self, args, state, control, **now):
        if numbers := self.monitor.step():
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            self.rows[state.global_step] = worst_vitals(finite)

    def on_train_end(self, args, state, control, **now):
        self.monitor.remove()


def test_the_trainers_rows_carry_the_worst_since_the_last_and_no_row_comes_between(
    tmp_path, caplog
):
    model = bert()
    plain = Plain()
    hooks = hook_count(model)
    callback = MonitorCallback(every=2, weights=False)
    trainer = trainer_of(
        tmp_path, model, callbacks=[plain, callback], max_steps=5, logging_steps=4,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    assert list(plain.rows) == [1, 3, 5]
    logged = {row["step"]: row for row in trainer.state.log_history if "vital/logit_max" in row}
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [4]
    assert list(logged) == [4, 5]
    assert plain.rows[5].items() <= logged[5].items()
    for name, first in plain.rows[1].items():
        worst = min if name.endswith("/entropy") else max
        assert logged[4][name] == worst(first, plain.rows[3][name])
    assert callback.monitor.alarms == plain.monitor.alarms != []  # the rate is large
    assert str(callback.monitor.alarms[0]) in caplog.messages
    assert hook_count(model) == hooks


@pytest.mark.slow
def test_a_resumed_training_counts_on(tmp_path):
    settings = {"logging_steps": 5, "save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path, bert(), max_steps=3, **settings).train()
    callback = MonitorCallback(every=2, weights=False)
    trainer = trainer_of(tmp_path, bert(), callbacks=[callback], max_steps=6, **settings)
    trainer.train(resume_from_checkpoint=True)
    logged = [row["step"] for row in trainer.state.log_history if "vital/logit_max" in row]
    assert logged == [5]  # of 1, 3, 5
    assert callback.monitor.steps == 6


def test_an_optimizer_that_runs_no_hooks_is_refused():
    class Flat(torch.optim.Optimizer):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="Flat runs no hooks around its step; give"):
        wp.Monitor(nn.TransformerEncoderLayer(16, 2, 24), Flat())
