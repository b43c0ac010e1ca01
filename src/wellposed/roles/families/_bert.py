"""BERT and RoBERTa, and ViT of older transformers: ``self.{query,key,value}``, ``intermediate``,
``output``."""

from wellposed.roles._located_module import LocatedModule
from wellposed.roles._roles import AttentionRole
from wellposed.roles.families._family import FAMILIES, Family, attention_named, feedforward_named

_READERS = tuple(
    attention_named(f"{inner}.query", f"{inner}.key", f"{inner}.value", "output.dense")
    for inner in ("self", "attention")
)


def _attention(place: LocatedModule) -> AttentionRole | None:
    return next((role for reader in _READERS if (role := reader(place)) is not None), None)


FAMILIES.register("bert")(
    Family(_attention, feedforward_named("intermediate.dense", "output.dense"))
)
