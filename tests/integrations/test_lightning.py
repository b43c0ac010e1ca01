"""Lightning logs the same names as the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wellposed as wp

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'wellposed[lightning]'"
)

from wellposed.integrations import ConditionMetrics, LightningConditionCallback  # noqa: E402


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.penalty = wp.OrthogonalityPenalty(self.encoder, key=0.1, attention=0.1, form="paper")
        self.rows: list[dict[str, float]] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.encoder(batch[0]).square().mean() + self.penalty()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(lightning.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.mark.filterwarnings("ignore")
def test_the_same_names_are_logged_and_the_penalty_decreases(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, rows = Net(), Rows()
    data = torch.utils.data.TensorDataset(torch.randn(40, 5, 16))
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=5, default_root_dir=tmp_path,
        callbacks=[LightningConditionCallback(net.penalty, details=True), rows], gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    logged = rows.seen[-1]
    assert logged.keys() == ConditionMetrics(net.penalty, details=True)(net, step=0).keys()
    assert {"cond/encoder.0.query/sigma_max", "penalty/key.encoder.0"} <= logged.keys()
    first = next(row for row in rows.seen if "penalty/total" in row)
    assert logged["penalty/total"] < first["penalty/total"]
