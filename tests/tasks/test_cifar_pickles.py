"""CIFAR-10's Python version: the release's own instructions, what Python 3 writes, and pickles that
would run code."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wellposed.errors import DataError
from wellposed.tasks import SPLITS, ImageTask, build_task
from wellposed.tasks.data.cifar import read_cifar_names, read_cifar_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
LABELS = [i % 10 for i in range(20)]
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def as_released(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Write the instructions of Python 2, protocol 2, that the release has."""
    content = pixels.tobytes()
    names = b"".join(short(f"leptodactylus_pentadactylus_s_{i:06}.png") for i in range(len(labels)))
    return b"".join([
        b"\x80\x02}q\x01(", short("batch_label"), b"q\x02", short("training batch 1 of 5"), b"q\x03",
        short("labels"), b"q\x04]q\x05(", b"".join(b"K" + bytes([label]) for label in labels), b"e",
        short("data"), b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85",
        short("b"), b"\x87Rq\x09(K\x01M", struct.pack("<H", len(pixels)), b"M\x00\x0c\x86cnumpy\ndtype\nq\x0a",
        short("u1"), b"K\x00K\x01\x87Rq\x0b(K\x03", short("|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
        struct.pack("<I", len(content)), content, b"tb", short("filenames"), b"q\x0c]q\x0d(", names, b"eu.",
    ])  # fmt: skip


def build(data: Path, **options: Any) -> ImageTask:
    task = build_task("image", {"data": str(data), **options})
    assert isinstance(task, ImageTask)
    return task


def release(folder: Path) -> Path:
    for number in range(1, 3):
        (folder / f"data_batch_{number}").write_bytes(
            as_released(PIXELS[::-1] if number == 2 else PIXELS, LABELS)
        )
    (folder / "test_batch").write_bytes(as_released(PIXELS[:10], LABELS[:10]))
    meta = {
        b"num_cases_per_batch": 10000,
        b"label_names": [name.encode() for name in NAMES],
        b"num_vis": 3072,
    }
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return folder


def test_the_release_is_read_as_unpickling_would(tmp_path: Path) -> None:
    stored = as_released(PIXELS, LABELS)
    unpickled = pickle.loads(stored, encoding="bytes")
    assert np.array_equal(unpickled[b"data"], PIXELS)
    task = build(release(tmp_path), color="rgb")
    assert [len(task.dataset(split)) for split in SPLITS] == [38, 2, 10]
    ids = np.array([example["input_ids"] for example in task.dataset("test")]) - 2
    expected = unpickled[b"data"][:10].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert np.array_equal(ids, expected.reshape(10, -1))
    assert task.dataset("test").labels.tolist() == unpickled[b"labels"][:10]
    assert task.labels == tuple(NAMES)
    assert len(task.description()["files"]) == 3
    single = build(tmp_path / "data_batch_1")
    assert [len(single.dataset(split)) for split in SPLITS] == [18, 1, 1]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_what_python_3_writes_is_read_too(tmp_path: Path, protocol: int) -> None:
    for number, key in enumerate((str, str.encode)):
        path = tmp_path / f"data_batch_{number}"
        path.write_bytes(
            pickle.dumps({key("data"): PIXELS, key("labels"): LABELS}, protocol=protocol)
        )
        images, described = read_cifar_pickle(path)
        assert np.array_equal(images.pixels.transpose(0, 3, 1, 2).reshape(20, -1), PIXELS)
        assert images.labels.tolist() == LABELS
        assert described["bytes"] == path.stat().st_size


class _Harmful:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(
    tmp_path: Path, protocol: int
) -> None:
    release(tmp_path)
    harm = {"data": PIXELS, "labels": LABELS, "more": _Harmful(tmp_path / "harm")}
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(harm, protocol=protocol))
    with pytest.raises(
        DataError, match=r"data_batch_2: is a pickle that asks for '\w+ mkdir', which is not loaded"
    ):
        build(tmp_path)
    assert not (tmp_path / "harm").exists()
    pickle.loads((tmp_path / "data_batch_2").read_bytes())
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({"data": PIXELS.astype(float), "labels": LABELS}, 2),
            r"received f8 of shape \(20, 3072\)",
        ),
        (
            pickle.dumps({"data": PIXELS[:, :3000], "labels": LABELS}, 2),
            r"received u1 of shape \(20, 3000\)",
        ),
        (
            pickle.dumps({"data": PIXELS, "labels": LABELS[1:]}, 2),
            "19 labels, expected a list 'labels' of 20 numbers",
        ),
        (
            pickle.dumps({"data": PIXELS, "fine_labels": LABELS}, 2),
            "keys 'data', 'fine_labels', expected a list 'labels'",
        ),
        (pickle.dumps({"data": PIXELS, "labels": [*LABELS[1:], 10]}, 2), "image 19: label 10"),
        (pickle.dumps({"labels": LABELS}, 2), "an array of uint8 of shape .* received nothing"),
        (pickle.dumps([1], 2), "holds list, expected a dict"),
        (pickle.dumps({(1, 2): 1}, 2), "expected a dict of named values"),
        (pickle.dumps({"data": PIXELS, "labels": {1, 2}}, 4), "the instruction EMPTY_SET"),
        (as_released(PIXELS, LABELS)[:5000], "no whole pickle"),
        (b"", "no whole pickle"),
        (b"\x89PNG\r\n\x1a\n", "pickle"),
        (b"label,text\n", "pickle"),
        (b".", "no whole pickle"),
        (b"K\x01K\x02R.", "no whole pickle"),
    ],
)
def test_damaged_batches_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        build(path)
    assert str(path) in str(caught.value)


