"""Images as sequences of pixels: gray and colour, drawn shapes, npz files, CIFAR-10's binary files."""

import numpy as np
import pytest
from PIL import Image

from wellposed.errors import DataError
from wellposed_lab.tasks.data import files
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task
from wellposed_studies.tasks.pixels import read_npz

Y = np.arange(30) % 3
PIXELS_X = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)


def build_pixels(data="builtin", **options):
    return build_task("image", {"data": str(data), **options})


def ids(task, split):
    return np.array([example["input_ids"] for example in task.dataset(split)]) - 2


def write_npz(folder, *splits, **arrays):
    for split in splits or SPLITS:
        np.savez(folder / f"{split}.npz", **{"x": PIXELS_X, "y": Y, **arrays})


def test_colours_become_the_gray_values_of_the_file(tmp_path):
    write_npz(tmp_path)
    gray = np.rint(PIXELS_X.astype(float) @ [0.299, 0.587, 0.114]).astype(int)
    assert np.array_equal(ids(build_pixels(tmp_path), "test"), gray.reshape(30, -1))
    assert build_pixels(tmp_path).dataset("test").labels.tolist() == Y.tolist()
    shrunk = gray.reshape(30, 2, 2, 2, 2).mean((2, 4))
    assert np.abs(ids(build_pixels(tmp_path, size=2), "test") - shrunk.reshape(30, -1)).max() <= 0.5
    assert build_pixels(tmp_path).tokenizer.decode([2, 257]) == "0 255"
    task = build_pixels(tmp_path / "test.npz", limit_train=10)
    assert [len(task.dataset(split)) for split in SPLITS] == [10, 2, 2]
    assert task.description()["train_images_left_out_by_limit_train"] == 16


def test_of_gray_and_colour_files_the_gray_one_is_read(tmp_path):
    write_npz(tmp_path, "train_rgb")
    write_npz(tmp_path, "train_gray", x=PIXELS_X[..., 0])
    read = ids(build_pixels(tmp_path), "train")
    assert {tuple(image) for image in read} <= set(map(tuple, PIXELS_X[..., 0].reshape(30, -1)))


def test_the_binary_version_of_cifar(tmp_path):
    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    labels = (np.arange(60) % 10).astype(np.uint8)
    records = np.concatenate([labels[:, None], pixels.reshape(60, -1)], 1)
    names = ("data_batch_1", "data_batch_2", "test_batch")
    for name, part in zip(names, np.split(records, 3), strict=True):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    (tmp_path / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    task = build_pixels(tmp_path)
    assert [len(task.dataset(split)) for split in SPLITS] == [38, 2, 20]
    gray = np.einsum("nchw,c->nhw", pixels[40:], [0.299, 0.587, 0.114])
    assert np.array_equal(ids(task, "test"), np.rint(gray).astype(int).reshape(20, -1))
    assert task.labels[3] == "class3"
    for content, message in (
        (b"\x0c" + records[0, 1:].tobytes(), "test_batch.bin: record 0: label 12"),
        (b"123", "3 bytes, expected records of 3073"),
    ):
        (tmp_path / "test_batch.bin").write_bytes(content)
        with pytest.raises(DataError, match=message):
            build_pixels(tmp_path)


def test_the_pickles_of_cifar_are_refused_unopened(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for data in (tmp_path, tmp_path / "data_batch_1"):
        with pytest.raises(DataError, match=r"data_batch_1: .* pickles.*take the binary version"):
            build_pixels(data)


def test_folders_of_images_of_one_size_become_pixels(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for index in range(12):
            gray = Image.fromarray(np.full((4, 4), 10 * index + label, np.uint8))
            gray.save(tmp_path / name / f"{index:02}.png")
    task = build_pixels(tmp_path)
    assert all((row["input_ids"][0] - 2) % 10 == row["labels"][0] for row in task.dataset("train"))
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "dog" / "99.png")
    with pytest.raises(DataError, match=r"99.png: 4 x 5 pixels, expected 4 x 4"):
        build_pixels(tmp_path)
    (tmp_path / "bird").mkdir()
    with pytest.raises(DataError, match=r"bird: no file named .png"):
        build_pixels(tmp_path)


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
    with pytest.raises(DataError, match=message):
        build_pixels(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b"label,text\n", b"PK\x03\x04 cut short"])
def test_files_that_are_no_npz_are_said_to_be_none(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(
        DataError, match=r"x.npz: cannot be read as npz without .*write it with numpy.savez_comp"
    ):
        build_pixels(tmp_path / "x.npz")


def test_splits_that_do_not_fit_and_options_that_cannot_be_used(tmp_path):
    write_npz(tmp_path)
    with pytest.raises(DataError, match="size = 3 does not divide the"):
        build_pixels(tmp_path, size=3)
    for arrays, message in (
        ({"x": PIXELS_X, "y": Y + 1}, r"labels that train lacks: .*'test': \[3\]"),
        ({"x": PIXELS_X[:, :2], "y": Y}, "splits of shapes"),
        ({"z": PIXELS_X}, "expected x, .*; it has z uint8"),
    ):
        np.savez(tmp_path / "test.npz", **arrays)
        with pytest.raises(DataError, match=message):
            build_pixels(tmp_path)


def test_builtin_shapes_are_balanced_and_told_apart_by_their_pixels():
    task = build_pixels(size=16)
    assert task.reference() == {"accuracy": 0.25}
    bright = ids(task, "train").reshape(-1, 256) > 70
    area = [bright[task.dataset("train").labels == label].mean() for label in range(4)]
    assert area[2] > area[1] > area[3] > 0
    assert task.description()["source"].startswith("builtin: drawn shapes")


def test_archives_that_grow_or_are_locked_are_refused(tmp_path):
    """The flag that says "encrypted" makes zipfile raise a RuntimeError."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((4000, 28, 28), np.uint8), y=np.zeros(4000, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BOMB_BYTES", 1 << 16)
        with pytest.raises(DataError, match=r"a.npz: its .* bytes unpack to more than 100 times"):
            read_npz(path)
    np.savez(path, x=np.zeros((2, 4, 4), np.uint8), y=np.zeros(2, np.int64))
    data = bytearray(path.read_bytes())
    for mark, flag_offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + flag_offset] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.npz: cannot be read as npz"):
        read_npz(path)
