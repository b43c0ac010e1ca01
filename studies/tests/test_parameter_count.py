"""Parameter counts of TransJect by formula, against models that are counted."""

import pytest
from torch import nn

from wellposed.nn import TransJectStack
from wellposed_studies.sengupta2023.costs import transject_parameter_count


@pytest.mark.parametrize(("vocab", "experts"), [(187, 1), (50, 4)])
@pytest.mark.parametrize("outputs", [1, 3])
def test_parameter_count_by_counting(vocab, experts, outputs):
    stack = TransJectStack(8, 2, num_experts=experts)
    model = nn.ModuleList([nn.Embedding(vocab, 4), stack, nn.Linear(8, outputs)])
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == transject_parameter_count(vocab, 8, 2, experts, num_outputs=outputs)
    # The released code: biases of every map and of the spectrum, a gate with bias for one expert
    # too.
    extra = 2 * (experts * 2 * 8 + (8 if experts == 1 else 0) + 1 + 2 * 8) + 8
    assert (
        transject_parameter_count(vocab, 8, 2, experts, num_outputs=outputs, released=True)
        == counted + extra
    )
