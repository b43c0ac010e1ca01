"""Decay of parameters from which a weight is computed: it must act on that weight, or not at all."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from wellposed.constrain import parameter_groups


class Symmetric(nn.Module):
    """A parametrisation of somebody else."""

    def forward(self, raw):
        return raw.triu() + raw.triu(1).mT


def symmetric(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


COMPUTED = {
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 4)),
    "cayley": lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
    "expm": lambda: parametrizations.orthogonal(nn.Linear(4, 8), orthogonal_map="matrix_exp"),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 8)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 8)),
    "own": lambda: symmetric(nn.Linear(4, 4)),
    "old weight_norm": lambda: old_weight_norm(nn.Linear(4, 8)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 8)),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_raw_parameter_does_not_decay(kind):
    torch.manual_seed(0)
    layer = COMPUTED[kind]()
    groups = parameter_groups(nn.Sequential(layer, nn.Linear(4, 4)), 0.1)
    raw = set(layer.parameters())
    assert not raw & set(groups[0]["params"])
    assert raw <= set(groups[1]["params"])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_a_step_without_gradients_leaves_an_orthogonal_weight_unchanged():
    torch.manual_seed(0)
    layer = parametrizations.orthogonal(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(parameter_groups(layer, 0.1), lr=0.1)
    before = layer.weight.detach().clone()
    (0.0 * layer.weight.sum()).backward()
    optimizer.step()
    assert float(before.norm()) == pytest.approx(2.0)
    torch.testing.assert_close(layer.weight.detach(), before)


def test_a_pruned_weight_shrinks_with_its_raw_parameter_so_it_decays():
    layer = nn.Linear(4, 8)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    groups = parameter_groups(layer, 0.1)
    assert {id(p) for p in groups[0]["params"]} == {id(layer.weight_orig)}
