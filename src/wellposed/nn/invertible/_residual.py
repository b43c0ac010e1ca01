"""Invertible residuals, `x + f(x)` of a contraction f."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.call_checks import checked_arguments
from wellposed.errors import (
    ConfigError,
    NotContractiveError,
    NotLipschitzError,
    ShapeError,
)
from wellposed.linalg import Norm, check_norm
from wellposed.nn._checks import CheckedModule, check_unwritten, writes_to
from wellposed.nn._frozen import frozen
from wellposed.nn._recompute import unchanged
from wellposed.nn.invertible._conditions import refuse_randomness, refuse_statistics
from wellposed.nn.invertible._inversion import (
    Inversion,
    LogDeterminant,
    solve,
    widest,
    with_error_bound,
)
from wellposed.options import Positive, Seed, Size


class InvertibleResidual(CheckedModule):
    """`y = x + f(x)`, `|f(x) - f(x')| <= c |x - x'|`, c < 1; the inverse is `x = lim y - f(x_k)`.

    Exact inverse up to rounding, with an a-posteriori error bound that includes rounding
    (`Inversion`). Distances change by factors in `[1 - c, 1 + c]`. Behrmann et al. (2019),
    "Invertible Residual Networks", Theorem 1 and Algorithm 1; Kim, Papamakarios, Mnih (2021), sec.
    4.1, for attention.

    Args:
        f: Any module that keeps the shape. Unless `lipschitz` is given, its bound is
            `f.contractive` (`L2SelfAttention`), else `f.lipschitz_bound(num_tokens)`.
        lipschitz: A bound c of f, not checked; `wellposed.certify` computes one for most modules.
        norm: Of `lipschitz`: `"tok"` (max over tokens of the 2-norm), `"inf"` or `2`; else f's own.

    Raises:
        NotContractiveError: `lipschitz` is not in [0, 1). `inverse` checks bounds of f itself.
        ConfigError: in a call, if f overwrites its input, which `x + f(x)` adds.

    Cost: forward as f. In float32 the inverse evaluates f about `ln(1e-7) / ln(c')` times (Picard),
    where c' is the slope along the iterates, often far below c. Anderson's acceleration halves that
    or better for attention that takes 20 or more, with the memory of twelve copies of x. The error
    bound takes one evaluation of f in float64, with two more attentions for each fused one.

    >>> from wellposed.nn import L2SelfAttention
    >>> block = InvertibleResidual(L2SelfAttention(8, 2, contractive=0.9, max_tokens=16))
    >>> x = torch.randn(3, 5, 8)
    >>> again, report = block.inverse(block(x))
    >>> bool((again - x).abs().max() < 1e-5), report.converged
    (True, True)
    """

    repr_fields = ("lipschitz", "norm")

    def __init__(self, f: nn.Module, *, lipschitz: float | None = None, norm: Norm = "tok") -> None:
        super().__init__()
        self.f = f
        self.lipschitz = lipschitz
        self._given_norm: Norm = norm
        if lipschitz is not None:
            self._checked(lipschitz, "the bound given as lipschitz=")

    @property
    def norm(self) -> Norm:
        """The norm in which f is a contraction and errors are reported."""
        norm_of_f = getattr(self.f, "norm", None)
        # Other modules may call a submodule "norm".
        is_own = self.lipschitz is None and isinstance(norm_of_f, str | int)
        return check_norm(norm_of_f) if is_own else self._given_norm

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Return `x + f(x, **options)`."""
        return x + self._branch(x, **options)

    def _branch(self, x: Tensor, **options: Any) -> Tensor:
        """Return `f(x, **options)`; raise `ConfigError` if f overwrites x."""
        writes = writes_to(x)
        branch = self.f(x, **options)
        check_unwritten(self, "f", x, writes)
        return branch

    def contraction(self, num_tokens: int) -> float:
        """Return the bound c < 1 of f for `num_tokens` tokens; else raise `NotContractiveError`."""
        if self.lipschitz is not None:
            return self._checked(self.lipschitz, "the bound given as lipschitz=")
        contractive = getattr(self.f, "contractive", None)
        if contractive is not None:
            return self._checked(float(contractive), "contractive=")

        lipschitz_bound = getattr(self.f, "lipschitz_bound", None)
        if lipschitz_bound is None:
            raise NotContractiveError(
                f"InvertibleResidual: no Lipschitz bound of {type(self.f).__name__} is known;"
                " expected f.contractive, f.lipschitz_bound(num_tokens) or lipschitz=; find a"
                " bound with wellposed.certify and pass it"
            )

        try:
            bound = float(lipschitz_bound(num_tokens).detach())
        except NotLipschitzError as error:
            raise NotContractiveError(
                f"InvertibleResidual: no bound below 1 exists: {error}"
            ) from error

        return self._checked(bound, f"the bound for {num_tokens} tokens is")

    def _checked(self, bound: float, source: str) -> float:
        if not 0 <= bound < 1:
            raise NotContractiveError(
                f"InvertibleResidual: {source} {bound:.6g} (norm {self.norm!r}, f ="
                f" {type(self.f).__name__}); expected a bound in [0, 1), without which x + f(x)"
                " need not have an inverse; scale f down, or build it with contractive="
            )
        return bound

    @torch.no_grad()
    @checked_arguments
    def inverse(
        self,
        y: Tensor,
        *,
        tol: Positive | None = None,
        max_iter: Size = 1000,
        **options: Any,
    ) -> tuple[Tensor, Inversion]:
        """Return x with `x + f(x) = y`, shape of y, and an `Inversion`, a report of the error.

        Picard's iteration `x <- y - f(x)` multiplies the residual by c or less. Anderson's mixes
        the last six iterates of each sample by least squares. If an iterate is worse than Picard
        guarantees, a Picard step replaces it, so the total is at most twice Picard's worst case. No
        gradient is recorded: see `ReversibleSequential`.

        Args:
            y: (batch, tokens, width), or any shape that f takes, with the batch first.
            tol: Target error `|x - x*|` relative to y and x; rounding adds to it, and the report's
                `error_bound` includes both. Default: as far as rounding allows (a residual of one
                unit of rounding, or one that stalls within `2 + sqrt(D) / 2` units).
            max_iter: Largest number of evaluations of f.
            **options: Passed to f, as in `forward` (`key_padding_mask`, `is_causal`).

        Raises:
            NotContractiveError: No bound of f below 1 is known.
            ConvergenceError: y is not finite, f returns NaN, or `max_iter` is reached.
            ConfigError: f draws random numbers in its mode (dropout in training), or `tol` is not
                valid.
        """
        with frozen(self.f), unchanged(self.f) as reset:
            x, report = self.rebuild(y, options, tol, max_iter)
            reset()
            return x, with_error_bound(report, self.f, x, y, options)

    @checked_arguments
    def log_abs_det(
        self,
        x: Tensor,
        *,
        method: Literal["series", "exact"] = "series",
        terms: Size = 10,
        probes: Size | None = None,
        seed: Seed = 0,
        **options: Any,
    ) -> LogDeterminant:
        """Return `log |det J|` of `x + f(x)` for each example; gradients flow through it.

        The series is `sum_{k=1}^n (-1)^(k+1) tr(J_f^k) / k`. The terms left out are at most
        `d c^(n+1) / ((n+1) (1 - c))`, d the coordinates of an example (theory note B17). A trace is
        exact, or the mean of `v J_f^k v` over random signs v (Hutchinson). Behrmann et al. (2019),
        sec. 3.2.

        Args:
            x: (batch, tokens, width), or any shape that f takes, with the batch first. f must map
                each example by itself, in the dtype of x (autocast is off). Padded tokens are
                coordinates, too.
            method: `"series"`, or `"exact"`, dense Jacobians and their LU decompositions in
                float64, without terms and probes.
            terms: n, the number of powers.
            probes: Number of random v; None for exact traces. Estimates are unbiased for n terms.
            seed: Of the probes. Use another one at each step of training.
            **options: Passed to f, as in `forward` (`key_padding_mask`, `is_causal`).

        Raises:
            NotContractiveError: No bound of f below 1 is known.
            ConfigError: f draws random numbers in its mode (dropout in training), numbers are
                complex, or Jacobians (without probes) would need more than 2 GiB.
            ShapeError: x has no batch dimension.

        Cost: f once, and n backward passes for each probe, or for each coordinate without probes
        (one if exact). Training stores the graph of all passes.

        >>> from wellposed.nn import L2SelfAttention
        >>> block = InvertibleResidual(L2SelfAttention(8, 2, contractive=0.5, max_tokens=16))
        >>> x = torch.randn(3, 5, 8)
        >>> exact, series = block.log_abs_det(x, method="exact"), block.log_abs_det(x)
        >>> bool(((series.value - exact.value).abs() <= series.truncation_bound + 1e-5).all())
        True
        """
        if x.is_complex() or any(weight.is_complex() for weight in self.parameters()):
            raise TypeError("expected real numbers")  # `checked_arguments` names them
        refuse_randomness(self, "log_abs_det")
        refuse_statistics(self, "log_abs_det")
        if x.dim() < 2:
            raise ShapeError(f"log_abs_det: x has shape {tuple(x.shape)}; expected (batch, ..., D)")
        c = self.contraction(x.shape[-2] if x.dim() > 2 else 1) * (1 + 2 * torch.finfo(x.dtype).eps)
        rest = x[:1].numel() * c ** (terms + 1) / ((terms + 1) * (1 - c)) if c < 1 else math.inf
        vectors = _vectors(x, None if method == "exact" else probes, seed)
        # Fused attention has no second derivative.
        fused_off = sdpa_kernel(SDPBackend.MATH)
        autocast_off = torch.autocast(x.device.type, enabled=False)
        with unchanged(self) as reset, fused_off, autocast_off:

            def f(x: Tensor) -> Tensor:
                reset()  # a transform refuses writes to tensors from outside it
                return self.f(x, **options)

            pull = torch.func.vjp(f, x)[1]
            multiply = torch.func.vmap(lambda row: pull(row)[0], chunk_size=64)
            if method == "exact":
                jacobian = (multiply(vectors).to(widest(x)) + vectors).flatten(2).transpose(0, 1)
                value = torch.linalg.slogdet(jacobian).logabsdet
                return LogDeterminant(value, 0.0, torch.zeros_like(value))
            rows = vectors
            sums = x.new_zeros(len(vectors), len(x), dtype=widest(x))
            for k in range(1, terms + 1):
                rows = multiply(rows)
                sums = sums - (-1) ** k / k * (rows * vectors).flatten(2).sum(-1, dtype=sums.dtype)
        if probes is None:
            return LogDeterminant(sums.sum(0), rest, torch.zeros_like(sums[0]))
        error = sums.detach().std(0) if probes > 1 else torch.full_like(sums[0], math.inf)
        return LogDeterminant(sums.mean(0), rest, error / math.sqrt(probes))

    def rebuild(
        self, y: Tensor, options: dict[str, Any], tol: float | None, max_iter: int
    ) -> tuple[Tensor, Inversion]:
        """Do `inverse` without its error bound, which costs an evaluation of f."""
        refuse_randomness(self, "inverse")
        contraction = self.contraction(y.shape[-2] if y.dim() > 2 else 1)
        with unchanged(self.f) as reset:

            def f(x: Tensor) -> Tensor:
                reset()  # every evaluation is of one map, also if a pass changes buffers
                return self._branch(x, **options)

            return solve(f, y, contraction, self.norm, tol=tol, max_iter=max_iter)


def _vectors(x: Tensor, probes: int | None, seed: int) -> Tensor:
    """Return random signs, or all unit vectors if ``probes`` is None, (vectors, *x.shape)."""
    if probes is not None:
        # Drawn on the host, so that all devices use the same signs.
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (probes, *x.shape), generator=generator, device="cpu")
        return (2 * signs - 1).to(x)

    size = math.prod(x.shape[1:])
    # In float64, with two copies.
    gib = 24 * len(x) * size**2 / 2**30
    if gib > 2:
        raise ConfigError(
            f"log_abs_det: Jacobians of {len(x)} examples of {size} coordinates need {gib:.3g} GiB,"
            " expected at most 2; use method='series' with probes=, or smaller batches"
        )
    unit = torch.eye(size, dtype=x.dtype, device=x.device)

    return unit.reshape(size, 1, *x.shape[1:]).expand(size, *x.shape)
