"""L2 and cosine attention, computed as dot-product attention on other vectors by fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ConfigError, ShapeError, listed
from wellposed.tensor_calls import attend

# Fused kernels want head widths that are a multiple of this, and one width for queries, keys and
# values.
_WIDTH_MULTIPLE = 8
# Half-precision columns that hold one float32 number: 3 x 8 bits (bfloat16), 3 x 11 bits (float16).
_HALF_COLUMNS = 3
# float16 ends at 65504, so its norm columns are stored in this unit; key norms up to 5790 fit.
_FLOAT16_UNIT = 256.0
# Logit offset of a padded key: exp underflows to exactly zero beside any real key, and stays finite
# beside none.
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
    """Return in a line what is wrong with a padding mask that is not bool or of none of the
    shapes."""
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
    """Whether two shapes broadcast."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return all(one == other or 1 in (one, other) for one, other in pairs)


def normalized_vectors(tokens: Tensor, eps: float) -> Tensor:
    """Return `a / sqrt(|a|^2 + eps)` of every token a; the norm is computed in float32 at least."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(tokens.dtype)


def l2_vectors(
    query: Tensor, key: Tensor, shift: Tensor, *, padding: Tensor | None = None, value_dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Return q' and k' with `q'_i . k'_j = (q_i - m) . (k_j - m) - |k_j - m|^2 / 2`, m the shift.

    That is `-|q_i - k_j|^2 / 2` up to a number that is the same for every j, so dot-product
    attention on them with twice the scale is L2 attention. Exact up to rounding of float32 (half
    precision: the norm takes three columns).

    Args:
        query: (..., heads, queries, head_dim).
        key: (..., heads, keys, head_dim); it may have fewer heads, each for a group of query heads
        that follow.
        shift: (..., key heads, 1, head_dim), from `common_shift`.
        padding: bool, broadcasts to the key without its last dimension: True gets a weight of
        exactly zero.
        value_dim: the vectors become at least as wide, so that values can have the same width.

    Returns:
        Two tensors of one width, a multiple of 8, in the dtype in which attention will run.
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
    """Return one vector (..., 1, d) per key head to move queries and keys by, which leaves every
    distance as it is.

    Any value is valid, a good one avoids cancellation: the mean key, or with ``first`` the first
    key, which no later token can change; keys where ``unseen`` (bool, broadcasts to the key without
    its last dimension) are left out.
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
    """The dtype in which `scaled_dot_product_attention` will run: norm columns must be split for
    that one."""
    device = query.device.type
    if query.dtype is not torch.float64 and not query.is_meta and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _exact_shift(query: Tensor, key: Tensor, unseen: Tensor | None) -> Tensor:
    """Return, per coordinate, the smallest value where all values lie within a factor two of it,
    else zero.

    There `x - shift` has no rounding error (Sterbenz), while a rounded shift would cost more than
    it gains: products of half-precision numbers are accumulated in float32 anyway. It matters for
    gradients, which are stored in half.
    """
    low, high = _range(key, unseen)
    if query.shape[-2]:
        together = query.reshape(*key.shape[:-2], -1, key.shape[-1])
        # Equal lengths are self-attention: a padded query then stands for a padded token.
        ends = _range(together, unseen if together.shape[-2] == key.shape[-2] else None)
        low, high = torch.minimum(low, ends[0]), torch.maximum(high, ends[1])
    found = low <= high
    positive = found & (low > 0) & (high <= 2 * low)
    negative = found & (high < 0) & (low >= 2 * high)
    return torch.where(positive, low, torch.where(negative, high, 0.0))


def _range(tokens: Tensor, unseen: Tensor | None) -> tuple[Tensor, Tensor]:
    low = high = tokens
    if unseen is not None:
        low, high = (torch.where(unseen[..., None], end, tokens) for end in (torch.inf, -torch.inf))
    return low.amin(-2, keepdim=True), high.amax(-2, keepdim=True)


def _augmented_query(query: Tensor, columns: int, width: int) -> Tensor:
    """Append ones against the norm columns (of the unit they are stored in), then zeros."""
    unit = _FLOAT16_UNIT if query.dtype is torch.float16 else 1.0
    places = torch.arange(width - query.shape[-1], device=query.device)
    tail = (places < columns).to(query.dtype) * unit
    return torch.cat([query, tail.expand(*query.shape[:-1], -1)], -1)


