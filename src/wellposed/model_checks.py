"""Check that an argument is a model whose weights this process has."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError, shortened
from wellposed.zero_weights import check_whole


def require_module(call: str, model: object) -> None:
    """Raise `ConfigError` unless ``model`` is a ``torch.nn.Module`` (not its name), with weights that
    this process has whole, or as shards of torch."""
    if callable(getattr(model, "named_modules", None)) and not isinstance(model, type):
        weights: Any = getattr(model, "named_parameters", dict)()
        lazy = [name for name, weight in weights if type(weight).__name__.startswith("Uninit")]
        if lazy:
            raise ConfigError(
                f"{call}: these weights of lazy layers have no shape yet: {shortened(lazy)}; run the"
                " model once on a batch, then call it again"
            )
        check_whole(call, model)
        return
    hint = ""
    if isinstance(model, str):
        hint = f"; load it first, as with transformers.AutoModel.from_pretrained({model!r})"
    raise ConfigError(
        f"{call}: expected a model (torch.nn.Module), received {type(model).__name__}{hint}"
    )
