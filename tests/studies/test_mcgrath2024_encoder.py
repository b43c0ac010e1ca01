"""McGrath (2024) on a pretrained encoder: loaded from a folder, fine-tuned gently, refused where
nothing reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.mcgrath2024 import TINY
from transformers import BertModel

from wellposed.errors import ConfigError
from wellposed.recipes.reproduce import reproduce
from wellposed.tasks.data.minbert import read_minbert
from wellposed_studies.mcgrath2024 import encoders, multitask
from wellposed_studies.mcgrath2024 import figures_1_3_table_1_qr as recipes
from wellposed_studies.mcgrath2024 import grid as study


def test_a_pretrained_encoder_is_loaded_from_a_folder(
    minbert: Path, sets: encoders.EncodedSets, encoder: Path, tmp_path: Path
) -> None:
    import dataclasses

    options = dataclasses.replace(TINY, encoder=str(encoder), steps=1)
    loaded = encoders.encode_sets(read_minbert(minbert), options)
    assert loaded.train["sts"].columns == sets.train["sts"].columns
    model = encoders.build_multitask_model(options, loaded.tokenizer)
    torch.testing.assert_close(
        model.encoder.embeddings.word_embeddings.weight,
        BertModel.from_pretrained(encoder).embeddings.word_embeddings.weight,
    )
    assert multitask.train_multitask(loaded, options)["scores"].keys() == {
        "sst",
        "para",
        "sts",
        "overall",
    }
    with pytest.raises(ConfigError, match="cannot be loaded"):
        encoders.encode_sets(
            read_minbert(minbert), dataclasses.replace(TINY, encoder=str(tmp_path / "nothing"))
        )


def test_the_recipe_of_a_pretrained_encoder(
    minbert: Path, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(study.SCALES, "toy", TINY)
    done = reproduce(
        "mcgrath2024/pretrained", scale="toy", out=tmp_path, data=str(minbert), encoder=str(encoder)
    )
    scores = [row for row in done.result.rows if "overall" in row]
    assert [row["cell"] for row in scores] == ["baseline", *recipes.PRETRAINED]
    trials = tmp_path / "runs" / f"mcgrath2024-{encoder.name}-toy" / "trials"
    runs = [json.loads((trials / "baseline" / f"seed-{seed}.json").read_text()) for seed in (0, 1)]
    assert scores[0]["overall"] == pytest.approx(sum(run["scores"]["overall"] for run in runs) / 2)
    first = runs[0]["scale_free_errors"][0]
    weight = BertModel.from_pretrained(encoder).encoder.layer[0].attention.self.key.weight
    gram = (weight @ weight.T).detach().double()
    cosine = gram.trace() / (16**0.5 * torch.linalg.matrix_norm(gram))
    assert first["encoder.0.key"] == pytest.approx((1 - cosine.item() ** 2) ** 0.5, rel=1e-5)
    assert first.keys() == {
        name for name in runs[0]["errors"][0] if not name.startswith("affinity")
    }
    claim = json.loads(done.files[2].read_text())
    assert claim["command"].endswith("--encoder ENCODER")
    assert claim["encoder"] == encoder.name


def test_an_encoder_is_asked_for_and_refused_where_nothing_reads_it(
    minbert: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="give --encoder FOLDER"):
        reproduce("mcgrath2024/pretrained", scale="toy", out=tmp_path, data=str(minbert))
    with pytest.raises(ConfigError, match=r"reads no encoder.*these do: mcgrath2024/figure-1"):
        reproduce("kim2021/figure-2", scale="toy", out=tmp_path, encoder="x")
