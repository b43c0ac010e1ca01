"""Huang et al. (2020), appendices B and C, in the scalars that they are derived in: the size of the
memory, and the three products of gradients that an initialization is to keep of order 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.charts import Row, where
from wellposed.recipes.recipe import Reproduction, Request, recipe
from wellposed_studies.huang2020.attention_block import TOKENS, draw_numbers
from wellposed_studies.study import exponent, log_panel, proved, said, spanned, sweep
from wellposed_studies.verdicts import UNCERTAINTY, every, within

_NEAR, _GROWS = 0.1, 0.5
_PRODUCTS = ("encoder", "decoder", "memory")
_SIZES = {"N^-1/2": -0.5, "0.67 N^-1/4": -0.25}


@recipe("huang2020/memory", measured={"mini": 0.1, "medium": 0.1}, estimated={"paper": 1})
def memory(request: Request) -> Reproduction:
    """Size of the memory over that of the input by the number of layers N, in scalars.

    Claim: where |v_e||w_e| is below 1/N the encoder's output is of the size of its input

    Quote: "With this in mind, we let" (appendix C)

    Test: in one dimension with positive weights, as appendix B assumes, the exponent of N in |m| /
    |x| is within {_NEAR:g} of 0 for |v_e| = |w_e| = N^-1/2, by {UNCERTAINTY}

    Note: the solution that the appendix arrives at, 0.67 N^-1/4, does not meet this condition: its
    ratio, in the table, grows faster than any power of N

    Note: {TOKENS} tokens; weights are at most of the stated size, at least half of it
    """
    rows = _measured(request)
    powers = {of: _powers(rows, of, "m_over_x") for of in _SIZES}
    holds = within(powers["N^-1/2"], -_NEAR, _NEAR)
    return _made(rows, powers, "m_over_x", holds)


@recipe("huang2020/gradients", measured={"mini": 0.1, "medium": 0.1}, estimated={"paper": 1})
def gradients(request: Request) -> Reproduction:
    """The products of gradients of appendix C by the number of layers N, in scalars.

    Claim: with |v_e| = |w_e| = 0.67 N^-1/4 and |v_d| = |w_d| = |x| = |y| = (9 N)^-1/4 the products
    of gradients of encoder, decoder and memory are of order 1 at any depth

    Quote: "which by design gives" (appendix C)

    Test: in one dimension with positive weights, as appendix B assumes, the exponent of N in each
    product is within {_NEAR:g} of 0, by {UNCERTAINTY}; against the claim where one is above
    {_GROWS:g}

    Note: the derivation keeps 1 + sum v w of prod (1 + v w), which are of the same order up to v w
    = 1/N; its own v w is of order N^-1/2

    Note: models of any width with weights of both signs, whose sums grow as roots, are
    `huang2020/updates` and `huang2020/signal`, which hold: the initialization does what is claimed
    for it, by another reason than the one printed
    """
    rows = _measured(request)
    powers = {of: _powers(rows, "0.67 N^-1/4", of) for of in _PRODUCTS}
    return _made(rows, powers, "decoder", judge_gradients(list(powers.values())))


def judge_gradients(powers: Sequence[Sequence[float]]) -> bool | None:
    """Say whether every product keeps its order, or one grows."""
    if False in (within(of, high=_GROWS) for of in powers):
        return False
    return every(within(of, -_NEAR, _NEAR) or None for of in powers)


def _made(
    rows: Sequence[Row], powers: dict[str, list[float]], shown: str, holds: bool | None
) -> Reproduction:
    depths = sorted({row["N"] for row in rows})
    ends = ", ".join(
        f"{size} {spanned([row[shown] for row in where(rows, size=size)])}" for size in _SIZES
    )
    got = (
        f"exponent of N: {', '.join(f'{of} {said(values)}' for of, values in powers.items())};"
        f" {shown.replace('_', ' ')} over N = {spanned(depths)}: {ends}"
    )
    panels = [log_panel(of, rows, "N", of, by="size") for of in (*_PRODUCTS, "m_over_x")]
    seeds = len({row["seed"] for row in rows})
    return proved(rows, got, holds, *panels, seeds=seeds, sure=UNCERTAINTY)


def _powers(rows: Sequence[Row], size: str, column: str) -> list[float]:
    seeds = dict.fromkeys(row["seed"] for row in rows)
    return [exponent(where(rows, size=size, seed=seed), "N", column) for seed in seeds]


def _measured(request: Request) -> list[Row]:
    depths = request.pick(toy=(2, 8), mini=(6, 20, 60), medium=(6, 20, 60, 200), paper=(6, 60, 600))
    seeds = request.pick(toy=2, mini=5, medium=10, paper=10)
    return sweep(measure_scalars, N=depths, size=_SIZES, seed=range(seeds))


def measure_scalars(N: int, size: str) -> Row:
    """Return the squared gradients of one output of a scalar encoder-decoder of N layers a side, and
    |m| / |x|."""
    power = _SIZES[size]
    factor = 0.67 if power == -0.25 else 1.0
    decoded = (9 * N) ** -0.25
    of_encoder, of_decoder = (
        [_weights(of).requires_grad_() for _ in range(kinds * N)]
        for of, kinds in ((factor * N**power, 2), (decoded, 3))
    )
    x, y = ((decoded * draw_numbers(TOKENS, 1)).requires_grad_() for _ in range(2))
    encoded = x
    for place, weights in enumerate(of_encoder):
        encoded = encoded + _block(encoded, weights, encoded if place % 2 == 0 else None)
    memory = encoded.detach().requires_grad_()
    out = y
    for place, weights in enumerate(of_decoder):
        seen = (out, memory, None)[place % 3]
        out = out + _block(out, weights, seen)
    found = {
        "encoder": torch.autograd.grad(encoded[0, 0], of_encoder),
        "decoder": torch.autograd.grad(out[0, 0], of_decoder, retain_graph=True),
        "memory": torch.autograd.grad(out[0, 0], [memory]),
    }
    products = {
        of: float(sum(each.square().sum() for each in grads)) for of, grads in found.items()
    }
    return {**products, "m_over_x": float(memory.detach().norm() / x.detach().norm())}


def _weights(size: float) -> Tensor:
    """Return k, q, v, w: the first two, which attention alone has, of order 1."""
    return torch.cat([draw_numbers(2, 1), size * draw_numbers(2, 1)])


def _block(x: Tensor, weights: Tensor, seen: Tensor | None) -> Tensor:
    """Return v w x, of what is attended to where something is seen."""
    key, query, value, output = weights
    if seen is None:
        return value * output * x
    return (x * query @ (seen * key).mT).softmax(-1) @ seen * value * output
