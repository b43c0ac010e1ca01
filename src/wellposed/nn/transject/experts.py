"""Gram attention, `ELU((x U * sigma) V)`, and a convex mixture of such experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ShapeError
from wellposed.functional.gram import check_spectrum, gram_attention, per_token
from wellposed.nn.checks import Eps, is_plain
from wellposed.nn.transject.orthogonal import OrthogonalLinear, ResetByParts
from wellposed.nn.transject.spectrum import SeenTokens, TransJectCache
from wellposed.options import Count, Size


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


Gating = Literal["pooled", "normalized", "fixed"]
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
            for; pooled gates have none. `"fixed"`: softmax of E learnt numbers, the same for every
            input.
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
        if num_experts > 1 and gating == "fixed":
            self.logits = nn.Parameter(torch.zeros(num_experts))
        elif num_experts > 1:
            self.gate = nn.Linear(embed_dim, 1, bias=False)

    def reset_parameters(self) -> None:
        """Draw the experts and the gate anew."""
        super().reset_parameters()
        if "logits" in self._parameters:
            nn.init.zeros_(self.logits)

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
        else:
            gates = self.known_gates(x, is_causal=is_causal)
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

    def known_gates(self, x: Tensor, *, is_causal: bool = False) -> Tensor | None:
        """Return the gates that no token has a part in: of one expert, or fixed ones."""
        shape = (*x.shape[: 2 if is_causal else 1], self.num_experts)
        if self.num_experts == 1:
            return x.new_ones(shape)
        return self.logits.softmax(0).to(x.dtype).expand(shape) if self.gating == "fixed" else None

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
