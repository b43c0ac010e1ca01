"""What a run read of the model it starts from, what it drew, and what it left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import shortened

if TYPE_CHECKING:
    from wellposed.models import Start
    from wellposed.training.config import StartOptions


def describe_start(options: StartOptions, start: Start) -> dict[str, Any]:
    """Return the entry ``started_from`` of ``train_info``; nothing where the run starts from no
    model."""
    if not options.model:
        return {}
    names = {"new_weights": list(start.new_weights), "left_out": list(start.left_out)}
    return {"started_from": {"model": options.model, **names}}


def start_line(started_from: dict[str, Any], parameters: Sequence[str]) -> str:
    """Return in one line what `describe_start` tells of a model with these parameters.

    >>> start_line({"model": "bert", "new_weights": ["classifier.bias"], "left_out": []}, ["a", "classifier.bias"])
    'starts from bert; drawn at random: classifier.bias'
    """
    drawn, left_out = started_from["new_weights"], started_from["left_out"]
    everything = set(parameters) <= set(drawn)
    told = [f"starts from {started_from['model']}"]
    told += (
        [f"drawn at random: {'every weight' if everything else shortened(drawn)}"] if drawn else []
    )
    told += [f"in the file and not used: {shortened(left_out)}"] if left_out else []
    return "; ".join(told)
