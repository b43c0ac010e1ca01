"""How far rounding of its logits moves a map: they are quadratic in the tokens, and the map is
not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wellposed.linalg import Norm

# Logits that rounding may move by more than this leave the weights of a softmax undetermined: no
# first order holds.
_MOVED_AT_MOST = 1 / 8
# Beyond this a key's entry marks padding (`l2_attention`), and is no part of a logit.
_MARK = 1e29
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# These hold a softmax that a function mode cannot look into.
_CLOSED = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty),
            ("key", inspect.Parameter.empty),
            ("value", inspect.Parameter.empty),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)


class LogitRounding(TorchFunctionMode):
    r"""Watches the softmaxes of what runs inside; `amplification` times `c |x - mean x|` is what
    their rounding costs.

    A logit `l_ij = s q_i . k_j` of d terms is computed to `g s sum_c |q_ic| |k_jc|`,
    `g = (sqrt(d) + 8) eps / 2` (Higham 2002, sec. 3.1, sqrt(d) in place of d as in
    `with_error_bound`). Errors `e_ij` of the logits move row i of `P v` by
    `sum_j P_ij e_ij (v_j - m_i)`, m_i its mean, plus `O(e^2)`; so by Cauchy, Schwarz and Minkowski
    by at most

        g s (sum_c |q_ic| sqrt(sum_j P_ij k_jc^2)) sd_i(v),   sd_i(v)^2 = sum_j P_ij |v_j - m_i|^2 .

    The means under P are attentions with the squares as values, so nothing of N x N is made. For L2
    attention, q and k here are the augmented vectors, moved near the origin, whose last product is
    `|k_j|^2 / 2`: that is where one far token enters every logit quadratically. What comes after P
    v, and makes v of x, belongs to the Lipschitz bound c of
    the map, a product of norms of its parts: `|rest| max_j |v_j - mean v| <= c |x - mean x|`. Hence
    the cost is `c |x - mean x|` times the largest of `g s (..) sd_i(v) / max_j |v_j - mean v|` over
    the rows, the ratio taken coordinate by coordinate; in the Frobenius norm the rows add up in
    squares. Softmaxes one after another add.

    Two steps are not proved but measured, with a margin of 1,000 where logits are large: that a
    bound c which is given is such a product (one that counts on `rest` and value map to cancel is
    not), and the ratio by coordinates, which may fall short of that of lengths by a factor sqrt(d).

    The weights P are the computed ones, which is right to a factor exp(2 e). Where e may pass 1/8,
    `refusal` says so.
    """

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm: Norm = norm
        self.amplification = 0.0
        self.refusal = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        """Run the function; note what it does to logits."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._note_attention(_SIGNATURE.bind(*args, **kwargs).arguments, result)
        elif func in _SOFTMAX:
            self._note_softmax((*args, *kwargs.values())[0], result)
        elif func in _CLOSED:
            self.refusal = (
                f"{func.__name__} forms its logits out of sight, so their rounding is not known"
            )
        return result

    def _note_attention(self, given: dict[str, Any], out: Tensor) -> None:
        query, key, value = given["query"], given["key"], given["value"]
        if not out.numel():
            return
        eps = torch.finfo(out.dtype).eps
        rest = {
            name: setting
            for name, setting in given.items()
            if name not in ("query", "key", "value")
        }

        def mean(values: Tensor) -> Tensor:
            """`sum_j P_ij values_j`; a kernel may want the width of the keys."""
            missing = max(key.shape[-1] - values.shape[-1], 0)
            return F.scaled_dot_product_attention(query, key, F.pad(values, (0, missing)), **rest)[
                ..., : values.shape[-1]
            ]

        scale = abs(given.get("scale") or 1 / math.sqrt(query.shape[-1]))
        keys = key.masked_fill(key.abs() >= _MARK, 0.0)
        logits = scale * (query.abs() * mean(keys.square()).clamp_min(0).sqrt()).sum(-1)
        seconds = mean(value.square())
        # The difference of two squares is not known better than this.
        deviation = (
            (seconds - out.square()).clamp_min(0).add(16 * eps * seconds.clamp_min(0)).sqrt()
        )
        reach = (value - value.mean(-2, keepdim=True)).abs().amax(-2, keepdim=True)
        if reach.shape[-3:-2] != deviation.shape[-3:-2]:  # grouped heads
            reach = reach.repeat_interleave(deviation.shape[-3] // reach.shape[-3], -3)
        share = (
            torch.where(deviation > 0, deviation / reach, 0.0)
            .nan_to_num(1.0)
            .amax(-1)
            .clamp_max(1.0)
        )
        self._add((math.sqrt(query.shape[-1]) + 8) * eps / 2 * logits, share)

    def _note_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Logits that came ready made are known to their own rounding, if nothing cancelled in
        them."""
        if weights.numel():
            seen = torch.where(weights > 0, logits.to(weights.dtype).abs(), 0.0)
            self._add(
                4 * torch.finfo(weights.dtype).eps * seen.amax(-1),
                torch.ones((), device=weights.device),
            )

    def _add(self, moved: Tensor, share: Tensor) -> None:
        worst = float(moved.max())
        if not worst <= _MOVED_AT_MOST:
            self.refusal = (
                f"rounding may move a logit by {worst:.2g} in"
                f" {str(moved.dtype).removeprefix('torch.')}, and more than {_MOVED_AT_MOST:g}"
                " leaves the attention weights undetermined; tokens or projections are too large"
            )
            return
        rows = moved * share
        self.amplification += float(
            torch.linalg.vector_norm(rows) if self.norm == 2 else rows.max()
        )
