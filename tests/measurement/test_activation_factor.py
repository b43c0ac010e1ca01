"""Activation factors and token distances against eq. 5 written out, and against the bounds of a
Lipschitz map."""

import math
import statistics

import pytest
import torch
from tests.support.refusal import refuses
from torch import nn

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.measurement import activation_factor, hidden_states, token_distances


def distance(first, second, metric):
    a, b = first.double(), second.double()
    if metric == "euclidean":
        return math.sqrt(sum((u - v) ** 2 for u, v in zip(a.tolist(), b.tolist(), strict=True)))
    inner = sum(u * v for u, v in zip(a.tolist(), b.tolist(), strict=True))
    return inner if metric == "dot" else 1 - inner / float(a.norm() * b.norm())


def written_out(states, lengths, metric):
    """Eq. 5: every ordered pair i != j of each sequence, then the mean over sequences."""
    factors = []
    for layer in states[1:]:
        means = []
        for index, length in enumerate(lengths):
            pairs = [(i, j) for i in range(length) for j in range(length) if i != j]
            ratios = [
                distance(layer[index][i], layer[index][j], metric)
                / distance(states[0][index][i], states[0][index][j], metric)
                for i, j in pairs
            ]
            means.append(statistics.fmean(ratios))
        factors.append(statistics.fmean(means))
    return factors


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
def test_eq_5_with_padding(metric):
    states = [torch.randn(2, 6, 4) for _ in range(3)]
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    found = activation_factor(states, metric=metric, attention_mask=mask)
    assert found.mean == pytest.approx(written_out(states, [6, 4], metric), rel=1e-9)
    assert (found.pairs, found.left_out, found.short, found.status) == (15 + 6, 0, 0, "exact")
    assert [len(row) for row in found.per_sequence] == [2, 2]
    assert found.rows()[1]["mean"] == found.mean[1]


def test_more_tokens_than_a_block_holds():
    first, second = torch.randn(1, 700, 2).double(), torch.randn(1, 700, 2).double()
    ratios = torch.pdist(second[0]) / torch.pdist(first[0])
    found = activation_factor([first, second])
    assert found.pairs == 700 * 699 // 2
    assert found.mean[0] == pytest.approx(float(ratios.mean()))
    least, most = float(ratios.min()), float(ratios.max())
    assert (found.smallest[0], found.largest[0]) == pytest.approx((least, most))


def test_sampled_pairs_estimate_the_mean_and_say_so():
    states = [torch.randn(20, 30, 8), torch.randn(20, 30, 8)]
    exact, drawn = activation_factor(states), activation_factor(states, pairs=100, seed=1)
    assert drawn.status == "empirical"
    assert drawn.pairs == 2000
    assert drawn.standard_error[0] is not None
    assert drawn.mean != exact.mean
    assert drawn.mean[0] == pytest.approx(exact.mean[0], abs=5 * drawn.standard_error[0])
    again, other = (activation_factor(states, pairs=100, seed=seed) for seed in (1, 2))
    assert drawn == again != other


def test_pairs_without_a_ratio_are_counted():
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [2.0, 0.0], [0.0, 3.0]]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = activation_factor([x, 3 * x], attention_mask=mask)
    assert (found.mean, found.pairs, found.left_out, found.short) == ([3.0], 2, 1, 1)
    assert found.standard_error == [None]
    # two with a zero vector, one of equal ones
    assert activation_factor([x, 3 * x], metric="cosine").left_out == 3


@pytest.mark.parametrize("metric", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("pairs", [None, 5])
def test_divergence_is_named_and_not_left_out(metric, pairs):
    x = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(0))
    diverged = x.clone()
    diverged[1, 0] = math.inf
    says = r"activation_factor: .*\n  state 2: 2 of 16 values, in 1 tokens\n"
    with pytest.raises(ConvergenceError, match=says):
        activation_factor([x, 2 * x, diverged], metric=metric, pairs=pairs)
    says = r"state 0: 16 of 16 values, in 8 tokens\n  state 1: 16 of 16"
    with pytest.raises(ConvergenceError, match=says):
        activation_factor([x * math.nan, x * math.nan], metric=metric, pairs=pairs)
    # Padding may hold anything.
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    found = activation_factor([x, 2 * x, diverged], metric=metric, attention_mask=mask, pairs=pairs)
    assert found.left_out == 0
    assert found.mean[1] == pytest.approx(1)


def test_distances_that_overflow():
    x = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]], dtype=torch.float64)
    for metric in ("euclidean", "dot"):
        refuses(ConvergenceError, "overflow", activation_factor, [x, 1e300 * x], metric=metric)


def test_a_state_of_zeros_has_no_angles():
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    y = x.clone()
    y[0, 0] = 0
    found = activation_factor([x, y], metric="cosine")
    assert (found.mean, found.pairs, found.left_out) == (pytest.approx([1.0]), 1, 2)
    refuses(ConfigError, "no zero vector", activation_factor, [x, 0 * x], metric="cosine")


def test_token_distances_keep_near_tokens_apart():
    x = torch.tensor([[[1000.0, 0.0], [1000.001, 0.0], [0.0, 0.0]]])
    near, _ = token_distances([x, x], attention_mask=torch.tensor([[1, 1, 0]]))
    assert near[0, 0, 1].item() == pytest.approx(float(x[0, 1, 0]) - 1000.0, rel=1e-9)
    assert near[0, 2].isnan().all()
    cosine, _ = token_distances([x, x], metric="cosine")
    assert cosine[0, 0, 1] == 0.0
    assert cosine[0, 0, 2].isnan()


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x, output_hidden_states=False):
        return {"hidden_states": (x, self.drop(2 * x))} if output_hidden_states else {}


def test_states_of_a_model_are_read_in_evaluation_mode():
    model, x = Doubling().train(), torch.randn(1, 4, 3)
    assert torch.equal(hidden_states(model, {"x": x})[1], 2 * x)
    assert model.training
    assert activation_factor(hidden_states(model, {"x": x})).mean == [2.0]


def test_bad_input():
    x = torch.randn(1, 3, 2)
    refuses(ConfigError, "metric", activation_factor, [x, x], metric="manhattan")
    refuses(ConfigError, "pairs = 0", activation_factor, [x, x], pairs=0)
    with pytest.raises(ConfigError, match="two real tokens"):
        activation_factor([x, x], attention_mask=torch.tensor([[1, 0, 0]]))
    refuses(ConfigError, "output_hidden_states", activation_factor, {"logits": x})
    wrong = r"tokens of state 0:\n  state 1: torch.float32 \(1, 2, 2\)$"
    refuses(ShapeError, wrong, activation_factor, [x, x[:, :2]])
    refuses(ShapeError, "attention_mask", token_distances, [x, x], attention_mask=torch.ones(1, 2))
    refuses(ShapeError, "received 1 hidden states; expected", token_distances, [x])
    refuses(ConfigError, "cannot be asked", hidden_states, nn.Linear(2, 2), {"input": x})
