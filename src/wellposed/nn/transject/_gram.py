"""Gram attention, mixtures of such experts, their spectrum sigma, and the cache of running sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ShapeError
from wellposed.functional import check_padding_shape, check_spectrum, gram_attention, per_token
from wellposed.nn._checks import CheckedModule, Eps, check_tokens, is_plain, on_host
from wellposed.nn.transject._parts import OrthogonalLinear, ResetByParts
from wellposed.options import Count, Size


class TransJectCache:
    """State of generation: d numbers for the spectrum and `E (d + 1)` for the gates of each layer.

    Exact up to rounding: later tokens are as in one pass over the whole sequence. The size does not
    depend on the number of tokens. Pass it to `TransJectStack`; a cache belongs to one batch.

    >>> TransJectCache().num_tokens
    0
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.last_sums: dict[Hashable, Tensor] = {}
        """Running sums and maxima at the last token, (batch, ...) each."""

    def check_batch(self, batch: int) -> None:
        """Raise `ShapeError` if the cache has another batch size; one row may serve many."""
        wrong = sorted({len(part) for part in self.last_sums.values()} - {1, batch})
        if wrong:
            raise ShapeError(
                f"TransJectCache: received {batch} sequences, but the cache is for {wrong[0]};"
                " select or repeat its rows with reorder_, or use a new cache"
            )

    def extend(
        self, name: Hashable, running: Tensor, join: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Join stored values to running values (batch, tokens, ...); keep the last."""
        if name in self.last_sums:
            running = join(running, self.last_sums[name].unsqueeze(1))
        self.last_sums[name] = running[:, -1].detach()
        return running

    def reorder_(self, rows: Tensor) -> TransJectCache:
        """Keep the sequences `rows` (int, (new batch,)), as in beam search; rows may repeat."""
        self.last_sums = {name: part.index_select(0, rows) for name, part in self.last_sums.items()}
        return self


class SeenTokens(NamedTuple):
    """Real tokens over which (batch, tokens, ...) is reduced; causal: up to each, cache too."""

    padding: Tensor | None = None
    is_causal: bool = False
    cache: TransJectCache | None = None

    def sum(self, name: Hashable, values: Tensor) -> Tensor:
        """Return the sum, (batch, ...); causal the running sums, (batch, tokens, ...)."""
        values = self.filled(values, 0.0)
        if not self.is_causal:
            return values.sum(1)
        return (self.cache or TransJectCache()).extend(name, values.cumsum(1), torch.add)

    def max(self, name: Hashable, values: Tensor) -> Tensor:
        """Return the maximum, in the shapes of `sum`; -inf if no token is real."""
        values = self.filled(values, -torch.inf)
        if not self.is_causal:
            return values.amax(1)
        largest = values.cummax(1).values
        return (self.cache or TransJectCache()).extend(name, largest, torch.maximum)

    def filled(self, values: Tensor, fill: float) -> Tensor:
        """Replace padded tokens by ``fill``."""
        if self.padding is None:
            return values
        padding = self.padding if values.dim() == 2 else self.padding.unsqueeze(-1)
        return values.masked_fill(padding, fill)


Normalization = Literal["max", "trace"]


class GramSpectrum(ResetByParts):
    """`sigma = g / (eps + max g)`, `g = diag(U0^T X^T X U0)`, U0 orthogonal: d numbers in [0, 1].

    Exact up to rounding, by which alone the largest reaches 1. `diag(g)` minimises
    `|X^T X - U0 diag U0^T|_F`; it is the true spectrum if U0 holds the eigenvectors, which
    `reconstruction_loss` trains it to do. `g_k = sum_t (x_t . u_k)^2` leaves padding out. In the
    causal form `sigma_t` comes from tokens 1..t alone, its normalisation too. Sengupta et al.
    (2023), sec. 3.2; the released code multiplies the matrices elementwise (correlation with the
    spectrum 0.44).

    Args:
        embed_dim: Width d.
        normalization: Divisor of g: `"max"`, its largest entry, keeps sigma of the order of 1;
            `"trace"`, its sum, makes `X -> sigma` Lipschitz with a constant free of d, for
            certificates of whole models. ConfigError for others.
        eps: Added to the divisor, at least 1.2e-38, in the unit of `|x|^2`; ConfigError if it is 0
            in float32.

    Cost: N d^2 multiply-adds for N tokens, memory N d; no N x N or, causal, N x d x d tensor.

    >>> sigma = GramSpectrum(8)(torch.randn(2, 5, 8))
    >>> sigma.shape, bool((sigma.amax(-1) > 0.999).all())
    (torch.Size([2, 8]), True)
    """

    repr_fields = ("normalization", "eps")

    def __init__(
        self, embed_dim: Size, *, normalization: Normalization = "max", eps: Eps = 1e-6
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.normalization: Normalization = normalization
        self.eps = eps
        self.basis = OrthogonalLinear(embed_dim)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TransJectCache | None = None,
    ) -> Tensor:
        """Return sigma, (batch, d), or (batch, tokens, d) if causal, in the dtype of x.

        It is computed in float32 or wider.

        Args:
            x: Embedded tokens, (batch, tokens, d).
            key_padding_mask: Bool (batch, tokens), True = padding.
            is_causal: A sigma for each token, from itself and those before it.
            cache: Sums of earlier tokens, to which these are added; causal only.
        """
        check_tokens(self, x, self.embed_dim, batched=True)
        inner = self.basis(x)
        # Sums of many half-precision numbers would stop growing.
        squares = inner.to(torch.promote_types(inner.dtype, torch.float32)).square()
        energy = SeenTokens(key_padding_mask, is_causal, cache).sum("energy", squares)
        of_all = torch.amax if self.normalization == "max" else torch.sum
        return (energy / (of_all(energy, -1, keepdim=True) + self.eps)).to(x.dtype)

    def reconstruction_loss(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the mean over the batch of `|X^T X - U0 diag(g) U0^T|_F^2 / |X^T X|_F^2`, 0-dim.

        It is in [0, 1] for orthogonal U0, and 0 exactly if U0 diagonalises `X^T X`: the share of
        the Gram matrix's energy outside the diagonal. It has gradients to U0 and x and is float32
        or wider. If the basis is wrapped or hooked, U0 is its image of the identity. The paper's
        mean square is of the order of N^2; this does not grow with the number or size of tokens.

        Args:
            x: Embedded tokens, (batch, tokens, d).
            key_padding_mask: Bool (batch, tokens), True = padding.

        Cost: N d min(N, d) + d^3 multiply-adds for each sample. Rounding: about 1e-6 in float32.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        # Use one precision throughout: the terms below nearly cancel.
        with torch.autocast(x.device.type, enabled=False):
            tokens = SeenTokens(key_padding_mask).filled(x.to(wide), 0.0)
            basis = self.basis.weight.mT
            if not is_plain(self.basis, OrthogonalLinear):
                weight = next(self.basis.parameters())
                device = "cpu" if weight.is_meta else weight.device
                basis = self.basis(torch.eye(self.embed_dim, dtype=weight.dtype, device=device))
            basis = basis.to(wide)
            energy = (tokens @ basis).square().sum(1)
            small = tokens @ tokens.mT if x.shape[1] < x.shape[2] else tokens.mT @ tokens
            size = small.square().sum((-2, -1))
            # |U0 diag(g) U0^T|_F^2 is |g|^2 only for orthogonal U0; with |g|^2 a growing U0 would win.
            overlaps = (basis.mT @ basis).square()
            rebuilt = (energy @ overlaps * energy).sum(-1)
            lost = size - 2 * energy.square().sum(-1) + rebuilt
            return (lost / size.clamp_min(torch.finfo(size.dtype).tiny)).mean()


class LearnedSpectrum(CheckedModule):
    """`sigma = tanh(w)`, w (d,) a parameter, normal at the start: `|sigma| <= 1` for all inputs.

    Exact; only rounding reaches 1. "Random-TransJect" of Sengupta et al. (2023) as sec. 3.2 has it;
    `DrawnSpectrum` is that of their code. Tokens then interact only through the gates, and with one
    expert or fixed gates not at all.

    Args:
        embed_dim: Width d, an integer of at least 1, else ConfigError.

    >>> LearnedSpectrum(8)(torch.randn(2, 5, 8)).shape
    torch.Size([8])
    """

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.weight = nn.Parameter(torch.empty(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w."""
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return sigma, (d,), in the dtype of x; all options are ignored."""
        return self.weight.tanh().to(x.dtype)


_DRAWN = "sigma"
"""Place of a drawn sigma in a cache."""


class DrawnSpectrum(CheckedModule):
    """`sigma = tanh(u) / max tanh(u)`, u uniform on [0, 1)^d: drawn in each pass, nothing is learnt.

    Exact; entries are in [0, 1], the largest is 1. "Random-TransJect" as the released code of
    Sengupta et al. (2023) has it, in training and in evaluation. One draw serves all sequences of a
    pass, and a cache keeps that of its first pass. The draw is from torch's generator of the CPU, so
    `torch.manual_seed` repeats it on each device. Two passes are two maps: `certify` refuses them,
    and an inverse needs the sigma of its pass.

    Args:
        embed_dim: Width d, an integer of at least 1, else ConfigError.

    When not to use: if one input must have one output; use `LearnedSpectrum`.

    >>> spectrum, x = DrawnSpectrum(8).eval(), torch.randn(2, 5, 8)
    >>> bool(spectrum(x).max() == 1), bool((spectrum(x) == spectrum(x)).all())
    (True, False)
    """

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim

    def reset_parameters(self) -> None:
        """Do nothing: it has no weights."""

    def forward(self, x: Tensor, *, cache: TransJectCache | None = None, **_: Any) -> Tensor:
        """Return sigma, (d,), in the dtype of x: the cached one, or a draw; x only gives its shape."""
        if cache is not None and _DRAWN in cache.last_sums:
            return cache.last_sums[_DRAWN][0].to(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        # On the CPU, so that a seed means the same draw on every device.
        sizes = torch.rand(self.embed_dim, dtype=wide, device="cpu").tanh()
        sigma = (sizes / sizes.amax()).to(x)
        if cache is not None:
            # A row for each sequence, as beam search selects rows.
            cache.last_sums[_DRAWN] = sigma.expand(len(x), -1)
        return sigma


def check_padding(
    key_padding_mask: Tensor | None, x: Tensor, cache: TransJectCache | None = None
) -> Tensor | None:
    """Return the part of the mask that belongs to the tokens of x, or None; check its shape.

    A sample of padding alone is refused on the CPU, outside compilation and without a cache.
    Elsewhere its Gram spectrum is 0, and gates that follow the input are equal.
    """
    if key_padding_mask is None:
        return None
    batch, tokens = x.shape[:2]
    cached = 0 if cache is None else cache.num_tokens
    check_padding_shape("TransJect", key_padding_mask, (batch, cached + tokens), (batch, tokens))
    empty = cache is None and on_host(key_padding_mask) and key_padding_mask.all(-1)
    if isinstance(empty, Tensor) and bool(empty.any()):
        rows = torch.nonzero(empty).flatten().tolist()
        raise ShapeError(
            f"TransJect: {len(rows)} of {batch} samples are padding alone (rows {rows[:10]}), so"
            " they have no spectrum and no gate; expected at least one real token in each; drop"
            " these samples"
        )

    return key_padding_mask[:, -tokens:]


class GramAttention(ResetByParts):
    """`F(x) = ELU((x U * sigma) V)`, U and V orthogonal, no bias: 1-Lipschitz for `|sigma| <= 1`.

    Exact up to rounding. Tokens interact only through sigma (see `GramSpectrum`). U and V (d, d)
    are plain parameters, orthogonal at the start; `constrain_` with `where="*.left"` and
    `"*.right"` keeps them so. If `left` or `right` is wrapped (an adapter), hooked or parametrised,
    both are called as modules. Sengupta et al. (2023), Theorem 1; the biases of the released code
    are left out, since they make the norm of the map grow like sqrt d.

    Args:
        embed_dim: Width d, an integer of at least 1, else ConfigError.

    Cost: 2 N d^2 multiply-adds for N tokens, or N d^2 + d^3 for each sigma, if less; memory linear
    in N.

    >>> x, y = torch.randn(2, 3, 5, 8)
    >>> attention, sigma = GramAttention(8), torch.ones(8)
    >>> moved = (attention(x, sigma) - attention(y, sigma)).norm(dim=-1)
    >>> bool((moved <= (x - y).norm(dim=-1) * (1 + 1e-5)).all())
    True
    """

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.left = OrthogonalLinear(embed_dim)
        self.right = OrthogonalLinear(embed_dim)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Map (batch, tokens, d); sigma is (d,), (batch, d) or (batch, tokens, d)."""
        if self.has_plain_maps():
            return gram_attention(x, self.left.weight.mT, self.right.weight.mT, sigma)
        check_spectrum("GramAttention", x, sigma)
        return F.elu(self.right(self.left(x) * per_token(sigma)))

    def has_plain_maps(self) -> bool:
        """Return whether `left` and `right` only multiply by U and V, so need not be called."""
        return is_plain(self.left, OrthogonalLinear) and is_plain(self.right, OrthogonalLinear)

    def norm_bound(self) -> float:
        """Return a bound of `|U| |V|`, F's constant for `|sigma| <= 1`; about 1 if orthogonal."""
        return self.left.norm_bound() * self.right.norm_bound()


Gating = Literal["pooled", "normalized"]
Join: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""`(x, branch) -> x + r branch`."""


class ExpertMixture(ResetByParts):
    """`sum_e lambda_e F_e(x)`, lambda convex: 1-Lipschitz for given sigma and lambda.

    Exact up to rounding. `lambda = softmax_e(w . max_t (x_t + r F_e(x)_t))`: the maximum of each
    coordinate over the real tokens, r the scale of the surrounding residual. All tokens of a sample
    share lambda; causal, each token has gates from tokens 1..t. Sengupta et al. (2023), eq. 3.

    Args:
        embed_dim: Width d.
        num_experts: E. One expert has no gate: lambda is 1.
        gating: `"pooled"` as above, without a global Lipschitz constant. With `"normalized"` the
            logits are divided by `sqrt(eps + |X|_F^2)` of the real tokens. Then the gates have one,
            for certificates.
        eps: See above, at least 1.2e-38.
        layer_index: Place in a cache.

    Raises:
        ConfigError: A size is not an integer of at least 1, `gating` is unknown, or eps is 0 in
            float32.

    Cost: E times that of `GramAttention`; on accelerators the experts run as one batched product.

    >>> mixture = ExpertMixture(8, 3)
    >>> branch, gates = mixture(torch.randn(2, 5, 8), torch.ones(8), torch.zeros(1))
    >>> branch.shape, bool(torch.allclose(gates, torch.full((2, 3), 1 / 3)))
    (torch.Size([2, 5, 8]), True)
    """

    repr_fields = ("gating",)

    def __init__(
        self,
        embed_dim: Size,
        num_experts: Size = 1,
        *,
        gating: Gating = "pooled",
        eps: Eps = 1e-6,
        layer_index: Count = 0,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_experts = num_experts
        self.eps = eps
        self.layer_index = layer_index
        self.gating: Gating = gating
        self.experts = nn.ModuleList(GramAttention(embed_dim) for _ in range(num_experts))
        if num_experts > 1:
            self.gate = nn.Linear(embed_dim, 1, bias=False)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        scale: Tensor | Join,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TransJectCache | None = None,
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the branch (batch, tokens, d), without x, and its gates.

        Gates are (batch, experts), or (batch, tokens, experts) if causal.

        Args:
            x: (batch, tokens, d).
            sigma: (d,), (batch, d) or, causal, (batch, tokens, d).
            scale: `r = alpha/L` of the residual around it, (1,); or that residual,
                `(x, branch) -> x + r branch`, called for each expert that is pooled.
            key_padding_mask: Bool (batch, tokens), True = padding.
            is_causal: Gates from the tokens up to each one.
            cache: Running maxima of earlier tokens; causal only.
            gates: Use these instead of computed ones, to repeat or invert a pass.

        Raises:
            ShapeError: Sigma or the gates do not fit.
        """
        if gates is not None:
            check_gates("ExpertMixture", gates, x, self.num_experts)
        elif self.num_experts == 1:
            gates = x.new_ones(*x.shape[: 2 if is_causal else 1], 1)

        outputs = self.expert_outputs(x, sigma)
        if gates is None:
            real_tokens = SeenTokens(key_padding_mask, is_causal, cache)
            pools = []
            for index, output in enumerate(outputs):
                joined = (
                    torch.addcmul(x, scale.to(x.dtype), output.to(x.dtype))
                    if isinstance(scale, Tensor)
                    else scale(x, output)
                )
                pools.append(real_tokens.max((self.layer_index, index), joined))
            gates = self.gates_from_pools(torch.stack(pools), x, real_tokens)

        weights = gates.to(outputs[0].dtype)
        weights = weights if weights.dim() == 3 else weights.unsqueeze(1)
        branch = outputs[0] * weights[..., :1]
        for index in range(1, self.num_experts):
            branch = torch.addcmul(branch, outputs[index], weights[..., index : index + 1])
        return branch, gates

    def expert_outputs(self, x: Tensor, sigma: Tensor) -> list[Tensor]:
        """Return `F_e(x)` of each expert, (batch, tokens, d) each."""
        experts = self._experts()
        # Wrapped or hooked modules are called, here and in `GramAttention`; plain ones are batched.
        if len(experts) == 1 or prefers_loop(x) or not self.has_plain_experts():
            return [expert(x, sigma) for expert in experts]
        left = torch.stack([expert.left.weight.mT for expert in experts])
        right = torch.stack([expert.right.weight.mT for expert in experts])
        return list(gram_attention(x, left, right, sigma).unbind())

    def has_plain_experts(self) -> bool:
        """Return whether no expert and no map of one is wrapped, hooked or parametrised."""
        experts = self._experts()
        return all(is_plain(one, GramAttention) and one.has_plain_maps() for one in experts)

    def gates_from_pools(self, pools: Tensor, x: Tensor, real_tokens: SeenTokens) -> Tensor:
        """Return lambda for the maxima of `x + r F_e(x)`, (experts, batch, [tokens,] d)."""
        # Padding before the first real token has an empty pool; its image does not matter.
        # (experts, batch, [tokens,] 1) -> (batch, [tokens,] experts)
        logits = self.gate(pools.masked_fill(pools == -torch.inf, 0.0)).squeeze(-1).movedim(0, -1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.gating == "normalized":
            squares = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)
            size = (real_tokens.sum((self.layer_index, "squares"), squares) + self.eps).sqrt()
            logits = logits / size.unsqueeze(-1)
        return logits.softmax(-1).to(x.dtype)

    def _experts(self) -> list[GramAttention]:
        return [cast(GramAttention, expert) for expert in self.experts]

    def norm_bound(self) -> float:
        """Return the largest `|U_e| |V_e|`, the constant for given gates and `|sigma| <= 1`."""
        return max(expert.norm_bound() for expert in self._experts())


def check_gates(
    where: str, gates: Tensor, x: Tensor, num_experts: int, *, each_token: bool = True
) -> None:
    """Raise `ShapeError` unless gates are (batch, [if `each_token`: tokens,] experts)."""
    shapes = [(len(x), num_experts), *([(*x.shape[:2], num_experts)] if each_token else [])]
    if tuple(gates.shape) not in shapes:
        raise ShapeError(
            f"{where}: received gates {tuple(gates.shape)} for x {tuple(x.shape)}; expected "
            f"{' or '.join(map(str, shapes))}{'' if each_token else ': gates for each token need is_causal=True'}"
        )


def prefers_loop(x: Tensor) -> bool:
    """Whether products one by one are as fast as a batch: on a CPU each uses all cores."""
    return x.device.type == "cpu"
