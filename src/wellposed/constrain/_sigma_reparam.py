"""`sigma_reparam_`: weights divided by their spectral norm, times a learnt gain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.call_checks import checked_arguments
from wellposed.constrain._select import Where, select_weights, unwrap_model
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConfigError, listed
from wellposed.interrupts import undoing
from wellposed.linalg import certified_spectral_norm, is_sharded
from wellposed.moves import say_moves
from wellposed.nn import SigmaReparam
from wellposed.options import Positive
from wellposed.roles import Verb

logger = logging.getLogger("wellposed.constrain")

SIGMA = Verb.by_name("sigma_reparam_", "model")


@dataclass(frozen=True)
class SigmaReparametrized:
    """The weights that `sigma_reparam_` changed."""

    moved: dict[str, float]
    """How far each matrix moved, ``|W' - W|_F / |W|_F``; 0 with ``gain="fit"``."""
    _slices: tuple[WeightSlice, ...] = field(repr=False)

    def norms(self) -> dict[str, tuple[float, float]]:
        """Return ``(|W|_2, g)`` of every matrix as its layer applies it; certified norms.

        Cost: an eigensolver for each matrix. The two differ by the error of the power steps.

        Raises:
            ConfigError: weights that are plain parameters now, as after ``merge()``.
        """
        gone = [part.label for part in self._slices if not _is_live(part)]
        if gone:
            raise ConfigError(
                "sigma_reparam_: these weights have no learnt norm any more, as after merge(); call"
                f" sigma_reparam_ again, or measure the plain weights:\n{listed(gone)}"
            )

        measured: dict[str, tuple[float, float]] = {}
        for part in self._slices:
            reparam = _reparam_of(part)
            with torch.no_grad(), _AtRest(part.module):
                matrix = part.matrix_in(getattr(part.module, part.name))
            gains = reparam.gain.detach()[part.expert or 0]
            rows = range(matrix.shape[0]) if part.rows is None else part.rows
            gain = float(gains[reparam.blocks.index(rows)])
            measured[part.label] = float(certified_spectral_norm(matrix)), gain
        return measured

    def merge(self) -> None:
        """Write the weights into plain parameters, and take the parametrisations off.

        The layers compute what they compute in evaluation. Optimizers must be made anew. Weights that
        are plain already stay as they are.
        """
        live = ((part.module, part.name) for part in self._slices if _is_live(part))
        for module, name in dict.fromkeys(live):
            with _AtRest(module):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)


