"""ViT: timm's fused ``qkv`` and ``proj``, Hugging Face's ``attention.{q,k,v,o}_proj``, and
``mlp.fc{1,2}``."""

from wellposed.roles._located_module import LocatedModule
from wellposed.roles._roles import AttentionRole
from wellposed.roles.families._family import (
    FAMILIES,
    Family,
    attention_fused,
    attention_named,
    feedforward_named,
)

_READERS = (attention_fused("qkv", "proj"), attention_named("q_proj", "k_proj", "v_proj", "o_proj"))


def _attention(place: LocatedModule) -> AttentionRole | None:
    return next((role for reader in _READERS if (role := reader(place)) is not None), None)


FAMILIES.register("vit")(Family(_attention, feedforward_named("fc1", "fc2")))
