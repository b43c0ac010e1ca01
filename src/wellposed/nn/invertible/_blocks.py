"""Invertible blocks, `x + f(x)` of a contraction f, and stacks that recompute their activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.call_checks import checked_arguments
from wellposed.errors import (
    ConfigError,
    ConvergenceError,
    NotContractiveError,
    NotLipschitzError,
    ShapeError,
    listed,
)
from wellposed.linalg import Norm, check_norm
from wellposed.nn._checks import CheckedModule, check_unwritten, writes_to
from wellposed.nn._recompute import Rerun, unchanged
from wellposed.nn.invertible._inversion import (
    Inversion,
    LogDeterminant,
    error_in_x,
    sample_norms,
    solve,
    widest,
    with_error_bound,
)
from wellposed.options import Positive, Seed, Size
from wellposed.second_derivatives import with_graph
from wellposed.torch_modes import is_transformed


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


@contextmanager
def frozen(module: nn.Module, arguments_of: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Promise that no weight changes inside, so that layers normalise by their weights only once.

    ``arguments_of`` maps ids of such layers to values that their ``frozen`` takes.
    """
    with ExitStack() as stack:
        for part in module.modules():
            # A module of others may mean something else by this name.
            freeze = getattr(part, "frozen", None) if isinstance(part, CheckedModule) else None
            if callable(freeze):
                arguments = (
                    [arguments_of[id(part)]] if arguments_of and id(part) in arguments_of else []
                )
                stack.enter_context(freeze(*arguments))  # type: ignore[arg-type]
        yield


