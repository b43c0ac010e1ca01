"""The two releases of CIFAR-10: binary records, and the Python version, whose batches are pickles.

A pickle is a program: unpickling imports what it names and calls it. Here the five names that
arrays of numpy need stand for plain records of what the pickle says about them, so numpy itself is
never called, and any other name or instruction is a `DataError`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.files import describe_file
from wellposed.tasks.data.images import Images
from wellposed.tasks.data.splits import cut_missing
from wellposed.tasks.task import Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 3 * 32 * 32
# The instructions of a batch as Python 2 and 3 write it.
_INSTRUCTIONS = """
PROTO FRAME STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE NONE NEWTRUE NEWFALSE TUPLE TUPLE1 TUPLE2 TUPLE3 LIST DICT
APPEND APPENDS SETITEM SETITEMS INT BININT BININT1 BININT2 LONG LONG1 LONG4 UNICODE BINUNICODE SHORT_BINUNICODE
BINUNICODE8 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 PUT BINPUT LONG_BINPUT MEMOIZE GET
BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_DAMAGED = (
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)


class _Recorded:
    """Stands for an object of numpy: keeps its arguments and its state, and builds nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Recorded):
    """Stands for an array; its state is (version, shape, type, order, bytes)."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name} {global_name}"
        if name in ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"):
            return _Array
        if name in ("numpy ndarray", "numpy dtype"):
            return _Recorded
        if name == "_codecs encode":
            return lambda text, _: text.encode(
                "latin-1"
            )  # bytes that Python 3 wrote for old readers
        raise DataError(
            f"is a pickle that asks for {name!r}, which is not loaded, as it can run any code"
        )


def read_cifar(
    root: Path, batches: Sequence[Path], *, with_test: bool
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    """Read the train batches of either release, the test batch beside them if wanted, and the names
    of the classes."""
    import numpy as np

    binary = batches[0].suffix == ".bin"
    read: Callable[[Path], tuple[Images, dict[str, Any]]] = (
        read_cifar_binary if binary else read_cifar_pickle
    )
    train, files = zip(*(read(path) for path in batches), strict=True)
    images: dict[Split, Images] = {
        "train": Images(
            np.concatenate([i.pixels for i in train]), np.concatenate([i.labels for i in train])
        )
    }
    test = root / ("test_batch.bin" if binary else "test_batch")
    if with_test and test.exists():
        images["test"], described = read(test)
        files = (*files, described)
    names = root / ("batches.meta.txt" if binary else "batches.meta")
    labels = None
    if names.exists():
        labels = names.read_text(encoding="utf-8").split() if binary else read_cifar_names(names)
    images, cut = cut_missing(images, str(root))
    return images, labels, {"source": str(root), "files": list(files), "splits": "published", **cut}


def read_cifar_binary(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read records of one label and 3 x 1024 bytes, the binary version of CIFAR-10."""
    import numpy as np

    stored = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(stored) or len(stored) % (1 + WIDTH):
        raise DataError(
            f"{path}: {len(stored)} bytes, expected records of 3073 (a label and 3 x 32 x 32"
            " values)"
        )
    records = stored.reshape(-1, 1 + WIDTH)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        problems = [
            f"{path}: record {index}: label {records[index, 0]}" for index in wrong.tolist()
        ]
        raise DataError("labels of CIFAR-10 are 0 to 9:\n" + listed(problems))
    pixels = _to_images(records[:, 1:])
    return Images(pixels, records[:, 0].astype(np.int64)), describe_file(path)


def read_cifar_pickle(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read ``data`` (uint8, (n, 3072)) and ``labels`` (n numbers, 0 to 9) of a batch of CIFAR-10's
    Python version."""
    import numpy as np

    batch = _unpickle(path)
    pixels = _array(path, batch.get("data"))
    labels = batch.get("labels")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        keys = f"keys {', '.join(map(repr, list(batch)[:10]))}"
        found = f"{len(labels)} labels" if isinstance(labels, list) else keys
        raise DataError(
            f"{path}: {found}, expected a list 'labels' of {len(pixels)} numbers, one an image"
        )
    wrong = [
        (i, label)
        for i, label in enumerate(labels)
        if type(label) is not int or not 0 <= label <= 9
    ]
    if wrong:
        problems = [
            f"{path}: image {i}: label {n if type(n) is int else type(n).__name__}"
            for i, n in wrong
        ]
        raise DataError("labels of CIFAR-10 are 0 to 9:\n" + listed(problems))
    return Images(_to_images(pixels), np.array(labels, np.int64)), describe_file(path)


def read_cifar_names(path: Path) -> list[str]:
    """Read the ten ``label_names`` of ``batches.meta``."""
    names = _unpickle(path).get("label_names")
    if (
        not isinstance(names, list)
        or len(names) != 10
        or not all(isinstance(name, str | bytes) for name in names)
    ):
        raise DataError(
            f"{path}: expected a list 'label_names' of ten names, received {type(names).__name__}"
        )
    return [_text(name) for name in names]


def _unpickle(path: Path) -> dict[str, Any]:
    stored = path.read_bytes()
    try:
        _refuse_instructions(stored)
        top = _Unpickler(io.BytesIO(stored), encoding="bytes").load()
    except DataError as error:
        raise DataError(
            f"{path}: {error}; expected a batch of CIFAR-10's Python version (data_batch_1, ...,"
            " test_batch of cifar-10-python.tar.gz); copy it again, or take the binary version or"
            " an npz file with arrays x and y"
        ) from None
    except _DAMAGED as error:
        raise DataError(
            f"{path}: {len(stored)} bytes that are no whole pickle ({error}); copy the file again"
        ) from None
    if not isinstance(top, dict) or not all(isinstance(key, str | bytes) for key in top):
        raise DataError(f"{path}: holds {type(top).__name__}, expected a dict of named values")
    return {_text(key): value for key, value in top.items()}


def _refuse_instructions(stored: bytes) -> None:
    """Refuse instructions that no batch has, lengths beyond the file, and memo places that would
    take memory."""
    argument: Any
    allowed = frozenset(_INSTRUCTIONS.split())
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stored)):
        if opcode.name not in allowed:
            raise DataError(
                f"is a pickle with the instruction {opcode.name}, which no batch of CIFAR-10 has"
            )
        if opcode.name in _PUTS and argument > count:
            raise ValueError(f"memo place {argument} after {count} instructions")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _to_images(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of 3 x 1024 values as images (32, 32, 3)."""
    import numpy as np

    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _array(path: Path, data: Any) -> NDArray[np.uint8]:
    """Return the array that a recorded state describes."""
    import numpy as np

    expected = f"{path}: expected 'data' to be an array of uint8 of shape (n, {WIDTH})"
    if not isinstance(data, _Array):
        raise DataError(
            f"{expected}, received {'nothing' if data is None else type(data).__name__}"
        )
    try:
        *_, (rows, width), kind, fortran, content = data.state
        kind_name, size = _text(kind.arguments[0]), len(content)
    except (ValueError, TypeError, AttributeError, IndexError):
        raise DataError(f"{expected}, received an array of another kind") from None
    if kind_name not in ("u1", "|u1", "uint8") or width != WIDTH or fortran or not rows:
        order = " in columns" if fortran else ""
        raise DataError(f"{expected}, received {kind_name} of shape ({rows}, {width}){order}")
    if not isinstance(content, bytes) or size != rows * WIDTH:
        raise DataError(f"{expected}, received {size} bytes for {rows} rows; copy the file again")
    return np.frombuffer(content, np.uint8).reshape(-1, WIDTH)
