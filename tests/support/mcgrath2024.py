"""What the tests of McGrath (2024) train: seconds, too small to show anything."""

from __future__ import annotations

from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions

TINY = MultiTaskOptions(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=120, max_length=16, batch_size=4, steps=3,
    measure_every=2,
)  # fmt: skip
