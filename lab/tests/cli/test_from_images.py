"""`train image_classification --from`, and what the other commands do with a model of images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.bert import make_checkpoint
from tests.support.images import class_folders, draw_squares, image_config
from tests.support.words import python, succeed
from tests.support.words import words as typed

from wellposed.roles import find_roles

pytestmark = pytest.mark.slow  # the whole table

FAST = typed("--steps 2 --batch-size 8 --eval-batches 1 --quiet")
LEARNING = typed("--steps 40 --batch-size 16 --eval-every 20 --learning-rate 1e-2 --quiet")


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("data") / "pets")


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return ["--data", draw_squares(tmp_path_factory.mktemp("squares"), count=40)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, pets):
    folder = tmp_path_factory.mktemp("run")
    words = train(image_config(folder / "vit"), folder / "run", "--data", pets)
    succeed(words, LEARNING)
    return folder / "run"


def train(source, out, *more):
    return typed("train image_classification --from", [source], "--out", [out, *more])


def test_final_is_loaded_by_transformers_alone_in_a_fresh_process(run, pets, tmp_path):
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
    ran = python(["-c", program, run / "final", *images], check=True)
    predictions = json.loads(ran.stdout)
    rows = []
    for image in (pets, tmp_path / "gray.png"):
        succeed(["predict", str(run), "--input", str(image), "--output", str(tmp_path / "out.tsv")])
        rows += [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]
    assert {row[2] for row in rows} >= set(map(str, images))
    for label, probability, path in (row for row in rows if row[2] in predictions):
        assert label == predictions[path][0]
        assert float(probability) == pytest.approx(predictions[path][1], abs=1e-4)
        assert path == str(tmp_path / "gray.png") or f"/{label}/" in path


def test_predict_takes_an_image_or_a_folder(run, pets, cli):
    error = cli(["predict", str(run), "--input", str(pets / "dog" / "01.jpg")]).out
    assert error.startswith("dog\t")
    error = cli(["predict", str(run), "--input", str(pets), "--batch-size", "7"]).out
    assert len(error.splitlines()) == 48


def test_the_card_and_the_result_tell_how_images_were_read(run):
    card = (run / "final" / "README.md").read_text()
    assert "from transformers import AutoModelForImageClassification, AutoImageProcessor" in card
    assert 'processor = AutoImageProcessor.from_pretrained("FOLDER")' in card
    result = json.loads((run / "result.json").read_text())
    saved = json.loads((run / "final" / "preprocessor_config.json").read_text())
    assert result["data"]["processor"] == saved
    assert result["results"]["image_classification"]["accuracy,valid"] == 1
    config = json.loads((run / "final" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog"}


def test_a_trained_model_goes_on_with_its_own_processor(run, pets, tmp_path):
    succeed(train(run, tmp_path / "more", "--data", pets), "--epochs 1 --quiet")
    first, second = (
        out_folder / "final/preprocessor_config.json" for out_folder in (run, tmp_path / "more")
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
def test_variants_of_a_model_of_images_are_compared(family, variants, tmp_path, squares):
    source = image_config(tmp_path / family, family)
    out = tmp_path / "runs"
    words = typed("compare image_classification --seeds 1 --from", [source], FAST, squares)
    succeed(words, "--variants", [variants], "--out", [out])
    last = variants.rsplit(",", maxsplit=1)[-1]
    assert (out / "report.html").is_file()
    orthogonal, final = (out / name / "seed-0" / "final" for name in ("orthogonal", last))
    model = transformers.AutoModelForImageClassification.from_pretrained(orthogonal)
    assert type(model).__name__.lower() == f"{family}forimageclassification"
    first = find_roles(model).attention[0]
    for weight in (first.query.tensor(), first.key.tensor()):
        gram = weight @ weight.T  # gain^2 I
        assert torch.allclose(gram / gram.diagonal().mean(), torch.eye(16), atol=1e-5)
    saved = json.loads((final / "config.json").read_text())
    assert saved["attn_implementation"] == f"wellposed_{last}"


def test_the_configuration_in_the_docs_trains(tmp_path, squares):
    page = (Path(__file__).parents[3] / "docs" / "howto" / "images.md").read_text()
    (tmp_path / "config.json").write_text(page.split("```json\n")[1].split("```")[0])
    succeed(train(tmp_path / "config.json", tmp_path / "run", *FAST, *squares))


def test_measure_and_certify_read_such_a_run(run, cli):
    assert "encoder.0.query" in cli(["measure", str(run)]).out
    assert "no rule for transformers.models.vit" in cli(["certify", str(run), "--seq-len", "4"]).out


def test_what_cannot_be_trained_is_said_in_one_line(run, pets, squares, tmp_path, cli):
    def error(*parts):
        (line,) = cli(*parts, status=None).err.strip().splitlines()
        return line

    out = tmp_path / "out"
    bare = tmp_path / "bare"
    data = typed("--quiet --data", [pets])
    assert "give a Hugging Face model with --from FOLDER" in error(
        "train image_classification --data", [pets]
    )
    make_checkpoint(tmp_path / "bert")
    other_kind = ("no head for", "no preprocessor_config.json", "no tokenizer", "no image_size")
    for words in (
        train(tmp_path / "bert", out, *data),
        train(tmp_path / "bert" / "config.json", out, *data),
        typed("train text_classification --from", [run], "--out", [out], data),
    ):
        message = error(words)
        assert any(words in message for words in other_kind)
    labels = "labels cat, dog and the data empty, square; give --new-head"
    assert labels in error(train(run, out, *FAST, *squares))
    succeed(train(run, tmp_path / "new", "--new-head", *FAST, *squares))
    words = train(image_config(tmp_path / "vit"), out, *data, "--variant", "t_fixup")
    assert "T-Fixup has no rule for patch embeddings" in error(words)
    other = image_config(tmp_path / "larger", image_size=32)
    words = train(run, out, *data, "--processor", f"config:{other}")
    assert "the model cannot read images of shape (3, 32, 32)" in error(words)
    transformers.ViTForImageClassification.from_pretrained(run / "final").save_pretrained(bare)
    assert "no preprocessor_config.json, so the preprocessing" in error(train(bare, out, *data))
    succeed(train(bare, tmp_path / "own", *data, "--processor", f"config:{bare}"))


def test_what_predict_cannot_read_is_said(run, pets, tmp_path, cli):
    def error(model, source):
        return cli("predict", [model, "--input", source], status=None).err

    message = cli("predict", [run], "--text cat", status=None).err
    assert "--text has no effect on this model: it labels images" in message
    (tmp_path / "list.txt").write_text("nothing.png\n")
    assert "list.txt: expected an image (" in error(run, tmp_path / "list.txt")
    (tmp_path / "empty").mkdir()
    assert "no image in the folder" in error(run, tmp_path / "empty")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert "bad.png: cannot be decoded" in error(run, tmp_path / "bad.png")
    (run / "final" / "preprocessor_config.json").rename(tmp_path / "kept.json")
    problem = error(run, pets)
    (tmp_path / "kept.json").rename(run / "final" / "preprocessor_config.json")
    assert "preprocessor_config.json" in problem
    ragged = shutil.copytree(run / "final", tmp_path / "ragged")
    (ragged / "manifest.json").unlink()
    transformers.ViTImageProcessor(size={"shortest_edge": 8}).save_pretrained(ragged)
    assert "the processor gives images of different shapes" in error(ragged, pets)
    bert = tmp_path / "bert"
    image = pets / "cat" / "01.jpg"
    make_checkpoint(bert)
    assert f"{image}: is a .jpg file, and a BertModel reads lines" in error(bert, image)
    assert "pets: is a folder, and a BertModel reads lines" in error(bert, pets)
