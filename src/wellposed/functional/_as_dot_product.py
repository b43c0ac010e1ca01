"""L2 and cosine attention, computed as dot-product attention on other vectors by fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError, ShapeError, listed
from wellposed.second_derivatives import attend

# Fused kernels need head widths that are multiples of this, equal for queries, keys and values.
_WIDTH_MULTIPLE = 8
# Half-precision columns that store a float32 number: 3 x 8 bits (bfloat16), 3 x 11 bits (float16).
_HALF_COLUMNS = 3
# float16 ends at 65504, so its norm columns are stored in this unit; key norms up to 5790 fit.
_FLOAT16_UNIT = 256.0
# Logit offset of a padded key: exp gives exactly zero beside a real key, else it is finite.
_PADDED = -1e30
_PADDED_FLOAT16 = -65504.0
_HALVES = (torch.float16, torch.bfloat16)


def check_attention_inputs(
    call: str, tensors: Sequence[Tensor], attn_mask: Tensor | None, padding: Tensor | None = None
) -> None:
    """Raise one `ShapeError` with every misfit of query, key, value and masks."""
    query, key, value = tensors
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if min(map(len, shapes)) < 2 or not all(tensor.is_floating_point() for tensor in tensors):
        kinds = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise ShapeError(
            f"{call}: query, key, value must be floating (..., tokens, head_dim); received {kinds}"
        )

    keys = key.shape[-2]
    problems: list[str] = []
    if query.shape[-1] != key.shape[-1]:
        problems.append(
            f"query width {query.shape[-1]} and key width {key.shape[-1]} differ; expected one"
            " head_dim"
        )

    if keys != value.shape[-2]:
        problems.append(
            f"{keys} keys and {value.shape[-2]} values; expected one value for every key"
        )

    if not all(broadcasts(one[:-2], other[:-2]) for one in shapes for other in shapes):
        problems.append(f"the leading dimensions of {shapes} do not broadcast")
    rows = (query.shape[-2], keys)
    if attn_mask is not None and not all(
        broadcasts(attn_mask.shape, (*shape[:-2], *rows)) for shape in shapes
    ):
        problems.append(
            f"attn_mask is {tuple(attn_mask.shape)}; expected (..., queries, keys) {rows}"
        )

    if padding is not None:
        batch = query.shape[: 1 if query.dim() > 2 else 0]
        problems += padding_problems(padding, (*batch, keys))
    if problems:
        raise ShapeError(f"{call}:\n" + listed(problems))


def padding_problems(padding: Tensor, *shapes: tuple[int, ...]) -> list[str]:
    """Return one line if a padding mask is not bool or has none of the shapes."""
    if padding.dtype is torch.bool and tuple(padding.shape) in shapes:
        return []
    return [
        f"key_padding_mask is {padding.dtype} {tuple(padding.shape)}; expected torch.bool"
        f" {shapes[0]}, True = padding; from a Hugging Face attention_mask (1 = real token) pass"
        " attention_mask == 0"
    ]


def check_padding_shape(where: str, padding: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise `ShapeError` for what `padding_problems` finds."""
    for problem in padding_problems(padding, *shapes):
        raise ShapeError(f"{where}: {problem}")


def broadcasts(first: Sequence[int], second: Sequence[int]) -> bool:
    pairs = zip(reversed(first), reversed(second), strict=False)
    return all(one == other or 1 in (one, other) for one, other in pairs)


