"""A Hugging Face model keeps its class, keys and files while its projections are exactly
orthogonal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.support.constrained import held
from tests.support.zoo import PLAIN, V

from wellposed.constrain import constrain_

transformers = pytest.importorskip("transformers")


def tiny_bert() -> torch.nn.Module:
    sizes = PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def test_bert_trains_saves_and_loads_as_a_plain_model(tmp_path: Path) -> None:
    model = tiny_bert()
    keys = list(model.state_dict())
    names = ["*.attention.self.*", "*.attention.output.dense", "re:.*output.dense"]
    _, optimizer, handle = held("adamw", names, model=model)
    # 2 layers of query, key, value, attention output and the second feed-forward weight.
    assert len(handle.paths) == 10
    tokens, labels = torch.randint(1, V, (8, 6)), torch.randint(0, 2, (8,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert handle.error().worst <= 1e-5

    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    model.eval()
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, model(input_ids=tokens).logits)
    report = held("adamw", list(handle.paths), model=loaded)[2].report
    assert max(row.moved_frobenius for row in report.rows) == 0.0


def test_the_gain_of_a_pretrained_model_is_fitted_and_its_moves_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_bert().save_pretrained(tmp_path)
    moved = {}
    for gain in (None, 1.0):
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
        with caplog.at_level(logging.INFO):
            _, optimizer, handle = held("adamw", None, model=model, roles="key", gain=gain)
        row = handle.report.rows[0]
        moved[gain] = row.moved_frobenius
        said = caplog.records[-1]
        assert said.levelname == "WARNING"
        assert "constrain_: 2 weights in the set orthogonal of size" in said.getMessage()
        assert f"{row.gain:.3g}" in said.getMessage()
        assert "2 of 2 by more than a tenth" in said.getMessage()
        with caplog.at_level(logging.INFO):
            handle.remove()
            constrain_(model, optimizer, roles="key", gain=gain)
        assert caplog.records[-1].levelname == "INFO"
        assert caplog.records[-1].getMessage().endswith("none moved")
    assert 0.1 < moved[None] < 0.8 * moved[1.0]
    rows = held("sgd", None, model=tiny_bert(), roles="key")[2].report.rows
    assert {row.gain for row in rows} == {1.0}


def test_gpt2_conv1d_weights_are_matrices_too() -> None:
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    _, optimizer, handle = held("adamw", "*.c_*", model=model)
    assert {row.shape for row in handle.report.rows} == {(16, 16), (16, 64), (64, 16)}
    assert [path for path in handle.paths if "c_attn" in path] == [
        f"transformer.h.0.attn.c_attn.weight[{start}:{start + 16}]" for start in (0, 16, 32)
    ]
    tokens = torch.randint(0, 30, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert handle.error().worst <= 1e-5


def test_accelerate_wrapper_is_looked_through() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))
    model, optimizer = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    )
    handle = constrain_(model, optimizer, where="0")
    start = plain[0].weight.detach().clone()
    moved = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(3, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        moved.append(float((plain[0].weight.detach() - start).norm()))
    assert moved[0] == 0.0 < moved[1] == moved[2] < moved[3]
    assert handle.error().worst <= 1e-5
