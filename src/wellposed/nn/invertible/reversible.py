"""Stacks whose backward pass rebuilds activations by inversion instead of storing them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wellposed.errors import ConfigError, ConvergenceError, ShapeError, listed
from wellposed.nn.checks import Part
from wellposed.nn.invertible.inversion_bound import carried, unmeasured
from wellposed.nn.invertible.residual import refuse_randomness
from wellposed.nn.invertible.solver import Inversion, sample_norms
from wellposed.options import Positive, Size


class ReversibleSequential(Part):
    r"""`y = g_L(... g_1(x))` for invertible blocks, trained with activation memory that does not
    depend on L.

    Forward stores x and y alone. Backward goes down the stack: it rebuilds the input of each block
    by `inverse`, runs that block once more with gradients, and moves on. Gradients equal ordinary
    backpropagation up to the error of the
    rebuilt activations: for contractive attention blocks measured 8e-7 relative in float32 and
    2e-15 in float64 at 32 blocks, while an error is multiplied by `1 / (1 - c')` or less on its way
    down (c' the slope at hand). Nothing is
    taken on trust: at the bottom the rebuilt input is compared with the true one. Behrmann et al.
    (2019), sec. 3; Gomez et al. (2017), Algorithm 1.

    Args:
        blocks: modules with `forward(x, **options)` and `inverse(y, **options) -> (x, Inversion)`,
            such as `InvertibleResidual` and `AdditiveCoupling`, all of one shape.
        drift: largest relative error of the rebuilt input (in the 2-norm of a sample) that backward
            accepts.
        tol, max_iter: passed to each `inverse`.

    Raises:
        ConfigError: a block has no inverse, or there is none at all; in `forward`, dropout is
            active in a block.

    Cost: activation memory of one block plus three activations, whatever L: at most as many bytes
    of tensors are alive at once with 64 blocks as with 8 (ratio 1.00 measured, 7.6 by ordinary
    backward), the gradients of the parameters set aside, of which L blocks have L times as many by
    any method. The resident memory of a process may grow more, by what its allocator keeps. Time of
    the forward pass twice, of the inverses (their iterations times a forward pass) and of backward.
    Under autocast the stack runs in the dtype of x: rounding f to bfloat16 would make its inverse
    that coarse. No second derivatives. Under `torch.compile` the blocks run one after the other and
    the compiler decides what is kept: no memory is saved.
    When not to use: in inference nothing is stored anyway; and where memory suffices, plain
    backward is faster.

    >>> from wellposed.nn import InvertibleResidual, L2SelfAttention
    >>> stack = ReversibleSequential(
    ...     [InvertibleResidual(L2SelfAttention(8, 2, contractive=0.5, max_tokens=8)) for _ in range(3)]
    ... )
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
                f" inverse:\n{listed(lacking)}\nwrap a contractive map in InvertibleResidual, or"
                " two maps in AdditiveCoupling"
            )
        self.blocks = nn.ModuleList(blocks)
        self.drift = drift
        self.tol = tol
        self.max_iter = max_iter

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Map x through all blocks; `options` go to each of them and carry no gradient.

        Raises:
            ConfigError: a block draws random numbers in its present mode, or an option requires
                gradient.
        """
        refuse_randomness(self, "ReversibleSequential")
        tensors = ((name, each) for name, each in options.items() if isinstance(each, Tensor))
        carrying = [name for name, each in tensors if each.requires_grad]
        if carrying:
            raise ConfigError(
                f"ReversibleSequential: options {', '.join(carrying)} require gradient and would"
                " get none"
            )
        if torch.compiler.is_compiling():
            # A graph cannot hold an inversion that runs until it is exact.
            with torch.autocast(x.device.type, enabled=False):
                for block in self.blocks:
                    x = block(x, **options)
            return x
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return cast(Tensor, _Rebuild.apply(self, options, x, *parameters))

    @torch.no_grad()
    def inverse(
        self, y: Tensor, *, tol: float | None = None, **options: Any
    ) -> tuple[Tensor, Inversion]:
        """Return x with `forward(x) = y`, and a report whose error bound holds for the whole stack.

        An error e above a block is an error of at most `(e + |r|) / (1 - c)` below it, r the
        residual of what was stored; where blocks speak of different norms, or one has no bound
        (`AdditiveCoupling`), it is infinite. See `Inversion` for what the bound covers.

        Raises:
            NotContractiveError, ConvergenceError, ConfigError: as the blocks' own `inverse`.
        """
        reports: list[Inversion] = []
        error = 0.0
        for block in reversed(self.blocks):
            y, report = self._invert(block, y, options, tol=tol)
            error = carried(error, report.contraction, block, y) + report.error_bound
            reports.append(report)
        known = len({report.norm for report in reports}) == 1
        return y, Inversion(
            iterations=sum(report.iterations for report in reports),
            residual=max(report.residual for report in reports),
            error_bound=error if known else float("inf"),
            contraction=max(report.contraction for report in reports),
            norm=reports[0].norm,
            blocks=tuple(reversed(reports)),
            reason=next((report.reason for report in reports if report.reason), ""),
        )

    def _invert(
        self, block: nn.Module, y: Tensor, options: dict[str, Any], *, tol: float | None = None
    ) -> tuple[Tensor, Inversion]:
        inverse = cast(Callable[..., tuple[Tensor, Inversion]], block.inverse)
        return inverse(y, tol=tol or self.tol, max_iter=self.max_iter, **options)


class _Rebuild(torch.autograd.Function):
    """Forward through all blocks without a graph; backward by inversion, one block at a time."""

    @staticmethod
    def forward(
        ctx: Any, stack: ReversibleSequential, options: dict[str, Any], x: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.stack, ctx.options, ctx.parameters = stack, options, weights
        y = x
        with torch.autocast(x.device.type, enabled=False):
            for block in stack.blocks:
                y = block(y, **options)
        if y.shape != x.shape:
            raise ShapeError(
                f"ReversibleSequential: blocks turned shape {tuple(x.shape)} into {tuple(y.shape)}"
            )
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        stack: ReversibleSequential = ctx.stack
        x, y = ctx.saved_tensors
        grad, totals = grads[0], dict[int, Tensor]()
        with torch.autocast(x.device.type, enabled=False), unmeasured():
            for block in reversed(stack.blocks):
                y, _ = stack._invert(block, y, ctx.options)
                parameters = [each for each in block.parameters() if each.requires_grad]
                with torch.enable_grad():
                    y = y.detach().requires_grad_()
                    image = block(y, **ctx.options)
                found = torch.autograd.grad(image, [y, *parameters], grad, allow_unused=True)
                grad = torch.zeros_like(y) if found[0] is None else found[0]
                for parameter, gradient in zip(parameters, found[1:], strict=True):
                    if gradient is not None:
                        # A weight shared by several blocks is met several times.
                        known = totals.get(id(parameter))
                        totals[id(parameter)] = gradient if known is None else known + gradient
        error, size = sample_norms(y.detach() - x, 2), sample_norms(x, 2)
        sizes = size.clamp_min(torch.finfo(x.dtype).tiny)
        worst = float((error / sizes).max()) if x.numel() else 0.0
        if not worst <= stack.drift:
            raise ConvergenceError(
                f"ReversibleSequential: the rebuilt input is off by {worst:.3g} of its size;"
                f" accepted is drift={stack.drift:g}, so the gradients of the first blocks would be"
                " wrong; use a smaller contraction, fewer blocks, float64, or a larger drift if you"
                " accept that error"
            )
        return (None, None, grad, *(totals.get(id(parameter)) for parameter in ctx.parameters))
