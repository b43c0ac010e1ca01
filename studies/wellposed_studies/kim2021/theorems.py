"""Kim et al. (2021): attacks on Theorems 3.1 and 3.2, Lemma F.1 and masks; bounds compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.attack import lipschitz_lower_bound
from wellposed.linalg import kim2021_bound
from wellposed.nn import L2SelfAttention
from wellposed_lab.charts import Row, where
from wellposed_studies.kim2021.inverses import probe_inputs, random_layer
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import exponent, log_panel, mean_se, proved, spanned, sweep
from wellposed_studies.verdicts import AGREED, UNCERTAINTY, every, within

NORMS: tuple[Literal["inf", 2], ...] = ("inf", 2)
_CONTRACTIVE = 0.999
_INIT = 2.0**-4
_NEAR = 0.1
_ORDERS = (1, 2, math.inf)
_TOKENS = 6
_ATTAINED = "slopes are attained values: more effort can only raise them"


@recipe("kim2021/theorem-3.1")
def theorem_3_1(request: Request) -> Reproduction:
    """The Jacobian of dot-product attention at the proof's input, by the size of the tokens.

    Claim: dot-product attention is not Lipschitz, in any p-norm.
    Quote: "DP-MHA is not Lipschitz" (section 3.2).
    Test: one token is 0 and the others have size r. The norm of the Jacobian grows as r to the
        power 2 +- {_NEAR:g} for p = 1, 2 and infinity, by {UNCERTAINTY}. Tied L2 attention never
        exceeds its bound at the same inputs.
    Note: Glorot's weights, 8 heads, {_TOKENS} tokens, float64.
    """
    width, seeds = request.pick(toy=(8, 2), mini=(32, 5), medium=(32, 20), paper=(128, 20))

    def drawn(seed: int) -> Mapping[str, _Case]:
        x = probe_inputs(1, _TOKENS, width, 1.0, seed)[0].double()
        torch.manual_seed(seed)
        layers: list[Any] = [
            random_layer(kind, width, _TOKENS).double() for kind in ("dot_product", "l2_tied")
        ]
        bounds = {
            p: layers[1].lipschitz_bound(_TOKENS, norm=norm)
            for p, norm in ((2, 2), (math.inf, "inf"))
        }
        plain, tied = (lambda x, layer=layer: layer(x[None])[0] for layer in layers)
        return {"dot product": (plain, x, {}), "tied L2": (tied, x, bounds)}

    return _grown(seeds, drawn, 2)


@recipe("kim2021/lemma-f.1")
def lemma_f_1(request: Request) -> Reproduction:
    """The Jacobian of L2 attention with free queries and keys at the proof's input, by its size.

    Claim: with W_K of full rank and a different W_Q, L2 attention is not Lipschitz; tying them is
        enough.
    Quote: "terms that are unbounded for" (appendix F).
    Test: the norm of the Jacobian grows as the size of the input to the power 2 +- {_NEAR:g} for p
        = 1, 2 and infinity, however near W_K is to W_Q, by {UNCERTAINTY}. With tied weights it is
        nowhere above the bound of Theorem 3.2 at the same inputs.
    Note: one head of full width, {_TOKENS} tokens, float64. The first token has size r over the
        share by which W_K differs from W_Q. The others solve x_j W_K = x_1 (2 W_Q - W_K), at which
        all affinities are the same.
    """
    width, seeds = request.pick(toy=(4, 2), mini=(8, 5), medium=(16, 20), paper=(64, 20))

    def drawn(seed: int) -> Mapping[str, _Case]:
        torch.manual_seed(seed)
        query, other = torch.randn(2, width, width, dtype=torch.float64) / math.sqrt(width)
        first = torch.randn(1, width, dtype=torch.float64)
        cases: dict[str, _Case] = {}
        for share in (1.0, 0.1, 0.01):
            key = (1 - share) * query + share * other
            others = torch.linalg.solve(key, first @ (2 * query - key), left=False)
            x = torch.cat([first, others.expand(_TOKENS - 1, -1)]) / share
            cases[f"{share:0.0%} other keys"] = (_head(query, key), x, {})
        bounds = {p: _printed(query, _TOKENS, norm) for p, norm in ((2, 2), (math.inf, "inf"))}
        return cases | {"tied L2": (_head(query, query), x, bounds)}

    return _grown(seeds, drawn, 2)


_Case = tuple[Callable[[Tensor], Tensor], Tensor, Mapping[Any, Any]]
"""A map, its input of size 1, and its bounds, if any, by p."""


def _grown(seeds: int, drawn: Callable[[int], Mapping[str, _Case]], order: float) -> Reproduction:
    """Return the norms of Jacobians by input size; judge the growth of those without a bound."""
    sizes = [10.0**power for power in (2, 2.5, 3, 3.5, 4)]
    rows: list[Row] = []
    for seed in range(seeds):
        for (name, (function, x, bounds)), size in itertools.product(drawn(seed).items(), sizes):
            matrix = _jacobian(function, size * x)
            norms = {p: float(torch.linalg.matrix_norm(matrix, p)) for p in _ORDERS}
            rows += [
                {"attention": name, "p": p, "seed": seed, "size": size, "norm": norm}
                | ({"over_bound": norm / float(bounds[p])} if p in bounds else {})
                for p, norm in norms.items()
            ]

    ratios = [row["over_bound"] for row in rows if "over_bound" in row]
    free = [row for row in rows if row["attention"] != "tied L2"]
    kinds = sorted({(row["attention"], row["p"]) for row in free})
    powers = [
        [
            exponent(where(free, attention=name, p=p, seed=seed), "size", "norm")
            for seed in range(seeds)
        ]
        for name, p in kinds
    ]
    texts = [
        f"{name}, p = {p}: {mean_se(power)}" for (name, p), power in zip(kinds, powers, strict=True)
    ]
    got = (
        f"power of the size of the input in the norm of the Jacobian, {'; '.join(texts)}; tied L2 is"
        f" at most {max(ratios):.2g} of its bound"
    )
    panels = [
        log_panel(f"p = {p}", where(rows, p=p), "size", "norm", by="attention") for p in _ORDERS
    ]
    holds = judge_growth(powers, ratios, order)

    return proved(rows, got, holds, *panels, seeds=seeds, sure=UNCERTAINTY)


def judge_growth(
    powers: Sequence[Sequence[float]], over_bounds: Sequence[float], order: float
) -> Verdict:
    """Return whether unbounded norms grow by this power of the input, and whether bounds hold."""
    grown = [within(power, order - _NEAR, order + _NEAR) for power in powers]
    return every([*grown, max(over_bounds) <= 1])


def _jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    matrix: Any = torch.autograd.functional.jacobian(function, x)
    return matrix.reshape(x.numel(), -1)


def _head(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the paper's head ``X -> P X A``, by its formulas."""
    scale = math.sqrt(query.shape[-1])

    def head(x: Tensor) -> Tensor:
        gaps = (x @ query)[..., :, None, :] - (x @ key)[..., None, :, :]
        logits = -gaps.square().sum(-1) / scale
        if mask is not None:
            logits = logits.masked_fill(~mask, -math.inf)
        return logits.softmax(-1) @ x @ query @ query.mT / scale

    return head


