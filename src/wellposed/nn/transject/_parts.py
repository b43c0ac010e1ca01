"""Parts of TransJect: orthogonal weights, feed-forward, injective residual and embedding."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn._checks import INTEGERS, CheckedModule, check_tokens, is_plain, read_table
from wellposed.nn._positions import (
    LearnedPositions,
    SinusoidalPositions,
    check_length,
    sines_and_cosines,
)
from wellposed.options import Rate, Size

ORTHOGONAL_WEIGHTS: tuple[str, ...] = ("*.left", "*.right", "*.up_proj", "*.down_proj", "*.basis")
"""Patterns of all weights of a TransJect model to constrain; see `orthogonal_patterns`."""


class OrthogonalLinear(CheckedModule, nn.Linear):
    """`x -> x W^T + b`, `W^T W = I` at the start: distances between tokens are kept.

    To tolerance at the start: Haar measure, by QR of a Gaussian matrix (Mezzadri 2007). In half
    precision W is drawn in float32 and rounded. The weight is a plain parameter that drifts in
    training unless `wellposed.constrain_(model, optimizer, where=OrthogonalLinear)` keeps it
    orthogonal.

    Args:
        embed_dim: Width d of W (d, d), an integer of at least 1, else ConfigError.
        bias: Whether there is a b (d,), 0 at the start.

    Cost: N d^2 multiply-adds for N tokens; d^3 at construction.

    >>> layer = OrthogonalLinear(8)
    >>> bool((layer.weight @ layer.weight.T - torch.eye(8)).abs().max() < 1e-5), layer.norm_bound() < 1.001
    (True, True)
    """

    def __init__(self, embed_dim: Size, *, bias: bool = False) -> None:
        super().__init__(embed_dim, embed_dim, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight; the bias becomes 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if not self.weight.is_meta:
            # QR does not support half precision.
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self.weight.data.copy_(nn.init.orthogonal_(torch.empty_like(self.weight, dtype=wide)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's own name)
        """Map (..., embed_dim) to the same shape."""
        check_tokens(self, input, self.in_features)
        return super().forward(input)

    @torch.no_grad()
    def norm_bound(self) -> float:
        """Return `sqrt(1 + |W^T W - I|_F) >= |W|_2` in float64, tight if W is nearly orthogonal."""
        weight = self.weight.detach().double()
        defect = weight.mT @ weight
        defect.diagonal().sub_(1.0)
        return float((1.0 + torch.linalg.matrix_norm(defect)).sqrt())


def orthogonal_patterns(module: nn.Module) -> tuple[str, ...]:
    """Return the `ORTHOGONAL_WEIGHTS` that match a weight of `module`.

    >>> orthogonal_patterns(nn.ModuleDict({"left": OrthogonalLinear(2), "right": nn.Linear(2, 2)}))
    ('*.left',)
    """
    names = {
        path.rpartition(".")[2]
        for path, part in module.named_modules()
        if isinstance(part, OrthogonalLinear)
    }
    return tuple(pattern for pattern in ORTHOGONAL_WEIGHTS if pattern.removeprefix("*.") in names)


class ResetByParts(CheckedModule):
    """A module without weights outside its parts."""

    def reset_parameters(self) -> None:
        """Draw every weight."""
        for part in self.children():
            for module in part if isinstance(part, nn.ModuleList) else (part,):
                module.reset_parameters()  # pyright: ignore[reportCallIssue]


class OrthogonalFeedForward(ResetByParts):
    """`f(x) = ELU(W2 ELU(W1 x + b1) + b2)` for each token, W1 and W2 orthogonal: 1-Lipschitz.

    Exact up to rounding, in eval mode. Sengupta et al. (2023), sec. 3.4; biases by `bias=True`.
    This is the branch alone; `InjectiveResidual` joins it to x. `constrain_` with
    `where="*.up_proj"` and `"*.down_proj"` keeps the weights orthogonal in training.

    Args:
        embed_dim: Width d.
        dropout: Rate in [0, 1), else ConfigError, between the two maps in training, which
            multiplies the constant by `1/(1 - dropout)`.
        bias: Whether there are b1 and b2, as printed; they change no distance bound.

    Cost: 2 N d^2 multiply-adds for N tokens.

    >>> OrthogonalFeedForward(8)(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    repr_fields = ("dropout",)

    def __init__(self, embed_dim: Size, *, dropout: Rate = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.dropout = dropout
        self.up_proj = OrthogonalLinear(embed_dim, bias=bias)
        self.down_proj = OrthogonalLinear(embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        check_tokens(self, x, self.embed_dim)
        inner = F.dropout(F.elu(self.up_proj(x)), self.dropout, self.training)
        return F.elu(self.down_proj(inner))

    def norm_bound(self) -> float:
        """Return a bound of `|W1| |W2|`, f's Lipschitz constant; about 1 if they are orthogonal."""
        return self.up_proj.norm_bound() * self.down_proj.norm_bound()


ResidualStart = Literal["rezero", "sigmoid"]


class InjectiveResidual(CheckedModule):
    """`x + (alpha/L) f(x)`, `|alpha| < 1`: distances change by factors within `1 +- |alpha|/L`.

    Exact for f with Lipschitz constant 1, and injective. Sengupta et al. (2023), eq. 2, who ask
    both for `alpha = sigmoid(w)` and for ReZero, a contradiction: sigmoid(0) = 1/2. In floating
    point alpha reaches 1 for large w; at L = 1 `inverse` then refuses.

    Args:
        num_layers: L, an integer of at least 1, else ConfigError.
        start: `"rezero"`: `alpha = tanh(w)`, w = 0 at the start (Bachlechner et al. 2021). It
            starts as exactly the identity, and in the first step only w has a gradient. Or
            `"sigmoid"`: `alpha = sigmoid(w)`, in (0, 1).

    >>> InjectiveResidual(3)(torch.ones(2), torch.full((2,), 3.0)).tolist()
    [1.0, 1.0]
    """

    repr_fields = ("num_layers", "start")

    def __init__(self, num_layers: Size, start: ResidualStart = "rezero") -> None:
        super().__init__()
        self.num_layers = num_layers
        self.start: ResidualStart = start
        self.weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set w = 0: alpha is 0 for ReZero, 1/2 for the sigmoid."""
        nn.init.zeros_(self.weight)

    def scale(self) -> Tensor:
        """Return `alpha/L`, (1,)."""
        alpha = self.weight.tanh() if self.start == "rezero" else self.weight.sigmoid()
        return alpha / self.num_layers

    def coefficients(self) -> tuple[float, float]:
        """Return (a, b) of `a x + b f(x)`, for certificates."""
        return 1.0, float(self.scale().detach())

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Add `alpha/L` times the branch `f(x)` to `x`."""
        return torch.addcmul(x, self.scale().to(x.dtype), branch.to(x.dtype))


PositionKind = Literal["sinusoidal", "learned"]


class InjectiveEmbedding(ResetByParts):
    """`(v, p) -> [E_v, P_p]`, each of width d/2: distinct if token or position differ.

    Exact if the rows of E differ, and those of P; sines and cosines of integers do. E is a plain
    `nn.Embedding`. `constrain_(..., where="*.token", embeddings="fit")` keeps its columns
    orthogonal, `E^T E = g^2 I`, so that no token vector is longer than g. Sengupta et al. (2023),
    sec. 3.5. Their code does not keep E orthogonal, pairs sines and cosines of different
    frequencies, and steps through frequencies twice too fast (112 of 256 channels hardly change).

    Args:
        vocab_size: Number of tokens.
        embed_dim: Width d: even, else ConfigError.
        position: `"sinusoidal"`, without parameters and for any length; or `"learned"`, a table.
            ConfigError for others.
        max_positions: Length of the learnt table, and of the stored part of the sines.

    Cost: a lookup; sines beyond `max_positions`, or at given positions, are computed in float64.

    >>> InjectiveEmbedding(10, 8)(torch.tensor([[3, 3]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        vocab_size: Size,
        embed_dim: Size,
        *,
        position: PositionKind = "sinusoidal",
        max_positions: Size = 512,
    ) -> None:
        super().__init__()
        if embed_dim < 2 or embed_dim % 2:
            raise ConfigError(
                f"InjectiveEmbedding: embed_dim is {embed_dim}; expected an even width of at least"
                " 2, half for the token and half for its position"
            )
        self.embed_dim = embed_dim
        self.max_positions = max_positions
        self.position_kind: PositionKind = position
        self.token = nn.Embedding(vocab_size, embed_dim // 2)
        build = SinusoidalPositions if position == "sinusoidal" else LearnedPositions
        self.position = build(max_positions, embed_dim // 2)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed tokens as (batch, tokens, d).

        Args:
            input_ids: Int (batch, tokens).
            positions: Int (tokens,) or (batch, tokens), from 0; default 0, 1, 2, ...

        Raises:
            ShapeError: Shapes or dtypes do not fit, or a learnt table is too short for the sequence
                or (checked on the CPU only) for a position.
        """
        if input_ids.dim() != 2:
            raise ShapeError(
                f"InjectiveEmbedding: input_ids is {tuple(input_ids.shape)}; expected (batch,"
                " tokens)"
            )
        tokens = read_table(self, input_ids, self.token.num_embeddings, self.token)
        codes = self._codes(input_ids, positions).to(tokens.dtype)
        return torch.cat((tokens, codes.expand_as(tokens)), dim=-1)

    def _codes(self, input_ids: Tensor, positions: Tensor | None) -> Tensor:
        length = input_ids.shape[1]
        shapes = ((length,), tuple(input_ids.shape))
        if positions is not None and (
            positions.dtype not in INTEGERS or tuple(positions.shape) not in shapes
        ):
            raise ShapeError(
                f"InjectiveEmbedding: positions is {positions.dtype} {tuple(positions.shape)};"
                f" expected torch.int64 or torch.int32 {shapes[0]} or {shapes[1]}"
            )

        # Wrapped or hooked sines are called, and are limited to their table.
        counted = torch.arange(length, device=input_ids.device) if positions is None else positions
        if self.position_kind == "learned" or not is_plain(self.position, SinusoidalPositions):
            if positions is None:
                check_length(length, self.max_positions, "InjectiveEmbedding")
            return self.position(counted)
        if positions is None and length <= self.max_positions:
            return cast(Tensor, self.position.table)[:length]

        return sines_and_cosines(counted, self.embed_dim // 2)
