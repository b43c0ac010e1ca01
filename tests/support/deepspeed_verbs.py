"""Verbs to train with and without DeepSpeed, for a comparison."""

import torch
from torch import nn

import wellposed as wp

BATCHES = torch.randn(4, 4, 5, 16, generator=torch.Generator().manual_seed(1))


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _constrained(to):
    options = (
        {"batch": BATCHES[0][:2], "bound": 0.1} if to == "logits" else {"where": ("query", "key")}
    )
    return lambda model, optimizer: wp.constrain_(model, optimizer, to=to, **options)


MADE = {
    "nothing": lambda model, optimizer: None,
    "penalty": lambda model, _: wp.OrthogonalityPenalty(model, attention=1e-2, feedforward=1e-2),
    "affinities": lambda model, _: wp.OrthogonalityPenalty(model, affinity=1e-2),
    "Monitor": lambda model, optimizer: wp.Monitor(model, optimizer, every=1),
    "measure": lambda model, _: wp.measure(model, BATCHES[0][:2]),
    "certify": lambda model, _: wp.certify(model.layers[0].linear1, seq_len=4),
    "t_fixup_": lambda model, _: wp.t_fixup_(model, exclude=("*norm*",)),
    **{to: _constrained(to) for to in ("orthogonal", "spectral", "columns", "logits")},
}


def _plain(model, batch, _):
    return model(batch).square().mean()


def _monitored(model, batch, monitor):
    monitor.step()
    return _plain(model, batch, monitor)


LOSSES = dict.fromkeys(MADE, _plain) | {
    "penalty": lambda model, batch, penalty: _plain(model, batch, None) + penalty(),
    "affinities": lambda model, batch, penalty: _plain(model, batch, None) + penalty(),
    "Monitor": _monitored,
}