@checked_arguments
def sigma_reparam_(
    model: nn.Module,
    where: Where = "layers",
    *,
    gain: Positive | Literal["fit"] | None = None,
    batch: Any = None,
) -> SigmaReparametrized:
    """Let layers apply ``g W / sigma(W)`` in place of W, with a learnt gain g for each matrix.

    Status: empirical: sigma follows the spectral norm by one power step a pass, from below
    (`SigmaReparam`). It lags behind: at steps of 5 % of a weight the norm was 1.2 g. Nothing is
    certified; for a proved bound use ``constrain_(to="spectral")``.
    Source: Zhai et al. 2023 (arXiv 2303.06296), against collapsing attention entropy. torch's
    ``spectral_norm`` has no gain, and takes a stack of experts for one matrix.

    Parts of a fused weight have a gain each, and so has each expert of a stack. The raw parameter
    keeps its name plus ``parametrizations``, so a checkpoint of the model without it does not load:
    call ``merge()`` before saving for others. Make the optimizer afterwards, with
    `wellposed.constrain.decay_groups`, which leaves raw weights without decay.

    Args:
        model: any module.
        where: as in `constrain_`; every matrix of attention and feed-forward networks by default.
        gain: at the start; ``"fit"`` is the norm of each matrix, so that nothing moves. The default is
            ``"fit"`` for pretrained Hugging Face models, else 1.
        batch: as in `constrain_`.

    Returns:
        A handle with ``moved``, ``norms()`` and ``merge()``.

    Raises:
        RoleNotFoundError: ``where`` matches nothing.
        ConfigError: weights that are zero, tied, sharded, adapted, computed already, or no matrix.

    Cost: `SigmaReparam`. When not to use: with gradient checkpointing, whose second pass has other
    power steps; for layers that read a weight many times (use ``torch.nn.utils.parametrize.cached``).

    >>> model = nn.TransformerEncoderLayer(8, 2, 16)
    >>> handle = sigma_reparam_(model)
    >>> [round(norm, 3) for norm, gain in handle.norms().values()]
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    model = unwrap_model(model, "sigma_reparam_")
    if gain is None:
        gain = "fit" if getattr(getattr(model, "config", None), "_name_or_path", "") else 1.0
    slices = select_weights(model, where, batch=batch, verb=SIGMA)
    _check(model, slices)
    by_weight: dict[tuple[int, str], list[WeightSlice]] = {}
    for part in slices:
        by_weight.setdefault((id(part.module), part.name), []).append(part)

    moved: dict[str, float] = {}
    with undoing() as undo:
        for parts in by_weight.values():
            first = parts[0]
            weight: Tensor = getattr(first.module, first.name)
            rows = [*dict.fromkeys(part.rows for part in parts if part.rows is not None)]
            size = None if gain == "fit" else float(gain)
            reparam = SigmaReparam(weight, rows, transposed=first.transposed, gain=size)
            norms = SigmaReparam(weight, rows, transposed=first.transposed, gain=None).gain.detach()
            for part in parts:
                index = 0 if part.rows is None else rows.index(part.rows)
                norm = float(norms[part.expert or 0, index])
                moved[part.label] = 0.0 if size is None else abs(size / norm - 1.0)
            reparam.gain.requires_grad_(weight.requires_grad)
            parametrize.register_parametrization(first.module, first.name, reparam)
            undo.later(_taken_off, first.module, first.name)
        undo.forget()
    say_moves(logger, f"sigma_reparam_: {len(moved)} matrices have a learnt norm", moved)
    return SigmaReparametrized(moved, tuple(slices))


def _taken_off(module: nn.Module, name: str) -> None:
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def _is_live(part: WeightSlice) -> bool:
    """Return whether the weight still has the parametrisation."""
    steps: Any = getattr(part.module, "parametrizations", {})
    return part.name in steps and isinstance(steps[part.name][0], SigmaReparam)


def _reparam_of(part: WeightSlice) -> SigmaReparam:
    steps: Any = part.module.parametrizations
    return steps[part.name][0]


class _AtRest:
    """Evaluation mode of a module's parametrisations, so that a look takes no power step."""

    def __init__(self, module: nn.Module) -> None:
        self.parts: Any = module.parametrizations

    def __enter__(self) -> None:
        self.was_training = self.parts.training
        self.parts.eval()

    def __exit__(self, *_: object) -> None:
        self.parts.train(self.was_training)


def _check(model: nn.Module, slices: Sequence[WeightSlice]) -> None:
    """Raise with every weight that cannot be reparametrised."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    lines = [
        f"{part.label}: {problem}"
        for part in slices
        if (problem := _problem(part, names.get(id(part.parameter), [])))
    ]
    if lines:
        raise ConfigError(
            f"sigma_reparam_: these weights cannot have a learnt norm:\n{listed(lines)}"
        )


def _problem(part: WeightSlice, names: Sequence[str]) -> str:
    parameter = part.parameter
    if parameter is None:
        return (
            "it is computed already (a parametrisation, a hook, or quantised); take that off first"
        )

    problems = {
        "its layer computes something else, or has an adapter; merge the adapter first": (
            part.deviation is not None or part.is_adapted
        ),
        f"it is tied ({', '.join(names)}), and the other layer would keep the raw weight": (
            len(names) > 1
        ),
        "it is sharded; call sigma_reparam_ before fully_shard": is_sharded(parameter),
        f"it has the shape {tuple(parameter.shape)}; expected a matrix, or a stack that find_roles"
        " knows": parameter.ndim != 2 + (part.expert is not None),
        "it is on the meta device, without values; load the weights first": parameter.is_meta,
    }
    problem_of_kind = next((problem for problem, is_so in problems.items() if is_so), "")

    return problem_of_kind or _problem_of_values(part.matrix_in(parameter.detach()))


def _problem_of_values(matrix: Tensor) -> str:
    is_usable = bool(matrix.isfinite().all()) and bool(matrix.any())
    return "" if is_usable else "it is zero or not finite, so it has no direction to keep"
