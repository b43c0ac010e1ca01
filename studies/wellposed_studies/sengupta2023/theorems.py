"""Sengupta et al. (2023): Theorem 1 and the sentence after it, Lemma 1, Corollary 1, Theorem 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wellposed_lab.charts import Panel, Row, lines, where
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.study import log_panel, proved, spanned, sweep
from wellposed_studies.verdicts import decided

_EXACT = 1e-9
_PRESERVED = 0.1
_ALPHA = 0.99
_COLLAPSED = 0.02
_APART = 0.05
_WITHIN = 0.99
_LIMIT = math.exp(6)
"""Limit of the printed constant for many layers."""
_RAISED = 1.01
_STEP = 1e-4
_ATTAINED = "factors are attained: more effort can only lower them"


@recipe("sengupta2023/theorem-1")
def theorem_1(request: Request) -> Reproduction:
    """Linear attention with orthogonal weights against X U Sigma V, and its stretch of a token.

    Claim: with orthogonal W_Q, W_K, W_V non-normalised linear attention is X U Sigma V, U and V
        orthogonal, and its activation bound is sigma_1(X)^2.
    Quote: "reduces the activation bound to" (section 3.2).
    Test: at every draw the two agree, U and V are orthogonal and the largest stretch is
        sigma_1(X)^2, each to {_EXACT:g}.
    Note: the stretch of a token by the matrix U Sigma V, with a fixed spectrum. As a function of
        all of X, on which the spectrum depends, attention has up to three times that slope (Lemma
        1).
    """
    rows = _drawn(request, _of_theorem_1)
    largest = {name: max(row[name] for row in rows) for name in ("difference", "turned", "stretch")}
    got = (
        f"relative difference at most {largest['difference']:.1g}, of U and V from orthogonal"
        f" {largest['turned']:.1g}, of the stretch from sigma_1^2 {largest['stretch']:.1g}"
    )
    panel = log_panel("normal tokens", rows, "width", "difference", by="seed")
    return proved(rows, got, judge_identity(list(largest.values())), panel, seeds=_seeds(rows))


def judge_identity(differences: Sequence[float]) -> bool:
    return max(differences) <= _EXACT


@recipe("sengupta2023/distances")
def distances(request: Request) -> Reproduction:
    """Factor by which attention of largest eigenvalue 1 changes the distance of two tokens.

    Claim: the sentence, literally: with the largest eigenvalue 1, the attention operator preserves
        the pairwise distance between any two tokens.
    Quote: "preserves the pairwise" (section 3.2).
    Test: at every draw every distance changes by a factor within {_PRESERVED:g} of 1. The claim is
        contradicted if some distance falls below half at every draw.
    Note: normal tokens, four times as many as the width. In a layer the residual branch is at most
        alpha / L times the input, and changes distances by no more than that.
    Note: section 3 asks for less, "within a theoretical bound": that no distance grows.
    """
    rows = _drawn(request, _of_distances)
    smallest, largest = ([row[name] for row in rows] for name in ("least", "greatest"))
    got = (
        f"the least factor of a draw is {spanned(smallest)}, the greatest {spanned(largest)};"
        f" no distance grows in {sum(growth <= 1 + _EXACT for growth in largest)} of {len(largest)} draws"
    )
    panel = log_panel("normal tokens", rows, "width", "least", by="seed")
    return proved(rows, got, judge_distances(smallest, largest), panel, seeds=_seeds(rows))


def judge_distances(smallest: Sequence[float], largest: Sequence[float]) -> bool | None:
    """Return whether distances stay; False if some distance is halved at every draw."""
    preserved = min(smallest) >= 1 - _PRESERVED and max(largest) <= 1 + _PRESERVED
    return decided(holds=preserved, against=max(smallest) < 0.5)


def _drawn(request: Request, measure: Callable[[Tensor], dict[str, float]]) -> list[Row]:
    """Return measurements of normal tokens, four times as many as their width."""
    widths, seeds = request.pick(
        toy=([4], 2), mini=([8, 32], 10), medium=([8, 32, 128], 20), paper=([8, 64, 512], 20)
    )
    return sweep(
        lambda width: measure(torch.randn(4 * width, width, dtype=torch.float64)),
        width=widths,
        seed=range(seeds),
    )


def _orthogonal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64)).Q


def _of_theorem_1(x: Tensor) -> dict[str, float]:
    width = x.shape[1]
    query, key, value = _orthogonal(3, width, width)
    attended = x @ query @ (x @ key).mT @ (x @ value)
    eigenvalues, basis = torch.linalg.eigh(x.mT @ x)
    left = query @ key.mT @ basis
    right = basis.mT @ value
    between = left @ eigenvalues.diag() @ right
    unit = torch.eye(width, dtype=torch.float64)
    stretch = torch.linalg.matrix_norm(between, 2) / torch.linalg.matrix_norm(x, 2).square()

    return {
        "difference": float((attended - x @ between).norm() / attended.norm()),
        "turned": max(float((matrix.mT @ matrix - unit).abs().max()) for matrix in (left, right)),
        "stretch": abs(float(stretch) - 1),
    }


def _of_distances(x: Tensor) -> dict[str, float]:
    left, right = _orthogonal(2, x.shape[1], x.shape[1])
    eigenvalues = torch.linalg.eigvalsh(x.mT @ x)
    attended = x @ left @ (eigenvalues / eigenvalues.max()).diag() @ right
    factors = torch.pdist(attended) / torch.pdist(x)
    return {"least": float(factors.min()), "greatest": float(factors.max())}


def _seeds(rows: Sequence[Row]) -> int:
    return len({row["seed"] for row in rows})


@recipe("sengupta2023/lemma-1")
def lemma_1(request: Request) -> Reproduction:
    """Least factor by which X + (alpha / L) F(X) changes distances, by L and by the set of X.

    Claim: the residual X + (alpha / L) F(X), F(X) = ELU(X W X^T X V), is injective for L >= 3 if
        X^T X is stochastic.
    Quote: "is injective for L" (section 3.3).
    Test: for every L >= 3 no pair with a stochastic X^T X, and none with |X|_2 <= 1, which such X
        have, falls below the proof's factor 1 - 3 alpha / L. Some of these pairs at L = 2 falls
        below {_COLLAPSED:g}.
    Note: alpha = {_ALPHA:g}; W and V orthogonal, drawn for each restart; gradient descent on pairs.
    Note: the premise is the paper's: no layer of the model makes X^T X stochastic, and that a
        trained one meets it is not judged. Stochastic also means that entries are at least 0. If
        rows sum to 1 with entries of either sign, the norm has no bound, and pairs collapse at
        every L (in the table).
    Note: with the spectrum of the first layer held fixed, as in the model, F has slope 1 and every
        L suffices.
    """
    tokens, width, restarts, steps = request.effort("sengupta2023/lemma-1")

    def measure(inputs: str, L: int) -> Row:
        request.announce(f"{inputs}, L = {L}")
        start = torch.randn(2, restarts, tokens, width, dtype=torch.float64)
        start[1] = start[0] + 0.3 * start[1]
        left, right = _orthogonal(2, restarts, width, width)

        def layer(x: Tensor) -> Tensor:
            return x + _ALPHA / L * torch.nn.functional.elu(x @ left @ x.mT @ x @ right)

        smallest, _ = _nearest(layer, _SETS[inputs], start, steps)
        return {"proof": 1 - 3 * _ALPHA / L, "least": smallest}

    rows = sweep(measure, inputs=_SETS, L=(2, 3, 4, 6))
    of_sets = {name: where(rows, inputs=name) for name in _SETS}
    got = "; ".join(
        f"{name}: " + ", ".join(f"{row['least']:.2g} at L = {row['L']}" for row in mine)
        for name, mine in of_sets.items()
    )
    panels = [Panel("least factor found", "L", "factor", lines(rows, "L", "least", by="inputs"))]
    stochastic, ball, _ = of_sets.values()
    return proved(rows, got, judge_lemma_1([*stochastic, *ball]), *panels, sure=_ATTAINED)


def judge_lemma_1(rows: Sequence[Row]) -> bool | None:
    """Return whether distances keep the factor for L >= 3 and collapse below; None if neither."""
    from_three = [row for row in rows if row["L"] >= 3]
    if any(row["least"] < row["proof"] - _EXACT for row in from_three):
        return False
    return True if min(row["least"] for row in rows) < _COLLAPSED else None


def _in_ball(x: Tensor) -> Tensor:
    return x / torch.linalg.matrix_norm(x.detach(), 2, keepdim=True).clamp(min=1)


def _stochastic(x: Tensor) -> Tensor:
    """Return a matrix of entries at least 0 and X^T X 1 = 1: |X| with Sinkhorn's scale of columns."""
    free = x.abs() + 1e-6
    gram = free.mT @ free
    scale = gram.sum(-1).rsqrt()
    for _ in range(50):
        scale = (scale / (gram @ scale[..., None])[..., 0]).sqrt()
    return free * scale[..., None, :]


