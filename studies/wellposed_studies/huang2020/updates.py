"""Huang et al. (2020): signal, and change of the output by one SGD step, at random weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellposed.models import build_model
from wellposed_lab.charts import Row, where
from wellposed_studies.huang2020.step_change import step_change
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import exponent, log_panel, mean_se, means, proved, spanned
from wellposed_studies.verdicts import AGREED, UNCERTAINTY, agreed, every, within

STACKS = ("encoder", "decoder")
_LOW = 0.95
_HIGH = 1.15
_GREW = 11.5
_DRAWS = 3
_SHOWN = {"signal": 1e12, "change": 1e20}
"""Larger values are left out of the figures, so that the others can be read."""
T_FIXUP = "T-Fixup"
XAVIER = "Xavier, no LayerNorm"
MODELS: Mapping[str, Mapping[str, Any]] = {
    T_FIXUP: {"init": "t_fixup", "norm": "none"},
    XAVIER: {"init": "xavier", "norm": "none"},
    "post-LN": {"init": "xavier", "norm": "post"},
    "pre-LN": {"init": "xavier", "norm": "pre"},
}
ENCODER = "encoder"
WHOLE = "encoder-decoder"
_DEPTHS = (6, 12, 25, 50, 100)
_FLAT = 0.15
_GROWS = 1.0


def random_model(depth: int, width: int, seed: int, *, heads: int = 4, **options: Any) -> Any:
    """Return an encoder-decoder in float64, of ``depth`` layers on each side."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    options |= {"intermediate_size": 2 * width, "max_position_embeddings": 32, "activation": "relu"}
    model: Any = build_model("wellposed", "seq2seq_lm", vocab_size=100, **sizes, **ids, **options)
    return model.double()


@recipe("huang2020/signal")
def signal(request: Request) -> Reproduction:
    """|out|/|in| after every layer at initial weights, Xavier and T-Fixup.

    Claim: with |v_e| = |w_e| = 0.67 N^-1/4 the encoder's output is of the size of its input at any
        depth N.
    Quote: "due to symmetry, we obtain" (appendix C).
    Test: |out|/|in| of T-Fixup's encoders is between {_LOW:g} and {_HIGH:g} at every depth, and
        that of Xavier's deepest is above {_GREW:g}.
    Note: root mean square norms of tokens in a forward pass of random tokens, float64, no LayerNorm
        on either side.
    Note: the paper's claim is about the size of an update. This is the forward signal that its
        derivation needs.
    """
    width = request.pick(toy=16, mini=64, medium=128, paper=512)
    depths = request.effort("huang2020/signal")
    rows: list[Row] = []
    labels = {"Xavier": "xavier", T_FIXUP: "t_fixup"}
    for depth, (label, init), seed in itertools.product(depths, labels.items(), range(_DRAWS)):
        request.announce(f"{label}, {depth}+{depth} layers of width {width}, seed {seed}")
        ratios = _ratios(init, depth, width, seed)
        rows += [{"init": label, "depth": depth, "seed": seed, **ratio} for ratio in ratios]

    def deepest(**keys: Any) -> list[float]:
        return [row["ratio"] for row in where(rows, **keys) if row["layer"] == row["depth"]]

    encoder, xavier, decoder = (
        ", ".join(spanned(deepest(init=init, stack=stack, depth=depth)) for depth in depths)
        for init, stack in ((T_FIXUP, "encoder"), ("Xavier", "encoder"), (T_FIXUP, "decoder"))
    )
    by_seed = [
        judge_signal(
            *(deepest(init=init, stack="encoder", seed=seed) for init in (T_FIXUP, "Xavier"))
        )
        for seed in range(_DRAWS)
    ]
    drawn = [
        {**row, "of": f"{row['init']}, {row['depth']} layers"}
        for row in rows
        if row["ratio"] < _SHOWN["signal"]
    ]
    panels = [
        log_panel(stack, where(drawn, stack=stack), "layer", "ratio", by="of") for stack in STACKS
    ]
    got = (
        f"|out|/|in| of encoders of {', '.join(map(str, depths))} layers: T-Fixup {encoder};"
        f" Xavier {xavier}; of decoders: T-Fixup {decoder}"
    )
    sure = f"{AGREED}; a ratio is a mean over all tokens"
    return proved(rows, got, agreed(by_seed), *panels, seeds=_DRAWS, sure=sure)


def judge_signal(t_fixup: Sequence[float], xavier: Sequence[float]) -> bool:
    return all(_LOW <= value <= _HIGH for value in t_fixup) and xavier[-1] > _GREW


