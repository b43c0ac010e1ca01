"""The table of McGrath (2024) at toy size: scores, losses, batches, penalties, and what a seed
decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.mcgrath2024 import TINY
from torch.nn import functional as F

from wellposed.errors import ConfigError
from wellposed.functional import gram_penalty, orthogonality_error
from wellposed.tasks.data.minbert import read_minbert
from wellposed_studies.mcgrath2024 import encoders, multitask
from wellposed_studies.mcgrath2024 import grid as study
from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions, overall_score


def test_the_overall_score_gives_every_row_of_his_table() -> None:
    for row in study.PAPER_TABLE.values():
        assert overall_score(row) == pytest.approx(row["overall"], abs=6e-5)


def test_the_grid_is_his_sweep_and_the_qr_forms() -> None:
    cells = study.grid()
    assert len(cells) == 1 + 3 * 3 + 2 * 3
    assert len({cell.name for cell in cells}) == len({cell.folder for cell in cells}) == 16
    by_name = {cell.name: cell for cell in cells}
    assert by_name["baseline"].penalty() is None
    assert by_name["key+query:1e-4"].penalty() == {"key": 1e-4, "query": 1e-4, "form": "gram"}
    assert by_name["gram_schmidt:1e-6"].penalty() == {
        "key": 1e-6, "query": 1e-6, "form": "qr", "qr_method": "gram_schmidt",
    }  # fmt: skip
    assert [cell.name for cell in study.chosen_cells(["query:1e-2"])] == ["baseline", "query:1e-2"]
    value, embedding = study.chosen_cells(["value:1e-2", "embedding:1e-6"])[1:]
    assert (value.penalty(), embedding.penalty()) == (
        {"value": 1e-2, "form": "gram"}, {"embedding": 1e-6, "form": "gram"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="nearest: query:1e-2"):
        study.chosen_cells(["qury:1e-2"])


def test_losses_are_those_of_the_paper() -> None:
    logits = torch.randn(6, 5)
    labels = torch.tensor([0.0, 1, 2, 3, 4, 0])
    torch.testing.assert_close(
        multitask.task_loss("sst", logits, labels), F.cross_entropy(logits, labels.long())
    )
    output, duplicate = torch.randn(6, 1), torch.tensor([1.0, 0, 1, 1, 0, 0])
    expected = -(
        duplicate * F.logsigmoid(output[:, 0]) + (1 - duplicate) * F.logsigmoid(-output[:, 0])
    ).mean()
    torch.testing.assert_close(multitask.task_loss("para", output, duplicate), expected)
    expected = (5 / (1 + torch.exp(-output[:, 0])) - labels).square().mean()
    torch.testing.assert_close(multitask.task_loss("sts", output, labels), expected)
    cosine = multitask.task_loss("sts", 3 * labels[:, None], labels, sts_loss="cosine")
    assert cosine.item() == pytest.approx(0, abs=1e-6)


def test_the_cosine_of_one_output_node_has_no_gradient() -> None:
    output = torch.randn(6, 1, requires_grad=True)
    F.cosine_embedding_loss(output, torch.rand(6, 1) + 0.1, torch.ones(6)).backward()
    assert output.grad is not None
    assert output.grad.abs().max() < 1e-6
    multitask.task_loss("sts", output, torch.rand(6), sts_loss="cosine").backward()
    assert output.grad.abs().max() > 1e-3


def test_pearson_agrees_with_numpy_and_a_constant_orders_nothing() -> None:
    x, y = torch.randn(50), torch.randn(50)
    assert multitask.pearson(x, y) == pytest.approx(
        torch.corrcoef(torch.stack([x, y]).double())[0, 1].item(), abs=1e-12
    )
    assert multitask.pearson(torch.full((50,), 0.3), y) == 0.0


def test_batches_hold_every_row_once_a_pass() -> None:
    stream = multitask.endless_batches(10, 4, seed=1)
    drawn = [index for _ in range(5) for index in next(stream)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    again = multitask.endless_batches(10, 4, seed=1)
    assert [next(again) for _ in range(2)] == [drawn[:4], drawn[4:8]]


def test_affinity_errors_leave_padding_out(sets: encoders.EncodedSets) -> None:
    torch.manual_seed(0)
    model = encoders.build_multitask_model(TINY, sets.tokenizer).eval()
    rows = sets.valid["sst"]
    short, _ = encoders.batch_of(rows, [0], sets.tokenizer.pad_token_id)
    padded = {name: F.pad(column, (0, 4), value=0) for name, column in short.items()}
    found = multitask.affinity_errors(model, short)
    assert list(found) == ["affinity.0"]
    assert multitask.affinity_errors(model, padded) == pytest.approx(found, rel=1e-5)
    assert model.encoder.config._attn_implementation == "sdpa"


def test_training_lowers_the_loss_and_reaches_the_reference_scores(minbert: Path) -> None:
    import dataclasses

    options = dataclasses.replace(TINY, steps=30, learning_rate=2e-2, batch_size=8, dropout=0.0)
    found = multitask.train_multitask(encoders.encode_sets(read_minbert(minbert), options), options)
    assert found["train_loss"] < 3  # from ln 5 + ln 2 + the variance of the scores, about 4
    assert found["errors"][0]["step"] == 0
    assert found["errors"][-1]["step"] == 30
    assert {
        "encoder.0.query",
        "encoder.0.key",
        "encoder.0.value",
        "token_embedding",
        "affinity.0",
    } <= found["errors"][0].keys()


def test_a_seed_decides_weights_and_batches_whatever_the_penalty(
    sets: encoders.EncodedSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []
    real = multitask.batch_of
    monkeypatch.setattr(
        multitask,
        "batch_of",
        lambda rows, which, pad: drawn.append(list(which)) or real(rows, which, pad),
    )
    baseline = multitask.train_multitask(sets, TINY, seed=1)
    plain = list(drawn)
    drawn.clear()
    penalised = multitask.train_multitask(sets, TINY, seed=1, penalty={"key": 10.0, "form": "gram"})
    assert drawn == plain
    assert penalised["errors"][0] == baseline["errors"][0]
    assert penalised["errors"][-1] != baseline["errors"][-1]
    assert penalised["penalty"] > 0 == baseline["penalty"]
    again = multitask.train_multitask(sets, TINY, seed=1)
    assert again["scores"] == baseline["scores"]
    assert again["errors"] == baseline["errors"]


def test_the_penalty_of_a_cell_is_his_equation(sets: encoders.EncodedSets) -> None:
    from wellposed import OrthogonalityPenalty

    model = encoders.build_multitask_model(TINY, sets.tokenizer)
    key = model.encoder.encoder.layer[0].attention.self.key.weight
    cell = study.chosen_cells(["key:1e-2"])[1]
    expected = 1e-2 * torch.linalg.matrix_norm(key @ key.T - torch.eye(16))
    torch.testing.assert_close(OrthogonalityPenalty(model.encoder, **cell.penalty())(), expected)
    assert gram_penalty(key, squared=False, side="rows").item() > 0
    assert orthogonality_error(key).item() > 0


def test_bad_options_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)steps = 0.*learning_rate = -1.*sts_loss = 'l1'"):
        MultiTaskOptions(steps=0, learning_rate=-1, sts_loss="l1")