def normalized_vectors(tokens: Tensor, eps: float) -> Tensor:
    """Return `a / sqrt(|a|^2 + eps)` of every token a; the norm is in float32 at least."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(tokens.dtype)


def l2_vectors(
    query: Tensor, key: Tensor, shift: Tensor, *, padding: Tensor | None = None, value_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Return q' and k' with `q'_i . k'_j = (q_i - m) . (k_j - m) - |k_j - m|^2 / 2`, m the shift.

    That is `-|q_i - k_j|^2 / 2` up to a number equal for all j: dot-product attention on them, at
    twice the scale, is L2 attention. Exact up to rounding of float32. Both have one width, a
    multiple of 8, and the dtype in which attention will run.

    Args:
        query: (..., heads, queries, head_dim).
        key: (..., heads, keys, head_dim); each head may serve a group of consecutive query heads.
        shift: (..., key heads, 1, head_dim), from `common_shift`.
        padding: bool, broadcasts to the key without its last dimension; True: weight exactly zero.
        value_dim: least width of the vectors, so that values can have the same width.
    """
    dtype = _compute_dtype(query)
    columns = _HALF_COLUMNS if dtype in _HALVES else 1
    width = max(query.shape[-1] + columns, value_dim)
    width += -width % _WIDTH_MULTIPLE
    centre = shift
    if key.dim() > 2 and query.shape[-3] != key.shape[-3]:
        centre = shift.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    wide_query = _augmented_query((query - centre).to(dtype), columns, width)
    return wide_query, _augmented_key((key - shift).to(dtype), padding, columns, width)


