"""Save the name of our attention in ``config.json``, or warn if the files cannot carry it."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from wellposed.errors import shortened
from wellposed.model_edits import ATTENTIONS, NAME, attention_of, parts_of

logger = logging.getLogger(__name__)


def _carried(config: Any) -> set[int]:
    return {id(config)}.union(*(_carried(part) for _, part in parts_of(config)))


def carry_attention() -> None:
    """Patch transformers, once: configs write our names, and saving warns of those it loses."""
    plain: Any = PreTrainedConfig.to_dict
    if getattr(plain, "names_attention", False):
        return

    @functools.wraps(plain)
    def to_dict(self: Any) -> dict[str, Any]:
        output = plain(self)
        note = output.get(NAME)
        if isinstance(note, dict):
            note.pop("attention", None)  # written by older versions, stale after a change
        name = attention_of(self)
        return output if name is None else {**output, "attn_implementation": name}

    vars(to_dict)["names_attention"] = True
    PreTrainedConfig.to_dict = to_dict
    say_lost_attention(PreTrainedModel)
    with suppress(ImportError):
        from peft import PeftModel

        say_lost_attention(PeftModel)  # an adapter's files contain nothing of its base model


def say_lost_attention(kind: Any) -> None:
    """Make ``kind.save_pretrained`` warn of parts whose attention its files do not carry."""
    plain = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(self: Any, *arguments: Any, **options: Any) -> Any:
        adapter = getattr(self, "_hf_peft_config_loaded", False)
        has_config = isinstance(self, PreTrainedModel) and not adapter
        carried = _carried(self.config) if has_config else set()
        root = self.config._attn_implementation if has_config else None
        lost = [
            f"{path or type(part).__name__}: {name}"
            for path, part in self.named_modules()
            if isinstance(part, PreTrainedModel) and id(part.config) not in carried
            if (name := part.config._attn_implementation) != root and {name, root} & {*ATTENTIONS}
        ]
        if lost:
            logger.warning(
                "%s.save_pretrained: these files do not carry the attention of %s; name it again after"
                " loading, by set_attn_implementation or attn_implementation=",
                type(self).__name__,
                shortened(lost),
            )

        return plain(self, *arguments, **options)

    kind.save_pretrained = save_pretrained
