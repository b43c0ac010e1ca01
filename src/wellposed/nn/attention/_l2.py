"""L2 self-attention, the attention that can carry a Lipschitz certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, NotContractiveError, NotLipschitzError
from wellposed.functional import l2_attention
from wellposed.linalg import (
    MASK_KINDS,
    L2Layer,
    MaskKind,
    Norm,
    SpectralMethod,
    check_norm,
    l2_constants,
)
from wellposed.model_options import ContractiveOptions, L2Options
from wellposed.nn._checks import CheckedModule, check_tokens
from wellposed.nn._frozen import NormalisesByWeights
from wellposed.nn._registry import ATTENTIONS, LayerCache
from wellposed.nn.attention import _l2_bound as l2_bound
from wellposed.nn.attention import _masks as masks
from wellposed.nn.attention._heads import head_width, join_heads, split_heads
from wellposed.options import Rate, Size, Strength


class L2SelfAttention(CheckedModule, NormalisesByWeights):
    """Per head, `softmax_j(-|z_i - z_j|^2 / sqrt(d)) z R_h` with `z = x W_h`; joined by `W_o`.

    Certified, if tied (the default): `|F(X) - F(Y)| <= L |X - Y|` for all X, Y; `lipschitz_bound`
    computes L. With `contractive=c` every call, in training too, divides the output by that bound,
    so that `L <= c`; gradients flow through the bound. Kim, Papamakarios, Mnih (2021), sec. 3.2 and
    Theorem 3.2; sharper bounds of the theory notes B1 and B3, with spectral norms from above (Gram
    iteration).

    The division holds for weights of any size and any precision of float32 products. Rounding of
    the forward pass is not covered: about `2^-24` (float32) or `2^-9` (bfloat16) of the largest
    value, and the root of that if logits exceed its inverse, since near tokens then swap places.
    Weights under which a token of norm 1 overflows or becomes denormal have no certificate
    (`certificate_refusal`).

    Args:
        embed_dim: Width D of a token.
        num_heads: Number of heads H, which divides D; d = D / H.
        tied: Queries and keys share one projection, and `R_h = W_h^T W_V,h / sqrt(d)`. `False` is
            for comparison only: values are `x W_V`, and there is no Lipschitz constant.
        contractive: None, or c in (0, 1): divide by the certified bound, so that `L <= c`.
        norm: Norm of `contractive`: `"tok"` (max over tokens of the 2-norm), `"inf"` or `2`
            (Frobenius).
        bound: Divisor of `contractive`: `"sharp"`, or `"kim2021"`, Theorem 3.2 as printed, for
            norms `"inf"` and `2` and query_width 1. That is never smaller (1,250 times at D = 512,
            H = 8, 288 tokens in norm `"inf"`). So the output is smaller.
        query_width: Columns of `W_h` in units of d, 1 or 2 (a tied layer as large as an untied one;
            app. M).
        max_tokens: Longest sequence, without padding, that `contractive` covers; a cache needs it.
            If None, the divisor is the bound for each sequence's own number of real tokens.
        dropout: Probability of dropping an attention weight in training, in [0, 1). Excludes
            `contractive`.
        bias: Whether projections have a bias (one for queries and keys); no bias changes the bound.
        init_scale: s: draw start weights uniform in `+-s / sqrt(D)` (app. I) instead of Glorot's.

    Raises:
        ShapeError: `num_heads` does not divide `embed_dim`.
        ConfigError: An option is out of range, or two exclude each other.
        NotContractiveError: `contractive` is not inside (0, 1).
        NotLipschitzError: `contractive` with a form that has no Lipschitz constant; the reason is
            named.

    Cost: 3 N D^2 + 2 N^2 D multiply-adds, in one fused attention at head width d + 8. Memory
    `O(N D)`. `contractive` adds about 20 D^3 a call for any batch, outside the graphs of
    `torch.compile`.
    When not to use: if a token must attend to a far token while near ones exist.

    >>> attention = L2SelfAttention(8, 2, contractive=0.9, max_tokens=16)
    >>> attention(torch.randn(3, 5, 8), is_causal=True).shape, bool(attention.lipschitz_bound(16) <= 0.9)
    (torch.Size([3, 5, 8]), True)
    """

    _frozen_scales: dict[tuple[int, MaskKind], Tensor] | None = None
    """Factors that `frozen` has stored."""
    _frozen_layers: tuple[L2Layer, L2Layer] | None = None
    """Layers that `frozen` received."""

    repr_fields = ("num_heads", "tied", "contractive", "norm", "bound", "max_tokens", "dropout")

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        tied: bool = True,
        contractive: float | None = None,
        norm: Norm = "tok",
        bound: l2_bound.DivisionBound = "sharp",
        query_width: Literal[1, 2] = 1,
        max_tokens: Size | None = None,
        dropout: Rate = 0.0,
        bias: bool = True,
        init_scale: Strength | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_width(type(self).__name__, embed_dim, num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.tied = tied
        self.contractive = contractive
        self.max_tokens = max_tokens
        self.norm: Norm = norm
        self.bound: l2_bound.DivisionBound = bound
        self.query_width = query_width
        self.dropout = dropout
        self.init_scale = init_scale
        self._check_combination()
        columns = query_width * embed_dim
        self.q_proj = nn.Linear(embed_dim, columns, bias=bias)
        self.k_proj = None if tied else nn.Linear(embed_dim, columns, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.o_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.reset_parameters()

    def _check_combination(self) -> None:
        """Raise if two options exclude each other."""
        of_paper = self.query_width == 1 and self.norm != "tok"
        if self.bound == "kim2021" and (self.contractive is None or not of_paper):
            raise ConfigError(
                f"L2SelfAttention: bound='kim2021' with contractive={self.contractive},"
                f" norm={self.norm!r} and query_width={self.query_width}: this bound needs"
                " contractive, norm 'inf' or 2, and query_width=1; set these, or bound='sharp'"
            )
        if self.contractive is None:
            return
        if not 0 < self.contractive < 1:
            raise NotContractiveError(
                f"L2SelfAttention: contractive is {self.contractive}; expected a constant inside"
                " (0, 1): at 1 and above the residual x + f(x) need not be invertible"
            )
        l2_bound.refuse_unbounded(self._form_refusal(self.dropout > 0))

    def _form_refusal(self, drops: bool) -> str | None:
        # `k_proj` may have been set after construction.
        tied = self.tied and getattr(self, "k_proj", None) is None
        form = {"tied": tied, "plain_values": not self.tied, "drops_weights": drops}
        return l2_bound.l2_attention_refusal(**form)

    def reset_parameters(self) -> None:
        """Draw weights: Glorot's uniform, or `U(-s, s) / sqrt(D)` by `init_scale`; zero biases."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if projection is None:
                continue
            if self.init_scale is None:
                nn.init.xavier_uniform_(projection.weight)
            else:
                limit = self.init_scale / math.sqrt(self.embed_dim)
                nn.init.uniform_(projection.weight, -limit, limit)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def head_weights(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return zero-padded `W_h` (H, D, w), `R_h` (H, w, w), `W_O,h` (H, w, D).

        w = query_width d; ``dtype`` is that of `R_h` (default: of the weights). Raises
        `NotLipschitzError` if not tied.
        """
        if not self.tied:
            raise NotLipschitzError(
                f"L2SelfAttention: {l2_bound.l2_attention_refusal(plain_values=True)}"
            )
        dtype = dtype or self.q_proj.weight.dtype
        projection = self.q_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1)).mT
        output = self.o_proj.weight.to(dtype).mT.unflatten(0, (self.num_heads, -1))
        return projection, *l2_bound.one_width(self._mixing(dtype), output)

    def _mixing(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return `R_h`, (H, w, d), in the precision of the weights even under autocast."""
        dtype = dtype or self.q_proj.weight.dtype
        with torch.autocast(self.q_proj.weight.device.type, enabled=False):
            query = self.q_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1))
            value = self.v_proj.weight.to(dtype).unflatten(0, (self.num_heads, -1))
            return query @ value.mT / math.sqrt(self.head_dim)

    def _unit_weights(self, layers: tuple[L2Layer, L2Layer] | None = None) -> l2_bound.UnitWeights:
        first_layer = None if layers is None else layers[0]
        with torch.autocast(self.q_proj.weight.device.type, enabled=False):
            return l2_bound.UnitWeights(
                self.q_proj.weight,
                self.o_proj.weight,
                self.v_proj.weight,
                num_heads=self.num_heads,
                by_call=first_layer,
            )

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: masks.PaddingMask = None,
        is_causal: bool = False,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from every token of `x` to the tokens that it may see, always including itself.

        Arguments and shapes are those of `ATTENTIONS`; the cache stores `z` as key and as value. A
        finished mask that `attention_mask` did not make counts as any mask that keeps the diagonal.
        In norm 2 the bound is larger then, so a contractive layer's output is smaller.

        Raises:
            ShapeError: The padding mask does not fit, or a sequence is longer than `max_tokens`.
            ConfigError: A cache in a contractive layer without `max_tokens`.
            NotLipschitzError: A finished mask drops the diagonal of a contractive layer.
        """
        check_tokens(self, x, self.embed_dim, batched=True)
        masks.check_batch(key_padding_mask, x)
        query = split_heads(self.q_proj(x), self.num_heads)
        key = query if self.k_proj is None else split_heads(self.k_proj(x), self.num_heads)
        # Tied attention averages z itself and mixes it by R_h afterwards.
        value = key
        if not self.tied:
            value = split_heads(self.v_proj(x), self.num_heads)

        if cache is not None:
            if self.contractive is not None and self.max_tokens is None:
                raise ConfigError(
                    "L2SelfAttention: a cache in a contractive layer without max_tokens: the output"
                    " of earlier tokens would change with every new one; build the layer with"
                    " max_tokens, the longest sequence"
                )
            shares = value is key
            key, value = cache.update(key, value)
            value = key if shares else value

        heads = self._attend(query, key, value, key_padding_mask, is_causal)
        if self.contractive is not None:
            division: Any = torch.compiler.disable(self._contraction)
            read, mixing, factor = division(
                key_padding_mask, is_causal, query.shape[-2], key.shape[-2]
            )
            heads = (heads / read).to(heads.dtype) @ mixing
            heads = (heads * factor).to(heads.dtype)
        elif self.tied:
            heads = heads @ self._mixing()

        if self.v_proj.bias is not None and self.tied:
            # (heads d,) -> (heads, 1, d), beside (batch, heads, T, d)
            heads = heads + self.v_proj.bias.unflatten(0, (self.num_heads, 1, -1))
        return self.o_proj(join_heads(heads))

    @torch.no_grad()
    def certificate_refusal(self, layers: tuple[L2Layer, L2Layer] | None = None) -> str | None:
        """Return why this layer, in its mode and with its weights, has no certificate, or None."""
        reason = self._form_refusal(self.dropout > 0 and self.training)
        if reason is not None or self.contractive is None:
            return reason

        weights = self._unit_weights(layers)
        for (num_tokens, mask), stored in (self._frozen_scales or {}).items():
            now = self._factor(weights, num_tokens, mask, cached=False)
            # The bound's margin covers the last digit.
            if not bool((stored <= now * (1 + 8 * torch.finfo(now.dtype).eps)).all()):
                return (
                    "its weights were edited inside frozen(), which divides by the bound they had"
                    " before"
                )
        factor = self._factor(weights, self.max_tokens or 1, "any", cached=False)

        return weights.range_refusal(factor, self.q_proj.bias)

    def lipschitz_bound(
        self,
        num_tokens: int,
        *,
        norm: Norm | None = None,
        mask: MaskKind = "any",
        method: SpectralMethod = "svd",
        layers: tuple[L2Layer, L2Layer] | None = None,
    ) -> Tensor:
        """Return `L`, 0-dim: `|F(X) - F(Y)| <= L |X - Y|` for all X, Y of at most so many tokens.

        Certified, for exact arithmetic with the weights as stored (`wellposed.linalg.L2Layer`), the
        division of a contractive layer included. Differentiable for `method="gram"`.

        Args:
            num_tokens: Largest number of keys that a query sees.
            norm: `"tok"`, `"inf"` or `2`; default the layer's own.
            mask: Which masks the bound covers; matters for norm 2 only.
            method: How spectral norms are bounded.
            layers: From `bound_layers`, so that several bounds share their spectral norms.

        Raises:
            NotLipschitzError: No bound exists; the message holds `certificate_refusal()`.
            ShapeError: `num_tokens` is above the certified length.
            ConfigError: A contractive layer without `max_tokens`, and a norm other than its own.
        """
        # Otherwise spectral norms would be cached by the refusal, without their gradient.
        l2_bound.refuse_unbounded(self.certificate_refusal(None if self._is_recorded() else layers))
        norm = self.norm if norm is None else check_norm(norm)
        by_call, exact = self.bound_layers(method) if layers is None else layers
        if self.contractive is None:
            return exact.bound(l2_constants(num_tokens, mask=mask), norm=norm).value
        if self.max_tokens is None:
            if norm != self.norm:
                raise ConfigError(
                    f"L2SelfAttention: contractive in norm {self.norm!r} at each sequence's own"
                    f" length, so it has no scale for a bound in norm {norm!r}; build the layer"
                    " with max_tokens"
                )
            return self.o_proj.weight.new_tensor(float(self.contractive), dtype=torch.float64)

        l2_bound.check_covered(num_tokens, self.max_tokens)
        bounds: list[Tensor] = []
        depends_on_mask = 2 in (norm, self.norm)
        for kind in MASK_KINDS if mask == "any" and depends_on_mask else (mask,):
            # The power of two that both layers are divided by cancels.
            divisor = self._divisor(by_call, self.max_tokens, kind).double()
            bound = exact.unit_bound(l2_constants(num_tokens, mask=kind), norm=norm).value.double()
            bounds.append(self.contractive * bound / torch.where(divisor > 0, divisor, 1.0))
        bound = torch.stack(bounds).amax()

        return bound.clamp_max(self.contractive) if norm == self.norm else bound

    def bound_layers(self, method: SpectralMethod = "svd") -> tuple[L2Layer, L2Layer]:
        """Return the weights as a contractive layer's division sees them, and for ``method``."""
        if self.contractive is not None:
            weights = self._unit_weights()
            exact = weights.by_call if method == "gram" else weights.layer(method)
            return weights.by_call, exact
        # In the precision of the weights, the product R_h would be rounded before it is bounded.
        wide = torch.promote_types(self.q_proj.weight.dtype, torch.float64)
        exact = L2Layer(*self.head_weights(wide), method=method)
        return exact, exact

    @torch.no_grad()
    def at_zero(self, num_tokens: int, layers: tuple[L2Layer, L2Layer] | None = None) -> Tensor:
        """Return the token (D,) that `num_tokens` zero tokens become, in float64.

        `layers` as in `lipschitz_bound`. Raises `NotLipschitzError` if there is no certificate.
        """
        if layers is None and self.contractive is not None:
            layers = self.bound_layers("gram")
        l2_bound.refuse_unbounded(self.certificate_refusal(layers))
        # (heads d,) -> (heads, 1, d)
        heads = _bias(self.q_proj).unflatten(0, (self.num_heads, 1, -1))
        if self.contractive is None:
            heads = heads @ self._mixing(torch.float64)
        else:
            weights = self._unit_weights(layers)
            factor = self._factor(weights, self.max_tokens or num_tokens, "any", cached=False)
            heads = (heads / weights.read) @ weights.mixing.double() * factor
        heads = heads.flatten() + _bias(self.v_proj)
        return self.o_proj.weight.double() @ heads + _bias(self.o_proj)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the values of `frozen`: a copy's weights may change."""
        return {**super().__getstate__(), "_frozen_scales": None, "_frozen_layers": None}

    @contextmanager
    def frozen(self, layers: tuple[L2Layer, L2Layer] | None = None) -> Iterator[None]:
        """Promise that no weight changes inside: a contractive layer computes its bound once.

        With `layers` from `bound_layers` it computes none. For generation and fixed-point
        iterations; no effect while gradients of the weights are recorded.

        >>> layer = L2SelfAttention(8, 2, contractive=0.9, max_tokens=16)
        >>> with layer.frozen(), torch.no_grad():
        ...     y = layer(layer(torch.randn(1, 4, 8)))
        """
        outer = self._frozen_scales, self._frozen_layers
        self._frozen_scales = {}
        self._frozen_layers = layers
        try:
            yield
        finally:
            self._frozen_scales, self._frozen_layers = outer

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: masks.PaddingMask, is_causal: bool
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        keywords: dict[str, Any] = {"dropout_p": dropout, "scale": 1 / math.sqrt(self.head_dim)}
        queries = query.shape[-2]
        keys = key.shape[-2]
        if not isinstance(padding, Tensor) or (is_causal and 1 < queries < keys):
            mask = masks.attention_mask(padding, is_causal, queries, keys, query.device)
            return l2_attention(query, key, value, **mask.flags, **keywords)
        # The norm column carries the padding, so no mask tensor is made. Then set padded rows.
        keywords |= {"is_causal": is_causal and queries == keys, "key_padding_mask": padding}
        heads = l2_attention(query, key, value, **keywords)
        padded = padding[:, None, keys - queries :, None]
        return torch.where(padded, value[..., keys - queries :, :].to(heads.dtype), heads)

    def _is_recorded(self) -> bool:
        return torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parameters())

    def _divisor(self, layer: L2Layer, num_tokens: int, mask: MaskKind) -> Tensor:
        weights = (self.q_proj.weight, self.o_proj.weight, self.v_proj.weight)
        keywords: dict[str, Any] = {"norm": self.norm, "bound": self.bound, "mask": mask}
        return l2_bound.divisor(layer, weights, num_tokens, **keywords)

    def _factor(
        self, weights: l2_bound.UnitWeights, num_tokens: int, mask: MaskKind, *, cached: bool = True
    ) -> Tensor:
        """Return `c / bound` of each head, (H, 1, 1), from the store of `frozen` if allowed."""
        assert self.contractive is not None
        frozen = self._frozen_scales if cached and not self._is_recorded() else None
        if frozen is not None and (num_tokens, mask) in frozen:
            return frozen[num_tokens, mask]
        with torch.autocast(self.q_proj.weight.device.type, enabled=False):
            divisor = self._divisor(weights.by_call, num_tokens, mask)
            factor = weights.factor(divisor, self.contractive)
        if frozen is not None:
            frozen[num_tokens, mask] = factor
        return factor

    def _contraction(
        self, padding: masks.PaddingMask, causal: bool, queries: int, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return divisor, mixing and factor of the heads; the factor is (1 | batch, H, 1, 1).

        Not part of a compiled graph, whose kernels would choose the precision of products
        themselves.
        """
        mask = masks.known_pattern(padding, causal)
        diagonal = None
        if isinstance(padding, masks.AttentionMask) and padding.mask is not None:
            diagonal = padding.mask.diagonal(keys - queries, -2, -1)

        counts: Tensor | int = keys
        if self.max_tokens is None or keys > self.max_tokens:
            counts = masks.most_visible(padding, keys)

        counts = torch.as_tensor(counts).reshape(-1).clamp_min(1)
        weights = self._unit_weights(None if self._is_recorded() else self._frozen_layers)
        if diagonal is not None and not bool(diagonal.all()):
            l2_bound.refuse_unbounded(
                l2_bound.l2_attention_refusal(keeps_itself=False),
                "; received a mask with False on its diagonal; make masks with"
                " wellposed.nn.attention_mask",
            )

        if self.max_tokens:
            l2_bound.check_covered(int(counts.max()), self.max_tokens)
            counts = counts.new_tensor([self.max_tokens])

        numbers, index = counts.unique(return_inverse=True)
        factors = [self._factor(weights, number, mask) for number in numbers.tolist()]
        return weights.read, weights.mixing, torch.stack(factors)[index]


def _bias(projection: nn.Linear) -> Tensor:
    """Return the bias in float64, zeros if there is none."""
    if projection.bias is None:
        return projection.weight.new_zeros(projection.out_features, dtype=torch.float64)
    return projection.bias.double()


def _build(config: Any, **options: Any) -> L2SelfAttention:
    if getattr(config, "qk_norm", False):
        raise ConfigError(
            f"attention {config.attention!r} with qk_norm=True: values are made of z, which"
            " normalised queries and keys no longer are; set qk_norm=False, or use"
            " attention='cosine'"
        )
    l2_options = L2Options.from_config(config)
    return L2SelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        dropout=config.attention_dropout,
        init_scale=l2_options.l2_init_scale,
        query_width=l2_options.query_width,
        **options,
    )


# Untied, for comparison: no Lipschitz constant.
ATTENTIONS.register("l2")(lambda config: _build(config, tied=False))
# Tied, with the paper's values: globally Lipschitz.
ATTENTIONS.register("l2_tied")(_build)


@ATTENTIONS.register("l2_contractive")
def build_l2_contractive(config: Any) -> L2SelfAttention:
    """Build tied L2 attention divided by its bound for `max_position_embeddings` tokens."""
    settings = ContractiveOptions.from_config(config)
    return _build(
        config,
        contractive=0.9 if settings.contractive is None else settings.contractive,
        norm=2 if settings.lipschitz_norm == "2" else settings.lipschitz_norm,
        bound=settings.contractive_bound,
        max_tokens=config.max_position_embeddings,
    )
