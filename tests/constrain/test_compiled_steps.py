"""An optimizer whose step is compiled holds weights as a plain one does: its hooks run as they are."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from wellposed.constrain import constrain_

SETS = {
    "orthogonal": {"to": "orthogonal"},
    "spectral": {"to": "spectral", "bound": 0.8},
    "columns": {"to": "columns", "bound": 0.8},
}


def trained(options, *, is_compiled):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    handle = constrain_(model, optimizer, where="*weight", **options)
    step = torch.compile(optimizer.step, backend="aot_eager") if is_compiled else optimizer.step
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        step()
    return [weight.detach() for weight in model.parameters()], handle.error().worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile inside
@pytest.mark.parametrize("name", SETS)
def test_a_compiled_step_ends_in_the_set_by_few_graphs(name):
    expected, _ = trained(SETS[name], is_compiled=False)
    weights, error = trained(SETS[name], is_compiled=True)
    assert error <= 1e-5
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 4
