"""Second derivatives of handwritten backward passes and of fused attention: computed, or explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import ConfigError
from wellposed.torch_modes import is_transformed


def with_graph(
    formula: Callable[..., Tensor], inputs: Sequence[Any], gradient: Tensor, *weights: Tensor
) -> list[Tensor | None]:
    """Return gradients with a graph, so that a handwritten backward pass has derivatives."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # Views, as two inputs may be one tensor.
        views = [None if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x in (*views, *weights) if x is not None and x.requires_grad]
        value = formula(*views)
        options = {"create_graph": True, "allow_unused": True}
        gradients = torch.autograd.grad(value, wanted, gradient, **options)
    by_id = dict(zip(map(id, wanted), gradients, strict=True))
    return [by_id.get(id(x)) for x in (*views, *weights)]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return `scaled_dot_product_attention`; a second derivative is explained or computed."""
    if is_transformed():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, **options)
    joined = F.scaled_dot_product_attention(query, key, value, **options)
    node = None if torch.compiler.is_compiling() else joined.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_differentiable_once)
    return joined


def _differentiable_once(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    problem = (
        "a fused attention kernel has no second derivative; run the forward pass in"
        " torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    )
    return tuple(None if g is None else Once.apply(problem, g) for g in gradients)


class Once(torch.autograd.Function):
    """``Once.apply(problem, gradient, *inputs)``: the gradient, whose derivative raises ``problem``."""

    @staticmethod
    def forward(ctx: Any, problem: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        del inputs
        ctx.problem = problem
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        raise ConfigError(ctx.problem)
