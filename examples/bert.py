"""Penalise the key and query weights of a BERT while the Hugging Face Trainer trains it, and log
its conditioning."""

from __future__ import annotations

import copy
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import wellposed as wp
from wellposed.integrations import MonitorCallback
from wellposed.presets import mcgrath2024

# A small model and rows that one token separates, to avoid downloads; replace them with any BERT and data.
torch.manual_seed(0)
shape = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
model = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=2, **shape))
untrained = copy.deepcopy(model)
rows = [{"input_ids": ids, "labels": int(7 in ids)} for ids in torch.randint(5, 20, (256, 9))]
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=100,
    learning_rate=2e-3,
    logging_steps=10,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)


def worst_key_error(model: torch.nn.Module) -> float:
    rows = wp.measure(model).find(role="key")
    return max(row["scale_free_orthogonality_error"] for row in rows)


# The five lines.
penalty = wp.OrthogonalityPenalty(model, **mcgrath2024(key=True, query=True, strength=1e-2))
trainer = Trainer(model, arguments, train_dataset=rows)
penalty.attach(trainer)
MonitorCallback(penalty, every=10).attach(trainer)
trainer.train()
penalty.remove()

first, *_, last = (row for row in trainer.state.log_history if "loss" in row)
for name in ("loss", "penalty/key", "penalty/query"):
    print(f"{name:<20} {first[name]:.4f} -> {last[name]:.4f}")
errors = [worst_key_error(candidate) for candidate in (untrained, model)]
print(f"{'worst error of keys':<20} {errors[0]:.4f} -> {errors[1]:.4f}  (0: orthogonal rows)")
