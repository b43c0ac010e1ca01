"""Images: pixel values against a plain computation, folders as ImageFolder reads them, npz, CIFAR-10, pixels
as tokens; bad images by name."""

import shutil
from itertools import chain

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.images import class_folders, image_config
from tests.support.refusal import bad_data, refuses, refuses_config, refuses_data

from wellposed.errors import CheckpointError, ConfigError
from wellposed.tasks import SPLITS, build_task, image_classification
from wellposed.tasks.data.images import read_image_file

X = np.random.default_rng(0).integers(0, 256, (30, 6, 4, 3), dtype=np.uint8)
Y = np.arange(30) % 3


def build(data="builtin", **options):
    return build_task("image_classification", {"data": str(data), **options})


def pixels(task, split="train"):
    return task.collate(list(task.dataset(split)))["pixel_values"]


@pytest.fixture
def npz(tmp_path):
    for split in SPLITS:
        np.savez(tmp_path / f"{split}.npz", x=X, y=Y)
    return tmp_path


def test_pixels_have_mean_zero_and_deviation_one_over_train(npz):
    task = build(npz)
    scaled = X.astype(np.float64) / 255
    expected = (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))
    found = pixels(task).double().numpy()
    assert np.abs(found - expected.transpose(0, 3, 1, 2)).max() < 1e-5  # float32 of numbers below 2
    assert task.collate([task.dataset("test")[4]])["labels"].tolist() == [1]
    assert task.processor.size == {"height": 6, "width": 4}
    assert task.model_kwargs() == {
        "num_labels": 3, "id2label": {0: "0", 1: "1", 2: "2"}, "label2id": {"0": 0, "1": 1, "2": 2},
    }  # fmt: skip


def test_images_become_the_size_and_the_channels_of_the_model(npz, tmp_path):
    rgb, gray = (image_config(tmp_path / f"vit{count}", num_channels=count) for count in (3, 1))
    assert pixels(build(npz, processor=f"config:{rgb}")).shape == (30, 3, 16, 16)
    found = pixels(build(npz, processor=f"config:{gray}")).double()
    assert found.shape == (30, 1, 16, 16)
    assert abs(float(found.mean())) < 1e-5
    assert float(found.std(correction=0)) == pytest.approx(1, abs=1e-5)
    # Gray images are repeated for a model of colours.
    shapes = pixels(build(limit_train=8))
    assert torch.allclose(shapes[:, 0], shapes[:, 1], atol=1e-6)


def test_a_saved_processor_is_used_as_it_is(npz, tmp_path):
    saved = transformers.BeitImageProcessor(
        size={"height": 20, "width": 20}, crop_size={"height": 12, "width": 12}
    )
    saved.save_pretrained(tmp_path / "beit")
    found = pixels(build(npz, processor=f"hf:{tmp_path / 'beit'}"))
    expected = saved(list(X), return_tensors="pt")["pixel_values"]
    assert torch.equal(found, expected)


def test_what_is_not_kept_is_made_again(npz, monkeypatch):
    first = pixels(build(npz))
    monkeypatch.setattr(image_classification, "KEPT_BYTES", 2 * first[0].nbytes)
    few = build(npz)
    assert torch.equal(first, pixels(few))
    assert torch.equal(first, pixels(few))
    assert len(few._kept) == 2


def test_flip_turns_about_half_of_train_differently_in_every_epoch(npz):
    plain, task = build(npz), build(npz, flip=True)
    for split in ("valid", "test"):
        assert task.batches(split, 4, seed=0, epoch=0) == plain.batches(split, 4, seed=0, epoch=0)
    turned = []
    for epoch in range(20):
        members = list(chain(*task.batches("train", 4, seed=0, epoch=epoch)))
        assert sorted(member % 30 for member in members) == list(range(30))
        turned.append({member % 30 for member in members if member >= 30})
    assert len(set(map(frozenset, turned))) == 20
    assert 0.4 < sum(map(len, turned)) / 600 < 0.6  # five standard deviations
    rows = task.dataset("train")
    both = task.collate([rows[3], rows[33]])
    assert torch.equal(both["pixel_values"][1], both["pixel_values"][0].flip(-1))
    assert both["labels"].tolist() == [0, 0]


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
    again = class_folders(tmp_path / "split" / "train")
    with bad_data(match=r"dev and no folder train; add it"):
        build(class_folders(tmp_path / "no_train" / "dev").parent)
    class_folders(again.parent / "test", count=2)
    assert len(build(again.parent, processor=f"config:{config}").dataset("test")) == 4