def refuse_randomness(module: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a part draws random numbers: two evaluations would be two maps."""
    drawn = []
    for path, part in module.named_modules():
        label = path or type(part).__name__
        rate_of = {name: rate for name, rate in vars(part).items() if "drop" in name}
        if isinstance(part, nn.modules.dropout._DropoutNd):
            rate_of["dropout"] = part.p
        rates = {float(rate) for rate in rate_of.values() if isinstance(rate, int | float)}
        rate = max(rates, default=0.0)
        if part.training and rate > 0:
            drawn.append(f"{label}: dropout {rate}")
        if part.training and isinstance(part, nn.RReLU):
            drawn.append(f"{label}: slopes between {part.lower} and {part.upper}")
    if drawn:
        raise ConfigError(
            f"{what} needs the same map at every evaluation, but these parts drop at random in"
            f" training:\n{listed(drawn)}\nset their dropout to 0, or call eval()"
        )


def refuse_statistics(module: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a part reads the statistics of the batch: examples are not apart."""
    kind = nn.modules.batchnorm._BatchNorm
    norms = [(path, part) for path, part in module.named_modules() if isinstance(part, kind)]
    mixing = [
        f"{path}: {type(n).__name__}" for path, n in norms if n.training or n.running_mean is None
    ]
    if mixing:
        raise ConfigError(
            f"{what} needs a map of each example by itself, but these parts read the statistics of"
            f" the batch:\n{listed(mixing)}\ncall eval(), or use another norm"
        )


class ReversibleSequential(CheckedModule):
    """`y = g_L(... g_1(x))` of invertible blocks; memory of activations does not depend on L.

    Forward stores only x and y. Backward computes the input of each block, last first, by
    `inverse`, and runs that block once more with gradients. They equal ordinary backpropagation up
    to the error of the rebuilt activations (contractive attention, 32 blocks: measured 8e-7
    relative in float32, 2e-15 in float64). Each block below multiplies an error by at most
    `1 / (1 - c')`, c' its slope there. At the end the rebuilt input is compared with the true one.
    Behrmann et al. (2019), sec. 3; Gomez et al. (2017), Algorithm 1.

    Args:
        blocks: Modules with `forward(x, **options)` and `inverse(y, **options) -> (x, Inversion)`,
            such as `InvertibleResidual`, all of one shape; ConfigError if there is none or one has
            no inverse.
        drift: Largest relative error of the rebuilt input (2-norm of a sample) that backward
            accepts.
        tol: Passed to each `inverse`.
        max_iter: Passed to each `inverse`.

    Cost: time of two forward passes, the inverses (their iterations times a forward pass) and
    backward. Activation memory of one block plus three activations for any L (64 blocks against 8:
    ratio 1.00 measured, 7.6 with ordinary backward); the gradients of parameters come on top. The
    process may grow more, by what its allocator keeps. Buffers advance once a step, and backward
    raises `ConfigError` if a weight has changed since forward. Under autocast the stack runs in the
    dtype of x, since the inverse would be as coarse as f. Second derivatives and transforms of
    `torch.func` use the whole graph, and `torch.compile` saves no memory.
    When not to use: in inference, which stores nothing, or if memory suffices: plain backward is
    faster.

    >>> from wellposed.nn import L2SelfAttention
    >>> f = [L2SelfAttention(8, 2, contractive=0.5, max_tokens=8) for _ in range(3)]
    >>> stack = ReversibleSequential([InvertibleResidual(part) for part in f])
    >>> stack(torch.randn(2, 5, 8)).square().mean().backward()
    >>> stack.blocks[0].f.q_proj.weight.grad is not None
    True
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        drift: Positive = 1e-3,
        tol: Positive | None = None,
        max_iter: Size = 1000,
    ) -> None:
        super().__init__()
        blocks = list(blocks) if isinstance(blocks, Iterable) else []  # pyright: ignore[reportUnnecessaryIsInstance]
        without = ((i, block) for i, block in enumerate(blocks) if not hasattr(block, "inverse"))
        lacking = [f"{i}: {type(block).__name__}" for i, block in without]
        if lacking or not blocks:
            raise ConfigError(
                "ReversibleSequential: every block needs inverse(y, **options) -> (x, Inversion),"
                f" and there must be a block; received {len(blocks)} blocks, without"
                f" inverse:\n{listed(lacking)}\nwrap a contractive map in InvertibleResidual"
            )

        self.blocks = nn.ModuleList(blocks)
        self.drift = drift
        self.tol = tol
        self.max_iter = max_iter

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Map x through all blocks; `options` go to each of them and carry no gradient.

        Raises `ConfigError` if a block draws random numbers in its mode, or an option requires
        gradient.
        """
        refuse_randomness(self, "ReversibleSequential")
        tensors = ((name, value) for name, value in options.items() if isinstance(value, Tensor))
        carrying = [name for name, value in tensors if value.requires_grad]
        if carrying:
            raise ConfigError(
                f"ReversibleSequential: options {', '.join(carrying)} require gradient but would"
                " get none"
            )
        if torch.compiler.is_compiling() or is_transformed():
            # A graph or transform cannot contain an iteration of unknown length.
            return self.run(x, options)

        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        records = torch.is_grad_enabled()
        return cast(Tensor, _Rebuild.apply(self, options, records, x, *parameters))

    def run(self, x: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Map x through all blocks in its own dtype, recording their graph."""
        with torch.autocast(x.device.type, enabled=False):
            for index, block in enumerate(self.blocks):
                writes = writes_to(x)
                image = block(x, **options)
                check_unwritten(self, f"blocks.{index}", x, writes)
                x = image
        return x

    def run_once(self, x: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, list[Rerun]]:
        """Do `run`, and return what backward needs to run each block again.

        Raises `ConfigError` if a block draws random numbers without a dropout that shows it.
        """
        reruns: list[Rerun] = []
        draws = _generator_states(x)
        with torch.autocast(x.device.type, enabled=False):
            for index, block in enumerate(self.blocks):
                rerun = Rerun(block, f"ReversibleSequential, block {index}")
                writes = writes_to(x)
                image = block(x, **options)
                check_unwritten(self, f"blocks.{index}", x, writes)
                x = image
                rerun.after_forward()
                reruns.append(rerun)

        if not all(map(torch.equal, draws, _generator_states(x))):
            raise ConfigError(
                "ReversibleSequential: a block draws random numbers in its forward, so backward"
                " would run another map; draw them outside and pass them, or use plain backward"
            )
        return x, reruns

    @torch.no_grad()
    def inverse(
        self, y: Tensor, *, tol: float | None = None, **options: Any
    ) -> tuple[Tensor, Inversion]:
        """Return x with `forward(x) = y`, and a report whose error bound covers the whole stack.

        An error e above a block becomes at most `(e + |r|) / (1 - c)` below it, r the residual of
        the stored value. The bound is infinite if blocks use different norms or one has no bound.
        See `Inversion` for what it covers, and the blocks' own `inverse` for errors.
        """
        reports: list[Inversion] = []
        error = 0.0
        for block in reversed(self.blocks):
            y, report = self._invert(block, y, options, tol=tol)
            error = error_in_x(error, report.contraction, block, y) + report.error_bound
            reports.append(report)

        is_one_norm = len({report.norm for report in reports}) == 1
        return y, Inversion(
            iterations=sum(report.iterations for report in reports),
            residual=max(report.residual for report in reports),
            error_bound=error if is_one_norm else float("inf"),
            contraction=max(report.contraction for report in reports),
            norm=reports[0].norm,
            blocks=tuple(reversed(reports)),
            reason=next((report.reason for report in reports if report.reason), ""),
        )

    @checked_arguments
    def log_abs_det(self, x: Tensor, *, seed: Seed = 0, **options: Any) -> LogDeterminant:
        """Return `log |det J|` of the stack, the sum over its blocks, with summed bounds.

        Options, errors and cost are those of `InvertibleResidual.log_abs_det`. Each block draws its
        own probes from ``seed``. Backward stores the graph of all blocks.
        """
        refuse_randomness(self, "log_abs_det")
        refuse_statistics(self, "log_abs_det")
        passed = {n: o for n, o in options.items() if n not in ("method", "terms", "probes")}
        parts = list[LogDeterminant]()
        generator = torch.Generator().manual_seed(seed)
        with unchanged(self), torch.autocast(x.device.type, enabled=False):
            for block in self.blocks:
                drawn = int(torch.randint(2**32, (), generator=generator, device="cpu"))
                parts.append(cast(Any, block).log_abs_det(x, seed=drawn, **options))
                x = block(x, **passed)

        values, rests, errors = zip(*parts, strict=True)
        error = torch.linalg.vector_norm(torch.stack(errors), dim=0)
        return LogDeterminant(torch.stack(values).sum(0), math.fsum(rests), error)

    def rebuild(self, block: nn.Module, y: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the input of a block, without an error bound if that costs an evaluation."""
        if (
            isinstance(block, InvertibleResidual)
            and type(block).inverse is InvertibleResidual.inverse
        ):
            with frozen(block.f), torch.no_grad():
                return block.rebuild(y, options, self.tol, self.max_iter)[0]
        return self._invert(block, y, options)[0]

    def _invert(
        self, block: nn.Module, y: Tensor, options: dict[str, Any], *, tol: float | None = None
    ) -> tuple[Tensor, Inversion]:
        inverse = cast(Callable[..., tuple[Tensor, Inversion]], block.inverse)
        return inverse(y, tol=tol or self.tol, max_iter=self.max_iter, **options)


def _run_again(
    stack: ReversibleSequential, x: Tensor, *, options: Mapping[str, Any], reruns: Sequence[Rerun]
) -> Tensor:
    """Do `ReversibleSequential.run` as an earlier pass did it, and leave buffers alone."""
    with torch.autocast(x.device.type, enabled=False):
        for block, rerun in zip(stack.blocks, reruns, strict=True):
            with rerun.repeated():
                x = block(x, **options)
    return x


def _generator_states(x: Tensor) -> list[Tensor]:
    """Return the states of the generators that a pass over x draws from; no device is waited for."""
    states = [torch.get_rng_state()]
    if x.is_cuda and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(x.device))
    return states


class _Rebuild(torch.autograd.Function):
    """Forward through all blocks without a graph; backward by inversion, one block at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        stack: ReversibleSequential,
        options: dict[str, Any],
        records: bool,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.stack = stack
        ctx.options = options
        ctx.parameters = weights
        y, ctx.reruns = stack.run_once(x, options) if records else (stack.run(x, options), [])
        if y.shape != x.shape:
            raise ShapeError(
                f"ReversibleSequential: blocks turned shape {tuple(x.shape)} into {tuple(y.shape)}"
            )
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stack: ReversibleSequential = ctx.stack
        x, y = ctx.saved_tensors
        reruns: list[Rerun] = ctx.reruns
        for rerun in reruns:
            rerun.check()

        if torch.is_grad_enabled():
            run = partial(_run_again, stack, options=ctx.options, reruns=reruns)
            return None, None, None, *with_graph(run, [x], grads[0], *ctx.parameters)

        grad = grads[0]
        totals = dict[int, Tensor]()
        with torch.autocast(x.device.type, enabled=False):
            for block, rerun in zip(reversed(stack.blocks), reversed(reruns), strict=True):
                parameters = [weight for weight in block.parameters() if weight.requires_grad]
                with rerun.repeated() as reset:
                    y = stack.rebuild(block, y, ctx.options)
                    reset()
                    with torch.enable_grad():
                        y = y.detach().requires_grad_()
                        image = block(y, **ctx.options)
                gradients = torch.autograd.grad(image, [y, *parameters], grad, allow_unused=True)
                grad = torch.zeros_like(y) if gradients[0] is None else gradients[0]
                for parameter, gradient in zip(parameters, gradients[1:], strict=True):
                    if gradient is not None:
                        # A weight that several blocks share occurs several times.
                        total = totals.get(id(parameter))
                        totals[id(parameter)] = gradient if total is None else total + gradient

        error = sample_norms(y.detach() - x, 2)
        size = sample_norms(x, 2)
        sizes = size.clamp_min(torch.finfo(x.dtype).tiny)
        worst = float((error / sizes).max()) if x.numel() else 0.0
        if not worst <= stack.drift:
            raise ConvergenceError(
                f"ReversibleSequential: the rebuilt input is off by {worst:.3g} of its size;"
                f" more than drift={stack.drift:g}, so gradients of the first blocks would be wrong;"
                " use a smaller contraction, fewer blocks, float64, or a larger drift"
            )

        return (
            None,
            None,
            None,
            grad,
            *(totals.get(id(parameter)) for parameter in ctx.parameters),
        )