def _printed(query: Tensor, tokens: int, norm: Any) -> float:
    """Return the bound of Theorem 3.2 of one head, whose other matrices are the identity."""
    identity = torch.eye(len(query), dtype=query.dtype)
    bound = kim2021_bound(query[None], identity[None], identity, seq_len=tokens, norm=norm)
    return float(bound)


@recipe("kim2021/theorem-3.2")
def theorem_3_2(request: Request) -> Reproduction:
    """Slopes that an attack attains on tied L2 attention of many heads, over the printed bounds.

    Claim: tied L2 attention is Lipschitz with the printed constants.
    Quote: "L2-MHA is Lipschitz, with the following bound" (Theorem 3.2).
    Test: no slope that the attack attains exceeds the bound in norm inf, or in norm 2 with the
        fourth power of W_Q, at weights from 1/16 to 16 times Glorot's.
    Note: the powers in norm 2 are illegible in our copy of the text. With the second power the map,
        which is quadratic in W_Q, exceeds its bound as weights grow. The table has both.
    """
    sizes, restarts, steps, seeds = request.effort("kim2021/theorem-3.2")

    def measure(layer: tuple[int, int], weights: float, norm: Any) -> Row:
        request.announce(f"N, D = {layer}, weights x {weights:g}, norm {norm}")
        tied: Any = random_layer("l2_tied", layer[1], layer[0]).double()
        for parameter in tied.parameters():
            parameter.mul_(weights)
        options: Any = {"norm": norm, "restarts": restarts, "steps": steps}
        attained = lipschitz_lower_bound(tied, layer, **options, seed=torch.initial_seed()).value
        bound, second = (
            theorem_bound(tied, layer[0], norm, as_printed=as_printed)
            for as_printed in (False, True)
        )
        over = {"over_bound": attained / bound, "over_second_power": attained / second}
        return {"layer": "N = {}, D = {}".format(*layer), "norm": str(norm), **over}

    axes = {"layer": sizes, "weights": (2.0**-4, 1.0, 16.0), "norm": NORMS}
    rows = sweep(measure, **axes, seed=range(seeds))
    ratios = {norm: [row["over_bound"] for row in where(rows, norm=norm)] for norm in ("inf", "2")}
    second = max(row["over_second_power"] for row in where(rows, norm="2"))
    got = (
        f"attained over bound {spanned(ratios['inf'])} in norm inf and {spanned(ratios['2'])} in"
        f" norm 2; with the second power of W_Q up to {second:.2g} in norm 2"
    )
    panels = [
        log_panel(f"norm {norm}", where(rows, norm=norm), "weights", "over_bound", by="layer")
        for norm in ratios
    ]
    holds = judge_bounds(list(itertools.chain(*ratios.values())))
    return proved(rows, got, holds, *panels, seeds=seeds, sure=_ATTAINED)