def _augmented_key(key: Tensor, padding: Tensor | None, columns: int, width: int) -> Tensor:
    """Append `-|k|^2 / 2` in one or three columns, padding marked there as well, then zeros."""
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
    """Write float32 as a sum of half-precision numbers; the gradient, the same for each, flows
    through the first."""
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
    r"""Row i is `sum_j p_ij v_j` with `p_ij = softmax_j(-scale |q_i - k_j|^2)`.

    Exact up to rounding, linear in memory: never an N x N tensor. Kim, Papamakarios, Mnih (2021),
    eq. 13 and sec. 3.2. In the softmax `|q_i|^2` cancels, so the logits are
    `2 scale [q_i, 1] . [k_j, -|k_j|^2 / 2]`: one call of `scaled_dot_product_attention` on vectors
    a few columns wider, whose fused kernel does the rest.

    Accuracy: logits err by a few rounding errors *of float32* relative to
    `scale (|q_i| |k_j| + |k_j|^2)`, in half precision too, where the norm is split over three
    columns. Distances do not change when queries and keys move
    together, so both are first moved near the origin: by the mean real key; by the first real key
    where a causal or a general mask could carry rounding of a later token into an earlier row; in
    half precision only in those coordinates where the subtraction is exact. The shift is a constant
    for autograd, so gradients are strictly causal.

    Args:
        query: (..., queries, head_dim), any floating dtype. The leading dimensions broadcast.
        key: (..., keys, head_dim).
        value: (..., keys, value_dim); when it is `key` itself, the augmented keys serve as values
            without a copy.
        attn_mask: broadcasts to (..., queries, keys); bool, True = may attend, or float, added to
            the logits. A row without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight. No certificate covers it.
        scale: positive; `1 / sqrt(head_dim)` where not given.
        key_padding_mask: bool (batch, keys), True = padding, batch the first leading dimension
            ((keys,) where query has none). It costs nothing: padding is one more term of the norm
            column and no mask tensor is made, so it combines with `is_causal`. A row all of whose
            keys are padding averages over padding.

    Returns:
        (..., queries, value_dim) in the dtype of `query`, or the autocast dtype under autocast.

    Raises:
        ShapeError: the shapes or the padding mask do not fit.
        ConfigError: `scale` is not positive, or `attn_mask` is combined with `is_causal`.

    Cost: `scaled_dot_product_attention` at head width d + 8 (d a multiple of 8) plus copies linear
    in N. On CPU in float32 at d = 64 the wider kernel alone takes 1.13 to 1.16 times the narrow
    one, so that is the floor; measured with the copies 1.08 to 1.22 (1.22 to 1.29 under a causal
    mask, which halves the kernel and not the copies). Second derivatives need the forward pass
    in `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, and are refused without;
    transforms of `torch.func` and forward mode take that kernel by themselves. float16 keys must have
    norm below 5790. Lipschitz only in the tied form of `wellposed.nn.L2SelfAttention`.

    >>> q = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> l2_attention(q, q, q, scale=1.0).round(decimals=4)
    tensor([[0., 0.],
            [3., 4.]])
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
    query, key = query.expand(*lead, -1, -1), key.expand(*lead, -1, -1)
    value = key if tied else value.expand(*lead, -1, -1)

    unseen = padding
    if unseen is None and attn_mask is not None and attn_mask.dtype is torch.bool:
        # Keys that only their own token sees are padding.
        own = key.shape[-2] - query.shape[-2]
        mask = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
        alone = F.pad(mask.diagonal(own, -2, -1), (max(own, 0), 0))
        unseen = (mask.sum(-2, dtype=torch.int32) <= alone).expand(*lead, -1)
    shift = common_shift(query, key, unseen, first=is_causal or attn_mask is not None)
    # Rows of the weights sum to one only where no row can be empty and nothing is dropped; then P(k
    # - m) + m = P k.
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
    """Reshape (*lead, tokens, width) to (batch, heads, tokens, width), which the fused kernels ask
    for."""
    if len(lead) == 2:
        return tokens
    return tokens.reshape(lead.numel(), 1, *tokens.shape[-2:])


def _align_mask(mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    if mask is None or mask.dim() <= 2 or len(lead) == 2:
        return mask
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
    r"""Row i is `nu sum_j p_ij n(v_j)`, `p_ij = softmax_j(tau n(q_i) . n(k_j))`, with
    `n(a) = a / sqrt(|a|^2 + eps)`.

    Exact up to rounding. Every row has norm below `nu`, and, since `n` has slope at most `eps^-1/2`
    and norm below 1,
    the map is globally Lipschitz for every mask and from each of its three arguments: with `|dq|`
    the largest change of a query, `|df_i| <= nu eps^-1/2 (|dv| + tau |dq| + tau |dk|)` (in the max
    over tokens of the 2-norm). Qi et al. (2023), "LipsFormer", with the constant re-derived (theory
    note B6).

    Args:
        query: (..., queries, head_dim).
        key: (..., keys, head_dim).
        value: (..., keys, value_dim); normalised as well: with a plain value no bound exists.
        eps: > 0, a real knob and not a guard against 0/0: the slope at the origin is `eps^-1/2`.
        tau: temperature, > 0; a tensor broadcasts to (..., queries, 1) and may be learnt, per head
            for example.
        nu: scale of the output; a tensor broadcasts to (..., queries, value_dim).
        attn_mask: as in `scaled_dot_product_attention`. The token itself need not be seen. A row
            without any key returns zero.
        is_causal: query i sees keys j <= i.
        dropout_p: probability of dropping an attention weight; the bound above is for 0.

    Returns:
        (..., queries, value_dim).

    Raises:
        ConfigError: `eps`, or a `tau` that is a number, is not positive.
        ShapeError: the widths of query and key, or the number of keys and values, differ.

    Cost: one `scaled_dot_product_attention` and three norms. Norms are computed in float32 at
    least.

    >>> import torch
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
    seen = {"attn_mask": attn_mask, "is_causal": is_causal}
    joined = attend(query, key, value, **seen, dropout_p=dropout_p, scale=scale)
    return (nu * joined).to(joined.dtype)
