"""Takes one step of a Trainer under DDP x 2 (gloo), without a penalty and with one of each scale, and
writes the gradients of a key weight.

Run by test_attached_losses.py: ``torchrun --nproc-per-node 2 -m tests.support.accumulated_worker OUT``.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers as hf

import wellposed as wp

WORLD = 2
ACCUMULATED = 2
KEY = "bert.encoder.layer.0.attention.self.key.weight"
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def gradient(folder, scale):
    """Return the key weight's gradient of the first step."""
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=3)).double()
    rows = [{"input_ids": [5 + row, 6, 7, 8 + row], "labels": row % 3} for row in range(8)]
    gradients = []

    class Kept(hf.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            gradients.append(dict(model.named_parameters())[KEY].grad.clone())

    options = {
        "max_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "max_grad_norm": 0.0,
    }
    options |= {
        "gradient_accumulation_steps": ACCUMULATED,
        "disable_tqdm": True,
        "ddp_backend": "gloo",
    }
    options |= {"per_device_train_batch_size": len(rows) // ACCUMULATED // WORLD}
    arguments = hf.TrainingArguments(str(folder), **options)
    trainer = hf.Trainer(model, arguments, train_dataset=rows, callbacks=[Kept()])
    if scale is not None:
        penalty = wp.OrthogonalityPenalty(model, key=0.3, form="gram_squared")
        penalty.attach(trainer, scale=scale)
    trainer.train()
    return gradients[0].tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = {str(scale): gradient(target, scale) for scale in (None, "step", "task")}
    if os.environ["RANK"] == "0":
        (target / "gradients.json").write_text(json.dumps(results))
