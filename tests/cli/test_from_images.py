"""`train image_classification --from`, and what the other commands do with a model of images."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.bert import make_checkpoint
from tests.support.images import class_folders, image_config
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.cli import main
from wellposed.roles import find_roles

FAST = (
    "--steps",
    "2",
    "--batch-size",
    "8",
    "--eval-batches",
    "1",
    "--limit-train",
    "40",
    "--quiet",
)
LEARNING = (
    "--steps",
    "40",
    "--batch-size",
    "16",
    "--eval-every",
    "20",
    "--learning-rate",
    "1e-2",
    "--quiet",
)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("data") / "pets")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pets: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = typed(
        "train image_classification --data", [pets], "--from", [image_config(folder / "vit")]
    )
    succeed([*words, *LEARNING, "--flip", "--out", str(folder / "run")])
    return folder / "run"


def train(source: Path, out: Path, *more: str, task: str = "image_classification") -> int:
    return main(["train", task, "--from", str(source), "--out", str(out), *more])


def test_final_is_loaded_by_transformers_alone_in_a_fresh_process(
    run: Path, pets: Path, tmp_path: Path
) -> None:
    program = """
import json, sys
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained(sys.argv[1])
processor = AutoImageProcessor.from_pretrained(sys.argv[1])
labels = {}
for path in sys.argv[2:]:
    logits = model(**processor(Image.open(path), return_tensors="pt")).logits
    labels[path] = [model.config.id2label[int(logits.argmax())], float(logits.softmax(-1).max())]
