"""Stacks of invertible blocks that recompute their activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import (
    ConfigError,
    ConvergenceError,
    ShapeError,
    listed,
)
from wellposed.nn._checks import CheckedModule, check_unwritten, writes_to
from wellposed.nn._frozen import frozen
from wellposed.nn._recompute import Rerun, unchanged
from wellposed.nn.invertible._conditions import refuse_randomness, refuse_statistics
from wellposed.nn.invertible._inversion import (
    Inversion,
    LogDeterminant,
    error_in_x,
    sample_norms,
)
from wellposed.nn.invertible._residual import InvertibleResidual
from wellposed.options import Positive, Seed, Size
from wellposed.second_derivatives import with_graph
from wellposed.torch_modes import is_transformed


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
