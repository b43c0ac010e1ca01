"""Take the LayerNorms out of a model, parameters and all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, listed
from wellposed.interrupts import Undo, all_or_nothing
from wellposed.model_checks import require_module
from wellposed.model_edits import record, recorded
from wellposed.nn import DynamicTanh, NoNorm, PostNorm, PreNorm, RemovedNorm
from wellposed.removed_names import removed_keywords
from wellposed.roles import Verb, find_roles_for, patterns_of

logger = logging.getLogger("wellposed.initialize")

_REMOVE = Verb("remove_norms_", "remove_norms_(model, batch=batch)", "")
_OTHERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)
_OTHERS += (DynamicTanh,)
_NUMBERS_OF_NORMS = ("eps", "epsilon", "variance_epsilon", "normalized_shape")
"""Attributes of norms of any name, most of which keep them from dividing by 0."""


@removed_keywords(keep="exclude")
@known_keywords
def remove_norms_(
    model: nn.Module, *, exclude: str | Sequence[str] = (), batch: Any = None
) -> tuple[str, ...]:
    """Replace every LayerNorm and RMSNorm by `x -> x`, in place, and drop their parameters.

    Exact. Norms are found by class, wherever they are: of torch, subclasses, and classes named
    ...LayerNorm or ...RMSNorm. With a ``batch`` also modules whose output ignores the scale of
    their input. The configuration of a Hugging Face model notes which are gone; after a plain
    ``from_pretrained`` call `remove_recorded_norms_`. Make the optimizer afterwards.

    Args:
        model: any module.
        exclude: shell-style pattern(s) on dotted paths of norms that stay, such as ``"*.q_norm"``.
        batch: as in `find_roles`; None finds norms by class alone.

    Returns:
        Dotted paths of the norms that were replaced, in model order; empty at a second call.

    Raises:
        ConfigError: a norm would stay that ``exclude`` does not name (BatchNorm and kin, a module with
            a norm's ``eps``, the model itself), or a pattern matches no norm. Nothing is changed.

    Cost: one walk over the modules. When not to use: a pretrained model, which needs its norms.

    >>> remove_norms_(nn.TransformerEncoderLayer(8, 2, 16))
    ('norm1', 'norm2')
    """
    require_module("remove_norms_", model)
    detected = () if batch is None else find_roles_for(_REMOVE, model, batch).norms
    excluded = patterns_of("exclude", exclude)
    norms = norms_of(model, detected)
    unused = [repr(p) for p in excluded if not any(matches(path, [p]) for path in norms)]
    if unused:
        raise ConfigError(
            f"exclude: no norm matches {', '.join(unused)}; norms of the model:\n"
            + (listed(list(norms)) or "  none")
        )

    paths = check_norms(model, excluded, detected)
    with all_or_nothing() as undo:
        removed = take_out(model, paths, undo)
    logger.info("remove_norms_: %d norms of %s are x -> x now", len(removed), type(model).__name__)
    return removed


def remove_recorded_norms_(model: nn.Module) -> tuple[str, ...]:
    """Replace the norms that ``model.config`` notes as removed by `x -> x`, in place.

    Exact: after ``from_pretrained`` and this call, logits are those of the saved model, bit for
    bit. Names match with and without the prefix of the body.

    Args:
        model: a Hugging Face model.

    Returns:
        Dotted paths of the norms that were replaced, in model order; empty without a note.

    Raises:
        CheckpointError: the note in the configuration is damaged.

    Cost: one walk over the modules. When not to use: after `wellposed.models.load_saved_model`.

    >>> from transformers import ViTConfig, ViTModel
    >>> config = ViTConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)
    >>> removed = remove_norms_(ViTModel(config))
    >>> removed[0], remove_recorded_norms_(ViTModel(config)) == removed
    ('layers.0.layernorm_before', True)
    """
    names = recorded(getattr(model, "config", None)).get("removed_norms", [])
    body = f"{getattr(model, 'base_model_prefix', '')}."
    wanted = {form for name in names for form in (name, name.removeprefix(body), body + name)}
    paths = [path for path in norms_of(model, wanted) if path in wanted]
    with all_or_nothing() as undo:
        return take_out(model, paths, undo)


def take_out(model: nn.Module, paths: Sequence[str], undo: Undo) -> tuple[str, ...]:
    """Replace norms by `x -> x`, note them in configurations, and return their paths.

    The caller runs ``undo`` after an exception: norms that are gone without a note would be missed
    when the model is loaded.
    """
    for path in paths:
        is_ours = isinstance(model.get_submodule(path), (PreNorm, PostNorm))
        parent, _, name = path.rpartition(".")
        undo.set(model.get_submodule(parent), name, NoNorm() if is_ours else RemovedNorm())
    if paths:
        _note_removed(model, paths, undo)
    return tuple(paths)


def _note_removed(model: nn.Module, paths: Sequence[str], undo: Undo) -> None:
    noted: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder):
            undo.set(module, "use_nested_tensor", False)  # its fused path reads weights of norm1
        config: Any = getattr(module, "config", None)
        prefix = f"{path}." if path else ""
        inside = [name.removeprefix(prefix) for name in paths if name.startswith(prefix)]
        if not inside or not hasattr(config, "model_type"):
            continue
        if config.model_type == "wellposed":
            per_head = [name for name in inside if name.endswith(("q_norm", "k_norm"))]
            undo.set(config, "norm", "none" if len(inside) > len(per_head) else config.norm)
            undo.set(config, "qk_norm", False if per_head else config.qk_norm)
        elif id(config) not in noted:
            gone = dict.fromkeys((*recorded(config).get("removed_norms", []), *inside))
            record(config, undo, removed_norms=[*gone])
        noted.add(id(config))


def check_norms(
    model: nn.Module,
    excluded: Sequence[str] = (),
    detected: Collection[str] = (),
    *,
    remove: bool = True,
) -> list[str]:
    """Return the paths of the norms to remove; ``detected`` are those that a pass shows.
    ConfigError if others would stay that no pattern of ``excluded`` names."""
    norms = norms_of(model, detected)
    if is_layer_norm(model):
        norms["the model itself"] = model
        remove = False

    free = {path: norm for path, norm in norms.items() if not matches(path, excluded)}
    goes = [
        path
        for path, norm in free.items()
        if remove and (is_layer_norm(norm) or path in detected) and not isinstance(norm, _OTHERS)
    ]
    stay = [f"{path} ({type(norm).__name__})" for path, norm in free.items() if path not in goes]
    if stay:
        advice = (
            "only LayerNorm and RMSNorm can be taken out; replace these, or name the harmless ones"
            " in exclude="
            if remove
            else "build the model without norms (norm='none'), or let them be taken out with"
            " remove_norms=True"
        )
        raise ConfigError(
            f"{type(model).__name__}: {len(stay)} norms stay, but these initial weights are for"
            f" models without norms; {advice}:\n{listed(stay)}"
        )

    return goes


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm or RMSNorm of torch or of another library."""
    name = type(module).__name__
    named = name.endswith(("LayerNorm", "RMSNorm")) and not list(module.children())
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or named


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted path matches any of the patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def norms_of(model: nn.Module, detected: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return every norm by path, shared ones once a path; ``detected`` adds those of a pass."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path
        and not isinstance(module, (NoNorm, RemovedNorm))
        and (path in detected or is_layer_norm(module) or _is_other_norm(module))
    }


def _is_other_norm(module: nn.Module) -> bool:
    """Return whether a module is another norm, by its class or its attributes."""
    if isinstance(module, nn.modules.loss._Loss) or list(module.children()):
        return False
    named = isinstance(module, _OTHERS) or type(module).__name__.endswith("Norm")
    return named or any(hasattr(module, number) for number in _NUMBERS_OF_NORMS)
