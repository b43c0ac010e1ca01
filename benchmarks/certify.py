"""What the cross-check adds to `certify`: both sides interleaved in one process, CPU time on one thread, medians.

python benchmarks/certify.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

from wellposed.certification import certify
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import DotProductAttention, L2SelfAttention


def modules() -> Iterator[tuple[str, nn.Module, float | None]]:
    """Name, module and ball of every row."""
    for width in (128, 512, 768):
        yield f"nn.Linear, D={width}", nn.Linear(width, width), None
        yield f"L2 attention, D={width}", L2SelfAttention(width, width // 64), None
        yield f"contractive L2, D={width}", L2SelfAttention(width, width // 64, contractive=0.9, max_tokens=128), None
        yield f"dot product on a ball, D={width}", DotProductAttention(width, width // 64), 1.0
    for width, layers in ((64, 2), (128, 4), (256, 6)):
        for attention in ("l2_tied", "l2_contractive", "cosine"):
            config = WellposedConfig(
                hidden_size=width, num_attention_heads=width // 32, num_hidden_layers=layers, norm="none",
                intermediate_size=4 * width, attention=attention, max_position_embeddings=128,
            )  # fmt: skip
            yield f"classifier {attention}, {layers} x {width}", WellposedForSequenceClassification(config), None


def seconds(module: nn.Module, radius: float | None, *, cross_check: bool) -> float:
    start = time.process_time()
    certify(module, seq_len=128, radius=radius, cross_check=cross_check)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| module | certify without (ms) | cross-check adds |\n|---|---|---|")
    for name, module, radius in modules():
        module.eval()
        pairs = [[seconds(module, radius, cross_check=tried) for tried in (False, True)] for _ in range(repeats + 1)]
        plain = statistics.median(without for without, _ in pairs[1:])
        added = statistics.median(tried - without for without, tried in pairs[1:])
        print(f"| {name} | {1e3 * plain:.1f} | {added / plain:.0%} |")


if __name__ == "__main__":
    main()
