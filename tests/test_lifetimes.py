"""Hooks, stances, modes and tensors end with what made them, also after an exception or Ctrl-C in any callback."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
import transformers as hf
from tests.support.hooks import hooks_of, torch_state
from tests.support.tables import rotated
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback

import wellposed as wp
from wellposed.integrations import MonitorCallback

pytestmark = pytest.mark.slow  # the whole table

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16,
}  # fmt: skip
lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'wellposed[lightning]'"
)
ROWS = [{"input_ids": [5 + n, 6, 7, 8], "labels": n % 2} for n in range(8)]
ENDS = [RuntimeError, KeyboardInterrupt, MemoryError]
NOT_IN_TRAINING = {"on_init_end", "on_predict", "on_push_begin"}
EVENTS = [
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in NOT_IN_TRAINING
]


def bert():
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES))


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def seen_tensors(model):
    """Weak references to what every module returns; the list grows as the model runs."""
    outputs = []

    def note(_module, _inputs, output):
        if isinstance(output, torch.Tensor):
            outputs.append(weakref.ref(output))

    for part in model.modules():
        part.register_forward_hook(note)
    return outputs


def arguments(folder):
    return hf.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, eval_strategy="steps", eval_steps=2, save_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip


class Breaks(TrainerCallback):
    """Raises once, in one event."""

    def __init__(self, event, error):
        self.is_broken = False

        def raises(*_, **__):
            if not self.is_broken:
                self.is_broken = True
                raise error("on purpose")

        setattr(self, event, raises)


MOMENTS = [*itertools.product(EVENTS, (True, False))]


@pytest.mark.parametrize(("moment", "error"), rotated(MOMENTS, ENDS), ids=str)
def test_a_trainer_that_breaks_in_any_callback_leaves_nothing(moment, error, tmp_path):
    """In each event, before and after the monitor's own callback."""
    event, is_first = moment
    model = bert()
    outputs = seen_tensors(model)
    before = hooks_of(model), torch_state()
    breaks = Breaks(event, error)
    monitor = MonitorCallback(every=1)
    callbacks = [breaks, monitor] if is_first else [monitor, breaks]
    trainer = hf.Trainer(
        model, arguments(tmp_path), train_dataset=ROWS, eval_dataset=ROWS, callbacks=callbacks
    )
    penalty = wp.OrthogonalityPenalty(model, affinity=1e-3, attention=1e-3)
    penalty.attach(trainer)
    with pytest.raises(error, match="on purpose"):
        trainer.train()
    penalty.remove()
    trainer.optimizer and trainer.optimizer.zero_grad()
    assert hooks_of(model) == before[0]
    assert torch_state() == before[1]
    assert "compute_loss" not in vars(trainer)
    gc.collect()
    assert [ref() for ref in outputs if ref() is not None] == []

    again = wp.OrthogonalityPenalty(model, affinity=1e-3)
    again.attach(trainer)
    trainer.train()
    assert any(name.startswith("vital/") for row in trainer.state.log_history for name in row)
    again.remove()
    assert (hooks_of(model), torch_state()) == before


def test_a_trainer_that_halves_its_batch_leaves_nothing(tmp_path):
    model = bert()
    tried = []

    class Full(TrainerCallback):
        def on_step_end(self, args, *_, **__):
            tried.append(args)
            if len(tried) == 1:
                raise RuntimeError("CUDA out of memory. on purpose")

    settings = arguments(tmp_path)
    settings.auto_find_batch_size = True
    before = hooks_of(model), torch_state()
    monitor = MonitorCallback(every=1)
    trainer = hf.Trainer(
        model, settings, train_dataset=ROWS, eval_dataset=ROWS, callbacks=[Full(), monitor]
    )
    trainer.train()
    assert len(tried) > 1
    assert (hooks_of(model), torch_state()) == before


