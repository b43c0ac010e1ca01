"""Orthogonality as a torch parametrisation: the Cayley map around a movable base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ShapeError, nearest_names
from wellposed.linalg import based_cayley, cayley, compute_dtype, inverse_cayley, polar, tall
from wellposed.options import Positive


class Orthogonal(nn.Module):
    """The map ``X -> gain * B cayley(X)``: its values satisfy ``W^T W = gain^2 I`` (``W W^T`` for
    wide W).

    Made by `orthogonal`. ``right_inverse`` takes any matrix to the nearest value of the map.
    """

    base: Tensor
    reflectors: Tensor
    scales: Tensor
    signs: Tensor

    def __init__(self, shape: tuple[int, int], *, gain: float = 1.0, base: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.gain = gain
        self.has_base = base
        rows, columns = max(shape), min(shape)
        if base and rows == columns:
            self.register_buffer("base", torch.eye(rows))
        elif base:
            # B is rows x rows: kept as the Householder vectors of its first columns, with their
            # signs.
            self.register_buffer("reflectors", torch.zeros(rows, columns))
            self.register_buffer("scales", torch.zeros(columns))
            self.register_buffer("signs", torch.ones(columns))

    def forward(self, free: Tensor) -> Tensor:
        with torch.autocast(free.device.type, enabled=False):
            point = tall(free.to(compute_dtype(free)))
            if not self.has_base:
                value = cayley(point)
            elif point.shape[0] == point.shape[1]:
                value = based_cayley(point, self.base.to(point.dtype))
            else:
                # B = H diag(signs, I) with the orthogonal H of a Householder QR
                parts = (self.reflectors, self.scales, self.signs)
                reflectors, scales, signs = (part.to(point.dtype) for part in parts)
                value, columns = cayley(point), len(signs)
                value = torch.cat([signs.unsqueeze(-1) * value[:columns], value[columns:]])
                value = torch.ormqr(reflectors, scales, value)
            value = value if self.gain == 1.0 else value * self.gain
            return (value if free.shape[0] >= free.shape[1] else value.mT).to(free.dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Orthogonal:
        """Do what every `to` and `half` does, but keep the base in float32: rounded, it would not be
        orthogonal."""
        wide = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            if buffer.dtype != compute_dtype(buffer):
                self._buffers[name] = cast(Tensor, wide[name]).to(buffer.device)
        return self

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Project to the nearest orthogonal matrix; make it the base, and return X = 0 (or, without
        base, its X)."""
        free, buffers = self.solve(weight)
        for name, value in buffers.items():
            # A new tensor, not a copy into the old one: a graph made before may still hold that.
            setattr(self, name, value)
        return free

    @torch.no_grad()
    def solve(self, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the X and the base buffers whose image is the matrix nearest to ``weight``."""
        if tuple(weight.shape) != self.shape:
            problem = f"the orthogonal weight has shape {self.shape}"
            raise ShapeError(f"{problem}, received {tuple(weight.shape)}")
        nearest = tall(polar(weight.to(compute_dtype(weight))))
        if not self.has_base:
            free = inverse_cayley(nearest)
            free = free if self.shape[0] >= self.shape[1] else free.mT
            return free.to(weight.dtype).contiguous(), {}
        zeros = torch.zeros_like(weight)
        if nearest.shape[0] == nearest.shape[1]:
            return zeros, {"base": nearest.contiguous()}
        reflectors, scales = torch.geqrf(nearest)
        signs = torch.where(reflectors.diagonal() < 0, -1.0, 1.0).to(nearest.dtype)
        return zeros, {"reflectors": reflectors, "scales": scales, "signs": signs}

    def extra_repr(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}, gain={self.gain:g}, base={self.has_base}"


@checked_arguments
def orthogonal(
    module: nn.Module, name: str = "weight", *, gain: Positive = 1.0, base: bool = True
) -> nn.Module:
    """Parametrise a weight so that ``W^T W = gain^2 I`` (``W W^T`` for wide W) at every forward
    pass, by any optimizer.

    Status: to tolerance: 1e-5 in float32; in half precision the map runs in float32 and its value
    is rounded once (8e-3 in bfloat16). Method: ``W = gain * B cayley(X)`` with X free and B fixed,
    through ``torch.nn.utils.parametrize``; see `wellposed.linalg.cayley` for sources and the
    analytic backward pass.

    The weight starts at the matrix nearest to the one the module had, and an assigned weight is
    projected likewise (``module.weight = W``, W a plain tensor). Assigning ``module.weight =
    module.weight`` moves the base to the current point, which keeps X small. Checkpoints of the
    plain module load. To leave, and before ``save_pretrained``, call
    ``torch.nn.utils.parametrize.remove_parametrizations(module, name)``: the weight becomes plain
    again.

    Args:
        module: holds the parameter; changed in place. name: the parameter, a matrix of any shape.
        gain: singular value of W, above 0.
        base: True reaches every orthogonal matrix around the start, of either determinant; False (B
            = I) is cheaper and stays among rotations without eigenvalue -1.

    Returns:
        ``module``.

    Raises:
        ShapeError: the parameter is no matrix. ConfigError: no such parameter, not floating, or
            gain not above 0.
        ConvergenceError: ``base=False`` and the nearest matrix is out of the map's reach, or W is
            not finite.

    Cost: for each forward and backward pass one inverse and 3 products of a square weight (2
    without base); inside ``parametrize.cached()`` once for several passes. `constrain_` costs about
    half, leaves no trace in checkpoints, and is the better choice unless the map must be part of
    the graph.

    >>> import torch
    >>> layer = orthogonal(torch.nn.Linear(6, 4))
    >>> bool(torch.allclose(layer.weight @ layer.weight.T, torch.eye(4), atol=1e-5))
    True
    """
    parameter = getattr(module, name, None)
    if not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
        own = module.named_parameters(recurse=False)
        near = nearest_names(name, [key for key, value in own if value.is_floating_point()])
        raise ConfigError(
            f"orthogonal: {type(module).__name__}.{name} is no floating parameter of this module"
            f" (received {type(parameter).__name__}); nearest: {', '.join(near) or 'none'}"
        )
    if parameter.dim() != 2:
        problem = f"{type(module).__name__}.{name} has shape {tuple(parameter.shape)}"
        raise ShapeError(f"orthogonal: {problem}, expected (rows, columns)")
    shape = (parameter.shape[0], parameter.shape[1])
    mapping = Orthogonal(shape, gain=gain, base=base).to(parameter.device, compute_dtype(parameter))
    parametrize.register_parametrization(module, name, mapping)
    module.register_load_state_dict_pre_hook(partial(_load_plain, name))
    return module


def _load_plain(
    name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let a checkpoint of the plain module load into the parametrised one: its weight is
    projected."""
    plain = f"{prefix}{name}"
    if parametrize.is_parametrized(module, name) and plain in state_dict:
        steps = cast(nn.ModuleDict, module.parametrizations)[name]
        free, buffers = cast(Orthogonal, steps.get_submodule("0")).solve(state_dict.pop(plain))
        inside = f"{prefix}parametrizations.{name}."
        state_dict[f"{inside}original"] = free
        state_dict.update({f"{inside}0.{key}": value for key, value in buffers.items()})
