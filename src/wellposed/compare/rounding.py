"""What a finished run is worth in 8 and 4 bits: its metric on *test* with rounded weights and
activations, and the kurtosis of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, shortened
from wellposed.finite_json import to_json
from wellposed.roles import is_table, is_transposed
from wellposed.training import load_run_model, read_result
from wellposed.training.certified import record
from wellposed.training.folder.durable_files import replace_file
from wellposed.training.folder.run_folder import read_config
from wellposed.training.loop import batches
from wellposed.watch import kurtosis

if TYPE_CHECKING:
    from wellposed.tasks import Task


def rounded(values: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Return values rounded to ``2^bits - 1`` numbers evenly about 0, up to the largest magnitude
    along ``dim``.

    >>> rounded(torch.tensor([[0.4, -1.0], [0.0, 0.0]]), 2)
    tensor([[ 0., -1.],
            [ 0.,  0.]])
    """
    most = 2 ** (bits - 1) - 1
    scale = values.abs().amax(dim, keepdim=True) / most
    return (values / scale.where(scale > 0, 1.0)).round() * scale


@contextmanager
def rounded_model(
    model: nn.Module, bits: int | None, tails: dict[nn.Module, float]
) -> Iterator[None]:
    """Round weights per output channel (embeddings per token) and inputs of linear maps per token inside
    the context; each is scaled by its own largest entry.

    Products of attention, norms, biases and sums stay as they are. Where ``bits`` is None nothing is
    rounded, and the kurtosis of what enters each linear map is added to ``tails``.
    """

    def enter(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        result = list(given)
        for place, each in enumerate(given):
            if isinstance(each, Tensor) and each.is_floating_point():
                if bits:
                    result[place] = rounded(each, bits)
                else:
                    tails[module] = tails.get(module, 0.0) + float(kurtosis(each))
        return tuple(result)

    stacks = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, each in module.named_parameters(recurse=False)
        if each.ndim == 3 and len(each) > 1 and not isinstance(module, nn.modules.conv._ConvNd)
    ]
    if stacks:
        raise ConfigError(
            f"rounding does not see what enters the matrices of a stack: {shortened(stacks)}; compare"
            " models without experts in one parameter, or leave the number format out"
        )
    kept: dict[nn.Parameter, Tensor] = {}
    hooks = []
    try:
        for module in model.modules():
            own = [each for each in module.parameters(recurse=False) if each.ndim == 2]
            if own and not is_table(module):
                hooks.append(module.register_forward_pre_hook(enter))
            for parameter in own if bits else ():
                if parameter not in kept:  # tied ones are rounded once
                    kept[parameter] = parameter.detach().clone()
                    channel = 0 if is_transposed(module) else 1
                    parameter.data = rounded(parameter.detach(), bits or 0, channel)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, value in kept.items():
            parameter.data = value


def round_runs(
    folders: Sequence[Path], task: Task, formats: Sequence[str], announce: Callable[[str], None]
) -> None:
    """Measure the headline metric of finished runs on *test* in every format, what that loses against
    the metric unrounded, and the kurtosis of what enters a linear map, unrounded, on average over
    batches, in the worst one; keep them as ``rounded.json`` in each folder.

    Status: exact for rounding to nearest; the arithmetic is float32, so sums lose nothing.

    Cost: a forward pass over *test* for each format, and one more.
    """
    order = task.batches("test", 64, seed=0, epoch=0)
    for folder in folders:
        announce(f"{', '.join(formats)} of {folder}")
        model, _ = load_run_model(folder)
        temperature, result = read_config(folder).train.temperature, read_result(folder)
        assert result is not None  # it has finished
        tails: dict[nn.Module, float] = {}
        found: dict[str | None, float] = {}
        for name in (None, *formats):
            totals: dict[str, tuple[float, float]] = {}
            bits = record.FORMATS[name] if name else None
            with torch.no_grad(), rounded_model(model, bits, tails):
                for batch in batches.collated(task, "test", order, workers=0):
                    logits = temperature * batches.forward(model, batch)
                    for metric, (value, count) in task.metric_sums(logits, batch).items():
                        before = totals.get(metric, (0.0, 0.0))
                        totals[metric] = before[0] + value, before[1] + count
            found[name] = task.summarize(totals)[task.headline]
        metrics = {"kurtosis,test": max(tails.values()) / len(order)}
        for name in formats:
            lost = found[None] - found[name]
            metrics[f"{task.headline}@{name},test"] = found[name]
            metrics[f"lost@{name},test"] = lost if task.higher_is_better else -lost
        run = record.RoundedRun(str(result.result["date"]), metrics)
        data = to_json({"format": record.FORMAT, **asdict(run)}, indent=2)
        replace_file(folder / record.ROUNDED_NAME, data)