def _rows_sum_to_one(x: Tensor) -> Tensor:
    """Return X = p 1^T / sqrt d + Z, |p| = 1, Z 1 = 0, Z^T p = 0: rows of X^T X sum to 1."""
    ones = torch.full((x.shape[-1], 1), 1 / math.sqrt(x.shape[-1]), dtype=x.dtype)
    first = torch.nn.functional.normalize(x @ ones, dim=-2)
    rest = x - x @ ones @ ones.mT
    return first @ ones.mT + rest - first @ (first.mT @ rest)


_SETS: dict[str, Callable[[Tensor], Tensor]] = {
    "X^T X stochastic": _stochastic,
    "|X|_2 <= 1": _in_ball,
    "rows of X^T X sum to 1": _rows_sum_to_one,
}


def _nearest(
    layer: Callable[[Tensor], Tensor], shape: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[float, Tensor]:
    """Return the least |f(X) - f(Y)| / |X - Y| that Adam finds, and its pair, `_APART` or more."""
    free = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    smallest = math.inf
    pair = start[:, 0]
    for _ in range(steps):
        x = shape(free)
        size = (x[0] - x[1]).norm(dim=(-2, -1))
        y = layer(x)
        factors = (y[0] - y[1]).norm(dim=(-2, -1)) / size
        counted = torch.where(size > _APART, factors, math.inf).detach()
        if float(counted.min()) < smallest:
            smallest = float(counted.min())
            pair = x[:, int(counted.argmin())].detach()
        optimizer.zero_grad()
        ((factors + 1e-12).log() + (_APART / size).square()).sum().backward()
        optimizer.step()
        schedule.step()

    return smallest, pair


@recipe("sengupta2023/corollary-1")
def corollary_1(request: Request) -> Reproduction:
    """Least factor by which a layer of experts changes the distance of two inputs, by gate size.

    Claim: the mixture of experts, its weights computed for each sample, is injective for L >= 3.
    Quote: "is computed for each sample, and the same expert weights are used for all tokens within
        a sample" (section 3.3).
    Test: at every L >= 3 and gate, no pair is brought nearer than the proof's factor 1 - 3 alpha /
        L. The claim is contradicted if two inputs further apart than {_APART:g} have one image to
        {_EXACT:g}.
    Note: alpha = {_ALPHA:g}, two experts ELU(X U Sigma V), U and V orthogonal, the spectrum the
        same for all X. The gate is the softmax over experts of w times the maximum over tokens, as
        in the released code. |X|_2 <= 1; the search stops at {_WITHIN:g}, as Newton's method moves
        one of a pair.
    Note: the proof takes the same weights of experts for both inputs, which is |w| = 0 in the
        table. Newton's method takes the nearest pair found to one image, which counts inside the
        ball.
    """
    tokens, width, restarts, steps = request.effort("sengupta2023/corollary-1")

    def measure(L: int, gate: float) -> dict[str, float]:
        request.announce(f"L = {L}, gate of size {gate:g}")
        start = torch.randn(2, restarts, tokens, width, dtype=torch.float64)
        start[1] = start[0] + 0.3 * start[1]
        left, right = _orthogonal(2, 2, width, width)
        spectrum = torch.linspace(0.2, 1, width, dtype=torch.float64).diag()
        w = torch.nn.functional.normalize(torch.randn(width, dtype=torch.float64), dim=0)

        def layer(x: Tensor) -> Tensor:
            inner = torch.nn.functional.elu(x[..., None, :, :] @ left @ spectrum @ right)
            moved = x[..., None, :, :] + _ALPHA / L * inner
            shares = (gate * moved.amax(-2) @ w).softmax(-1)
            return (shares[..., None, None] * moved).sum(-3)

        smallest, (x, y) = _nearest(layer, lambda free: _WITHIN * _in_ball(free), start, steps)
        for _ in range(30):
            jacobian: Tensor = torch.func.jacrev(layer)(y).reshape(y.numel(), -1)
            step = torch.linalg.lstsq(jacobian, (layer(y) - layer(x)).reshape(-1, 1)).solution
            y = y - step.reshape(y.shape)
        apart = float((x - y).norm())
        image = float((layer(x) - layer(y)).norm())
        inside = float(torch.linalg.matrix_norm(y, 2)) <= 1
        one = float(inside and apart > _APART and image < _EXACT)
        return {"least": smallest, "proof": 1 - 3 * _ALPHA / L, "apart": apart, "one_image": one}

    rows = sweep(measure, L=(3, 6), gate=(0.0, 1.0, 10.0, 100.0))
    texts = [
        f"L = {row['L']}, |w| = {row['gate']:g}: {row['least']:.2g}"
        + (f", two inputs {row['apart']:.2g} apart have one image" if row["one_image"] else "")
        for row in rows
    ]
    panels = [Panel("least factor found", "|w|", "factor", lines(rows, "gate", "least", by="L"))]
    got = f"least factor: {'; '.join(texts)}"
    return proved(rows, got, judge_corollary_1(rows), *panels, sure=_ATTAINED)


def judge_corollary_1(rows: Sequence[Row]) -> bool | None:
    """Return whether the proof's factor holds everywhere; False if two inputs have one image."""
    above = all(row["least"] >= row["proof"] - _EXACT for row in rows)
    return decided(holds=above, against=any(row["one_image"] for row in rows))


@recipe("sengupta2023/theorem-2")
def theorem_2(request: Request) -> Reproduction:
    """Slope of the whole encoder at one explicit pair of inputs, against the printed constant.

    Claim: the composite map of L layers is Lipschitz with a constant of at most
        (1 + 3 alpha / L)^(2L), which is below e^6 = 403 at any L and width.
    Quote: "f(y)|| < e6||x" (appendix A.6).
    Test: in the Frobenius norm, with the largest eigenvalue at 1, as in section 3.2, a proved bound
        is at most the printed one at every width and depth. The claim is contradicted if attained
        slopes exceed the printed constant of their depth and, at some width, its limit e^6.
    Note: the other half holds: some constant exists that depends on no data, as "injective Lipschitz
        with a fixed (data-independent) upper bound" (section 3.5) says. It grows with the width.
    Note: alpha = {_ALPHA:g}, one expert, all weights the identity, the spectrum of the first layer,
        as in the paper. X = I except one entry of {_RAISED:g}, which is raised by {_STEP:g}. The
        eigenvalue of its column is the largest, so that all others fall. The states are diagonal,
        and only diagonals are computed.
    Note: proved: the recursion of theory note B8, with |d Sigma| <= 4 |dX| / |X|_2 for the largest
        eigenvalue at 1 and 4 |dX| / |X|_F for a sum of 1. The first costs a factor that grows as
        the root of the width, and the pair shows that this is real. A spectrum of sum 1 keeps the
        constant. In the largest norm of a token, which is no norm of the paper, the same pair stays
        below it (in the table).
    """
    widths = request.pick(
        toy=[4, 64], mini=[4, 16, 64, 512], medium=[4, 16, 64, 512, 2048], paper=[512, 2048]
    )
    rows = sweep(_of_theorem_2, width=widths, L=(3, 6), spectrum=_SCALES)
    texts = [
        f"{row['spectrum']}, D = {row['width']}, L = {row['L']}: attained {row['attained']:.3g}"
        f" ({row['attained_by_token']:.3g} in the largest norm of a token), printed"
        f" {row['printed']:.3g}, proved {row['proved']:.3g}"
        for row in where(rows, width=widths[-1])
    ]
    kinds = ("attained", "printed", "proved")
    long = [{**row, "kind": kind, "slope": row[kind]} for row in rows for kind in kinds]
    panels = [
        log_panel(name, where(long, spectrum=name, L=6), "width", "slope", by="kind")
        for name in _SCALES
    ]
    holds = judge_theorem_2(where(rows, spectrum=next(iter(_SCALES))))
    sure = "none: one pair of inputs, in float64"

    return proved(rows, "; ".join(texts), holds, *panels, sure=sure)


def judge_theorem_2(rows: Sequence[Row]) -> bool | None:
    """Return whether the printed constant is proved; False if attained slopes exceed it and e^6."""
    above = any(row["attained"] > row["printed"] for row in rows)
    beyond = any(row["attained"] > _LIMIT for row in rows)
    return decided(
        holds=all(row["proved"] <= row["printed"] for row in rows), against=above and beyond
    )


_SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "largest eigenvalue 1": lambda eigenvalues: eigenvalues / eigenvalues.max(),
    "sum of eigenvalues 1": lambda eigenvalues: eigenvalues / eigenvalues.sum(),
}
"""Scales of the spectrum of X^T X, from its eigenvalues."""


