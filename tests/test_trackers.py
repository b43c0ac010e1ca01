"""One argument, `log_to`: each tracker gets the numbers of the measured steps, at their steps."""

import copy
import pickle
from types import ModuleType

import pytest
import torch
import transformers as hf
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.integrations import MonitorCallback
from wellposed.penalize import summed_terms
from wellposed.trackers import TrackerLog

MEASURED = [1, 4, 7]


class Wandb:
    """A run of wandb: a step behind its counter is dropped, and rows without a commit wait."""

    def __init__(self):
        self.rows = []
        self.waiting = {}
        self.axes = {}

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=True):
        if step is None or step >= len(self.rows):
            self.waiting |= data
        if commit:
            self.rows.append(self.waiting)
            self.waiting = {}

    def received(self):
        return [(row["monitor/step"], row) for row in self.rows if "monitor/step" in row]


class Summary:
    def __init__(self):
        self.steps = {}

    def add_scalar(self, name, value, step):
        self.steps.setdefault(step, {})[name] = value

    def received(self):
        return list(self.steps.items())


class WithMetrics:
    """A logger of Lightning, or an experiment of Comet."""

    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))

    def received(self):
        return self.calls


class WithLoggers:
    """A Trainer, Fabric or module of Lightning, whose loggers exist once training begins."""

    def __init__(self):
        self.logger = WithMetrics()

    @property
    def loggers(self):
        return [self.logger]

    def log(self, name, value):
        raise AssertionError("a module of Lightning logs one value by name")

    def received(self):
        return self.logger.calls


class WithLog:
    """A run of trackio, or an Accelerator."""

    def __init__(self):
        self.calls = []

    def log(self, values, step=None):
        self.calls.append((step, values))

    def received(self):
        return self.calls


class Function:
    def __init__(self):
        self.calls = []

    def __call__(self, numbers, step):
        self.calls.append((step, numbers))

    def received(self):
        return self.calls


