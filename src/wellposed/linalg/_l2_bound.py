"""Lipschitz bound of a whole multi-head L2 self-attention layer as a function of its weights (theory note B1, B3).

The layer, in row convention: ``z_h = x W_h`` is query and key of head h, its value is ``z_h R_h``, the head outputs
are concatenated and multiplied by ``W_O``; ``C_h = R_h W_O,h`` is head h's path to the output. Logits are
``-tau |z_i - z_j|^2 + b_ij`` for any ``tau > 0``: the bounds do not depend on ``tau``. Shared biases of query and key,
value biases and output biases change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.linalg._brackets import L2Constants, Norm, check_norm
from wellposed.linalg._norms import SpectralMethod, certified_spectral_norm

# Up to this width three scalings are certified, above it only the most promising one.
_TRY_ALL_BELOW = 128


@dataclass(frozen=True)
class Bound:
    """An upper bound (0-dim tensor, which carries gradient where the weights do) and the name of the proved form."""

    value: Tensor
    form: str


def least(bounds: Sequence[Bound]) -> Bound:
    """Return the smallest of several proved bounds; the first wins a tie."""
    return min(bounds, key=lambda bound: float(bound.value.detach()))


def l2_attention_bound(
    projection: Tensor,
    mixing: Tensor,
    output: Tensor,
    constants: L2Constants,
    *,
    norm: Norm = "tok",
    method: SpectralMethod = "svd",
    per_head_only: bool = False,
) -> Bound:
    """Return ``L`` with ``|F(X) - F(Y)| <= L |X - Y|`` for tied L2 self-attention, the least of the proved forms.

    Certified. Kim, Papamakarios, Mnih (2021), Theorem 3.2, in the sharper forms B1 (inf) and B3 (tok, 2) of the theory
    note. Beyond the note, ``2`` and ``tok`` use a family of which its forms are members or relaxations: for any
    ``s_h > 0``, with ``C`` the stack of ``s_h C_h`` over heads,

    - ``2``:   ``|C| |[W_1/s_1 .. W_H/s_H]| (sqrt(colP) + 2c + 2 sqrt(c colT))``, since every term of the Jacobian acts
      on ``zeta_h = delta W_h`` head by head and ``sum_h |zeta_h / s_h|^2 <= |[W_h/s_h]|^2 |delta|^2``;
    - ``tok``: ``|C| ((1 + 2c) sqrt(sum_h |W_h|^2/s_h^2) + 2c |[W_h/s_h]|)``, as heads may attend to different tokens
      but the query term of all heads moves one token.

    ``s_h = sqrt(|W_h| / |C_h|)`` gives at most ``sum_h |W_h| |C_h|``; ``1/|R_h|`` and 1 give the note's other forms.

    Args:
        projection: ``W_h``, ``(H, D, d)``, query = key = ``x @ W_h``.
        mixing: ``R_h``, ``(H, d, d)``; Kim et al.: ``W_h^T W_V,h / sqrt d`` (with ``tau = 1/sqrt d``).
        output: ``W_O,h``, ``(H, d, E)``: the rows of ``W_O`` that read head h.
        constants: tokens, mask and biases, from `l2_constants` and its siblings.
        norm: ``"tok"``, ``"inf"`` or ``2``.
        method: how spectral norms are bounded; ``"gram"`` is differentiable and meant for training.
        per_head_only: use only spectral norms of single heads (``sum_h |W_h| |C_h|``, far cheaper, looser).

    Raises:
        ShapeError: the three shapes do not fit.
        NotLipschitzError: a weight is not finite.

    Cost: without ``per_head_only`` two spectral norms of D x D matrices; O(D^2 d) else.

    >>> from wellposed.linalg import l2_constants
    >>> W = torch.eye(4).reshape(1, 4, 4)
    >>> bound = l2_attention_bound(W, W, W, l2_constants(2))
    >>> round(float(bound.value), 3)
    2.114
    """
    check_norm(norm)
    _check_shapes(projection, mixing, output)
    dtype = torch.float64 if method in ("svd", "cholesky") else torch.promote_types(projection.dtype, torch.float32)
    projection, mixing, output = projection.to(dtype), mixing.to(dtype), output.to(dtype)
    paths = mixing @ output
    if norm == "inf":
        return _inf_bound(projection, paths, constants)
    heads = _Heads(
        projection,
        paths,
        certified_spectral_norm(projection, method=method),
        certified_spectral_norm(paths, method=method),
    )
    composite = Bound((heads.read * heads.write).sum() * constants.bracket(norm), f"sum |W_h||C_h|, {norm} (B3)")
    if per_head_only or projection.shape[0] == 1:
        return composite
    mixed = certified_spectral_norm(mixing, method=method)
    choices = {
        "|W_O| sqrt(sum |W_h|^2|R_h|^2)": 1 / _positive(mixed),
        "|stack C_h| |[W_h]|": torch.ones_like(mixed),
        "balanced stack |s C_h| |[W_h/s]|": (_positive(heads.read) / _positive(heads.write)).sqrt(),
    }
    bounds = [composite]
    if projection.shape[1] > _TRY_ALL_BELOW:
        # Every scaling is valid, so a guess may choose the one whose two large norms are then certified.
        guesses = {
            form: float(_stacked_bound(heads, s, constants, norm, _power_guess).detach()) for form, s in choices.items()
        }
        form = min(guesses, key=lambda form: guesses[form])
        choices = {form: choices[form]}
    certified = partial(certified_spectral_norm, method=method)
    for form, scales in choices.items():
        value = _stacked_bound(heads, scales.detach(), constants, norm, certified)
        bounds.append(Bound(value, f"{form}, {norm} (B3)"))
    return least(bounds)


@dataclass(frozen=True)
class _Heads:
    """``W_h``, ``C_h`` and their spectral norms."""

    projection: Tensor
    paths: Tensor
    read: Tensor
    write: Tensor


def _stacked_bound(
    heads: _Heads, scales: Tensor, constants: L2Constants, norm: Norm, size: Callable[[Tensor], Tensor]
) -> Tensor:
    write = size((heads.paths * scales[:, None, None]).flatten(0, 1))
    read = size((heads.projection / scales[:, None, None]).movedim(0, 1).flatten(1))
    if norm == 2:
        return write * read * constants.bracket(2)
    heads_apart = (heads.read / scales).square().sum().sqrt()
    return write * ((1 + 2 * constants.c) * heads_apart + 2 * constants.c * read)


def _inf_bound(projection: Tensor, paths: Tensor, constants: L2Constants) -> Bound:
    """B1, coordinate r of the output: the averaging term plus 4c, in the inf-norm or through the 2-norm of the head."""
    head_dim = projection.shape[-1]
    read = projection.abs().sum(-2)
    read_inf, read_two = read.amax(-1, keepdim=True), read.square().sum(-1, keepdim=True).sqrt()
    path_one, path_two = paths.abs().sum(-2), paths.square().sum(-2).sqrt()
    averaging = path_one * read_inf
    through_inf = averaging * (constants.bracket("inf", head_dim=head_dim) - 1)
    through_two = path_two * read_two * (4 * constants.c)
    margin = 1 + 4 * (projection[0].numel() + paths[0].numel()) * torch.finfo(paths.dtype).eps
    return least(
        [
            Bound((averaging + through_inf).sum(0).amax() * margin, "composite rows, inf (B1)"),
            Bound((averaging + through_two).sum(0).amax() * margin, "composite through the 2-norm, inf (B1)"),
            Bound((averaging + torch.minimum(through_inf, through_two)).sum(0).amax() * margin, "per row, inf (B1)"),
        ]
    )


@torch.no_grad()
def _guess(heads: _Heads, scales: Tensor, constants: L2Constants, norm: Norm) -> float:
    return float(_stacked_bound(heads, scales, constants, norm, _power_guess))


@torch.no_grad()
def _power_guess(matrix: Tensor) -> Tensor:
    """Cheap guess of a spectral norm, only to choose among valid scalings; never part of a bound."""
    vector = torch.linspace(1, 2, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(8):
        vector = matrix.mT @ (matrix @ vector)
        vector = vector / vector.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
    return (matrix @ vector).norm()


def _positive(norms: Tensor) -> Tensor:
    """Replace zero norms by 1: any positive scale is valid, and a silent head then scales like the others."""
    return torch.where(norms > 0, norms, torch.ones_like(norms))


def _check_shapes(projection: Tensor, mixing: Tensor, output: Tensor) -> None:
    fits = projection.ndim == mixing.ndim == output.ndim == 3
    if fits:
        heads, _, dim = projection.shape
        fits = tuple(mixing.shape) == (heads, dim, dim) and tuple(output.shape[:2]) == (heads, dim)
    if not fits:
        raise ShapeError(
            "L2 attention bound: expected projection (H, D, d), mixing (H, d, d), output (H, d, E); received "
            f"{tuple(projection.shape)}, {tuple(mixing.shape)}, {tuple(output.shape)}"
        )