assert "wellposed" not in sys.modules
print(json.dumps(labels))
"""
    Image.fromarray(np.full((20, 20), 200, np.uint8)).save(tmp_path / "gray.png")
    images = [*sorted(pets.rglob("0*.*")), tmp_path / "gray.png"]
    ran = subprocess.run(
        [sys.executable, "-c", program, str(run / "final"), *map(str, images)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(ran.stdout)
    listed = tmp_path / "list.txt"
    listed.write_text("\n".join(map(str, images)) + "\n")
    succeed(["predict", str(run), "--input", str(listed), "--output", str(tmp_path / "out.tsv")])
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert [row[2] for row in rows] == list(map(str, images))
    for label, probability, path in rows:
        assert label == found[path][0]
        assert float(probability) == pytest.approx(found[path][1], abs=1e-4)
        assert path == str(tmp_path / "gray.png") or f"/{label}/" in path


def test_predict_takes_an_image_or_a_folder(
    run: Path, pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    succeed(["predict", str(run), "--input", str(pets / "dog" / "01.jpg")])
    assert capsys.readouterr().out.startswith("dog\t")
    succeed(["predict", str(run), "--input", str(pets), "--batch-size", "7"])
    assert len(capsys.readouterr().out.splitlines()) == 48


def test_the_card_and_the_result_tell_how_images_were_read(run: Path) -> None:
    card = (run / "final" / "README.md").read_text()
    assert "from transformers import AutoModelForImageClassification, AutoImageProcessor" in card
    assert 'processor = AutoImageProcessor.from_pretrained("FOLDER")' in card
    result = json.loads((run / "result.json").read_text())
    saved = json.loads((run / "final" / "preprocessor_config.json").read_text())
    assert result["data"]["processor"] == saved
    assert result["results"]["image_classification"]["accuracy,valid"] == 1
    config = json.loads((run / "final" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog"}


def test_a_trained_model_goes_on_with_its_own_processor(
    run: Path, pets: Path, tmp_path: Path
) -> None:
    assert train(run, tmp_path / "more", "--data", str(pets), "--epochs", "1", "--quiet") == 0
    first, second = (
        folder / "final" / "preprocessor_config.json" for folder in (run, tmp_path / "more")
    )
    assert first.read_bytes() == second.read_bytes()
    assert f'processor = "hf:{run / "final"}"' in (tmp_path / "more" / "config.toml").read_text()
    info = json.loads((tmp_path / "more" / "result.json").read_text())["train_info"]
    assert info["started_from"]["new_weights"] == []


@pytest.mark.parametrize(
    ("family", "variants"),
    [
        ("vit", "plain,key:1e-2,query:1e-2,oc3,orthogonal,cosine,l2"),
        ("deit", "plain,oc3,orthogonal,l2"),
        ("beit", "plain,oc3,orthogonal,cosine"),
    ],
)
def test_variants_of_a_model_of_images_are_compared(
    family: str, variants: str, tmp_path: Path
) -> None:
    words = typed(
        "compare image_classification --seeds 1 --from",
        [image_config(tmp_path / family, family), *FAST],
    )
    out = str(tmp_path / "runs")
    succeed([*words, "--seeds", "1", "--variants", variants, "--out", out])
    names = variants.split(",")
    assert (tmp_path / "runs" / "report.html").is_file()
    finals = {
        name: tmp_path / "runs" / name.replace(":", "-") / "seed-0" / "final" for name in names
    }
    model = transformers.AutoModelForImageClassification.from_pretrained(finals["orthogonal"])
    assert type(model).__name__.lower() == f"{family}forimageclassification"
    first = find_roles(model).attention[0]
    for weight in (first.query.tensor(), first.key.tensor()):
        gram = weight @ weight.T  # gain^2 I
        assert torch.allclose(gram / gram.diagonal().mean(), torch.eye(16), atol=1e-5)
    note = json.loads((finals[names[-1]] / "config.json").read_text())["wellposed"]
    assert note["attention"] == f"wellposed_{names[-1]}"


def test_the_configuration_in_the_docs_trains_on_the_drawn_shapes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
    (tmp_path / "config.json").write_text(page.split("```json\n")[1].split("```")[0])
    assert train(tmp_path / "config.json", tmp_path / "run", *FAST) == 0


def test_measure_and_certify_read_such_a_run(
    run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(["measure", str(run), "--image", str(pets / "cat" / "01.jpg")])
    said = capsys.readouterr().out
    assert "encoder.0.query" in said
    assert "vit.layers.0.attention" in said
    assert main(["measure", str(run), "--text", "a cat"]) != 0
    assert "has no tokenizer, so no text can be read" in capsys.readouterr().err
    make_checkpoint(tmp_path)
    assert main(["measure", str(tmp_path), "--image", str(pets / "cat" / "01.jpg")]) != 0
    assert "reads no images; give --text TEXT" in capsys.readouterr().err
    succeed(["certify", str(run)])
    assert "<= 4 tokens" in capsys.readouterr().out  # patches of 8 pixels of an image of 16


def test_what_cannot_be_trained_is_said_in_one_line(
    run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(code: int) -> str:
        assert code != 0
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    capsys.readouterr()
    out = tmp_path / "out"
    assert "give a Hugging Face model with --from FOLDER" in said(
        main(["train", "image_classification"])
    )
    make_checkpoint(tmp_path / "bert")
    capsys.readouterr()
    other_kind = ("no head for", "no preprocessor_config.json", "no tokenizer", "no image_size")
    for source, task in (
        (tmp_path / "bert", ""),
        (tmp_path / "bert" / "config.json", ""),
        (run, "text_classification"),
    ):
        told = said(train(source, out, "--data", str(pets), task=task or "image_classification"))
        assert any(words in told for words in other_kind)
    assert "labels cat, dog and the data disc, ring, square, cross; give --new-head" in said(
        train(run, out, *FAST)
    )
    assert train(run, tmp_path / "new", "--new-head", *FAST) == 0
    capsys.readouterr()
    other = image_config(tmp_path / "larger", image_size=32)
    assert "the model cannot read images of shape (3, 32, 32)" in said(
        train(run, out, "--data", str(pets), "--processor", f"config:{other}", "--quiet")
    )
    bare = tmp_path / "bare"
    transformers.ViTForImageClassification.from_pretrained(run / "final").save_pretrained(bare)
    capsys.readouterr()
    assert "no preprocessor_config.json, which says how" in said(
        train(bare, out, "--data", str(pets))
    )
    assert (
        train(
            bare, tmp_path / "own", "--data", str(pets), "--processor", f"config:{bare}", "--quiet"
        )
        == 0
    )


def test_what_predict_cannot_read_is_said(
    run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        capsys.readouterr()
        assert main(["predict", *words]) != 0
        return capsys.readouterr().err

    assert "--text has no effect on this model: it labels images" in said(
        str(run), "--text", "a cat"
    )
    (tmp_path / "list.txt").write_text("nothing.png\n")
    assert "list.txt:1: nothing.png: no such file" in said(
        str(run), "--input", str(tmp_path / "list.txt")
    )
    (tmp_path / "empty").mkdir()
    assert "no image in the folder" in said(str(run), "--input", str(tmp_path / "empty"))
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert "bad.png: cannot be decoded" in said(str(run), "--input", str(tmp_path / "bad.png"))
    (run / "final" / "preprocessor_config.json").rename(tmp_path / "kept.json")
    problem = said(str(run), "--input", str(pets))
    (tmp_path / "kept.json").rename(run / "final" / "preprocessor_config.json")
    assert "preprocessor_config.json" in problem
    ragged = shutil.copytree(run / "final", tmp_path / "ragged")
    (ragged / "manifest.json").unlink()
    transformers.ViTImageProcessor(size={"shortest_edge": 8}).save_pretrained(ragged)
    assert "the processor gives images of different shapes" in said(
        str(ragged), "--input", str(pets)
    )
    make_checkpoint(tmp_path / "bert")
    image = pets / "cat" / "01.jpg"
    assert f"{image}: is an image, and a BertModel reads texts" in said(
        str(tmp_path / "bert"), "--input", str(image)
    )
    assert "pets: is a folder, and a BertModel reads texts" in said(
        str(tmp_path / "bert"), "--input", str(pets)
    )


@pytest.mark.data
def test_a_vit_learns_the_subset_of_cifar(tmp_path: Path, shared_data: Path) -> None:
    config = image_config(tmp_path / "vit", image_size=32, hidden_size=32, intermediate_size=64)
    words = typed("--data", [shared_data / "cifar10_subset"], "--limit-train 1000 --epochs 4")
    words += ["--learning-rate", "3e-3", "--eval-every", "1000", "--quiet"]
    assert train(config, tmp_path / "run", *words) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        result["results"]["image_classification"]["accuracy,valid"]
        > 1.5 * result["reference"]["accuracy"]
    )
