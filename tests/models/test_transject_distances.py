"""TransJect keeps distances, before and after training and against attacks, and goes back to where
it started."""

import pytest
import torch
from tests.support.transject import IDS, MASK, SETTINGS, SIZES, awake, blocks

from wellposed.constrain import constrain_
from wellposed.models import TransJectConfig, TransJectForSequenceClassification, TransJectModel


def orthogonality_error(model):
    """Return the largest |W^T W - I| of every square weight of attention, feed-forward and
    spectrum, in float64."""
    names = ("left", "right", "up_proj", "down_proj", "basis")
    weights = [
        parameter.detach().double()
        for path, parameter in model.named_parameters()
        if path.split(".")[-2] in names
    ]
    assert len(weights) >= 4
    return max(
        float((weight.T @ weight - torch.eye(len(weight))).abs().max()) for weight in weights
    )


@pytest.fixture(scope="module")
def trained():
    """Return a classifier after 300 steps of AdamW with a large learning rate."""
    torch.manual_seed(0)
    settings = {"num_experts": 2, "num_labels": 3, "num_hidden_layers": 2}
    model = TransJectForSequenceClassification(TransJectConfig(**{**SIZES, **settings}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    constrain_(model, optimizer, where=model.orthogonal_patterns())
    ids = torch.randint(0, 13, (8, 6))
    losses = []
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids[:, 0] % 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    return model.eval()


def test_orthogonality_after_training_and_after_files(trained, tmp_path):
    assert orthogonality_error(trained) <= 1e-5
    trained.save_pretrained(tmp_path)
    loaded = TransJectForSequenceClassification.from_pretrained(tmp_path)
    assert orthogonality_error(loaded) <= 1e-5
    assert torch.equal(loaded(input_ids=IDS).logits, trained(input_ids=IDS).logits)
    assert any(abs(float(layer.residual.weight.detach())) > 0.05 for layer in blocks(trained))


def stretch(states, start):
    """Return how much the distance of the first two tokens grew."""
    return (states[0, 0] - states[0, 1]).norm() / (start[0, 0] - start[0, 1]).norm()


def bounds(model):
    """Return the least and the largest factor after each layer (theory note B8, statement A)."""
    lower, upper = [1.0], [1.0]
    for layer in blocks(model):
        size = abs(float(torch.tanh(layer.residual.weight.detach().double()))) / len(blocks(model))
        lower.append(lower[-1] * (1 - size) ** 2)
        upper.append(upper[-1] * (1 + size) ** 2)
    return lower, upper


@pytest.mark.parametrize("which", ["random", "trained", "large residuals"])
def test_distances_stay_within_the_bounds_for_random_and_attacked_pairs(trained, which):
    if which == "trained":
        model = trained.model
    else:
        model = awake(
            TransJectModel(TransJectConfig(**SIZES, num_experts=2)),
            0.4 if which == "random" else 4.0,
        )
    lower, upper = bounds(model)
    for _ in range(20):
        with torch.no_grad():
            output = model(input_ids=torch.randint(0, 13, (1, 6)), output_hidden_states=True)
        for index, state in enumerate(output.hidden_states):
            distances, starts = (
                torch.cdist(x[0].double(), x[0].double()) for x in (state, output.hidden_states[0])
            )
            ratios = (distances / starts)[~torch.eye(6, dtype=torch.bool)]
            assert (
                lower[index] * (1 - 1e-5)
                <= float(ratios.min())
                <= float(ratios.max())
                <= upper[index] * (1 + 1e-5)
            )
    for sign in (1.0, -1.0):
        attacked = [attack(model, sign, seed) for seed in range(2)]
        assert all(
            lower[-1] * (1 - 1e-4) <= ratio <= upper[-1] * (1 + 1e-4) for _, ratio in attacked
        )
        assert all(sign * (after - before) > 0 for before, after in attacked), (
            "the attack found nothing"
        )


def attack(model, sign, seed):
    """Push the first two of six tokens to stretch (or shrink) their distance, with sigma and gates
    held."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 6, 16, generator=generator)
    with torch.no_grad():
        kept = model.stack(x)

    def ratio(pair):
        whole = torch.cat((pair, x[:, 2:]), dim=1)
        return stretch(
            model.stack(whole, sigma=kept.sigma, gates=kept.gates).last_hidden_state, whole
        )

    pair = x[:, :2].clone().requires_grad_()
    optimizer = torch.optim.Adam([pair], lr=0.1)
    before = float(ratio(pair).detach())
    for _ in range(40):
        optimizer.zero_grad()
        (-sign * ratio(pair)).backward()
        optimizer.step()
    return before, float(ratio(pair).detach())


@pytest.mark.parametrize("settings", SETTINGS[:2])
def test_a_fresh_model_is_the_identity(settings):
    output = TransJectModel(TransJectConfig(**SIZES, **settings))(
        input_ids=IDS, output_hidden_states=True
    )
    assert all(torch.equal(state, output.hidden_states[0]) for state in output.hidden_states)


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_the_way_back(settings):
    model = awake(TransJectModel(TransJectConfig(**SIZES, **settings)))
    output = model(input_ids=IDS, attention_mask=MASK, output_hidden_states=True)
    start, report = model.invert(output.last_hidden_state, output.sigma, output.gates)
    error = float((start - output.hidden_states[0]).norm(dim=-1).max())
    # The bound is for the exact map of the hidden state as given, which is rounded once.
    assert error <= report.error_bound + 1e-5
    assert error < 1e-4
    assert float((output.last_hidden_state - output.hidden_states[0]).abs().max()) > 0.1
