"""The Python version of CIFAR-10, whose batches are pickles, read without unpickling.

A pickle is a program: unpickling imports what it names and calls it. Here its instructions are read as data:
containers, numbers and strings are built, and what names an array of numpy becomes a placeholder. Nothing is imported
and nothing is called; any other name or instruction is a `DataError`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.images import Images, describe_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 3 * 32 * 32
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_NAMES = (*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode")
_MARK = object()
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None, "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
}  # fmt: skip
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")


@dataclass
class _Made:
    """What the pickle would have made by calling ``name``; nothing is called."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class _Name:
    name: str


def read_cifar_pickle(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read ``data`` (uint8, (n, 3072)) and ``labels`` (n numbers, 0 to 9) of a batch of CIFAR-10's Python version.

    Raises:
        DataError: not such a batch, or a pickle that names anything but an array of numpy.
    """
    import numpy as np

    batch = _read(path)
    pixels = _array(path, batch.get("data"))
    labels = batch.get("labels")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        found = (
            f"{len(labels)} labels" if isinstance(labels, list) else f"keys {', '.join(map(repr, list(batch)[:10]))}"
        )
        raise DataError(f"{path}: {found}, expected a list 'labels' of {len(pixels)} numbers, one an image")
    wrong = [(i, label) for i, label in enumerate(labels) if type(label) is not int or not 0 <= label <= 9]
    if wrong:
        problems = [f"{path}: image {i}: label {n if type(n) is int else type(n).__name__}" for i, n in wrong]
        raise DataError("labels of CIFAR-10 are 0 to 9:\n" + listed(problems))
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Images(images, np.array(labels, np.int64)), describe_file(path)


def read_cifar_names(path: Path) -> list[str]:
    """Read ``label_names`` of ``batches.meta``.

    Raises:
        DataError: the file holds no such list.
    """
    names = _read(path).get("label_names")
    if not isinstance(names, list) or len(names) != 10 or not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"{path}: expected a list 'label_names' of ten names, received {type(names).__name__}")
    return [_text(name) for name in names]


def _read(path: Path) -> dict[str, Any]:
    stored = path.read_bytes()
    try:
        top = _interpret(stored)
    except DataError as error:
        raise DataError(
            f"{path}: {error}; expected a batch of CIFAR-10's Python version (data_batch_1, ..., test_batch of "
            "cifar-10-python.tar.gz); copy it again, or take the binary version or an npz file with arrays x and y"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: {len(stored)} bytes that are no whole pickle ({error}); copy the file again"
        ) from None
    if not isinstance(top, dict) or not all(isinstance(key, str | bytes) for key in top):
        raise DataError(f"{path}: holds {type(top).__name__}, expected a dict of named values")
    return {_text(key): value for key, value in top.items()}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _interpret(stored: bytes) -> Any:
    """Return the value of a pickle of containers, numbers, strings and arrays; arrays and their types are `_Made`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(stored):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _BYTES:
            stack.append(argument.encode("latin-1") if isinstance(argument, str) else bytes(argument))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            _change(name, argument, stack)
    raise ValueError("no end")


def _change(name: str, argument: Any, stack: list[Any]) -> None:
    """Carry out an instruction that takes values off the stack."""
    if name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):
        items = _above_mark(stack)
        if name == "APPENDS":
            stack[-1].extend(items)
        elif name == "SETITEMS":
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            made = dict(zip(items[::2], items[1::2], strict=True)) if name == "DICT" else items
            stack.append(tuple(items) if name == "TUPLE" else made)
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "APPEND":
        item = stack.pop()
        stack[-1].append(item)
    elif name == "SETITEM":
        item = stack.pop()
        key = stack.pop()
        stack[-1][key] = item
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        wanted = argument if name == "GLOBAL" else " ".join(map(_text, stack[-2:]))
        if wanted not in _NAMES:
            raise DataError(f"is a pickle that asks for {wanted!r}, which is not loaded, as it can run any code")
        stack[len(stack) - 2 * (name == "STACK_GLOBAL") :] = [_Name(wanted)]
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_call(stack.pop(), arguments))
    elif name == "BUILD" and isinstance(stack[-2], _Made):
        state = stack.pop()
        stack[-1].state = state
    else:
        raise DataError(f"is a pickle with the instruction {name}, which no batch of CIFAR-10 has")


def _above_mark(stack: list[Any]) -> list[Any]:
    start = max(index for index, item in enumerate(stack) if item is _MARK)
    items = stack[start + 1 :]
    del stack[start:]
    return items


def _call(function: _Name, arguments: tuple[Any, ...]) -> Any:
    # Python 3 writes bytes for old readers as text and its encoding.
    if function.name == "_codecs encode":
        return arguments[0].encode("latin-1")
    return _Made(function.name, arguments)


def _array(path: Path, data: Any) -> NDArray[np.uint8]:
    """Return the array that numpy's own state (version, shape, type, order, bytes) describes."""
    import numpy as np

    expected = f"{path}: expected 'data' to be an array of uint8 of shape (n, {WIDTH})"
    if not isinstance(data, _Made) or data.name not in _RECONSTRUCT:
        raise DataError(f"{expected}, received {'nothing' if data is None else type(data).__name__}")
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
