"""Losses of certified margins against their definitions, written out in float64."""

from __future__ import annotations

import pytest
import torch

from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.models import WellposedConfig, WellposedForCausalLM
from wellposed.training import TrainOptions
from wellposed.training.loop.step import certified_logits, hinge_sum, rows_of


def test_the_hinge_is_how_far_another_class_can_come_ahead() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 4, (20,))
    expected = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        expected += max(0.0, max(row[k] - row[label] for k in range(4) if k != label))
    found, count = hinge_sum(logits, labels)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert int(count) == 20
    labels[3] = -100
    without = hinge_sum(torch.cat([logits[:3], logits[4:]]), torch.cat([labels[:3], labels[4:]]))
    found, count = hinge_sum(logits.reshape(4, 5, 4), labels.reshape(4, 5))
    assert float(found) == pytest.approx(float(without[0]), rel=1e-12)
    assert int(count) == 19


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_next_token_has_no_hinge_loss_exactly_where_its_certified_radius_reaches_r(
    tied: bool,
) -> None:
    torch.manual_seed(0)
    config = WellposedConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, norm="none", unit_embeddings=True,
        attention="ball", feedforward="maxmin", residual="convex", max_position_embeddings=6, dropout=0.0,
        attention_dropout=0.0, tie_word_embeddings=tied,
    )  # fmt: skip
    model = WellposedForCausalLM(config).double().eval()
    ids = torch.randint(0, 9, (8, 6))
    logits = model(input_ids=ids).logits
    certificate = certify(model, seq_len=6)
    assert certificate.head is not None
    ids[:, 1:] = logits[:, :-1].argmax(-1)  # so that some radii are above 0
    logits = model(input_ids=ids).logits
    rows = rows_of("causal_lm", ids)
    assert rows[:, -1].tolist() == [-100] * 8
    here, classes = logits[:, :-1].reshape(-1, 9), ids[:, 1:].reshape(-1)
    radii = certificate.radius(here, classes)
    body = certificate.head[1]
    r = float(radii[radii > 0].median()) * (1 + 1e-4) * body
    shifted = certified_logits(logits, rows, model, r)[:, :-1].reshape(-1, 9)
    for row, radius in enumerate(radii.tolist()):
        one = slice(row, row + 1)
        assert (float(hinge_sum(shifted[one], classes[one])[0]) == 0.0) == (radius * body >= r)
    assert any(radius * body >= r for radius in radii.tolist())


def test_an_encoder_decoder_has_no_margin() -> None:
    with pytest.raises(ConfigError, match="received an encoder-decoder"):
        rows_of("seq2seq_lm", torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"margin_loss": "ce", "margin_radius": 0.1}, "margin_radius = 0.1 with margin_loss = ce"),
        ({"margin_loss": "certified"}, "margin_loss = certified needs a margin_radius"),
        ({"margin_loss": "hinge"}, "margin_loss = hinge needs a margin_radius"),
        (
            {"margin_loss": "hinge", "margin_radius": 0.1, "label_smoothing": 0.1},
            "label_smoothing = 0.1",
        ),
        (
            {"margin_loss": "mse"},
            "margin_loss = 'mse', expected 'ce', 'certified', 'hinge', 'words:K' or None",
        ),
        *(
            ({"margin_loss": loss}, "expected words:K with a number K above 0")
            for loss in ("words", "words:", "words:0", "words:-1", "words:two", "words:nan")
        ),
        ({"margin_loss": "words:2", "margin_radius": 0.1}, "margin_radius = 0.1"),
        ({"margin_loss": "words:2", "parallel": "fsdp"}, "parallel = fsdp with margin_loss"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainOptions(**options)  # pyright: ignore[reportArgumentType]