def test_any_cut_or_changed_byte_is_read_or_a_data_error(tmp_path: Path) -> None:
    stored = as_released(PIXELS[:1], LABELS[:1])
    frame = [i for i in range(len(stored)) if i < 160 or i > len(stored) - 80]
    generator = np.random.default_rng(1)
    path = tmp_path / "data_batch_1"
    refused = 0
    for place in [*frame, *frame]:
        changed = bytearray(stored)
        changed[place] = generator.integers(256)
        for content in (bytes(changed), stored[:place]):
            path.write_bytes(content)
            try:
                read_cifar_pickle(path)
            except DataError:
                refused += 1
    assert refused > len(frame)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "memo place 2147483647 after 2 instructions"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "no whole pickle"),
        (b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b"x.", "no whole pickle|BYTEARRAY8"),
        (b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85R.", "holds _Recorded, expected a dict"),
        (b"\x80\x02cnumpy\nzeros\nJ\xff\xff\xff\x7f\x85R.", "asks for 'numpy zeros'"),
    ],
)
def test_a_pickle_that_would_take_memory_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            read_cifar_pickle(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "name",
    ["numpy\nndarray", "numpy\ndtype", "numpy.core.multiarray\n_reconstruct", "_codecs\nencode"],
)
def test_a_pickle_cannot_change_what_stands_for_a_name(tmp_path: Path, name: str) -> None:
    # GLOBAL name, state (None, {"__init__": 1, "__defaults__": None}), BUILD: sets attributes where
    # it may.
    path = tmp_path / "data_batch_1"
    state = b"N}(X\x08\x00\x00\x00__init__K\x01X\x0c\x00\x00\x00__defaults__Nu\x86"
    path.write_bytes(b"\x80\x02c" + name.encode() + b"\n" + state + b"b.")
    with pytest.raises(DataError):
        read_cifar_pickle(path)
    path.write_bytes(pickle.dumps({"data": PIXELS, "labels": LABELS}, protocol=2))
    assert read_cifar_pickle(path)[0].labels.tolist() == LABELS


def test_names_of_classes(tmp_path: Path) -> None:
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}))
    assert read_cifar_names(tmp_path / "batches.meta") == NAMES
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES[1:]}))
    with pytest.raises(DataError, match="a list 'label_names' of ten names, received list"):
        read_cifar_names(tmp_path / "batches.meta")
