"""Hold the query and key weights of a ViT orthogonal while Lightning trains it."""

from __future__ import annotations

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import wellposed as wp

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


class Classifier(lightning.LightningModule):
    """Any module; the constraint is one line after the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ViTForImageClassification(
            ViTConfig(image_size=16, patch_size=4, num_labels=3, **SHAPE)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        return self.model(pixel_values=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, after whose steps the named weights are orthogonal again."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
        wp.constrain_(self.model, optimizer, ["*.q_proj", "*.k_proj"])
        return optimizer


torch.manual_seed(0)
classifier = Classifier()
images = [(torch.randn(3, 16, 16), number % 3) for number in range(24)]
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet).fit(
    classifier, DataLoader(images, batch_size=8)
)
constrained = [
    weight.view.tensor().detach()
    for weight in wp.find_roles(classifier.model).weights()
    if weight.role in ("query", "key")
]
worst = max(
    torch.linalg.matrix_norm(weight.T @ weight - torch.eye(32), 2).item() for weight in constrained
)
print(f"largest |W^T W - I| after training: {worst:.1e}")
