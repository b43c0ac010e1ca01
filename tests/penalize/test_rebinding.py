"""A penalty bound to another model leaves no hook on the first; it refuses unknown forms and frozen weights."""

import pytest
import torch
from torch import nn

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty


def encoder(seed):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def hooks_on(model):
    modules = list(model.modules())
    tables = [m._forward_hooks for m in modules] + [m._forward_pre_hooks for m in modules]
    return sum(map(len, tables))


def test_a_rebound_penalty_is_that_of_the_new_model_and_leaves_no_hook_on_the_old_one():
    first = encoder(0)
    second = encoder(1)
    penalty = OrthogonalityPenalty(first, affinity=1.0, query=0.1)
    assert hooks_on(first) > 0

    penalty.rebind(second)
    assert hooks_on(first) == 0
    x = torch.randn(2, 5, 16)
    output = second(x)
    value = penalty().item()
    penalty.remove()
    assert hooks_on(second) == 0

    fresh = OrthogonalityPenalty(second, affinity=1.0, query=0.1)
    output = second(x)
    assert value == fresh().item()
    assert output.shape == x.shape


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("grams", "form 'grams'.*nearest: gram"),
        ({"query": "grams"}, "form 'grams'.*nearest: gram"),
        ({"querry": "gram"}, "strength in form 'querry'.*nearest: query"),
        (3, "form = 3, expected a form or a mapping"),
    ],
)
def test_other_forms_are_refused(form, message):
    with pytest.raises(ConfigError, match=message):
        OrthogonalityPenalty(encoder(0), query=0.1, form=form)


def test_frozen_weights_are_named_if_they_would_be_trained():
    model = encoder(0)
    penalty = OrthogonalityPenalty(model, feedforward=1.0)
    model.layers[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"layers\.0\.linear1"):
        penalty()
    penalty()  # no second warning, which would be an error

    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        penalty()
    with torch.no_grad():
        assert penalty().item() > 0
