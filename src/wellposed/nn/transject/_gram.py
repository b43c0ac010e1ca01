"""Gram attention and a convex mixture of such experts, and the numbers sigma through which their tokens
meet, with the running sums that generation keeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ShapeError
from wellposed.functional import check_padding_shape, check_spectrum, gram_attention, per_token
from wellposed.nn._checks import Eps, Part, check_tokens, is_plain, on_host
from wellposed.nn.transject._parts import OrthogonalLinear, ResetByParts
from wellposed.options import Count, Size


class TransJectCache:
    """State of one-token generation: d numbers for the spectrum, `E (d + 1)` for the gates of each
    layer.

    Exact: later tokens come out as in one pass over the whole sequence, up to rounding. Its size
    does not depend on the number of tokens, unlike a cache of keys and values. Fill it by passing
    it to `TransJectStack`; one cache belongs to one batch of sequences.

    >>> cache = TransJectCache()
    >>> cache.num_tokens
    0
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.kept: dict[Hashable, Tensor] = {}
        """Running sums and maxima at the last token, (batch, ...) each."""

    def check_batch(self, batch: int) -> None:
        """Raise `ShapeError` where the cache is of another number of sequences; one prefix may be
        common to many."""
        wrong = sorted({len(part) for part in self.kept.values()} - {1, batch})
        if wrong:
            raise ShapeError(
                f"TransJectCache: received {batch} sequences, and the cache holds the sums of"
                f" {wrong[0]}; expected as many; pick or repeat those of the cache with reorder_,"
                " or begin with a new cache"
            )

    def extend(
        self, name: Hashable, running: Tensor, join: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Join what is kept to running values (batch, tokens, ...) of new tokens, and keep the
        last."""
        if name in self.kept:
            running = join(running, self.kept[name].unsqueeze(1))
        self.kept[name] = running[:, -1].detach()
        return running

    def reorder_(self, rows: Tensor) -> TransJectCache:
        """Keep the sequences `rows` (int, (new batch,)), as beam search asks for; rows may
        repeat."""
        self.kept = {name: part.index_select(0, rows) for name, part in self.kept.items()}
        return self


class SeenTokens(NamedTuple):
    """The tokens over which values (batch, tokens, ...) are summed: the real ones; causal, those up
    to each token, cached ones included."""

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
        """Return the maximum, as `sum` does the sum; -inf where no token is real."""
        values = self.filled(values, -torch.inf)
        if not self.is_causal:
            return values.amax(1)
        largest = values.cummax(1).values
        return (self.cache or TransJectCache()).extend(name, largest, torch.maximum)

    def filled(self, values: Tensor, fill: float) -> Tensor:
        """Put ``fill`` in the place of padded tokens."""
        if self.padding is None:
            return values
        padding = self.padding if values.dim() == 2 else self.padding.unsqueeze(-1)
        return values.masked_fill(padding, fill)


Normalization = Literal["max", "trace"]


class GramSpectrum(ResetByParts):
    """`sigma = g / (eps + max g)` with `g = diag(U0^T X^T X U0)`, U0 orthogonal: `0 <= sigma <= 1`,
    d numbers a sample.

    Exact up to rounding, by which alone the largest reaches 1. g is the best diagonal spectrum of
    the Gram matrix in the basis U0: `diag(g)` minimises `|X^T X - U0 diag U0^T|_F`; it is the true
    spectrum where U0 holds the eigenvectors, which `reconstruction_loss` teaches it. Sengupta et
    al. (2023), sec. 3.2; the released code multiplies the matrices elementwise (correlation with
    the spectrum 0.44). `g_k = sum_t (x_t . u_k)^2`, so padding is left out
    by leaving its tokens out of the sum, and the causal form is a cumulative sum: `sigma_t` comes
    from tokens 1..t alone, its normalisation too.

    Args:
        embed_dim: width d.
        normalization: what g is divided by: `"max"`, its largest entry, keeps sigma of the order of
            1; `"trace"`, its sum, makes `X -> sigma` Lipschitz with a constant free of d, which
            certificates of a whole model want.
        eps: added to the divisor, at least 1.2e-38, in the unit of `|x|^2`.

    Raises:
        ConfigError: `embed_dim` is no integer of at least 1, `normalization` is unknown, or eps is
            0 in float32.

    Cost: N d^2 multiply-adds for N tokens, memory N d; never an N x N or, causal, N x d x d tensor.

    >>> x = torch.randn(2, 5, 8)
    >>> sigma = GramSpectrum(8)(x)
    >>> sigma.shape, bool((sigma.amax(-1) > 0.999).all())
    (torch.Size([2, 8]), True)
    """

    shown = ("normalization", "eps")

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
        """Return sigma of the embedded tokens.

        Args:
            x: (batch, tokens, d).
            key_padding_mask: bool (batch, tokens), True = padding.
            is_causal: a sigma for each token, from itself and those before it.
            cache: holds the sums of earlier tokens and takes those of these; causal only.

        Returns:
            (batch, d), or (batch, tokens, d) if causal; dtype of x, computed in float32 or wider.
        """
        check_tokens(self, x, self.embed_dim, batched=True)
        inner = self.basis(x)
        # In float32 or wider: sums of many halves would stop growing.
        squares = inner.to(torch.promote_types(inner.dtype, torch.float32)).square()
        energy = SeenTokens(key_padding_mask, is_causal, cache).sum("energy", squares)
        of_all = torch.amax if self.normalization == "max" else torch.sum
        return (energy / (of_all(energy, -1, keepdim=True) + self.eps)).to(x.dtype)

    def reconstruction_loss(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return `|X^T X - U0 diag(g) U0^T|_F^2 / |X^T X|_F^2`, in [0, 1] for orthogonal U0: mean
        over the batch.

        The part of the Gram matrix's energy outside the diagonal in the basis U0; of a basis that
        is wrapped or hooked, U0 is what it makes of the identity. Relative, so that it grows
        neither with the number of tokens nor with their size; the paper's mean square is of the
        order of N^2. It is 0 exactly where U0 diagonalises `X^T X`.

        Args:
            x: embedded tokens, (batch, tokens, d); key_padding_mask: bool (batch, tokens), True =
                padding.

        Returns:
            0-dim tensor, float32 or wider, with gradient to U0 and to x.

        Cost: N d min(N, d) + d^3 multiply-adds for each sample. Rounding sets a floor of about 1e-6
        in float32.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        # All of it in one precision: the terms below nearly cancel.
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
            # |U0 diag(g) U0^T|_F^2, which is |g|^2 only where U0 is orthogonal: without it a growing U0 would gain.
            overlaps = (basis.mT @ basis).square()
            rebuilt = (energy @ overlaps * energy).sum(-1)
            lost = size - 2 * energy.square().sum(-1) + rebuilt
            return (lost / size.clamp_min(torch.finfo(size.dtype).tiny)).mean()


class LearnedSpectrum(Part):
    """`sigma = tanh(w)`, w a parameter, normal at the start: `|sigma| <= 1`, the same for every
    input.

    Exact; 1 is reached by rounding alone. "Random-TransJect" of Sengupta et al. (2023), sec. 3.2;
    the released code draws sigma anew in every forward pass, in evaluation too. Tokens then meet in
    the gates of the experts alone, and
    with one expert or fixed gates nowhere: each token is mapped by itself.

    Args:
        embed_dim: width d.

    Raises:
        ConfigError: `embed_dim` is no integer of at least 1.

    >>> LearnedSpectrum(8)(torch.randn(2, 5, 8)).shape
    torch.Size([8])
    """

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.weight = nn.Parameter(torch.empty(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w anew."""
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Return sigma, (d,); nothing is read from x but its dtype, and no option of
        `GramSpectrum.forward`."""
        return self.weight.tanh().to(x.dtype)


def check_padding(
    key_padding_mask: Tensor | None, x: Tensor, cache: TransJectCache | None = None
) -> Tensor | None:
    """Return the part of the mask that belongs to the tokens of x, or None.

    Samples without a real token are looked for on the CPU alone, and not while compiling: reading
    values would make an accelerator wait, or break the graph. Elsewhere such a sample gets a Gram
    spectrum of 0, and gates that follow the input are equal for it.

    Args:
        key_padding_mask: bool (batch, cached + tokens) or (batch, tokens), True = padding; or None.
        x: (batch, tokens, d).
        cache: of the tokens seen before these; with one, a piece of the sequence may be padding
            alone.

    Raises:
        ShapeError: another shape or dtype, or (on the CPU) a sample without a real token.
    """
    if key_padding_mask is None:
        return None
    batch, tokens = x.shape[:2]
    seen = 0 if cache is None else cache.num_tokens
    check_padding_shape("TransJect", key_padding_mask, (batch, seen + tokens), (batch, tokens))
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
    """`F(x) = ELU((x U * sigma) V)`, U and V orthogonal, without bias: 1-Lipschitz in x for
    `|sigma| <= 1`.

    Exact up to rounding. Sengupta et al. (2023), Theorem 1; the released code adds biases, which
    are left out here because they make the norm of the map grow like sqrt d. U and V are orthogonal
    at the start and plain parameters; `constrain_` with `where="*.left"` and `"*.right"` holds
    them. Tokens meet only in sigma (see `GramSpectrum`).

    Where `left` or `right` is wrapped (an adapter), hooked or parametrised, both are called as
    modules.

    Args:
        embed_dim: width d.

    Raises:
        ConfigError: `embed_dim` is no integer of at least 1.

    Cost: 2 N d^2 multiply-adds for N tokens, or N d^2 + d^3 for each sigma, whichever is less;
    memory linear in N.

    >>> import torch
    >>> attention = GramAttention(8)
    >>> x, y = torch.randn(2, 3, 5, 8)
    >>> images = attention(x, torch.ones(8)), attention(y, torch.ones(8))
    >>> bool(((images[0] - images[1]).norm(dim=-1) <= (x - y).norm(dim=-1) * (1 + 1e-5)).all())
    True
    """

    def __init__(self, embed_dim: Size) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.left = OrthogonalLinear(embed_dim)
        self.right = OrthogonalLinear(embed_dim)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Map (batch, tokens, d) with sigma (d,), (batch, d) or (batch, tokens, d); see
        `functional.gram_attention`.

        Raises:
            ShapeError: the shapes do not fit.
        """
        if self.has_plain_maps():
            return gram_attention(x, self.left.weight.mT, self.right.weight.mT, sigma)
        check_spectrum("GramAttention", x, sigma)
        return F.elu(self.right(self.left(x) * per_token(sigma)))

    def has_plain_maps(self) -> bool:
        """Return whether U and V are all that `left` and `right` do, so that they need not be
        called."""
        return is_plain(self.left, OrthogonalLinear) and is_plain(self.right, OrthogonalLinear)

    def norm_bound(self) -> float:
        """Return a bound of `|U| |V|`, 1 up to rounding where they are orthogonal: F's constant for
        `|sigma| <= 1`."""
        return self.left.norm_bound() * self.right.norm_bound()


Gating = Literal["pooled", "normalized"]
Join: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""`(x, branch) -> x + r branch`."""


class ExpertMixture(ResetByParts):
    """`sum_e lambda_e F_e(x)`, lambda convex, one for all tokens of a sample: 1-Lipschitz for given
    sigma, lambda.

    Exact up to rounding. Sengupta et al. (2023), eq. 3: with `r` the scale of the residual around
    it, `lambda = softmax_e(w . max_t (x_t + r F_e(x)_t))`, the maximum taken of each coordinate
    over the real tokens.
    Causal: over tokens 1..t, so each token has gates of its own. A bias in front of the softmax
    would cancel.

    Args:
        embed_dim: width d.
        num_experts: E. One expert has no gate: lambda is 1.
        gating: `"pooled"` as above. `"normalized"` divides the logits by `sqrt(eps + |X|_F^2)` of
            the real tokens: then the gates have a global Lipschitz constant, as a certificate asks
            for; pooled gates have none.
        eps: see above, at least 1.2e-38.
        layer_index: place in a cache.

    Raises:
        ConfigError: a size that is no integer of at least 1, `gating` unknown, or eps that is 0 in
            float32.

    Cost: E times that of `GramAttention`; on accelerators the experts run as one batched product.

    >>> mixture = ExpertMixture(8, 3)
    >>> branch, gates = mixture(torch.randn(2, 5, 8), torch.ones(8), torch.zeros(1))
    >>> branch.shape, bool(torch.allclose(gates, torch.full((2, 3), 1 / 3)))
    (torch.Size([2, 5, 8]), True)
    """

    shown = ("gating",)

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
        self.embed_dim, self.num_experts = embed_dim, num_experts
        self.eps, self.layer_index = eps, layer_index
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
        """Return the branch and its gates.

        Args:
            x: (batch, tokens, d).
            sigma: (d,), (batch, d) or, causal, (batch, tokens, d).
            scale: `r = alpha/L` of the residual that will join the branch to x, (1,); or that
                residual, `(x, branch) -> x + r branch`, which is then called for each expert whose
                tokens are pooled.
            key_padding_mask: bool (batch, tokens), True = padding.
            is_causal: gates from the tokens up to each one.
            cache: running maxima of earlier tokens; causal only.
            gates: use these in place of computed ones, to repeat or invert a pass.

        Returns:
            branch (batch, tokens, d), without x; gates (batch, experts), or (batch, tokens,
            experts) if causal.

        Raises:
            ShapeError: sigma or the gates do not fit.
        """
        if gates is not None:
            check_gates("ExpertMixture", gates, x, self.num_experts)
        elif self.num_experts == 1:
            gates = x.new_ones(*x.shape[: 2 if is_causal else 1], 1)
        outputs = self.expert_outputs(x, sigma)
        if gates is None:
            seen = SeenTokens(key_padding_mask, is_causal, cache)
            pools = []
            for index, output in enumerate(outputs):
                joined = (
                    torch.addcmul(x, scale.to(x.dtype), output.to(x.dtype))
                    if isinstance(scale, Tensor)
                    else scale(x, output)
                )
                pools.append(seen.max((self.layer_index, index), joined))
            gates = self.gates_from_pools(torch.stack(pools), x, seen)
        weights = gates.to(outputs[0].dtype)
        weights = weights if weights.dim() == 3 else weights.unsqueeze(1)
        branch = outputs[0] * weights[..., :1]
        for index in range(1, self.num_experts):
            branch = torch.addcmul(branch, outputs[index], weights[..., index : index + 1])
        return branch, gates

    def expert_outputs(self, x: Tensor, sigma: Tensor) -> list[Tensor]:
        """Return `F_e(x)` of each expert, (batch, tokens, d) each."""
        experts = self._experts()
        # What is wrapped or hooked is called, here and in `GramAttention`; only plain weights are
        # batched.
        if len(experts) == 1 or prefers_loop(x) or not self.has_plain_experts():
            return [expert(x, sigma) for expert in experts]
        left = torch.stack([expert.left.weight.mT for expert in experts])
        right = torch.stack([expert.right.weight.mT for expert in experts])
        return list(gram_attention(x, left, right, sigma).unbind())

    def has_plain_experts(self) -> bool:
        """Return whether no expert and no map of one is wrapped, hooked or parametrised."""
        experts = self._experts()
        return all(is_plain(each, GramAttention) and each.has_plain_maps() for each in experts)

    def gates_from_pools(self, pools: Tensor, x: Tensor, seen: SeenTokens) -> Tensor:
        """Return lambda for the maxima of `x + r F_e(x)`: (experts, batch, d), or (experts, batch,
        tokens, d)."""
        # Padding in front of the first real token has pooled nothing; what it is mapped to does not
        # matter.
        logits = self.gate(pools.masked_fill(pools == -torch.inf, 0.0)).squeeze(-1).movedim(0, -1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.gating == "normalized":
            squares = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)
            size = (seen.sum((self.layer_index, "squares"), squares) + self.eps).sqrt()
            logits = logits / size.unsqueeze(-1)
        return logits.softmax(-1).to(x.dtype)

    def _experts(self) -> list[GramAttention]:
        return [cast(GramAttention, expert) for expert in self.experts]

    def norm_bound(self) -> float:
        """Return the largest `|U_e| |V_e|`: the branch's Lipschitz constant for given gates and
        `|sigma| <= 1`."""
        return max(expert.norm_bound() for expert in self._experts())


def check_gates(
    where: str, gates: Tensor, x: Tensor, num_experts: int, *, each_token: bool = True
) -> None:
    """Raise `ShapeError` where the gates are not (batch, experts) or, `each_token`, (batch, tokens,
    experts)."""
    shapes = [(len(x), num_experts), *([(*x.shape[:2], num_experts)] if each_token else [])]
    if tuple(gates.shape) not in shapes:
        raise ShapeError(
            f"{where}: received gates {tuple(gates.shape)} for x {tuple(x.shape)}; expected "
            f"{' or '.join(map(str, shapes))}{'' if each_token else ': gates for each token need is_causal=True'}"
        )


def prefers_loop(x: Tensor) -> bool:
    """Whether one product after the other is as fast as a batch of them: on a CPU each fills the
    machine by itself."""
    return x.device.type == "cpu"
