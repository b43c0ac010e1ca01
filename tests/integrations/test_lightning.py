"""A penalty and a `Monitor` in a module of Lightning, as docs/howto/monitor.md has them."""

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.measurement import worst_vitals

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'wellposed[lightning]'"
)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.penalty = wp.OrthogonalityPenalty(self.encoder, key=0.1, attention=0.1, form="paper")
        self.rows = []

    def training_step(self, batch, index):
        loss = self.penalty()
        self.log("penalty", loss)
        return self.encoder(batch[0]).square().mean() + loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self):
        self.monitor = wp.Monitor(self, self.trainer.optimizers[0], every=10, weights=False)

    def on_train_batch_end(self, *_):
        self.log_dict(worst_vitals(self.monitor.step()))
        self.rows.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    def on_train_end(self):
        self.monitor.remove()


@pytest.mark.filterwarnings("ignore")
def test_vital_signs_are_logged_and_the_penalty_decreases(tmp_path):
    net = Net()
    data = torch.utils.data.TensorDataset(torch.randn(40, 5, 16))
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4))
    first, *_, last = net.rows
    assert {"vital/logit_max", "vital/update", "penalty"} <= first.keys()
    assert last["penalty"] < first["penalty"]
    assert net.monitor.steps == 20
    assert not any(module._forward_hooks for module in net.modules())
