"""Lightning logs the same names as the Trainer."""

import pytest
import torch
from torch import nn

import wellposed as wp

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'wellposed[lightning]'"
)

from wellposed.errors import ConfigError  # noqa: E402
from wellposed.integrations import ConditionMetrics, LightningConditionCallback  # noqa: E402
from wellposed.measurement import worst_vitals  # noqa: E402


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.penalty = wp.OrthogonalityPenalty(self.encoder, key=0.1, attention=0.1, form="paper")
        self.rows = []

    def training_step(self, batch, index):
        return self.encoder(batch[0]).square().mean() + self.penalty()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(lightning.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *rest):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.filterwarnings("ignore")
def test_the_same_names_are_logged_and_the_penalty_decreases(tmp_path):
    net, rows = Net(), Rows()
    data = torch.utils.data.TensorDataset(torch.randn(40, 5, 16))
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=5, default_root_dir=tmp_path,
        callbacks=[LightningConditionCallback(net.penalty), rows], gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    logged = rows.seen[-1]
    assert logged.keys() == ConditionMetrics(net.penalty)(net, step=0).keys()
    assert {"cond/sigma_max/max", "penalty/key"} <= logged.keys()
    first = next(row for row in rows.seen if "penalty/total" in row)
    assert logged["penalty/total"] < first["penalty/total"]


class Plain(lightning.Callback):
    """A Monitor in a loop of one's own, inside Lightning's."""

    def __init__(self):
        self.rows = []

    def on_train_start(self, trainer, pl_module):
        self.monitor = wp.Monitor(pl_module, trainer.optimizers[0], every=2, weights=False)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 2 and (numbers := self.monitor.step()):
            self.rows.append((trainer.global_step, worst_vitals(numbers)))

    def on_train_end(self, trainer, pl_module):
        self.monitor.remove()


class Kept(lightning.loggers.Logger):
    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        assert step is not None
        self.rows.append((step + 1, metrics))

    def log_hyperparams(self, *_, **__):
        pass


class Two(Net):
    def configure_optimizers(self):
        self.automatic_optimization = False
        return [torch.optim.AdamW(self.parameters(), lr=1e-2) for _ in range(2)]


def fit(folder, net, *callbacks, logger=False, max_steps=5, accumulated=2, every=1, **resumed):
    trainer = lightning.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulated, default_root_dir=folder,
        callbacks=list(callbacks), log_every_n_steps=every,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(40, 5, 16))
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4), **resumed)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_every_logger_gets_the_vital_signs_that_a_monitor_gives(tmp_path):
    net, plain, kept = Net(), Plain(), Kept()
    callback = LightningConditionCallback(net.penalty, vitals=2)
    fit(tmp_path, net, plain, callback, logger=kept, every=2)
    assert [step for step, _ in plain.rows] == [1, 3, 5]
    assert [step for step, _ in kept.rows] == [2, 4]  # the trainer's own
    for (_, row), (_, numbers) in zip(kept.rows, plain.rows, strict=False):
        assert row | numbers == pytest.approx(row, rel=1e-6)  # Lightning logs float32
    assert "vital/logit_max" in kept.rows[0][1]
    assert callback.monitor.alarms == plain.monitor.alarms
    assert not any(module._forward_hooks for module in net.modules())
    with pytest.raises(ConfigError, match="one optimizer can be watched, not 2"):
        fit(tmp_path, Two(), LightningConditionCallback(vitals=2), accumulated=1)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_training_counts_on(tmp_path):
    saved, kept = tmp_path / "at3.ckpt", Kept()
    fit(tmp_path, Net(), max_steps=3).save_checkpoint(saved)
    callback = LightningConditionCallback(vitals=2)
    fit(tmp_path, Net(), callback, logger=kept, max_steps=6, ckpt_path=saved)
    assert [step for step, row in kept.rows if "vital/logit_max" in row] == [5]  # of 1, 3, 5
    assert callback.monitor.steps == 6
