"""Words of a command line, written as one types them."""

import json
import subprocess
import sys

SMALLEST = "--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2"
TINY = "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2 --quiet"
"""Options of a model that trains in no time."""


def words(*parts):
    """Return the words of texts, split at white space, and the items of lists as they are."""
    split = (part.split() if isinstance(part, str) else part for part in parts)
    return [str(word) for words in split for word in words]


def succeed(*parts):
    """Run the command of these words, which must end well."""
    from wellposed_lab.cli.main import main

    typed = words(*parts)
    assert main(typed) == 0, typed


def python(*parts, **options):
    """Run a fresh Python with these words; ``options`` are those of `subprocess.run`."""
    options = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([sys.executable, *words(*parts)], **options)


COMMANDS = """
import contextlib, io, json, sys
{before}
from wellposed_lab.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        status = main(words)
    print(json.dumps([status, said.getvalue()]))
"""


def commands(calls, before="", **options):
    """Run commands in one fresh Python, after the line ``before``; return status and output of
    each, and what Python said."""
    code = COMMANDS.format(before=before)
    done = python(["-c", code, json.dumps([list(call) for call in calls])], **options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


class Cli:
    """The command in this process, and what it says."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *parts, status=0):
        """Return what the command of these words says, which must end with ``status``
        (None: 1 or 2)."""
        from wellposed_lab.cli.main import main

        self._capsys.readouterr()
        typed = words(*parts)
        code = main(typed)
        printed = self._capsys.readouterr()
        assert code in ((1, 2) if status is None else (status,)), (typed, printed.err)
        assert "Traceback" not in printed.err, typed
        return printed
