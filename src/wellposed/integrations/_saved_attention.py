"""The name of our attention in what transformers saves: written into ``config.json`` under the key that
transformers reads, or said where the files cannot carry it."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from wellposed.config_record import ATTENTIONS, NAME, attention_of, parts_of
from wellposed.errors import shortened

logger = logging.getLogger(__name__)


def _carried(config: Any) -> set[int]:
    return {id(config)}.union(*(_carried(part) for _, part in parts_of(config)))


def carry_attention() -> None:
    """Let configurations of transformers write our names, and saving say which it loses; once."""
    plain: Any = PreTrainedConfig.to_dict
    if getattr(plain, "names_attention", False):
        return

    @functools.wraps(plain)
    def to_dict(self: Any) -> dict[str, Any]:
        output = plain(self)
        if isinstance(note := output.get(NAME), dict):
            note.pop("attention", None)  # of older versions, which a later change leaves behind
        found = attention_of(self)
        return output if found is None else {**output, "attn_implementation": found}

    vars(to_dict)["names_attention"] = True
    PreTrainedConfig.to_dict = to_dict
    say_lost_attention(PreTrainedModel)
    with suppress(ImportError):
        from peft import PeftModel

        say_lost_attention(PeftModel)  # files of an adapter contain nothing of the model below


def say_lost_attention(kind: Any) -> None:
    """Let ``kind.save_pretrained`` warn of parts whose attention its files do not carry."""
    plain = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(self: Any, *given: Any, **options: Any) -> Any:
        adapter = getattr(self, "_hf_peft_config_loaded", False)
        whole = isinstance(self, PreTrainedModel) and not adapter
        carried = _carried(self.config) if whole else set()
        root = self.config._attn_implementation if whole else None
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
                *(type(self).__name__, shortened(lost)),
            )
        return plain(self, *given, **options)

    kind.save_pretrained = save_pretrained
