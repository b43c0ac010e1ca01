"""``reproduce frontier/characters``: its verdict on both sides, its two bounds, and a run of
seconds."""

import pytest
import torch

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.models import WellposedConfig, WellposedForCausalLM, embedding_radius
from wellposed.nn import InverseDAttention
from wellposed_studies.frontier.characters import (
    SHARES,
    Measured,
    NextCharacters,
    attention_slope,
    next_characters,
    printed_bound,
    rivalry,
    sound_bound,
)
from wellposed_studies.reproduce import reproduce
from wellposed_studies.tuning import Tuned

RADII = len(SHARES) - 1


def outcome(accuracy, sound):
    return NextCharacters(accuracy, sound, None, (accuracy, *[accuracy / 2] * RADII))


def test_accuracies_are_compared_only_where_no_bound_of_ours_is_larger():
    theirs = Measured("theirs", Tuned([], []), [outcome(0.2, 1.5), outcome(0.2, 1.2)])
    tighter = rivalry(
        Measured("ours", Tuned([], []), [outcome(0.4, 1.4), outcome(0.3, 1.5)]),
        theirs,
    )
    assert tighter.accuracy == [pytest.approx(0.2), pytest.approx(0.1)]
    assert tighter.certified == [[pytest.approx(0.1), pytest.approx(0.05)]] * RADII
    looser = rivalry(
        Measured("ours", Tuned([], []), [outcome(0.4, 1.4), outcome(0.3, 1.6)]),
        theirs,
    )
    assert looser.accuracy == []
    failed = rivalry(Measured("ours", Tuned([], []), [outcome(0.4, 1.4), None]), theirs)
    assert failed.accuracy == [pytest.approx(0.2), pytest.approx(-0.2)]


def test_the_printed_slope_of_attention_is_exceeded_with_four_heads_and_the_sound_one_is_not():
    """All weights the identity and tokens of root mean square 1: printed 1, as for one head."""
    width = 16
    heads = 4
    tokens = 4
    attention = InverseDAttention(width, heads).double()
    for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        torch.nn.init.eye_(part.weight)
    radius = width**0.5
    attacked = lipschitz_lower_bound(
        attention, (tokens, width), restarts=4, steps=60, radius=radius, seed=0
    ).value
    assert attention_slope(1.0, 1.0, 1.0, 1.0, radius=1.0) == 1.0 < attacked
    assert attacked <= certify(attention, seq_len=tokens, radius=radius).total


def newhouse_model(heads):
    """Every weight has norm 1, as the study holds it."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "max_position_embeddings": 6,
    }
    parts = {"attention": "inverse_d", "residual": "mean", "norm": "none", "position": "none"}
    parts |= {"activation": "unit_gelu", "tie_word_embeddings": False}
    config = WellposedConfig(num_attention_heads=heads, **sizes, **parts)
    model = WellposedForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.div_(torch.linalg.matrix_norm(weight, 2))
    return model


def test_the_printed_bound_is_the_formula_term_by_term():
    model = newhouse_model(2)
    weights = {
        name: weight.detach() for name, weight in model.named_parameters() if weight.ndim == 2
    }
    sizes = {
        name: float(torch.linalg.eigvalsh(weight.T @ weight)[-1].sqrt())
        for name, weight in weights.items()
    }
    largest = bound = embedding_radius(model)
    for layer in ("model.layers.0", "model.layers.1"):
        q, k, v, o = (sizes[f"{layer}.attention.{part}_proj.weight"] for part in "qkvo")
        mlp = (
            sizes[f"{layer}.feedforward.up_proj.weight"]
            * sizes[f"{layer}.feedforward.down_proj.weight"]
            / 1.1289
        )
        bound *= 3 / 4 + o * v * (1 + 2 * q * k * largest**2) / 3 / 4
        bound *= 3 / 4 + mlp / 4
        largest *= (3 / 4 + o * v / 3 / 4) * (3 / 4 + mlp / 4)
    assert printed_bound(model.model) == pytest.approx(bound, rel=1e-6)


def test_the_sound_bound_holds_for_the_map_from_tokens_to_states():
    model = newhouse_model(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    radius = embedding_radius(model)
    attacked = lipschitz_lower_bound(
        model.model, (6, 8), restarts=3, steps=40, radius=radius, seed=0
    ).value
    assert 0 < attacked * radius / model.model.embeddings.scale <= sound_bound(model, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_perturbation_breaks_a_certified_character(dtype):
    model = newhouse_model(2)
    model.to(dtype=dtype)
    ids = torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(0))
    measured = next_characters(model, [ids], SHARES, printed=True)
    assert list(measured.certified) == sorted(measured.certified, reverse=True)
    assert measured.certified[0] == measured.accuracy > measured.certified[-1]
    assert measured.certified[2] > 0
    vectors = model.get_input_embeddings()(ids).detach()
    radius = float(vectors.norm(dim=-1).max())
    for share, certified in zip(SHARES, measured.certified, strict=True):
        delta = torch.randn(vectors.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        moved = vectors + share * radius * delta / delta.norm(dim=-1, keepdim=True)
        right = model(inputs_embeds=moved).logits[:, :-1].argmax(-1) == ids[:, 1:]
        assert float(right.double().mean()) >= certified


def test_the_text_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="give --data FILE"):
        reproduce("frontier/characters", scale="toy", out=tmp_path)