def _of_theorem_2(width: int, L: int, spectrum: str) -> Row:
    share = _ALPHA / L
    x = torch.ones(width, dtype=torch.float64)
    x[0] = _RAISED
    moved = x.clone()
    moved[0] += _STEP
    change = encoded_diagonal(moved, L, spectrum) - encoded_diagonal(x, L, spectrum)
    step = moved - x
    grown = (1 + share) ** (2 * L)
    root = math.sqrt(width) if spectrum == next(iter(_SCALES)) else 1.0

    return {
        "attained": float(change.norm() / step.norm()),
        "attained_by_token": float(change.abs().max() / step.abs().max()),
        "printed": (1 + 3 * share) ** (2 * L),
        "proved": grown * (1 + L * 4 * root * share / (1 + share)),
    }


def encoded_diagonal(x: Tensor, layers: int, spectrum: str) -> Tensor:
    """Return the encoding of diag(x) by equations 2 to 4 with one expert and identity weights.

    It is diagonal too, as ELU(0) = 0: its diagonal is returned.
    """
    elu = torch.nn.functional.elu
    between = _SCALES[spectrum](x.square())
    for _ in range(layers):
        x = x + _ALPHA / layers * elu(x * between)
        x = x + _ALPHA / layers * elu(elu(x))
    return x