def judge_bounds(over_bounds: Sequence[float]) -> bool:
    return max(over_bounds) <= 1


@recipe("kim2021/masking")
def masking(request: Request) -> Reproduction:
    """Rows of the Jacobian of tied L2 attention under masks, over the bound of the tokens they see.

    Claim: the bound of Theorem 3.2 holds under every mask that lets a token attend to itself, with
        the number of tokens that it sees in place of N.
    Quote: "can in fact be tightened" (appendix G).
    Test: no row that ascent attains exceeds the bound in norm inf for the tokens that it sees. If a
        token does not see itself, its row grows as the size of the input to the power 1 +-
        {_NEAR:g}, by {UNCERTAINTY}, past every bound.
    Note: one head of full width, float64. The input without a diagonal: two seen tokens at +-1 and
        the token itself at r, at right angles in the geometry of the queries.
    """
    tokens, width, restarts, steps, seeds = request.effort("kim2021/masking")
    rows: list[Row] = []
    for seed in range(seeds):
        request.announce(f"seed {seed}")
        torch.manual_seed(seed)
        query = torch.randn(width, width, dtype=torch.float64) / math.sqrt(width)
        for name, mask in masks(tokens).items():
            attained = _ascended_rows(_head(query, query, mask), tokens, width, restarts, steps)
            bounds = torch.tensor([_printed(query, int(count), "inf") for count in mask.sum(-1)])
            rows.append(
                {"mask": name, "seed": seed, "over_bound": float((attained / bounds).max())}
            )
        rows += _without_diagonal(query, seed)

    ratios = [row["over_bound"] for row in rows if "size" not in row]
    free = [row for row in rows if "size" in row]
    powers = [exponent(where(free, seed=seed), "size", "over_bound") for seed in range(seeds)]
    largest = {
        name: max(row["over_bound"] for row in where(rows, mask=name)) for name in masks(tokens)
    }
    worst = ", ".join(f"{name} {ratio:.2f}" for name, ratio in largest.items())
    got = (
        f"largest row over its bound: {worst}; without a diagonal the row grows as the size to the"
        f" power {mean_se(powers)}, to {max(row['over_bound'] for row in free):.2g} times the bound"
    )
    title = "a row of a token that does not see itself"
    panel = log_panel(title, free, "size", "over_bound", by="mask")
    holds = judge_growth([powers], ratios, 1)
    sure = f"{_ATTAINED}; {AGREED}"

    return proved(rows, got, holds, panel, seeds=seeds, sure=sure)


def masks(tokens: int) -> dict[str, Tensor]:
    """Return which tokens each token sees, (tokens, tokens), by mask; every token sees itself."""
    ones = torch.ones(tokens, tokens, dtype=torch.bool)
    padded = ones.clone()
    padded[:, tokens // 2 :] = False
    drawn = torch.rand(tokens, tokens) < 0.5
    patterns = {"none": ones, "causal": ones.tril(), "window": ones.tril(1).triu(-1)}
    return patterns | {
        name: mask | ones.diag().diag()
        for name, mask in {"padding": padded, "random": drawn}.items()
    }


def _ascended_rows(
    head: Callable[[Tensor], Tensor], tokens: int, width: int, restarts: int, steps: int
) -> Tensor:
    """Return the largest row sum of the Jacobian that Adam finds for each token, (tokens,)."""
    spread = 10 * torch.rand(restarts, 1, 1, dtype=torch.float64)
    x = (spread * torch.randn(restarts, tokens, width, dtype=torch.float64)).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1, maximize=True)
    best = torch.zeros(tokens, dtype=torch.float64)
    for _ in range(steps):
        rows = torch.func.vmap(torch.func.jacrev(head))(x).abs().sum((-2, -1)).amax(-1)
        best = torch.maximum(best, rows.detach().amax(0))
        optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
    return best


