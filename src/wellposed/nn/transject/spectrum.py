"""The numbers sigma through which TransJect's tokens meet, and the running sums that generation
keeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wellposed.errors import ShapeError
from wellposed.functional.as_dot_product import check_padding_shape
from wellposed.nn.checks import Eps, Part, check_tokens, is_plain, on_host
from wellposed.nn.transject.orthogonal import OrthogonalLinear, ResetByParts
from wellposed.options import Size


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
