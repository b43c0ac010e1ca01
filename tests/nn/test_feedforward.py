import math

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import bad_config

from wellposed.nn import MLP


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_it_equals_the_formula_token_by_token(activation):
    layer = MLP(4, 6, activation=activation).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    output = layer(x)
    for b, i in [(0, 0), (1, 2)]:
        hidden = layer.up_proj.weight @ x[b, i] + layer.up_proj.bias
        if activation == "relu":
            hidden = torch.tensor([max(h, 0.0) for h in hidden.tolist()], dtype=torch.float64)
        else:
            hidden = torch.tensor(
                [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden.tolist()]
            ).double()
        expected = layer.down_proj.weight @ hidden + layer.down_proj.bias
        within(output[b, i], expected, 1e-7)


def test_an_unknown_activation_is_named():
    with bad_config(match="unknown activation 'gleu'; nearest: gelu"):
        MLP(4, 6, activation="gleu")
    assert MLP(4, 6, bias=False).up_proj.bias is None