class Module(lightning.LightningModule):
    def __init__(self, event, error):
        super().__init__()
        self.body = bert()
        self.event = event
        self.error = error
        self.penalty = wp.OrthogonalityPenalty(self.body, affinity=1e-3, attention=1e-3)

    def on_train_start(self):
        self.monitor = wp.Monitor(self.body, self.trainer.optimizers[0], every=1)
        self.break_at("on_train_start")

    def break_at(self, event):
        if event == self.event:
            raise self.error("on purpose")

    def training_step(self, batch):
        loss = self.body(**batch).loss
        self.break_at("training_step")
        return loss + self.penalty()

    def on_before_optimizer_step(self, _):
        self.break_at("on_before_optimizer_step")

    def on_train_batch_end(self, *_):
        self.break_at("on_train_batch_end")
        self.monitor.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize(
    "event", ["on_train_start", "training_step", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_a_lightning_module_that_breaks_takes_its_hooks_with_it(event, error):
    module = Module(event, error)
    body = module.body
    before = torch_state()
    batches = DataLoader(
        [{"input_ids": torch.tensor(row["input_ids"]), "labels": row["labels"]} for row in ROWS]
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", **quiet)
    with pytest.raises(error, match="on purpose"):
        trainer.fit(module, batches)
    del trainer, module
    gc.collect()
    assert hooks_of(body) == hooks_of(bert())
    assert torch_state()["stance"] == before["stance"]
    assert torch_state()["function modes"] == before["function modes"]


OWNERS = {
    "Monitor": lambda model, optimizer: wp.Monitor(model, optimizer, every=1),
    "penalty": lambda model, _: wp.OrthogonalityPenalty(model, affinity=1e-2),
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_deleted_owner_takes_its_hooks_and_its_stance(name):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks_of(model, optimizer), torch_state()
    owner = OWNERS[name](model, optimizer)
    assert hooks_of(model, optimizer) != before[0]
    for _ in range(3):  # a cell of a notebook that is run again
        owner = OWNERS[name](model, optimizer)
        model(torch.randn(2, 3, 16)).sum().backward()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    del owner
    gc.collect()
    assert (hooks_of(model, optimizer), torch_state()) == before
    for part in copies:
        part(torch.randn(2, 3, 16)).sum().backward()


def test_a_monitor_is_a_context():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks_of(model, optimizer), torch_state()

    def interrupted():
        with wp.Monitor(model, optimizer, every=1):
            model(torch.randn(2, 3, 16))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (hooks_of(model, optimizer), torch_state()) == before


def test_two_monitors_share_the_stance():
    before = torch_state()["stance"]
    first, second = (wp.Monitor(layer(), every=2) for _ in range(2))
    first.remove()
    assert torch_state()["stance"] != before
    second.step()
    assert torch_state()["stance"] == before
    second.step()
    assert torch_state()["stance"] != before
    second.remove()
    assert torch_state()["stance"] == before


def test_a_stance_that_somebody_else_set_stays():
    monitor = wp.Monitor(layer())
    with torch.compiler.set_stance("eager_on_recompile"):
        chosen = torch_state()["stance"]
        monitor.remove()
        assert torch_state()["stance"] == chosen


@pytest.mark.parametrize(("has_optimizer", "count"), [(True, 70), (False, 4100)])
def test_a_forgotten_monitor_stops_and_says_so_once(has_optimizer, count, caplog):
    before = torch_state()["stance"]
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = wp.Monitor(model, optimizer if has_optimizer else None, every=1)
    for _ in range(count):
        output = model(torch.randn(1, 2, 16))
        output.sum().backward()
        optimizer.step()
    messages = [record.message for record in caplog.records]
    assert sum("nobody called step()" in message for message in messages) == 1
    assert torch_state()["stance"] == before
    last = weakref.ref(output)
    del output
    gc.collect()
    assert last() is None
    monitor.step()
    model(torch.randn(2, 3, 16)).sum().backward()
    assert monitor.step() != {}
    monitor.remove()
