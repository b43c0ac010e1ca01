"""Calls of a model on (batch, tokens, width), and the size of perturbations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ShapeError
from wellposed.hooks import copied
from wellposed.linalg import TokenNorm


def reads_pairs(model: Any) -> bool:
    """Return whether a model reads two texts, or two vectors, which are certified together."""
    forward = getattr(model, "forward", model)
    taken = inspect.signature(forward).parameters
    return getattr(model, "reads_two_vectors", False) is True or "inputs_embeds_pair" in taken


def as_pair(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return keywords for a model of pairs: both halves of the tokens, or the first and last token.

    Raises:
        ShapeError: fewer than two tokens.
    """
    half = tokens.shape[1] // 2
    if not half:
        raise ShapeError(
            "a model of pairs reads two texts: expected tokens of both, at least 2, received 1"
        )
    if getattr(model, "reads_two_vectors", False) is True:
        return {"first": tokens[:, 0], "second": tokens[:, -1]}
    return {"inputs_embeds": tokens[:, :half], "inputs_embeds_pair": tokens[:, half:]}


class Call:
    """``x -> y`` of shape (batch, tokens, features)."""

    def __init__(self, target: Any, kwargs: Mapping[str, Any]) -> None:
        self.target = target
        self.kwargs = kwargs
        self.embeds = isinstance(target, nn.Module) and hasattr(target, "get_input_embeddings")
        self.is_pair = isinstance(target, nn.Module) and reads_pairs(target)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_pair:
            out = self.target(**as_pair(self.target, x), **self.kwargs)
        elif self.embeds:
            out = self.target(inputs_embeds=x, **self.kwargs)
        else:
            # Attention of torch.nn takes queries, keys and values: one sequence here.
            count = 3 if isinstance(self.target, nn.MultiheadAttention) else 1
            out = self.target(*[x] * count, **self.kwargs)

        if not isinstance(out, Tensor):
            names = ("logits", "last_hidden_state")
            named = next((name for name in names if hasattr(out, name)), None)
            out = out[0] if named is None else getattr(out, named)

        if not isinstance(out, Tensor) or out.ndim < 2 or out.shape[0] != x.shape[0]:
            received = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ShapeError(
                f"attack: expected an output (batch={x.shape[0]}, ..., features), received"
                f" {received}"
            )

        return out.unsqueeze(1) if out.ndim == 2 else out.flatten(1, -2)


def perturbation_size(delta: Tensor, norm: TokenNorm) -> Tensor:
    """Return the norm ``(batch,)`` of perturbations ``(batch, tokens, width)``: tok, 2, inf or sum.

    >>> import torch
    >>> perturbation_size(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), "tok")
    tensor([5.])
    """
    if norm == 2:
        return delta.flatten(1).norm(dim=-1)
    if 0 in delta.shape[1:]:
        return delta.new_zeros(len(delta))
    if norm == "inf":
        return delta.abs().flatten(1).amax(-1)
    lengths = delta.norm(dim=-1)
    return lengths.sum(-1) if norm == "sum" else lengths.amax(-1)


def steepest_direction(gradient: Tensor, norm: TokenNorm) -> Tensor:
    """Return the perturbation of norm 1 along which a function with this gradient grows fastest."""
    if norm == "inf":
        return gradient.sign()
    if norm == "sum":
        lengths = gradient.norm(dim=-1, keepdim=True)
        chosen = torch.zeros_like(lengths).scatter(1, lengths.argmax(1, keepdim=True), 1.0)
        gradient = gradient * chosen
    size = (
        gradient.flatten(1).norm(dim=-1)[:, None, None]
        if norm == 2
        else gradient.norm(dim=-1, keepdim=True)
    )
    return gradient / size.where(size > 0, 1.0)


FLOAT32_NORMS = tuple(
    f"transformers.models.{family}.modeling_{family}.{prefix}RMSNorm"
    for family, prefix in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"))
)
"""Norms that compute in float32 in models of every dtype."""


def _computes_in_float32(part: nn.Module) -> bool:
    kind = type(part)
    return f"{kind.__module__}.{kind.__qualname__}" in FLOAT32_NORMS


def rounding_unit(module: nn.Module, dtype: torch.dtype) -> float:
    """Return the unit of rounding of a pass in ``dtype``: that of float32 at least, if the module
    has a part of `FLOAT32_NORMS`, whose family computes the softmax in float32 too."""
    eps = torch.finfo(dtype).eps
    in_float32 = any(map(_computes_in_float32, module.modules()))
    return max(eps, torch.finfo(torch.float32).eps) if in_float32 else eps


def _rms_norm(part: Any, hidden_states: Tensor) -> Tensor:
    """Compute a norm of `FLOAT32_NORMS` in the dtype of its input."""
    square = hidden_states.square().mean(-1, keepdim=True)
    return part.weight * (hidden_states * torch.rsqrt(square + part.variance_epsilon))


def _without_float32(part: nn.Module) -> None:
    """Make a norm of `FLOAT32_NORMS` compute in the dtype of its input."""
    if _computes_in_float32(part):
        part.forward = functools.partial(_rms_norm, part)


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in another dtype that computes the same map: RMSNorm keeps its default eps, and
    norms that compute in float32 compute in float64 in a float64 copy."""
    twin = copied(module)
    unit = torch.promote_types(activation_dtype(module), torch.float32)
    for part in twin.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None:
            part.eps = torch.finfo(unit).eps
        if dtype == torch.float64:
            _without_float32(part)
    return twin.to(dtype)


def activation_dtype(module: nn.Module) -> torch.dtype:
    """Return the widest floating dtype of the weights, or float64 if there are none."""
    dtypes = [p.dtype for p in module.parameters() if p.is_floating_point() and p.itemsize > 1]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float64