@torch.no_grad()
def common_shift(
    query: Tensor, key: Tensor, unseen: Tensor | None = None, *, first: bool
) -> Tensor:
    """Return the vector (..., 1, d) per key head that is subtracted from queries and keys.

    Against cancellation: the mean key, or with ``first`` the first, which no later token can
    change. Keys marked by ``unseen`` (bool, broadcasts to the key without its last dimension) are
    left out.
    """
    if key.shape[-2] == 0:
        return key.new_zeros((*key.shape[:-2], 1, key.shape[-1]))
    if key.dtype in _HALVES:
        return _exact_shift(query, key, unseen)
    if unseen is None:
        return key[..., :1, :] if first else key.mean(-2, keepdim=True)
    if first:
        index = (~unseen).to(torch.uint8).argmax(-1)[..., None, None]
        return torch.take_along_dim(key, index, -2)
    real = ~unseen[..., None]
    return torch.where(real, key, 0).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype in which `scaled_dot_product_attention` will run, autocast included."""
    device = query.device.type
    if query.dtype is not torch.float64 and not query.is_meta and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _exact_shift(query: Tensor, key: Tensor, unseen: Tensor | None) -> Tensor:
    """Return, per coordinate, the least value if all are within a factor two of it, else zero."""
    # Then `x - shift` has no rounding error (Sterbenz): it matters for gradients stored in half.
    low, high = _range(key, unseen)
    if query.shape[-2]:
        # (batch, heads, T, d) -> (batch, key heads, heads / key heads T, d)
        together = query.reshape(*key.shape[:-2], -1, key.shape[-1])
        # Equal lengths are self-attention: a padded query is then a padded token.
        ends = _range(together, unseen if together.shape[-2] == key.shape[-2] else None)
        low = torch.minimum(low, ends[0])
        high = torch.maximum(high, ends[1])
    is_range = low <= high
    positive = is_range & (low > 0) & (high <= 2 * low)
    negative = is_range & (high < 0) & (low >= 2 * high)
    return torch.where(positive, low, torch.where(negative, high, 0.0))


def _range(tokens: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor]:
    low = high = tokens
    if unseen is not None:
        low, high = (torch.where(unseen[..., None], end, tokens) for end in (torch.inf, -torch.inf))
    return low.amin(-2, keepdim=True), high.amax(-2, keepdim=True)


def _augmented_query(query: Tensor, columns: int, width: int) -> Tensor:
    """Append ones against the norm columns (in the unit of these), then zeros."""
    unit = _FLOAT16_UNIT if query.dtype is torch.float16 else 1.0
    places = torch.arange(width - query.shape[-1], device=query.device)
    tail = (places < columns).to(query.dtype) * unit
    return torch.cat([query, tail.expand(*query.shape[:-1], -1)], -1)


def _augmented_key(key: Tensor, padding: Tensor | None, columns: int, width: int) -> Tensor:
    """Append `-|k|^2 / 2` in one or three columns, which also mark padding, then zeros."""
    narrow = key.dtype is torch.float16
    unit, padded = (_FLOAT16_UNIT, _PADDED_FLOAT16) if narrow else (1.0, _PADDED)
    # Never under autocast: the norm must be summed in float32.
    wide = key.float() if key.dtype in _HALVES else key
    norm = (wide * wide).sum(-1) * (-0.5 / unit)
    if padding is not None:
        norm = torch.where(padding, padded, norm)
    tail = torch.stack(_split(norm, key.dtype, columns), -1)
    return torch.cat([key, F.pad(tail, (0, width - key.shape[-1] - columns))], -1)


def _split(number: Tensor, dtype: torch.dtype, columns: int) -> list[Tensor]:
    """Write float32 as a sum of half-precision numbers; the gradient flows through the first."""
    parts = [number.to(dtype)]
    rest = number.detach()
    for _ in range(columns - 1):
        rest = rest - parts[-1].detach().float()
        parts.append(rest.to(dtype))
    return parts


def l2_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    r"""Return `sum_j p_ij v_j` in row i, where `p_ij = softmax_j(-scale |q_i - k_j|^2)`.

    Status: exact up to rounding of float32, relative to `scale (|q_i| |k_j| + |k_j|^2)`, in half
    precision too. Gradients are strictly causal. Lipschitz only as tied in
    `wellposed.nn.L2SelfAttention`.
    Source: Kim, Papamakarios, Mnih (2021), eq. 13 and sec. 3.2, by dot products of `l2_vectors`.

    Args:
        query: (..., queries, head_dim), any floating dtype. The leading dimensions broadcast.
        key: (..., keys, head_dim); in float16, of norm below 5790.
        value: (..., keys, value_dim); if it is `key` itself, it is not copied.
        attn_mask: broadcasts to (..., queries, keys); bool, True = may attend, or float, added to
            the logits. A row without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight. No certificate covers it.
        scale: positive; default `1 / sqrt(head_dim)`.
        key_padding_mask: bool (batch, keys), True = padding, batch the first leading dimension
            ((keys,) if query has none); free. A row whose keys are all padding averages over them.

    Returns:
        (..., queries, value_dim) in the dtype of `query`, or the autocast dtype under autocast.

    Raises:
        ShapeError: the shapes or the padding mask do not fit.
        ConfigError: `scale` is not positive, or `attn_mask` is combined with `is_causal`.

    Cost: linear memory; `scaled_dot_product_attention` at head width d + 8 (d a multiple of 8) plus
    copies. On CPU in float32 at d = 64, 1.08 to 1.22 times the narrow kernel (causal 1.22 to 1.29).
    Second derivatives are refused unless the forward pass is in `sdpa_kernel(SDPBackend.MATH)` of
    `torch.nn.attention`; `torch.func` and forward mode use that kernel automatically.

    >>> q = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> l2_attention(q, q, q, scale=1.0).round(decimals=4).tolist()
    [[0.0, 0.0], [3.0, 4.0]]
    """
    check_attention_inputs("l2_attention", (query, key, value), attn_mask, key_padding_mask)
    if scale is not None and not scale > 0:
        raise ConfigError(
            f"l2_attention: scale is {scale}; expected a positive number (default 1 /"
            " sqrt(head_dim))"
        )
    if attn_mask is not None and is_causal:
        raise ConfigError(
            "l2_attention: received attn_mask and is_causal=True; expected one of them; put the"
            " causal mask into attn_mask, or pass padding as key_padding_mask"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    tied = value is key
    padding = key_padding_mask
    if padding is not None and lead:
        # (batch, 1, .., keys)
        padding = padding.reshape(padding.shape[0], *(1,) * (len(lead) - 1), padding.shape[-1])
    query = query.expand(*lead, -1, -1)
    key = key.expand(*lead, -1, -1)
    value = key if tied else value.expand(*lead, -1, -1)

    unseen = padding
    if unseen is None and attn_mask is not None and attn_mask.dtype is torch.bool:
        # Keys that only their own token attends to are padding.
        offset = key.shape[-2] - query.shape[-2]
        mask = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
        alone = F.pad(mask.diagonal(offset, -2, -1), (max(offset, 0), 0))
        unseen = (mask.sum(-2, dtype=torch.int32) <= alone).expand(*lead, -1)
    shift = common_shift(query, key, unseen, first=is_causal or attn_mask is not None)
    # Rows of the weights sum to one only if none can be empty and nothing is dropped: then
    # P(k - m) + m = P k.
    shares_keys = tied and attn_mask is None and dropout_p == 0
    value_dim = value.shape[-1]
    wide_query, wide_key = l2_vectors(query, key, shift, padding=padding, value_dim=value_dim)
    dtype = wide_key.dtype
    missing = (0, wide_key.shape[-1] - value_dim)
    wide_value = wide_key if shares_keys else F.pad(value.to(dtype), missing)
    joined = attend(
        *(_four_dimensional(part, lead) for part in (wide_query, wide_key, wide_value)),
        attn_mask=_align_mask(attn_mask, lead),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=2 * scale,
    )
    joined = joined[..., :value_dim].reshape(*lead, query.shape[-2], value_dim)
    return joined + shift.to(dtype) if shares_keys else joined


def _four_dimensional(tokens: Tensor, lead: torch.Size) -> Tensor:
    if len(lead) == 2:
        return tokens
    # (..., T, d) -> (batch, 1, T, d)
    return tokens.reshape(lead.numel(), 1, *tokens.shape[-2:])


def _align_mask(mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    if mask is None or mask.dim() <= 2 or len(lead) == 2:
        return mask
    # (..., T, keys) -> (batch, 1, T, keys)
    return mask.expand(*lead, *mask.shape[-2:]).reshape(lead.numel(), 1, *mask.shape[-2:])


def cosine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    eps: float = 0.01,
    tau: float | Tensor = 1.0,
    nu: float | Tensor = 1.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Return `nu sum_j p_ij n(v_j)` in row i, where `p_ij = softmax_j(tau n(q_i) . n(k_j))`.

    Status: exact up to rounding. `n(a) = a / sqrt(|a|^2 + eps)`, so rows have norm below `nu`.
    Globally Lipschitz for every mask, in each argument: with `|dq|` the largest change of a query,
    `|df_i| <= nu eps^-1/2 (|dv| + tau |dq| + tau |dk|)` (max over tokens of the 2-norm). Source: Qi
    et al. (2023), "LipsFormer", with the constant re-derived (theory note B6).

    Args:
        query: (..., queries, head_dim).
        key: (..., keys, head_dim).
        value: (..., keys, value_dim); normalised as well: with a plain value no bound exists.
        eps: > 0. It sets the slope at the origin, `eps^-1/2`, and is no guard against 0/0.
        tau: temperature, > 0. A tensor broadcasts to (..., queries, 1) and may be learnt.
        nu: scale of the output, (..., queries, value_dim). A tensor broadcasts to it.
        attn_mask: as in `scaled_dot_product_attention`. A row without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight; the bound above is for 0.

    Raises:
        ConfigError: `eps`, or a `tau` that is a number, is not positive.
        ShapeError: the widths of query and key, or the number of keys and values, differ.

    Cost: one `scaled_dot_product_attention` and three norms, in float32 at least.

    >>> x = 1e6 * torch.randn(3, 4)
    >>> bool(cosine_attention(x, x, x).norm(dim=-1).max() <= 1 + 1e-6)
    True
    """
    if not eps > 0:
        raise ConfigError(
            f"cosine_attention: eps is {eps}; expected > 0, since the Lipschitz constant is"
            " eps^-1/2"
        )
    if not isinstance(tau, Tensor) and not tau > 0:
        raise ConfigError(f"cosine_attention: tau is {tau}; expected a positive temperature")

    check_attention_inputs("cosine_attention", (query, key, value), attn_mask)
    query, key, value = (normalized_vectors(tokens, eps) for tokens in (query, key, value))
    # A learnt temperature must stay a tensor, while the fused kernel takes a number.
    scale = 1.0 if isinstance(tau, Tensor) else tau
    query = (query * tau).to(key.dtype) if isinstance(tau, Tensor) else query
    masks = {"attn_mask": attn_mask, "is_causal": is_causal}
    joined = attend(query, key, value, **masks, dropout_p=dropout_p, scale=scale)
    return (nu * joined).to(joined.dtype)
