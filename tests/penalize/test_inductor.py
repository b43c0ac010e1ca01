"""Under ``torch.compile`` with inductor, weights and affinities give the loss and gradient of the
eager model."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.penalize import OrthogonalityPenalty


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(
            F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch.compile
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # likewise
@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="inductor needs a C++ compiler",
)
def test_inductor_equals_eager() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()), torch.randn(2, 6, 8)
    penalty = OrthogonalityPenalty(model, affinity=0.3, attention=0.7)
    compiled = torch.compile(model, backend="inductor")
    found: list[tuple[Tensor, dict[str, Tensor | None]]] = []
    for run in (model, compiled, compiled):
        model.zero_grad()
        loss = run(x).square().mean() + penalty()
        loss.backward()
        found.append(
            (loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})
        )
    torch.compiler.reset()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-7)
