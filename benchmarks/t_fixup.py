"""What T-Fixup does at initialisation: signal and one training step by depth, beside plain Xavier without LayerNorm.

    python benchmarks/t_fixup.py [--width 64] [--depths 2,8,32] [--seeds 3] [--signal-depths 6,20] [--signal-width 512]

Two tables. The first is |out| / |in| of an encoder on random tokens. The second is |f(W - lr g) - f(W)| / lr, g the
gradient of <f, u> with |u| = 1, in float64, by which parameters are stepped: matrices alone (what the derivation of
Huang et al. 2020 is on), or biases too (each adds a term of order one, so the sum grows with depth).
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import statistics
import time

import torch
from torch import nn

from wellposed.initialize import remove_norms_, signal_propagation, t_fixup_
from wellposed.models import WellposedConfig, WellposedModel


def plain_xavier_(model: nn.Module) -> None:
    """Draw the same weights without the factors, and take the norms out."""
    remove_norms_(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 2:
                    nn.init.xavier_uniform_(parameter)


def signal(depth: int, width: int, *, fixup: bool) -> tuple[float, float]:
    """Return |out| / |in| of an encoder, and the seconds that drawing its weights took."""
    layer = nn.TransformerEncoderLayer(width, 8, 2 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    start = time.perf_counter()
    if fixup:
        t_fixup_(model, input_scale=(9 * depth) ** -0.25, zero_biases=True)
    else:
        plain_xavier_(model)
    seconds = time.perf_counter() - start
    return signal_propagation(model, torch.randn(2, 16, width)).ratios()[-1], seconds


def step_size(depth: int, width: int, seed: int, *, fixup: bool, biases: bool) -> float:
    """Return |change of the output| / lr of one step of gradient descent."""
    torch.manual_seed(seed)
    config = WellposedConfig(
        vocab_size=50, hidden_size=width, num_hidden_layers=depth, num_attention_heads=4, norm="none",
        intermediate_size=2 * width, scale_embeddings=False, is_causal=False, max_position_embeddings=16,
    )  # fmt: skip
    model = WellposedModel(config).double().eval()
    if fixup:
        t_fixup_(model)
    else:
        plain_xavier_(model)
    ids = torch.randint(0, 50, (4, 8))
    before = model(input_ids=ids).last_hidden_state
    direction = torch.randn_like(before)
    (before * direction / direction.norm()).sum().backward()
    lr = 1e-5 if fixup else 1e-11
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None and (biases or parameter.ndim >= 2):
                parameter -= lr * parameter.grad
        return (model(input_ids=ids).last_hidden_state - before).norm().item() / lr


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depths", default="2,8,32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--signal-depths", default="6,20")
    parser.add_argument("--signal-width", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{datetime.date.today()}  {platform.machine()}  torch {torch.__version__}  {torch.get_num_threads()} threads"
    )
    print(f"\n|out| / |in|, encoder without LayerNorm, width {options.signal_width}\n")
    print("| layers | t_fixup | xavier | seconds of t_fixup_ |\n|---|---|---|---|")
    for depth in map(int, options.signal_depths.split(",")):
        ours, seconds = signal(depth, options.signal_width, fixup=True)
        control = signal(depth, options.signal_width, fixup=False)[0] if depth <= 40 else math.inf
        print(f"| {depth} | {ours:.4f} | {control:.3g} | {seconds:.1f} |", flush=True)
    depths = [int(depth) for depth in options.depths.split(",")]
    print(f"\n|change of output| / lr of one step, width {options.width}, mean of {options.seeds} seeds\n")
    print("| initialisation | stepped | " + " | ".join(f"N = {depth}" for depth in depths) + " |")
    print("|---|---|" + "---|" * len(depths))
    for fixup, biases in ((True, False), (True, True), (False, False)):
        sizes = [
            statistics.fmean(
                step_size(depth, options.width, seed, fixup=fixup, biases=biases) for seed in range(options.seeds)
            )
            for depth in depths
        ]
        row = " | ".join(f"{size:.3g}" for size in sizes)
        print(f"| {'t_fixup' if fixup else 'xavier'} | {'all' if biases else 'matrices'} | {row} |", flush=True)


if __name__ == "__main__":
    main()
