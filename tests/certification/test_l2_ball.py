"""The ball that comes out of L2 attention holds what it does to zeros, for every number of tokens
up to the last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wellposed.certification import certify
from wellposed.nn import L2SelfAttention

TINY = 1e-9


@pytest.mark.parametrize("bias", ["values", "output", "both", "against each other"])
@pytest.mark.parametrize("options", [{}, {"contractive": 0.9}], ids=["plain", "contractive"])
def test_the_ball_is_that_of_the_worst_number_of_tokens(
    options: dict[str, float], bias: str
) -> None:
    torch.manual_seed(1)
    module = L2SelfAttention(4, 2, **options).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                if bias in ("both", "against each other") or (bias == "output") == name.startswith(
                    "o_"
                ):
                    parameter.normal_()
        zeros = [torch.zeros(1, count, 4, dtype=torch.float64) for count in range(1, 7)]
        if bias == "against each other":
            constant = module(zeros[-1])[0, 0] - module.o_proj.bias
            module.o_proj.bias.copy_(-2 * constant)
        largest = max(float(module(x).norm(dim=-1).max()) for x in zeros)
    model = nn.Sequential(module, nn.Linear(4, 4).double())
    after = next(row for row in certify(model, seq_len=6, radius=TINY).layers if row.path == "1")
    assert largest <= after.radius
    assert after.radius == pytest.approx(largest, rel=1e-4, abs=1e-6)
