"""Penalise the key and query weights of a BERT while the Hugging Face Trainer trains it, and log
its conditioning."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import wellposed as wp
from wellposed.integrations import ConditionCallback, penalized_loss
from wellposed.presets import mcgrath2024

# A small model and random rows, so that nothing is downloaded; any BERT and any data set go here.
shape = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))
rows = [{"input_ids": ids, "labels": int(ids.sum()) % 2} for ids in torch.randint(5, 100, (32, 9))]
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=10,
    logging_steps=5,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)

# The five lines.
penalty = wp.OrthogonalityPenalty(model, **mcgrath2024(key=True, query=True, strength=1e-2))
trainer = Trainer(
    model, arguments, train_dataset=rows, compute_loss_func=penalized_loss(model, penalty)
)
ConditionCallback(penalty).attach(trainer)
trainer.train()
penalty.remove()

first, last = (row for row in trainer.state.log_history if "loss" in row)
for name in ("loss", "penalty/total", "cond/key/orthogonality_error/max"):
    print(f"{name:<40} {first[name]:.4f} -> {last[name]:.4f}")
