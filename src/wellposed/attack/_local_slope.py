"""The direction in which a map stretches most at a point, from vector-Jacobian products alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.attack._directions import steepest_direction
from wellposed.attack._inputs import Call
from wellposed.linalg import Norm


@dataclass(frozen=True)
class LocalSlope:
    """Finds ``|J(x) v|`` and the v of norm 1 that makes it large, for every input of a batch."""

    call: Call
    norm: Norm
    allowed: Tensor
    """(tokens, 1), 1 where a token may move."""
    exact: bool

    def __call__(self, x: Tensor, direction: Tensor, inner: int) -> tuple[Tensor, Tensor]:
        """Return ``|J(x) v|``, with gradient in x (and weights), and v; the search starts from
        ``direction``."""
        y = self.call(x)
        if not y.requires_grad:
            return y.new_zeros(y.shape[0]), direction
        if self.exact:
            left, direction = self._from_jacobian(_jacobian(y, x) * self.allowed)
        else:
            left, direction = self._alternate(y, x, direction, inner)
        (pulled,) = torch.autograd.grad(y, x, left, create_graph=True)
        # At the best pair (u, v) the gradient of the norm is that of u^T J(x) v with u and v held.
        return (pulled * direction).flatten(1).sum(-1), direction

    def _alternate(
        self, y: Tensor, x: Tensor, direction: Tensor, inner: int
    ) -> tuple[Tensor, Tensor]:
        """Alternate ``u <- dual(J v)``, ``v <- dual(J^T u)``; J v comes from differentiating the
        linear u -> J^T u."""
        dummy = torch.zeros_like(y, requires_grad=True)
        (pullback,) = torch.autograd.grad(y, x, dummy, create_graph=True)
        direction = steepest_direction(direction * self.allowed, self.norm)
        left = torch.zeros_like(y)
        for _ in range(inner):
            (pushed,) = torch.autograd.grad(pullback, dummy, direction, retain_graph=True)
            left = self._align_output(pushed)
            (pulled,) = torch.autograd.grad(y, x, left, retain_graph=True)
            direction = steepest_direction(pulled * self.allowed, self.norm)
        return left, direction

    def _from_jacobian(self, jacobian: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, features = jacobian.shape[:3]
        if self.norm == 2:
            left, _, right = torch.linalg.svd(
                jacobian.flatten(1, 2).flatten(2), full_matrices=False
            )
            return left[..., 0].unflatten(1, (tokens, features)), right[:, 0].unflatten(
                1, jacobian.shape[3:]
            )
        if self.norm == "inf":
            sums = jacobian.abs().flatten(3).sum(-1).flatten(1)
            left = (
                nn.functional.one_hot(sums.argmax(-1), sums.shape[-1])
                .to(jacobian)
                .reshape(batch, tokens, features)
            )
            return left, torch.einsum("btf,btfij->bij", left, jacobian).sign()
        # Every output token is tried; its direction is found by alternation from the leading
        # singular vector.
        by_token = pushed = torch.linalg.svd(jacobian.flatten(3), full_matrices=False).U[..., 0]
        for _ in range(12):
            pulled = torch.einsum("btf,btfij->btij", by_token, jacobian)
            pushed = torch.einsum("btij,btfij->btf", _unit(pulled), jacobian)
            by_token = _unit(pushed)
        best = pushed.norm(dim=-1).argmax(-1)
        left = by_token * nn.functional.one_hot(best, tokens).to(jacobian).unsqueeze(-1)
        return left, _unit(torch.einsum("btf,btfij->bij", left, jacobian))

    def _align_output(self, pushed: Tensor) -> Tensor:
        """The functional of dual norm 1 that attains the norm of ``J v``."""
        if self.norm == 2:
            return _unit(pushed.flatten(1)).view_as(pushed)
        flat = pushed.abs().flatten(1) if self.norm == "inf" else pushed.norm(dim=-1)
        chosen = nn.functional.one_hot(flat.argmax(-1), flat.shape[-1]).to(pushed)
        if self.norm == "inf":
            return (chosen * pushed.flatten(1).sign()).view_as(pushed)
        return _unit(pushed) * chosen.unsqueeze(-1)


def _jacobian(y: Tensor, x: Tensor) -> Tensor:
    """(batch, tokens out, features out, tokens in, features in); batch entries do not mix."""
    rows = [
        torch.autograd.grad(y[:, token, feature].sum(), x, retain_graph=True)[0]
        for token in range(y.shape[1])
        for feature in range(y.shape[2])
    ]
    return torch.stack(rows, 1).unflatten(1, y.shape[1:])


def _unit(vectors: Tensor) -> Tensor:
    size = vectors.norm(dim=-1, keepdim=True)
    return vectors / torch.where(size > 0, size, 1.0)
