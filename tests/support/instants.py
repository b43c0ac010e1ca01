"""Interrupt a call at its k-th torch operation, or by a real Ctrl-C at its k-th line of the library."""

import dis
import functools
import signal
import sys
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

import wellposed

LIBRARY = str(Path(wellposed.__file__).parent)
_LOOKS = ("CALL", "JUMP_BACKWARD", "RESUME", "FOR_ITER", "SEND")


class OnPurposeError(RuntimeError):
    """An error of torch, such as one that memory ran out."""


class _AtOperation(TorchDispatchMode):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise OnPurposeError("CUDA out of memory. on purpose")
        return func(*args, **(kwargs or {}))


@functools.cache
def lines_that_look(code):
    """Lines at which Python looks for signals: at calls, at entries and in loops."""
    lines = set()
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.opname.startswith(_LOOKS):
            lines.add(line)
    return lines


@functools.cache
def exits(code):
    """Offsets at which a ``with`` block calls ``__exit__``; Python looks for no signal before that call."""
    steps = [*dis.get_instructions(code)]
    nothing = [step.opname == "LOAD_CONST" and step.argval is None for step in steps]
    calls = {index for index in range(len(steps)) if nothing[index : index + 3] == [True] * 3}
    # A value that the block returns is put under the call's arguments first.
    swaps = {index - 1 for index in calls if steps[index - 1].opname == "SWAP"}
    return {steps[index].offset for index in calls | swaps}


def operations(call):
    """Run a call; return how many torch operations it makes."""
    with _AtOperation(0) as mode:
        call()
    return mode.count


def at_operation(call, number):
    with _AtOperation(number):
        call()


def traced(call, number=0):
    """Run a call with Ctrl-C before its k-th visit of a line; return the places visited."""
    places = []
    printed = []

    def lines(frame, event, _):
        code = frame.f_code
        is_exit = frame.f_lasti in exits(code)
        if event == "line" and not is_exit and frame.f_lineno in lines_that_look(code):
            places.append((code.co_filename, frame.f_lineno))
            if len(places) == number:
                signal.raise_signal(signal.SIGINT)
        return lines

    def enter(frame, *_):
        return lines if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace(), sys.unraisablehook
    # Python prints an interrupt that comes inside a finalizer, as of a deleted penalty, and goes on.
    sys.unraisablehook = printed.append
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.unraisablehook = before[1]
    return places


def chosen(places, most):
    """Numbers of the first and last visit of each line, at most ``most`` of them, evenly."""
    first = {index: number for number, index in reversed([*enumerate(places, 1)])}
    last = {index: number for number, index in enumerate(places, 1)}
    numbers = sorted({*first.values(), *last.values()})
    return numbers[:: max(1, -(-len(numbers) // most))]


def spread(count, most):
    return range(1, count + 1, max(1, -(-count // most)))