def test_images_of_many_kinds_are_converted(tmp_path):
    red, gray = np.zeros((4, 5, 3), np.uint8), np.full((4, 5), 51, np.uint8)
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
    whole = (root / "cat" / "01.jpg").read_bytes()
    (root / "cat" / "01.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "cat" / "02.png").write_bytes(b"")
    (root / "dog" / "02.png").write_bytes(b"<html>not found</html>")
    Image.fromarray(np.ones((3, 3), np.float32)).save(root / "dog" / "real.tif")
    named = ("cat/01.jpg", "cat/02.png", "dog/02.png")
    real = "dog/real.tif: cannot be decoded: its pixels are F"
    refuses_data(("4 images that cannot be used; correct or remove", *named, real), build, root)
    for limit in (143, 71):  # an image between once and twice the limit is a mere warning of Pillow
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with bad_data(match=rf"00.png: over {limit} pixels; shrink it"):
            read_image_file(root / "cat" / "deeper" / "00.png")


def test_what_does_not_fit_is_said_in_one_line(npz, tmp_path):
    pets = class_folders(tmp_path / "pets", count=10)
    shallow = shutil.ignore_patterns("deeper")
    cat = shutil.copytree(pets / "cat", tmp_path / "cat", ignore=shallow)
    for data, says in (
        (pets, r"images of \d+ sizes .*give --processor config:FOLDER"),
        (cat, "cat: holds 6 images, such as 01.jpg, and nothing says of which class"),
        (pets / "cat" / "01.jpg", "01.jpg: is an image, and nothing says of which class"),
    ):
        refuses_data(says, build, data)
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    five = image_config(tmp_path / "five", num_channels=5)
    for kind, processor, says in (
        (ConfigError, "vit", "processor = 'vit', expected data, hf:FOLDER_OR_NAME or config:"),
        (CheckpointError, f"hf:{tmp_path}", "no preprocessor_config.json; copy it"),
        (ConfigError, f"config:{tmp_path / 'bert'}", "a bert configuration has no image_size"),
        (ConfigError, f"config:{five}", "the model reads images of 5 channels, expected 1 or 3"),
    ):
        refuses(kind, says, build, npz, processor=processor)
    transformers.ViTImageProcessor(size={"shortest_edge": 8}).save_pretrained(tmp_path / "ragged")
    with bad_data(match="the processor gives images of different shapes"):
        pixels(build(pets, processor=f"hf:{tmp_path / 'ragged'}"))
    for value in (0, 5, 6):
        np.savez(tmp_path / "train.npz", x=np.full_like(X, value), y=Y)
        refuses_data("every train image has the same pixels", build, tmp_path)
    refuses_config("has no tokenizer: its model reads images", lambda: build().tokenizer)


def test_images_of_the_hub_are_those_of_a_folder(tmp_path, monkeypatch):
    import datasets

    root = class_folders(tmp_path / "pets")
    paths = [sorted(p for p in (root / n).rglob("*") if p.is_file()) for n in ("cat", "dog")]
    columns = {"image": list(map(str, chain(*paths)))}
    columns["label"] = [0] * len(paths[0]) + [1] * len(paths[1])
    label = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    held = {"train": datasets.Dataset.from_dict(columns, features=features)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: held)
    config = f"config:{image_config(tmp_path / 'vit')}"
    hub, folder = build("hf:pets", processor=config), build(root, processor=config)
    assert hub.labels == folder.labels
    for split in SPLITS:
        assert torch.equal(pixels(hub, split), pixels(folder, split))
    assert len(build("hf:pets", processor=config, limit_train=30).dataset("train")) == 30
    held["train"] = held["train"].rename_column("image", "picture")
    refuses_data(r"expected a column of images.*it has picture, label", build, "hf:pets")
    columns["image"][3] = str(root / "cat" / "broken.png")
    (root / "cat" / "broken.png").write_bytes(b"no image")
    held["train"] = datasets.Dataset.from_dict(columns, features=features)
    refuses_data(r"hf:pets \(train\):4: cannot be decoded", build, "hf:pets")


PIXELS_X = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)


def build_pixels(data="builtin", **options):
    return build_task("image", {"data": str(data), **options})


def ids(task, split):
    return np.array([example["input_ids"] for example in task.dataset(split)]) - 2


def write_npz(folder, *splits, **arrays):
    for split in splits or SPLITS:
        np.savez(folder / f"{split}.npz", **{"x": PIXELS_X, "y": Y, **arrays})


def test_gray_and_colour_are_the_values_of_the_file(tmp_path):
    write_npz(tmp_path)
    colour = build_pixels(tmp_path, color="rgb")
    assert np.array_equal(ids(colour, "test"), PIXELS_X.reshape(30, -1))
    gray = np.rint(PIXELS_X.astype(float) @ [0.299, 0.587, 0.114]).astype(int)
    assert np.array_equal(ids(build_pixels(tmp_path), "test"), gray.reshape(30, -1))
    assert build_pixels(tmp_path).dataset("test").labels.tolist() == Y.tolist()
    shrunk = gray.reshape(30, 2, 2, 2, 2).mean((2, 4))
    assert np.abs(ids(build_pixels(tmp_path, size=2), "test") - shrunk.reshape(30, -1)).max() <= 0.5
    assert build_pixels(tmp_path).tokenizer.decode([2, 257]) == "0 255"
    task = build_pixels(tmp_path / "test.npz", limit_train=10)
    assert [len(task.dataset(split)) for split in SPLITS] == [10, 2, 2]
    assert task.description()["train_images_left_out_by_limit_train"] == 16