def _ratios(init: str, depth: int, width: int, seed: int) -> list[Row]:
    """Return stack, layer and |out|/|in| of every layer; infinite if it overflows."""
    model = random_model(depth, width, seed, heads=max(4, width // 64), norm="none", init=init)
    tokens = torch.randint(4, 100, (4, 16), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        out = model(tokens, decoder_input_ids=tokens.flip(1), output_hidden_states=True)
    rows: list[Row] = []
    for stack in STACKS:
        sizes = [state.norm().item() for state in out[f"{stack}_hidden_states"]]
        ratios = [size / sizes[0] if math.isfinite(size) else math.inf for size in sizes[1:]]
        rows += [{"stack": stack, "layer": n, "ratio": ratio} for n, ratio in enumerate(ratios, 1)]
    return rows


@recipe("huang2020/updates")
def updates(request: Request) -> Reproduction:
    """|change of f| / rate of one SGD step by depth: T-Fixup, Xavier without LayerNorm, post-LN,
    pre-LN.

    Claim: f is updated by Theta(rate) in a step of SGD, independent of model depth (the goal of
        section 3.2).
    Quote: "make model update bounded in magnitude independent of model depth" (appendix B).
    Test: with T-Fixup the exponent of N in |change of f| / rate is between -{_FLAT:g} and {_FLAT:g}
        for encoder and encoder-decoder. With Xavier's weights and no LayerNorm it is above
        {_GROWS:g}.
    Note: f is the memory of the encoder, or the decoder's last hidden states. The gradient of the
        loss in f is a random direction of norm 1 (assumption 4). In float64, in the limit of small
        rates.
    Note: matrices and embeddings are stepped, as in the derivation. It leaves out biases, whose
        steps make the change grow with depth.
    Note: Adam is not treated in our copy of the text.
    """
    depths: tuple[int, ...] = request.pick(
        toy=(1, 2, 4), mini=_DEPTHS, medium=_DEPTHS, paper=(*_DEPTHS, 200)
    )
    width = request.pick(toy=8, mini=32, medium=128, paper=512)
    seeds: int = request.pick(toy=2, mini=3, medium=5, paper=5)
    rows: list[Row] = []
    for label, depth in itertools.product(MODELS, depths):
        request.announce(f"{label}, {depth}+{depth} layers of width {width}")
        rows += [row for seed in range(seeds) for row in _changes(label, depth, width, seed)]

    x = "layers_each_side"
    y = "change_over_rate"

    def powers(label: str) -> dict[str, list[float]]:
        mine = where(rows, model=label)
        return {
            stack: [exponent(where(mine, stack=stack, seed=seed), x, y) for seed in range(seeds)]
            for stack in (ENCODER, WHOLE)
        }

    def listed(label: str, column: str = y) -> str:
        changes = means(where(rows, model=label, stack=WHOLE), x, column).values()
        texts = [f"{value:.3g}" if math.isfinite(value) else "overflow" for value in changes]
        return f"{label} {', '.join(texts)}"

    flat = powers(T_FIXUP)
    slopes = ", ".join(f"{stack} {mean_se(values)}" for stack, values in flat.items())
    drawn = [row for row in rows if row[y] < _SHOWN["change"]]
    panels = [
        log_panel(stack, where(drawn, stack=stack), x, y, by="model") for stack in (ENCODER, WHOLE)
    ]
    got = (
        f"|change of f| / rate goes with T-Fixup as N to the power of {slopes}; of the"
        f" encoder-decoder at {', '.join(map(str, depths))} layers:"
        f" {'; '.join(map(listed, MODELS))}; with biases stepped too"
        f" {listed(T_FIXUP, 'change_with_biases')}"
    )
    holds = judge_updates(flat, powers(XAVIER))
    return proved(rows, got, holds, *panels, seeds=seeds, sure=UNCERTAINTY)


def judge_updates(
    t_fixup: Mapping[str, Sequence[float]], xavier: Mapping[str, Sequence[float]]
) -> Verdict:
    """Return whether the update does not grow with depth with T-Fixup, and grows with Xavier."""
    flat = [within(slopes, -_FLAT, _FLAT) for slopes in t_fixup.values()]
    return every([*flat, *(within(slopes, low=_GROWS) for slopes in xavier.values())])


def _changes(label: str, depth: int, width: int, seed: int) -> list[Row]:
    model = random_model(depth, width, seed, **MODELS[label]).eval()
    tokens = torch.randint(4, 100, (2, 8))
    parts = {
        ENCODER: (model.model.encoder, tokens),
        WHOLE: (model.model, {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}),
    }
    rows: list[Row] = []
    for stack, (part, batch) in parts.items():
        row: dict[str, Any] = {"model": label, "stack": stack, "layers_each_side": depth}
        row["seed"] = seed
        for name, biases in (("change_over_rate", False), ("change_with_biases", True)):
            change = step_change(part, batch, biases=biases)
            row[name] = change if math.isfinite(change) else math.inf
        rows.append(row)

    return rows
