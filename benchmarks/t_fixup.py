"""T-Fixup at initialisation by depth, and plain Xavier without LayerNorm: signal, training step.

The signal is |out| / |in| of an encoder on random tokens. The step is |f(W - lr g) - f(W)| / lr,
with g the gradient of <f, u> and |u| = 1, in float64. It moves matrices only (as derived by Huang
et al. 2020), or biases too: each adds a term of order one, so the sum grows with depth.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of, single
from wellposed.models import WellposedConfig, WellposedModel, WellposedSeq2SeqModel
from wellposed_studies.huang2020.step_change import step_change

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
    names = ("input_ids", "decoder_input_ids") if decoder else ("input_ids",)
    return {name: torch.randint(0, 50, (sentences, tokens)) for name in names}


def step_size(
    depth: int, width: int, seed: int, *, fixup: bool, decoder: bool, biases: bool
) -> float:
    """Return |change of the output| / lr of one step of gradient descent."""
    torch.manual_seed(seed)
    model = build(depth, width, fixup=fixup, decoder=decoder).double()
    return step_change(model, batch_of(4, 8, decoder=decoder), biases=biases)


def rows(setup: Setup) -> Iterator[Row]:
    """Yield signals, then steps; the goal of a step is that at the least depth, within 2x."""
    width = setup.size(512, 16)
    for decoder in (False, True):
        for depth in setup.size((6, 20), (2,)):
            for fixup in (True, False):
                torch.manual_seed(0)
                model = build(depth, width, fixup=fixup, decoder=decoder)
                encoder = model.encoder if decoder else model
                tokens = batch_of(2, 16, decoder=False)
                with torch.no_grad():
                    states = encoder(**tokens, output_hidden_states=True).hidden_states
                value = (states[-1].norm() / states[0].norm()).item()
                init = "t_fixup" if fixup else "xavier"
                yield single(
                    f"|out| / |in|, {NAMES[decoder]} of {depth}, width {width}, {init}", value
                )
    width, seeds = setup.size((64, 3), (16, 2))
    for decoder in (False, True):
        for fixup, biases in ((True, False), (True, True), (False, False)):
            options = {"fixup": fixup, "biases": biases, "decoder": decoder}
            first: float | None = None
            for depth in setup.size((2, 8, 32), (1, 2)):
                values = [step_size(depth, width, seed, **options) for seed in range(seeds)]
                goal = (
                    f"{first / 2:.3g} to {first * 2:.3g}"
                    if first and fixup and not biases
                    else None
                )
                stepped = (
                    f"{'t_fixup' if fixup else 'xavier'},"
                    f" {'all stepped' if biases else 'matrices stepped'}"
                )
                row = row_of(
                    f"|change of output| / lr, {NAMES[decoder]} of {depth}, {stepped}", values, goal
                )
                first = first or row.value
                yield row


BENCHMARK = Benchmark(
    "T-Fixup at initialisation: signal through the encoder, and how far one step moves the output, by depth",
    "signal in [1.0, 1.1], steps within 2x", 1, rows,
    goals=(Goal("|out| / |in|, encoder of *, t_fixup", "1.0 to 1.1"),),
)  # fmt: skip
