"""Images: npz, CIFAR-10's binary version, folders by class, gray and colour, bad input by name."""

import itertools

import numpy as np
import pytest
from tests.support.refusal import bad_config, bad_data

from wellposed.errors import DataError
from wellposed.tasks import SPLITS, build_task

X = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)
Y = np.arange(30) % 3


def build(data="builtin", **options):
    return build_task("image", {"data": str(data), **options})


def ids(task, split):
    return np.array([example["input_ids"] for example in task.dataset(split)]) - 2


def write_npz(folder, *splits, **arrays):
    for split in splits or SPLITS:
        np.savez(folder / f"{split}.npz", **{"x": X, "y": Y, **arrays})


def test_gray_and_colour_are_the_values_of_the_file(tmp_path):
    write_npz(tmp_path)
    colour = build(tmp_path, color="rgb")
    assert np.array_equal(ids(colour, "test"), X.reshape(30, -1))
    gray = np.rint(X.astype(float) @ [0.299, 0.587, 0.114]).astype(int)
    assert np.array_equal(ids(build(tmp_path), "test"), gray.reshape(30, -1))
    assert build(tmp_path).dataset("test").labels.tolist() == Y.tolist()
    shrunk = gray.reshape(30, 2, 2, 2, 2).mean((2, 4))
    assert np.abs(ids(build(tmp_path, size=2), "test") - shrunk.reshape(30, -1)).max() <= 0.5
    assert build(tmp_path).tokenizer.decode([2, 257]) == "0 255"


def test_a_missing_split_is_cut_and_train_can_be_limited(tmp_path):
    write_npz(tmp_path, "train")
    task = build(tmp_path / "train.npz", limit_train=10)
    assert [len(task.dataset(split)) for split in SPLITS] == [10, 2, 2]
    described = task.description()
    assert described["train_images_left_out_by_limit_train"] == 16
    assert set(described["cut_from_train"]) == {"valid", "test"}
    assert len(described["files"]["train"]["sha256"]) == 64


def test_a_folder_with_gray_and_colour_files_gives_the_one_asked_for(tmp_path):
    write_npz(tmp_path, "train_rgb")
    write_npz(tmp_path, "train_gray", x=X[..., 0])
    assert build(tmp_path, color="rgb").lengths("train")[0] == 48
    assert build(tmp_path).lengths("train")[0] == 16


def test_the_binary_version_of_cifar(tmp_path):
    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    labels = (np.arange(60) % 10).astype(np.uint8)
    records = np.concatenate([labels[:, None], pixels.reshape(60, -1)], 1)
    names = ("data_batch_1", "data_batch_2", "test_batch")
    for name, part in zip(names, np.split(records, 3), strict=True):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    (tmp_path / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    task = build(tmp_path, color="rgb")
    assert [len(task.dataset(split)) for split in SPLITS] == [38, 2, 20]
    assert np.array_equal(ids(task, "test"), pixels[40:].transpose(0, 2, 3, 1).reshape(20, -1))
    assert task.labels[3] == "class3"
    for content, says in (
        (b"\x0c" + records[0, 1:].tobytes(), "test_batch.bin: record 0: label 12"),
        (b"123", "3 bytes, expected records of 3073"),
    ):
        (tmp_path / "test_batch.bin").write_bytes(content)
        with bad_data(match=says):
            build(tmp_path)


def test_the_pickles_of_cifar_are_refused_unopened(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for data in (tmp_path, tmp_path / "data_batch_1"):
        with bad_data(match=r"data_batch_1: .* pickles.*take the binary version"):
            build(data)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b"label,text\n", b"PK\x03\x04 cut short"])
@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_files_that_are_no_npz_are_said_to_be_none(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with bad_data(
        match=rf"{name}: cannot be read as npz without .*write it with numpy.savez_compressed"
    ):
        build(tmp_path / name)


def test_folders_of_images_by_class(tmp_path):
    image = pytest.importorskip("PIL.Image")

    def write(name, value=0, *, height=4):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((height, 4), value, np.uint8)).save(tmp_path / name)

    for split, index in itertools.product(("train", "test"), range(12)):
        write(f"{split}/cat/{index:02}.png", 10 * index)
        write(f"{split}/dog/{index:02}.png", 10 * index + 1)
    task = build(tmp_path)
    assert task.labels == ("cat", "dog")
    assert [len(task.dataset(split)) for split in SPLITS] == [23, 1, 24]
    for example in task.dataset("test"):
        assert (example["input_ids"][0] - 2) % 10 == example["labels"][0]
    (tmp_path / "test" / "cat" / "00.png").write_bytes(b"no image")
    write("test/dog/99.png", height=5)
    with bad_data(match=r"00.png: cannot be decoded"):
        build(tmp_path)
    write("test/cat/00.png")
    with bad_data(match=r"99.png: 4 x 5 pixels, expected 4 x 4"):
        build(tmp_path)
    (tmp_path / "test" / "bird").mkdir()
    with bad_data(match=r"bird: no file named .png"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X.astype(float)}, "x is float64 "),
        ({"x": X[..., 0, 0]}, "expected uint8 .n"),
        ({"y": Y[:-1]}, "30 images and 29 labels"),
        ({"y": Y - 1}, "label -1 of image 0"),
        ({"y": Y / 2}, "y is float64"),
        ({"y": 0 * Y}, "every image has label 0"),
        ({"x": np.array([{}], dtype=object)}, "without unpickling"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path, arrays, message):
    write_npz(tmp_path, **arrays)
    with pytest.raises(DataError, match=message):
        build(tmp_path)


def test_splits_that_do_not_fit_and_options_that_cannot_be_used(tmp_path):
    write_npz(tmp_path)
    with bad_data(match="size = 3 does not divide the"):
        build(tmp_path, size=3)
    for arrays, says in (
        ({"x": X, "y": Y + 1}, r"labels that train lacks: .*'test': \[3\]"),
        ({"x": X[:, :2], "y": Y}, "splits of shapes"),
        ({"z": X}, "no array x and y; it has z"),
    ):
        np.savez(tmp_path / "test.npz", **arrays)
        with bad_data(match=says):
            build(tmp_path)
    write_npz(tmp_path, x=X[..., 0])
    for data, options, says in (
        (tmp_path, {"color": "rgb"}, "the images are gray"),
        (tmp_path, {"data_seed": 3}, "data_seed: says what is drawn"),
        ("builtin", {"color": "rgb"}, "needs data=FILE; the builtin shapes are gray"),
    ):
        with bad_config(match=says):
            build(data, **options)
    with bad_data(match="no such file or folder"):
        build(tmp_path / "nothing")


def test_builtin_shapes_are_balanced_and_told_apart_by_their_pixels():
    task, again = build(size=16), build(size=16)
    assert list(task.dataset("valid")) == list(again.dataset("valid"))
    assert task.reference() == {"accuracy": 0.25}
    assert build(size=16, data_seed=1).dataset("valid")[0] != task.dataset("valid")[0]
    bright = ids(task, "train").reshape(-1, 256) > 70
    area = [bright[task.dataset("train").labels == label].mean() for label in range(4)]
    assert area[2] > area[1] > area[3] > 0
    assert task.description()["source"].startswith("builtin: drawn shapes")
