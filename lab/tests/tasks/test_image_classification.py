"""Images: pixel values against a plain computation, folders as ImageFolder reads them, bad images by
name."""

import shutil
from itertools import chain

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.images import class_folders, draw_squares, image_config, write_images

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed_lab.tasks import image_classification
from wellposed_lab.tasks.data.images import read_image_file
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task

X = np.random.default_rng(0).integers(0, 256, (30, 6, 4, 3), dtype=np.uint8)
Y = np.repeat([0, 1, 2], 10)


def build(data, **options):
    return build_task("image_classification", {"data": str(data), **options})


def pixels(task, split="train"):
    return task.collate(list(task.dataset(split)))["pixel_values"]


@pytest.fixture
def folder(tmp_path):
    for split in SPLITS:
        write_images(tmp_path / "X" / split, X, Y)
    return tmp_path / "X"


def test_pixels_have_mean_zero_and_deviation_one_over_train(folder):
    task = build(folder)
    scaled = X.astype(np.float64) / 255
    expected = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))
    array = pixels(task).double().numpy()
    assert np.abs(array - expected.transpose(0, 3, 1, 2)).max() < 1e-5  # float32 of numbers below 2
    assert task.collate([task.dataset("test")[14]])["labels"].tolist() == [1]
    assert task.processor.size == {"height": 6, "width": 4}
    assert task.model_kwargs() == {
        "num_labels": 3, "id2label": {0: "0", 1: "1", 2: "2"}, "label2id": {"0": 0, "1": 1, "2": 2},
    }  # fmt: skip


def test_images_become_the_size_and_the_channels_of_the_model(folder, tmp_path):
    rgb, gray = (image_config(tmp_path / f"vit{count}", num_channels=count) for count in (3, 1))
    assert pixels(build(folder, processor=f"config:{rgb}")).shape == (30, 3, 16, 16)
    values = pixels(build(folder, processor=f"config:{gray}")).double()
    assert values.shape == (30, 1, 16, 16)
    assert abs(float(values.mean())) < 1e-5
    assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)
    # Gray images are repeated for a model of colours.
    gray = pixels(build(draw_squares(tmp_path / "squares")))
    assert torch.allclose(gray[:, 0], gray[:, 1], atol=1e-6)


def test_a_saved_processor_is_used_as_it_is(folder, tmp_path):
    saved = transformers.BeitImageProcessor(
        size={"height": 20, "width": 20}, crop_size={"height": 12, "width": 12}
    )
    saved.save_pretrained(tmp_path / "beit")
    values = pixels(build(folder, processor=f"hf:{tmp_path / 'beit'}"))
    expected = saved(list(X), return_tensors="pt")["pixel_values"]
    assert torch.equal(values, expected)


def test_what_is_not_kept_is_made_again(folder, monkeypatch):
    first = pixels(build(folder))
    monkeypatch.setattr(image_classification, "KEPT_BYTES", 2 * first[0].nbytes)
    few = build(folder)
    assert torch.equal(first, pixels(few))
    assert torch.equal(first, pixels(few))
    assert len(few._cached_pixels) == 2


def test_folders_are_read_as_imagefolder_reads_them(tmp_path):
    root = class_folders(tmp_path / "pets")
    (root / "cat" / "notes.txt").write_text("no image")
    config = image_config(tmp_path / "vit")
    task = build(root, processor=f"config:{config}")
    assert task.labels == ("cat", "dog")
    assert [len(task.dataset(split)) for split in SPLITS] == [44, 2, 2]
    for split in SPLITS:
        batch = task.collate(list(task.dataset(split)))
        redder = batch["pixel_values"][:, 0].mean((1, 2)) > batch["pixel_values"][:, 1].mean((1, 2))
        assert torch.equal(batch["labels"] == 0, redder)
    described = task.description()
    assert described["files"]["train"]["other_files_not_read"] == 1
    assert described["processor"]["image_mean"] == task.processor.image_mean
    (link := root / "cat" / "x.png").symlink_to("nowhere")
    with pytest.raises(DataError, match=f"{link}: a link to no file"):
        build(root)
    again = class_folders(tmp_path / "split" / "train")
    with pytest.raises(DataError, match=r"dev and no folder train; add it"):
        build(class_folders(tmp_path / "no_train" / "dev").parent)
    class_folders(again.parent / "test", count=2)
    assert len(build(again.parent, processor=f"config:{config}").dataset("test")) == 4


def test_images_of_many_kinds_are_converted(tmp_path):
    red = np.zeros((4, 5, 3), np.uint8)
    gray = np.full((4, 5), 51, np.uint8)
    red[..., 0] = 200
    colour = Image.fromarray(red)
    palette = colour.quantize(4)
    palette.info["transparency"] = bytes([0, 255, 255, 255])
    written = [
        (colour.convert("RGBA"), red),
        (palette, red),
        (Image.fromarray(gray), gray),
        (Image.fromarray(gray).convert("LA"), gray),
        (Image.fromarray(gray.astype(np.uint16) * 257), gray),
        (Image.fromarray(gray > 0), 5 * gray),
    ]
    for image, expected in written:
        image.save(tmp_path / "a.png")
        assert np.array_equal(read_image_file(tmp_path / "a.png"), expected), image.mode


