"""L2 and cosine attention rewritten as dot-product attention on other vectors, for fused
kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import ShapeError, listed

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
    if query.dtype is not torch.float64 and torch.is_autocast_enabled(device):
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
