"""Weights that a parametrisation computes: roles see the layout of its result, not of its steps."""

import pytest
import torch
from tests.support.four_families import FAMILIES
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import wellposed as wp
from wellposed.constrain import sigma_reparam_


class ByTheTranspose(nn.Module):
    """Ends with a view whose layout is not that of the tensor it was computed in."""

    def forward(self, weight):
        return (2 * weight.mT).mT


class InAStack(nn.Module):
    def forward(self, weight):
        return (2 * weight[None])[0]


class Shortened(nn.Module):
    """Computes more rows than the layer applies."""

    def forward(self, weight):
        return (torch.cat((weight, weight)) * 2)[: len(weight)]


def of_every_layer(register):
    def wrap(model):
        for name, module in list(model.named_modules()):
            is_layer = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if is_layer and not name.startswith(("lm_head", "cls")):
                register(module)

    return wrap


def by(kind):
    return of_every_layer(
        lambda layer: parametrize.register_parametrization(layer, "weight", kind())
    )


PARAMETRISATIONS = {
    "weight norm": of_every_layer(parametrizations.weight_norm),
    "spectral norm": of_every_layer(parametrizations.spectral_norm),
    # torch transposes wide weights inside.
    "orthogonal": of_every_layer(parametrizations.orthogonal),
    "transposed inside": by(ByTheTranspose),
    "stacked inside": by(InAStack),
    "shortened inside": by(Shortened),
    "sigmaReparam": sigma_reparam_,
}


def views_of(model, batch):
    weights = wp.find_roles(model, batch).weights()
    return {
        (weight.role, weight.path, weight.view.expert): (
            weight.view.spans,
            weight.view.transposed,
            weight.view.shape,
        )
        for weight in weights
        if not weight.role.endswith("_embedding")
    }


@pytest.mark.parametrize("batch", [None, {"input_ids": torch.arange(16).reshape(2, 8)}])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", PARAMETRISATIONS)
def test_roles_are_those_of_the_plain_model(kind, family, batch):
    torch.manual_seed(0)
    model = FAMILIES[family]()
    plain = views_of(model, batch)
    PARAMETRISATIONS[kind](model)
    assert views_of(model, batch) == plain