def test_images_that_cannot_be_used_are_named_at_once(tmp_path, monkeypatch):
    root = class_folders(tmp_path / "pets", count=12)
    stored = (root / "cat" / "01.jpg").read_bytes()
    (root / "cat" / "01.jpg").write_bytes(stored[: len(stored) // 2])
    (root / "cat" / "02.png").write_bytes(b"")
    (root / "dog" / "02.png").write_bytes(b"<html>not found</html>")
    Image.fromarray(np.ones((3, 3), np.float32)).save(root / "dog" / "real.tif")
    named = ("cat/01.jpg", "cat/02.png", "dog/02.png")
    real = "dog/real.tif: cannot be decoded: its pixels are F"
    with pytest.raises(DataError) as caught:
        build(root)
    assert "4 images that cannot be used; correct or remove" in str(caught.value)
    for part in named:
        assert str(part) in str(caught.value)
    assert str(real) in str(caught.value)
    for limit in (143, 71):  # an image between once and twice the limit is a mere warning of Pillow
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match=rf"00.png: over {limit} pixels; shrink it"):
            read_image_file(root / "cat" / "deeper" / "00.png")


def test_what_does_not_fit_is_said_in_one_line(folder, tmp_path):
    pets = class_folders(tmp_path / "pets", count=10)
    shallow = shutil.ignore_patterns("deeper")
    cat = shutil.copytree(pets / "cat", tmp_path / "cat", ignore=shallow)
    for data, message in (
        (pets, r"images of \d+ sizes .*give --processor config:FOLDER"),
        (cat, "cat: expected a folder with one folder of images for each class"),
        (pets / "cat" / "01.jpg", "01.jpg: expected a folder with one folder of images"),
    ):
        with pytest.raises(DataError, match=message):
            build(data)
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    five = image_config(tmp_path / "five", num_channels=5)
    for kind, processor, message in (
        (ConfigError, "vit", "processor = 'vit', expected data, hf:FOLDER_OR_NAME or config:"),
        (CheckpointError, f"hf:{tmp_path}", "no preprocessor_config.json; copy it"),
        (ConfigError, f"config:{tmp_path / 'bert'}", "a bert configuration has no image_size"),
        (ConfigError, f"config:{five}", "the model reads images of 5 channels, expected 1 or 3"),
    ):
        with pytest.raises(kind, match=message):
            build(folder, processor=processor)
    transformers.ViTImageProcessor(size={"shortest_edge": 8}).save_pretrained(tmp_path / "ragged")
    with pytest.raises(DataError, match="the processor gives images of different shapes"):
        pixels(build(pets, processor=f"hf:{tmp_path / 'ragged'}"))
    for value in (0, 5, 6):
        flat = write_images(tmp_path / f"flat{value}", np.full_like(X, value), Y)
        with pytest.raises(DataError, match="every train image has the same pixels"):
            build(flat)
    with pytest.raises(ConfigError, match="has no tokenizer: its model reads images"):
        _ = build(folder).tokenizer
    alone = write_images(tmp_path / "alone", X, 0 * Y)
    with pytest.raises(DataError, match="every image has label 0, expected two or more"):
        build(alone)
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"x.npy: expected a folder .*pip install .*studies"):
        build(tmp_path / "x.npy")


def test_images_of_the_hub_are_those_of_a_folder(tmp_path, monkeypatch):
    import datasets

    root = class_folders(tmp_path / "pets")
    paths = [sorted(p for p in (root / n).rglob("*") if p.is_file()) for n in ("cat", "dog")]
    columns = {"image": list(map(str, chain(*paths)))}
    columns["label"] = [0] * len(paths[0]) + [1] * len(paths[1])
    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    hub_splits = {"train": datasets.Dataset.from_dict(columns, features=features)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: hub_splits)
    config = f"config:{image_config(tmp_path / 'vit')}"
    hub = build("hf:pets", processor=config)
    folder = build(root, processor=config)
    assert hub.labels == folder.labels
    for split in SPLITS:
        assert torch.equal(pixels(hub, split), pixels(folder, split))
    assert len(build("hf:pets", processor=config, limit_train=30).dataset("train")) == 30
    hub_splits["train"] = hub_splits["train"].rename_column("image", "picture")
    with pytest.raises(DataError, match=r"expected a column of images.*it has picture, label"):
        build("hf:pets")
    columns["image"][3] = str(root / "cat" / "broken.png")
    (root / "cat" / "broken.png").write_bytes(b"no image")
    hub_splits["train"] = datasets.Dataset.from_dict(columns, features=features)
    with pytest.raises(DataError, match=r"hf:pets \(train\):4: cannot be decoded"):
        build("hf:pets")
