"""The sub-commands of ``wellposed`` by name; importing this module does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from wellposed.registry import Registry


class Command(NamedTuple):
    """A sub-command: its line in ``wellposed --help`` and the module that runs it."""

    summary: str
    module: str
    """Its function ``run(words)`` takes the words after the name and returns the exit status."""


COMMANDS: Registry[Command] = Registry(
    "command", entry_points="wellposed.commands", elsewhere={"reproduce": "wellposed-studies"}
)
for _name, _summary in {
    "train": "train one model on a task",
    "compare": "train variants on the same batches; report differences and their uncertainty",
    "report": "write one offline HTML page about finished runs",
    "certify": "certified Lipschitz bound of every layer; certified accuracy beside an attack",
    "measure": "orthogonality, singular values and conditioning of every weight by role and layer",
    "predict": "continue a text or label lines with a trained model",
    "doctor": "versions and devices of this installation",
}.items():
    COMMANDS.register(_name)(Command(_summary, f"wellposed_lab.cli.{_name}"))