class Mlflow(ModuleType):
    """The module: it refuses names that mlflow refuses."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls = []
        self.log_metrics = self.take

    def take(self, metrics, step):
        assert not any(character in name for name in metrics for character in "@[]:")
        self.calls.append((step, metrics))

    def received(self):
        return self.calls


TRACKERS = [Wandb, Summary, WithMetrics, WithLoggers, WithLog, Function, Mlflow]


def block():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)


def trained(tracker, model=None, steps=8, **options):
    """Train with a monitor and a tracker; return the numbers that `step` returned, by step."""
    model = model or block()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    returned = []
    with wp.Monitor(model, optimizer, every=3, log_to=tracker, **options) as monitor:
        for step in range(1, steps + 1):
            model(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if numbers := monitor.step():
                returned.append((step, numbers))
            if isinstance(tracker, Wandb):
                tracker.log({"loss": 1.0})
                tracker.log({"accuracy": 1.0})  # its counter is ahead of the step
    return monitor, returned


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_gets_measured_steps_alone_at_their_steps(kind):
    tracker = kind()
    _, returned = trained(tracker)
    received = tracker.received()
    assert [step for step, _ in received] == MEASURED == [step for step, _ in returned]
    for (_, logged), (_, numbers) in zip(received, returned, strict=True):
        assert {name: logged[name] for name in numbers} == numbers
        assert logged.keys() - numbers.keys() <= {"monitor/step", "loss"}
    if kind is Wandb:
        assert tracker.axes == {"cond/*": "monitor/step", "vital/*": "monitor/step"}
        assert len(tracker.rows) == 16, "no row was added to those of the script"


def test_names_that_mlflow_refuses_are_spelt_otherwise():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = block()
            self.right = block()

        def forward(self, x):
            return self.left(x) + self.right(x)

    tracker = Mlflow()
    trained(tracker, Towers(), steps=1)
    assert "cond/encoder.0.query_left.self_attn/sigma_max" in tracker.calls[0][1]


def test_several_trackers_get_the_same():
    first = WithLog()
    second = Function()
    trained([first, second])
    assert first.calls == second.calls
    assert len(first.calls) == 3


@pytest.mark.parametrize(
    "wrong", ["wandb", 3, object(), block(), Wandb, lambda numbers: None, [WithLog(), None]]
)
@pytest.mark.parametrize("call", [wp.Monitor, MonitorCallback, wp.OrthogonalityPenalty])
def test_what_is_no_tracker_is_refused_by_every_call(call, wrong):
    options = {"key": 1.0} if call is wp.OrthogonalityPenalty else {}
    positional = () if call is MonitorCallback else (block(),)
    expected = rf"{call.__name__}: log_to = .*; expected a wandb run.*numbers, step"
    with pytest.raises(ConfigError, match=expected):
        call(*positional, log_to=wrong, **options)


def test_an_error_of_a_tracker_is_raised_and_the_next_step_counts_on():
    def full(numbers, step):
        if step == 1:
            raise OSError("disk is full")
        steps.append(step)

    steps = []
    monitor = wp.Monitor(block(), every=1, log_to=full)
    with pytest.raises(OSError, match="disk is full"):
        monitor.step()
    monitor.step()
    assert steps == [2]
    assert [row["step"] for row in monitor.history()] == [1, 2]


def test_copies_and_pickles_log_nowhere():
    tracker = WithLog()
    log = TrackerLog(tracker, "Monitor", "monitor/step")
    for copied in (copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
        copied.write({"a": 1.0}, 1)
    assert tracker.calls == []
    penalty = wp.OrthogonalityPenalty(block(), key=1.0, log_to=tracker, log_every=1)
    penalty()
    assert len(tracker.calls) == 1
    copy.deepcopy(penalty)()
    assert len(tracker.calls) == 1


def penalised(steps=7, **options):
    model = block()
    tracker = WithLog()
    penalty = wp.OrthogonalityPenalty(model, key=0.1, attention=0.1, log_to=tracker, **options)
    terms = {}
    for step in range(1, steps + 1):
        penalty()
        terms[step] = penalty.terms()
        with torch.no_grad():
            model.self_attn.in_proj_weight.mul_(0.9)
    return tracker, terms, penalty


@pytest.mark.parametrize(
    ("every", "log_every", "steps"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7]), (1, 3, [1, 4, 7]), (3, 1, [1, 4, 7]), (2, 3, [1, 5, 7])],
)
def test_a_penalty_is_logged_at_the_calls_that_computed_it(every, log_every, steps):
    tracker, terms, _ = penalised(every=every, log_every=log_every)
    assert [step for step, _ in tracker.calls] == steps
    for step, logged in tracker.calls:
        expected = {f"penalty/{name}": value for name, value in terms[step].items()}
        assert logged == {**expected, **summed_terms(terms[step])}
        assert logged["penalty/total"] == pytest.approx(sum(terms[step].values()))


def test_a_strength_of_zero_is_logged_as_zero():
    tracker = WithLog()
    penalty = wp.OrthogonalityPenalty(
        block(), key=lambda step: float(step > 0), log_to=tracker, log_every=1
    )
    penalty()
    penalty()
    (first, zero), (second, some) = tracker.calls
    assert (first, zero) == (1, {"penalty/total": 0.0})
    assert second == 2
    assert some["penalty/total"] > 0


def test_calls_that_are_not_logged_read_nothing(monkeypatch):
    reads = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or plain(self))
    penalty = wp.OrthogonalityPenalty(block(), key=0.1, log_to=WithLog(), log_every=5)
    counts = []
    for _ in range(6):
        reads.clear()
        penalty()
        counts.append(len(reads))
    assert counts == [1, 0, 0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_penalty_is_logged_at_its_steps():
    tracker = WithLog()
    penalty = wp.OrthogonalityPenalty(block(), key=0.1, log_to=tracker, log_every=2)
    compiled = torch.compile(lambda: penalty(), backend="eager")
    for _ in range(5):
        compiled()
    assert [step for step, _ in tracker.calls] == [1, 3, 5]


BERT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


def trainer(folder, **changes):
    torch.manual_seed(0)
    rows = [{"input_ids": [5 + n, 6, 7], "labels": n % 2} for n in range(16)]
    settings = {
        "max_steps": 6, "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "per_device_train_batch_size": 4, "dataloader_pin_memory": False,
    }  # fmt: skip
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT))
    arguments = hf.TrainingArguments(str(folder), **{**settings, **changes})
    return hf.Trainer(model, arguments, train_dataset=rows)


def test_a_trainer_gets_rows_of_its_own_with_the_step(tmp_path):
    training = trainer(tmp_path)
    monitor = wp.Monitor(training.model, every=2, log_to=training)
    for _ in range(4):
        monitor.step()
    assert [row["monitor/step"] for row in training.state.log_history] == [1, 3]
    assert "cond/encoder.0.query/sigma_max" in training.state.log_history[0]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_penalty_in_a_trainer_counts_the_steps_of_its_optimizer(tmp_path, accumulated):
    training = trainer(tmp_path, gradient_accumulation_steps=accumulated)
    tracker = WithLog()
    penalty = wp.OrthogonalityPenalty(
        training.model, key=1e-3, log_to=[tracker, training], log_every=2
    )
    penalty.attach(training, scale="task")
    training.train()
    assert [step for step, _ in tracker.calls] == [1, 3, 5]
    rows = [row["penalty/step"] for row in training.state.log_history if "penalty/step" in row]
    assert rows == [1, 3, 5]


def test_the_callback_logs_every_number_to_a_tracker_beside_the_rows(tmp_path):
    training = trainer(tmp_path)
    tracker = WithLog()
    MonitorCallback(every=4, log_to=tracker).attach(training)
    training.train()
    assert [step for step, _ in tracker.calls] == [1, 5]
    assert "vital/encoder.0.head1/logit_max" in tracker.calls[0][1]
    rows = {
        row["step"]: row.get("monitor/step") for row in training.state.log_history if "loss" in row
    }
    assert rows == {1: 1, 2: None, 3: None, 4: None, 5: 5, 6: None}


def test_a_row_has_no_penalty_of_an_earlier_row(tmp_path):
    training = trainer(tmp_path)
    penalty = wp.OrthogonalityPenalty(training.model, key=1e-3, every=4)
    penalty.attach(training, scale="task")
    MonitorCallback(penalty, every=4).attach(training)
    training.train()
    rows = [row for row in training.state.log_history if "loss" in row]
    assert {row["step"]: row.get("penalty/step") for row in rows} == {
        1: 1, 2: None, 3: None, 4: None, 5: 5, 6: None,
    }  # fmt: skip
    assert [row["step"] for row in rows if "penalty/total" in row] == [1, 5]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        _, returned = trained(writer)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    name = "vital/encoder.0.head0/entropy"
    read = [(event.step, event.value) for event in events.Scalars(name)]
    assert [step for step, _ in read] == MEASURED
    expected = [numbers[name] for _, numbers in returned]
    assert [value for _, value in read] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_lightning_by_its_module_trainer_or_logger(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = block()
            self.monitors = []

        def training_step(self, batch, index):
            return self.encoder(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

        def on_train_start(self):
            for target in (self, self.trainer, self.logger):
                self.monitors.append(wp.Monitor(self, every=3, vitals=False, log_to=target))

        def on_train_batch_end(self, *_):
            for monitor in self.monitors:
                monitor.step()

    net = Net()
    logger = lightning.loggers.CSVLogger(tmp_path)
    received = []
    plain = logger.log_metrics
    logger.log_metrics = lambda metrics, step=None: (
        "cond/encoder.0.query/sigma_max" in metrics and received.append(step),
        plain(metrics, step=step),
    )
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_steps=7, accelerator="cpu", logger=logger, **quiet)
    data = torch.utils.data.TensorDataset(torch.randn(28, 5, 8))
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    assert sorted(received) == sorted(3 * MEASURED)


def test_an_accelerator_gets_the_numbers(tmp_path):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Kept(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def log(self, values, step=None, **_):
            steps.append(step)

        @property
        def tracker(self):
            return self

    steps = []
    accelerator = Accelerator(log_with=[Kept()], cpu=True)
    accelerator.init_trackers("mine")
    trained(accelerator)
    assert steps == MEASURED