def _without_diagonal(query: Tensor, seed: int) -> list[Row]:
    """Return Jacobian rows, by size, of a token that sees two others and not itself."""
    mask = torch.tensor([[False, True, True], [True, True, True], [True, True, True]])
    near = torch.randn(len(query), dtype=torch.float64)
    metric = query @ query.mT
    far = torch.randn(len(query), dtype=torch.float64)
    far = far - (far @ metric @ near) / (near @ metric @ near) * near
    rows: list[Row] = []
    for size in (10.0, 100.0, 1000.0, 10_000.0):
        x = torch.stack([size * far, near, -near])
        row = torch.func.jacrev(_head(query, query, mask))(x)[0].abs().sum((-2, -1)).max()
        over = float(row) / _printed(query, 3, "inf")
        rows.append({"mask": "no diagonal", "seed": seed, "size": size, "over_bound": over})
    return rows


@recipe("kim2021/bound-ratio")
def bound_ratio(request: Request) -> Reproduction:
    """The bound of Theorem 3.2 over the sharper one, by width, tokens and norm.

    Claim: a claim of ours: the sharper bound is nowhere above that of Theorem 3.2, by which the
        paper divides contractive L2 attention.
    Quote: "normalise L2-MHA by the bound on" (section 5.3).
    Test: at every size, draw and norm the sharper bound is at most that of Theorem 3.2.
    Note: both are proved; this compares formulas. Slopes that an attack attains are compared with
        Theorem 3.2 in kim2021/theorem-3.2, and with the sharper bound in figures 2 and 7.
    Note: at c = {_CONTRACTIVE:g} a layer divided by its bound keeps c / bound of its output. With
        the paper's bound the branch therefore starts smaller by the ratio.
    Note: weights uniform in +-{_INIT:g} / sqrt(D), appendix I.
    Note: in norm 2 with the fourth power of W_Q; with the printed second power it is no bound.
    """
    sizes, lengths, seeds = request.effort("kim2021/bound-ratio")
    rows: list[dict[str, Any]] = []
    for (width, heads), seed in itertools.product(sizes, range(seeds)):
        request.announce(f"D = {width}, H = {heads}, seed {seed}")
        torch.manual_seed(seed)
        layer = L2SelfAttention(width, heads, init_scale=_INIT).requires_grad_(False)
        for tokens, norm in itertools.product(lengths, NORMS):
            row = {"D": width, "H": heads, "N": tokens, "norm": str(norm), "seed": seed}
            rows.append({**row, **_bounds(layer, tokens, norm)})

    width, heads = sizes[-1]
    texts = [
        f"norm {row['norm']}: {row['kim2021']:.2g} against {row['sharp']:.2g},"
        f" {row['ratio']:.0f} times"
        for row in where(rows, D=width, N=lengths[-1], seed=0)
    ]
    panels = [
        log_panel(f"norm {norm}", where(rows, norm=str(norm), seed=0), "N", "ratio", by="D")
        for norm in NORMS
    ]
    got = f"at D = {width}, H = {heads}, N = {lengths[-1]}: {', '.join(texts)}"
    holds = judge_ratio([row["ratio"] for row in rows])

    return proved(rows, got, holds, *panels, seeds=seeds)


def judge_ratio(ratios: list[float]) -> bool:
    return min(ratios) >= 1


def _bounds(layer: L2SelfAttention, tokens: int, norm: Literal["inf", 2]) -> dict[str, float]:
    printed = theorem_bound(layer, tokens, norm)
    sharp = float(layer.lipschitz_bound(tokens, norm=norm))
    return {
        "kim2021": printed,
        "sharp": sharp,
        "ratio": printed / sharp,
        "branch_factor_kim2021": _CONTRACTIVE / printed,
        "branch_factor_sharp": _CONTRACTIVE / sharp,
    }


def theorem_bound(
    layer: Any, tokens: int, norm: Literal["inf", 2], *, as_printed: bool = False
) -> float:
    """Return the bound of Theorem 3.2 of a layer; see `kim2021_bound`."""
    query, value = (
        projection.weight.double().unflatten(0, (layer.num_heads, -1)).mT
        for projection in (layer.q_proj, layer.v_proj)
    )
    output = layer.o_proj.weight.double().mT
    options: dict[str, Any] = {"seq_len": tokens, "norm": norm, "as_printed": as_printed}
    return float(kim2021_bound(query, value, output, **options))
