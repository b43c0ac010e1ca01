"""An embedding of more vectors than dimensions: held at the size it has, its columns stay
orthogonal."""

import math

import pytest
import torch
from tests.support.constrained import OPTIMIZERS, descend, goes_on_bit_for_bit, held, isometry_error
from torch import nn

from wellposed.constrain import constrain_

VOCAB, DIM = 40, 6


class Bag(nn.Module):
    """Mean of word vectors, read out."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.few = nn.Embedding(4, DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1) + self.few(ids % 4).mean(1))


def attached(model):
    return held("adamw", nn.Embedding, model=model, lr=3e-2, embeddings="fit")[1:]


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (32, 7), generator=generator)
    labels = (ids < VOCAB // 3).sum(1).clamp(max=2)
    return descend(lambda: nn.functional.cross_entropy(model(ids), labels), optimizer, steps)


def frame_gain(table):
    """The slow reference: root of the mean eigenvalue of E^T E, which are all equal for orthogonal
    columns."""
    return math.sqrt(float(table.detach().double().square().sum()) / DIM)


def test_columns_stay_orthogonal_at_the_size_they_had_while_training_works():
    model = Bag()
    singular = torch.linalg.svdvals(model.words.weight.detach().double())
    optimizer, handle = attached(model)
    losses = train(model, optimizer, 300)
    gain = frame_gain(model.words.weight)
    assert gain == pytest.approx(float(singular.mean()), rel=5e-3)
    assert gain == pytest.approx(float(f"{gain:.3g}"), rel=1e-6)
    assert isometry_error(model.words.weight / gain) <= 1e-5
    assert handle.error().worst <= 1e-5
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("vocab", [DIM, DIM - 1])
def test_a_small_table_with_a_vector_of_padding_gives_it_a_direction_of_its_own(vocab):
    table = nn.Embedding(vocab, DIM, padding_idx=0)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(2 * DIM, 2))
    _, optimizer, handle = held("adamw", "0", model=model, lr=3e-2, embeddings="fit")
    ids = torch.randint(0, vocab, (32, 2))
    descend(lambda: nn.functional.cross_entropy(model(ids), ids[:, 0] % 2), optimizer, 50)
    assert handle.error().worst <= 1e-5


def test_the_vector_of_padding_stays_zero_and_no_vector_is_longer_than_the_gain():
    model = Bag()
    optimizer, _ = attached(model)
    train(model, optimizer, 50)
    lengths = model.words.weight.detach().norm(dim=1)
    assert float(lengths[0]) == 0.0
    assert float(lengths.max()) <= frame_gain(model.words.weight) * (1 + 1e-5)


def test_a_token_that_is_never_seen_moves_by_the_common_turn_alone():
    model = Bag()
    optimizer, _ = attached(model)
    before = model.words.weight.detach().clone()
    rare = slice(VOCAB - 8, VOCAB)
    ids = torch.randint(1, VOCAB - 8, (32, 7), generator=torch.Generator().manual_seed(1))
    descend(lambda: nn.functional.cross_entropy(model(ids), ids[:, 0] % 3), optimizer, 30)
    after = model.words.weight.detach()
    # one d x d matrix, fitted on six of the eight unseen vectors, explains the other two
    turn = torch.linalg.solve(before[rare][:DIM].double(), after[rare][:DIM].double())
    turned = before[rare].double() @ turn
    torch.testing.assert_close(turned, after[rare].double(), atol=1e-4, rtol=0)
    assert float((after - before)[: VOCAB - 8].norm(dim=1)[1:].min()) > 0.1


def test_a_resumed_run_goes_on_bit_for_bit():
    def build():
        model = Bag()
        return model, OPTIMIZERS["adamw"](list(model.parameters()))

    def attach(model, optimizer):
        return constrain_(model, optimizer, where=nn.Embedding, embeddings="fit")

    goes_on_bit_for_bit(build, attach, train)
