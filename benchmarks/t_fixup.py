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

from wellposed.initialize import signal_propagation, step_change
from wellposed.models import WellposedConfig, WellposedModel, WellposedSeq2SeqModel

NAMES = {False: "encoder", True: "encoder-decoder"}


def build(depth: int, width: int, *, fixup: bool, decoder: bool) -> torch.nn.Module:
    """Return an encoder, or an encoder-decoder of twice the depth, without LayerNorm."""
    config = WellposedConfig(
        vocab_size=50, hidden_size=width, num_hidden_layers=depth, num_attention_heads=4, norm="none",
        intermediate_size=2 * width, scale_embeddings=False, max_position_embeddings=16, activation="relu",
        init="t_fixup" if fixup else "xavier",
    )  # fmt: skip
    return (WellposedSeq2SeqModel(config) if decoder else WellposedModel(config)).eval()


def batch_of(sentences: int, tokens: int, *, decoder: bool) -> dict[str, torch.Tensor]:
    """Return random tokens."""
    names = ("input_ids", "decoder_input_ids") if decoder else ("input_ids",)
    return {name: torch.randint(0, 50, (sentences, tokens)) for name in names}


def signal(depth: int, width: int, *, fixup: bool, decoder: bool) -> tuple[float, float]:
    """Return |out| / |in| of the encoder, and the seconds that making the model took."""
    start = time.perf_counter()
    model = build(depth, width, fixup=fixup, decoder=decoder)
    seconds = time.perf_counter() - start
    return signal_propagation(model, batch_of(2, 16, decoder=decoder)).ratios("encoder")[-1], seconds


def step_size(depth: int, width: int, seed: int, *, fixup: bool, decoder: bool, biases: bool) -> float:
    """Return |change of the output| / lr of one step of gradient descent."""
    torch.manual_seed(seed)
    model = build(depth, width, fixup=fixup, decoder=decoder).double()
    return step_change(model, batch_of(4, 8, decoder=decoder), lr=1e-5 if fixup else 1e-11, biases=biases)


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
    print(f"\n|out| / |in| of the encoder, width {options.signal_width}, seconds to draw the weights\n")
    print("| model | layers | t_fixup | xavier | seconds |\n|---|---|---|---|---|")
    for decoder in (False, True):
        for depth in map(int, options.signal_depths.split(",")):
            ours, seconds = signal(depth, options.signal_width, fixup=True, decoder=decoder)
            control = signal(depth, options.signal_width, fixup=False, decoder=decoder)[0] if depth <= 40 else math.inf
            print(f"| {NAMES[decoder]} | {depth} | {ours:.4f} | {control:.3g} | {seconds:.1f} |", flush=True)
    depths = [int(depth) for depth in options.depths.split(",")]
    print(f"\n|change of output| / lr of one step, width {options.width}, mean of {options.seeds} seeds\n")
    print("| model | initialisation | stepped | " + " | ".join(f"N = {depth}" for depth in depths) + " |")
    print("|---|---|---|" + "---|" * len(depths))
    for decoder in (False, True):
        for fixup, biases in ((True, False), (True, True), (False, False)):
            how = {"fixup": fixup, "biases": biases, "decoder": decoder}
            sizes = [
                statistics.fmean(step_size(depth, options.width, seed, **how) for seed in range(options.seeds))
                for depth in depths
            ]
            row = " | ".join(f"{size:.3g}" for size in sizes)
            names = f"{NAMES[decoder]} | {'t_fixup' if fixup else 'xavier'} | {'all' if biases else 'matrices'}"
            print(f"| {names} | {row} |", flush=True)


if __name__ == "__main__":
    main()