def test_a_folder_with_gray_and_colour_files_gives_the_one_asked_for(tmp_path):
    write_npz(tmp_path, "train_rgb")
    write_npz(tmp_path, "train_gray", x=PIXELS_X[..., 0])
    assert build_pixels(tmp_path, color="rgb").lengths("train")[0] == 48
    assert build_pixels(tmp_path).lengths("train")[0] == 16


def test_the_binary_version_of_cifar(tmp_path):
    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    labels = (np.arange(60) % 10).astype(np.uint8)
    records = np.concatenate([labels[:, None], pixels.reshape(60, -1)], 1)
    names = ("data_batch_1", "data_batch_2", "test_batch")
    for name, part in zip(names, np.split(records, 3), strict=True):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    (tmp_path / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    task = build_pixels(tmp_path, color="rgb")
    assert [len(task.dataset(split)) for split in SPLITS] == [38, 2, 20]
    assert np.array_equal(ids(task, "test"), pixels[40:].transpose(0, 2, 3, 1).reshape(20, -1))
    assert task.labels[3] == "class3"
    for content, says in (
        (b"\x0c" + records[0, 1:].tobytes(), "test_batch.bin: record 0: label 12"),
        (b"123", "3 bytes, expected records of 3073"),
    ):
        (tmp_path / "test_batch.bin").write_bytes(content)
        refuses_data(says, build_pixels, tmp_path)


def test_the_pickles_of_cifar_are_refused_unopened(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for data in (tmp_path, tmp_path / "data_batch_1"):
        refuses_data(r"data_batch_1: .* pickles.*take the binary version", build_pixels, data)


def test_folders_of_images_of_one_size_become_pixels(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for index in range(12):
            gray = Image.fromarray(np.full((4, 4), 10 * index + label, np.uint8))
            gray.save(tmp_path / name / f"{index:02}.png")
    task = build_pixels(tmp_path)
    assert all((row["input_ids"][0] - 2) % 10 == row["labels"][0] for row in task.dataset("train"))
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "dog" / "99.png")
    refuses_data(r"99.png: 4 x 5 pixels, expected 4 x 4", build_pixels, tmp_path)
    (tmp_path / "bird").mkdir()
    refuses_data(r"bird: no file named .png", build_pixels, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": PIXELS_X.astype(float)}, "it has x float64 "),
        ({"x": PIXELS_X[..., 0, 0]}, "expected x, uint8 .n"),
        ({"y": Y[:-1]}, "y int64 .29,."),
        ({"y": Y - 1}, "y from -1, of image 0;"),
        ({"y": Y / 2}, "y float64"),
        ({"y": Y + 0j}, "y complex128 .30,.; write"),
        ({"y": Y.astype("datetime64[s]")}, "y datetime64.s. .30,.; write"),
        ({"y": 0 * Y}, "every image has label 0"),
        ({"x": np.array([{}], dtype=object)}, "without unpickling"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path, arrays, message):
    write_npz(tmp_path, **arrays)
    refuses_data(message, build_pixels, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b"label,text\n", b"PK\x03\x04 cut short"])
@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_files_that_are_no_npz_are_said_to_be_none(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with bad_data(match=f"{name}: cannot be read as npz without .*write it with numpy.savez_comp"):
        build_pixels(tmp_path / name)


def test_splits_that_do_not_fit_and_options_that_cannot_be_used(tmp_path):
    write_npz(tmp_path)
    refuses_data("size = 3 does not divide the", build_pixels, tmp_path, size=3)
    for arrays, says in (
        ({"x": PIXELS_X, "y": Y + 1}, r"labels that train lacks: .*'test': \[3\]"),
        ({"x": PIXELS_X[:, :2], "y": Y}, "splits of shapes"),
        ({"z": PIXELS_X}, "expected x, .*; it has z uint8"),
    ):
        np.savez(tmp_path / "test.npz", **arrays)
        refuses_data(says, build_pixels, tmp_path)
    write_npz(tmp_path, x=PIXELS_X[..., 0])
    refuses_config("the images are gray", build_pixels, tmp_path, color="rgb")


def test_builtin_shapes_are_balanced_and_told_apart_by_their_pixels():
    task = build_pixels(size=16)
    assert task.reference() == {"accuracy": 0.25}
    bright = ids(task, "train").reshape(-1, 256) > 70
    area = [bright[task.dataset("train").labels == label].mean() for label in range(4)]
    assert area[2] > area[1] > area[3] > 0
    assert task.description()["source"].startswith("builtin: drawn shapes")
