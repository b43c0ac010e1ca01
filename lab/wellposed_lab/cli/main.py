"""The ``wellposed`` command: one file per sub-command; torch is imported after arguments are parsed."""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from wellposed import errors
from wellposed.text_table import aligned, printable
from wellposed.version import __version__
from wellposed_lab.cli.commands import COMMANDS
from wellposed_lab.cli.peek_arguments import peek_arguments
from wellposed_lab.plugins import import_file
from wellposed_lab.training.loop.processes import is_first, is_one_of_several

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

TYPED = ("train", "compare", "predict")
"""Commands whose error messages name options of tasks."""
TOGETHER = ("train", "compare")
"""Commands that several processes of a launcher run together."""
NEWLINE_AND_TAB = "\n\t"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Escape names that the terminal cannot show.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")

    own_options: dict[str, Any] = {"debug": False}
    try:
        own_options = peek_arguments(words, flags=["debug"], many=["import"])
        words = [word for word in words if word not in ("--debug", "--no-debug")]
        with _notices():
            return _dispatch(words, imports=own_options["import"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except Exception as error:
        message = None if own_options["debug"] else _describe(error, words)
        if message is None:
            raise
        message = printable(_as_typed(message, words[0]), keep=NEWLINE_AND_TAB)
        message = re.sub(r"\A(.*)\n  (.*)\Z", r"\1 \2", message).removeprefix("wellposed ")
        print(f"wellposed: {message}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (errors.ConfigError, ImportError)) else EXIT_FAILED


def _dispatch(words: list[str], *, imports: Sequence[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in {"-V", "--version"}:
        print(f"wellposed {__version__}")
        return EXIT_OK
    if words[0] not in TOGETHER and is_one_of_several():
        raise errors.ConfigError(
            f"wellposed {words[0]} runs in one process; start it without torchrun or accelerate"
            " launch"
        )

    for file in imports:
        import_file(Path(file))
    module = importlib.import_module(COMMANDS.get(words[0]).module)
    if not hasattr(module, "run"):
        raise errors.ConfigError(
            f"command {words[0]!r}: its module {module.__name__} has no function run(words)"
        )

    return module.run(words[1:])


@contextmanager
def _notices() -> Iterator[None]:
    """Show the library's messages of level ``logging.INFO`` on standard error."""
    logger = logging.getLogger("wellposed")
    handler = logging.StreamHandler(sys.stderr)
    handler.format = lambda record: printable(record.getMessage(), keep=NEWLINE_AND_TAB)
    # Training shows its own progress.
    handler.addFilter(
        lambda entry: entry.name != "wellposed_lab.training" or entry.levelno > logging.INFO
    )
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_first() else logging.WARNING)

    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _describe(error: Exception, words: Sequence[str]) -> str | None:
    """Return the message for an error in one line, or None for an unexpected error."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        missing = errors.missing_module(module, f"parts of wellposed {words[0]}")
        return str(missing) if missing else None
    if isinstance(error, FileExistsError):
        return f"{error.filename}: is a file, expected a folder; name another one"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'system'}: {error.strerror}"
    if isinstance(error, (errors.WellposedError, OSError)):
        return str(error)
    if errors.is_out_of_memory(error):
        return (
            f"{words[0]}: out of memory: the model, its inputs or a batch is too large for this"
            f" machine ({str(error).partition(chr(10))[0] or 'no more memory'})"
        )

    return None


def _as_typed(message: str, command: str) -> str:
    """Return ``message`` with options of tasks written as on the command line.

    >>> _as_typed("give label_column=topic, or header='no'", "train")
    'give --label-column topic, or --header no'
    """
    # Tasks that raised an error are imported already.
    tasks = sys.modules.get("wellposed_lab.tasks.task")
    if tasks is None or command not in TYPED:
        return message
    specs = [tasks.TASKS.get(name) for name in tasks.TASKS]
    names = {field.name for spec in specs for field in fields(spec.options)}

    def option(match: re.Match[str]) -> str:
        name = match[1]
        value = match[2]
        plain = value if " " in value else value.strip("'")
        return f"--{name.replace('_', '-')} {plain}" if name in names else match[0]

    return re.sub(r"(?<![\w.(])([a-z][a-z_]*)=('[^']*'|[\w.,:/*\[\]-]*[\w*\]])", option, message)


def usage() -> str:
    """Return the text of ``wellposed --help``."""
    rows = aligned([(f"  {name}", COMMANDS.get(name).summary) for name in COMMANDS], "l")
    return (
        "usage: wellposed COMMAND [OPTIONS]\n\nOrthogonality, Lipschitz bounds and certificates for"
        f" any PyTorch Transformer.\n\n{rows}\n\n`wellposed COMMAND --help`"
        " describes a command; --debug shows tracebacks; --version prints the version.\n"
        "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."
    )
