"""The ``wellposed`` command: one file per sub-command, none of which imports torch before its
arguments are parsed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from wellposed.errors import ConfigError, WellposedError, is_out_of_memory, unknown_name
from wellposed.version import __version__

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

COMMANDS: dict[str, str] = {
    "train": "train one model on a task",
    "compare": (
        "train variants on the same batches and report the differences with their uncertainty"
    ),
    "reproduce": "make a table or figure of a paper again: CSV, SVG, paper says / we got",
    "report": "write one offline HTML page about finished runs",
    "certify": (
        "certified Lipschitz bound of every layer; certified accuracy of a classifier beside an"
        " attack"
    ),
    "measure": "orthogonality, singular values and conditioning of every weight by role and layer",
    "predict": "continue a text or label lines with a trained model",
    "push": (
        "upload the saved model of a finished run, with its model card, to the Hugging Face hub"
    ),
    "doctor": "check this installation: versions, devices, a self-test of a few seconds",
}
"""Sub-command -> one-line summary; the code is in ``wellposed/cli/_<name>.py``."""
TOGETHER = ("train", "compare")
"""The commands that several processes of a launcher do together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage, 130
    interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if isinstance(
        sys.stdout, TextIOWrapper
    ):  # a name that is no text, or that the terminal cannot show, is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    words = [word for word in words if word != "--debug"]
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except (WellposedError, OSError) as error:
        if debug:
            raise
        print(f"wellposed: {_printable(_describe(error))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except (MemoryError, RuntimeError) as error:
        if debug or not is_out_of_memory(error):
            raise
        print(
            f"wellposed: {words[0]}: out of memory: the model, its inputs or a batch is too large"
            f" for this machine ({str(error).partition(chr(10))[0] or 'no more can be had'})",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in {"-V", "--version"}:
        print(f"wellposed {__version__}")
        return EXIT_OK
    if words[0] == "sweep":  # gone in 0.3
        raise ConfigError(
            "`wellposed sweep` has gone: the study is `wellposed reproduce mcgrath2024 --data DIR`,"
            " a grid of yours `wellposed compare minbert --data DIR --variants plain,key:1e-2,...`"
        )
    if words[0] not in COMMANDS:
        raise unknown_name("command", words[0], COMMANDS)
    if words[0] not in TOGETHER:
        _refuse_several_processes(words[0])
    if any(word.partition("=")[0] == "--import" for word in words):
        from wellposed.cli.imports import import_named_files

        import_named_files(words)
    command = importlib.import_module(f"wellposed.cli._{words[0]}")
    return command.run(words[1:])


def _refuse_several_processes(command: str) -> None:
    from wellposed.training.loop.processes import is_one_of_several

    if is_one_of_several():
        raise ConfigError(
            f"wellposed {command} runs in one process; start it without torchrun or accelerate"
            " launch"
        )


def _describe(error: Exception) -> str:
    if isinstance(error, FileExistsError):
        return (
            f"{error.filename}: there is a file of that name, expected a folder; name another one"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'system'}: {error.strerror}"
    return str(error)


def _printable(message: str) -> str:
    """Return ``message`` with every character escaped that could tell a terminal to do
    something."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in message
    )


def usage() -> str:
    """Return the text of ``wellposed --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: wellposed COMMAND [OPTIONS]\n\nWell-posed Transformers: train, compare, measure"
        f" and certify them beside the plain baseline.\n\n{rows}\n\n`wellposed COMMAND --help`"
        " describes a command; --debug shows tracebacks; --version prints the version.\nExit"
        " status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."
    )
