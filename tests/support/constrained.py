"""A model with weights of every shape, a regression to train it on, and the slow reference of the
error."""

import io

import torch
from torch import nn

from wellposed.constrain import constrain_

WIDTH = 12


class Mixed(nn.Module):
    """A square, a tall and a wide weight, and a free read-out."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.square = nn.Linear(width, width)
        self.tall = nn.Linear(width, 2 * width)
        self.wide = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.wide(nn.functional.elu(self.tall(nn.functional.elu(self.square(x))))))


NAMES = ["square", "tall", "wide"]


def isometry_error(weight):
    """The slow reference: max |W^T W - I| on the smaller side, in float64, entry by entry from
    column products."""
    matrix = weight.detach().double()
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    worst = 0.0
    for i in range(matrix.shape[1]):
        for j in range(matrix.shape[1]):
            worst = max(worst, abs(float((matrix[:, i] * matrix[:, j]).sum()) - (i == j)))
    return worst


def distance(weight, to):
    """The slow reference for each set of size 1, in float64."""
    if to == "orthogonal":
        return isometry_error(weight)
    if to == "columns":
        return float((weight.detach().double().norm(dim=0) - 1.0).abs().max())
    return max(0.0, float(torch.linalg.svdvals(weight.detach().double())[0]) - 1.0)


def errors(model):
    return {name: isometry_error(getattr(model, name).weight) for name in NAMES}


def problem(width=WIDTH, rows=64):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)


def descend(loss, optimizer, steps):
    """Take so many steps down a function; return its values before each."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def train(model, optimizer, steps, *, width=WIDTH):
    x, y = problem(width)
    x = x.to(next(model.parameters()).dtype)
    return descend(lambda: nn.functional.mse_loss(model(x).float(), y), optimizer, steps)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=2e-2, weight_decay=0.0),
}


def constrained(kind="sgd", where=NAMES, *, model=None, lr=None, **options):
    """A model (`Mixed`), an optimizer of all its parameters, and the constraint on the weights."""
    model = Mixed() if model is None else model
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    return model, optimizer, constrain_(model, optimizer, where=where, **options)


def same_state(one, other):
    """Whether two models, or their state dicts, hold the same numbers bit for bit."""
    states = [part if isinstance(part, dict) else part.state_dict() for part in (one, other)]
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def goes_on_bit_for_bit(build, attach, train):
    """A run that is saved after some steps and loaded before attaching takes the same next steps."""
    model, optimizer = build()
    attach(model, optimizer)
    train(model, optimizer, 5)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    expected = train(model, optimizer, 5)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=True)
    resumed, other = build()
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    handle = attach(resumed, other)
    assert same_state(resumed, weights)
    assert max(row.moved_frobenius for row in handle.report.rows) == 0.0
    assert train(resumed, other, 5) == expected
    assert same_state(resumed, model)
