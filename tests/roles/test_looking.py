"""Verbs that only look leave the model, the generators and torch as they were, also if they fail."""

import random

import numpy as np
import pytest
import torch
from tests.support.state import changes, state_of
from tests.support.wrappers import WIDTH, WRAPPED, Model, batch, stirred
from torch import nn
from torch.utils.checkpoint import checkpoint

import wellposed as wp
from wellposed.errors import WellposedError


class Restless(Model):
    """A model whose forward changes buffers, replaces one, keeps tensors and draws numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.table = nn.Embedding(7, WIDTH, max_norm=0.1)

    def forward(self, x):
        self.count.add_(1)
        self.last = x.detach().mean().reshape(1)
        self.last_input = x
        noise = random.random() + np.random.rand() + torch.rand(())
        x = self.drop(self.norm(x.mT).mT) + 1e-3 * noise + self.table(torch.tensor([1, 2, 3, 4, 5]))
        return super().forward(x)


class Checkpointed(Model):
    def forward(self, x):
        x = x + checkpoint(self.attention, x, use_reentrant=False)
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def mixed(model):
    model.attention.eval()
    model.mlp.down_proj.eval()
    model.mlp.up_proj.requires_grad_(False)
    return model


def tied(model):
    model.attention.k_proj.weight = model.attention.q_proj.weight
    return model


CHOSEN = (
    "plain", "prune", "old weight_norm", "old spectral_norm", "weight_norm", "spectral_norm",
    "parametrised", "low rank of its own", "lora", "dora", "lora merged and off", "saved", "boft",
)  # fmt: skip
MODELS = {
    **{name: lambda name=name: WRAPPED[name](Model()) for name in CHOSEN},
    "restless": lambda: stirred(Restless()),
    "mixed modes": lambda: mixed(Model()),
    "tied": lambda: tied(Model()),
    "checkpointed": Checkpointed,
    "wrapped": lambda: Wrapper(Model()),
    "compiled": lambda: torch.compile(Model()),
    "torch": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True),
}


def monitor(model):
    watching = wp.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        watching.step()
    finally:
        watching.remove()


def penalty(model):
    wp.OrthogonalityPenalty(model, query=1.0, affinity=1.0, form="paper", batch=batch()).remove()


def constrain(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"where": ("query", "key"), "to": "spectral", "bound": 1e3}  # all are inside
    wp.constrain_(model, optimizer, batch=batch(), **options).remove()


def clip(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wp.constrain_(model, optimizer, to="logits", batch=batch()).remove()


VERBS = {
    "find_roles": wp.find_roles,
    "find_roles, batch": lambda model: wp.find_roles(model, batch()),
    "views": lambda model: [weight.view.tensor() for weight in wp.find_roles(model).weights()],
    "measure": lambda model: wp.measure(model, batch()),
    "monitor": monitor,
    "penalty": penalty,
    "parameter_groups": lambda model: wp.parameter_groups(model, 0.1),
    "certify": lambda model: wp.certify(model, seq_len=5),
    "attack": lambda model: wp.lipschitz_lower_bound(model, (5, WIDTH), steps=2, restarts=1),
    "constrain_": constrain,
    "constrain_ logits": clip,
}
RUNS = {"find_roles, batch", "measure", "attack"}


def fails(*_):
    raise RuntimeError("in the middle of a pass")


REFUSED = {"lora merged and off"}
"""A pass would change them."""
CASES = [(name, verb, False) for name in MODELS for verb in VERBS]
CASES += [(name, verb, True) for name in ("restless", "spectral_norm", "lora") for verb in VERBS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "verb", "broken"), CASES)
def test_looking_changes_nothing(name, verb, broken):
    torch.manual_seed(0)
    model = MODELS[name]()
    if name not in REFUSED:
        model(batch()).square().mean().backward()
    if broken:
        last = [part for path, part in model.named_modules() if path.endswith("down_proj")]
        last[-1].register_forward_pre_hook(fails)
    before = state_of(model)
    failure = None
    try:
        VERBS[verb](model)
    except WellposedError as error:
        failure = error
    assert not changes(before, state_of(model))
    if verb in RUNS:
        assert (failure is None) != (broken or (name in REFUSED and verb != "attack"))
