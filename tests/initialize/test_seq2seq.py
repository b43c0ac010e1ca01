"""T-Fixup on our encoder-decoder: the table of Huang et al. (2020), sharing, the option init,
depth."""

from __future__ import annotations

import pytest
import torch
from tests.support.initialized import PLAIN, SPECIAL, seq2seq
from torch import Tensor

from wellposed.initialize import t_fixup_
from wellposed.models import WellposedConfig, WellposedForSeq2SeqLM

IWSLT = {
    "vocab_size": 1000, "hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1024, "activation": "relu",
    "num_hidden_layers": 6, "norm": "none", "position": "sinusoidal",
}  # fmt: skip
# standard deviations at N = 6, d = 512, dff = 1024, and factors (appendix C and the authors' code)
TABLE = {
    ("encoder", "value"): (0.018919, 0.42809), ("encoder", "output"): (0.018919, 0.42809),
    ("encoder", "feedforward_in"): (0.015447, 0.42809), ("encoder", "feedforward_out"): (0.015447, 0.42809),
    ("decoder", "value"): (0.016303, 0.36889), ("decoder", "output"): (0.016303, 0.36889),
    ("decoder", "feedforward_in"): (0.013311, 0.36889), ("decoder", "feedforward_out"): (0.013311, 0.36889),
    (None, "token_embedding"): (0.016303, 0.36889), (None, "output_embedding"): (0.044194, 1.0),
}  # fmt: skip


def test_every_number_of_the_table_and_the_size_of_the_model() -> None:
    torch.manual_seed(0)
    model = WellposedForSeq2SeqLM(WellposedConfig(**IWSLT, tie_word_embeddings=False))
    report = t_fixup_(model)
    seen = set()
    for row in report.rows:
        if row.role in ("query", "key"):
            assert (row.factor, row.drawn) == (1.0, True)
            assert row.std_after == pytest.approx(0.044194, rel=0.01)
            continue
        std, factor = TABLE[row.stack, row.role]
        seen.add((row.stack, row.role))
        assert row.factor == pytest.approx(factor, abs=1e-5)
        assert row.std_after / row.std_before == pytest.approx(row.factor, abs=1e-6)
        assert row.std_after == pytest.approx(std, rel=0.01)
    assert seen == set(TABLE)
    tables = sum(p.numel() for p in model.parameters() if p.shape == (1000, 512))
    assert (
        sum(p.numel() for p in model.parameters()) - tables == 31_512_576
    )  # without the paper code's dead norms
    assert tables == 2 * 1000 * 512


def tables_of(model: WellposedForSeq2SeqLM) -> dict[str, float]:
    return {row.name: row.factor for row in t_fixup_(model).rows if row.role == "token_embedding"}


def test_shared_tables_are_scaled_once_by_the_encoders_depth_and_own_ones_by_their_own() -> None:
    shared = seq2seq(2, 5, norm="none")
    assert tables_of(shared) == {
        "model.encoder.embeddings.token.weight": pytest.approx((9 * 2) ** -0.25)
    }
    assert shared.lm_head.weight is shared.model.encoder.embeddings.token.weight
    assert tables_of(seq2seq(2, 5, norm="none", share_embeddings=False)) == {
        "model.encoder.embeddings.token.weight": pytest.approx((9 * 2) ** -0.25),
        "model.decoder.embeddings.token.weight": pytest.approx((9 * 5) ** -0.25),
    }


@pytest.mark.parametrize("tie", [True, False])
def test_init_in_the_configuration_is_the_call_on_the_model(tie: bool) -> None:
    built = seq2seq(2, 3, norm="none", init="t_fixup", tie_word_embeddings=tie)
    plain = seq2seq(2, 3, norm="none", tie_word_embeddings=tie)
    report = {row.name: row for row in t_fixup_(plain).rows}
    for name, parameter in built.named_parameters():
        if name in report and parameter.numel() >= 240:
            # two draws of at least 240 numbers of the same law
            assert parameter.std().item() == pytest.approx(report[name].std_after, rel=0.3), name
    assert {name for name, _ in built.named_parameters()} == {
        name for name, _ in plain.named_parameters()
    }


def test_token_norms_that_enter_are_those_of_the_derivation_up_to_the_positions() -> None:
    sizes = {"position": "sinusoidal", "norm": "none", "hidden_size": 64, "scale_embeddings": False}
    model = seq2seq(6, 6, **sizes, init="t_fixup")
    ids = torch.randint(3, PLAIN["vocab_size"], (4, 8))
    report = t_fixup_(model, batch={"input_ids": ids, "decoder_input_ids": ids})
    # tokens of norm x = (9 * 6)^(-1/4) and sines of norm x / sqrt(2)
    for stack in ("encoder", "decoder"):
        assert report.assumed[stack] == pytest.approx(0.36889, abs=1e-5)
        assert report.entering[stack] == pytest.approx(0.36889 * 1.5**0.5, rel=0.1)
    unscaled = seq2seq(6, 6, **sizes, position_scale=1.0, init="t_fixup")
    far = t_fixup_(unscaled, batch={"input_ids": ids, "decoder_input_ids": ids}).entering["encoder"]
    assert far > 1.5 * report.entering["encoder"]


def test_thirty_and_thirty_layers_train_without_norm_and_without_warm_up() -> None:
    torch.manual_seed(0)
    config = WellposedConfig(
        **{**PLAIN, **SPECIAL, "hidden_size": 32, "num_hidden_layers": 30}, max_position_embeddings=16, norm="none",
        activation="relu", position="sinusoidal", init="t_fixup",
    )  # fmt: skip
    model = WellposedForSeq2SeqLM(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    source = torch.randint(3, PLAIN["vocab_size"], (8, 6))
    losses: list[float] = []
    for _ in range(3):
        loss: Tensor = model(input_ids=source, labels=source.flip(1)).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(PLAIN["vocab_size"]).log().item(), rel=0.2)
    assert losses[-1] < losses[0]
