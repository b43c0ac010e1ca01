"""GPT-2: fused ``c_attn`` and ``c_proj`` stored (in, out); cross-attention has its own
``q_attn``."""

from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole
from wellposed.roles._views import view_of
from wellposed.roles.families._family import FAMILIES, Family, attention_fused, feedforward_named

_self_attention = attention_fused("c_attn", "c_proj")


def _attention(place: LocatedModule) -> AttentionRole | None:
    query, fused, output = place.child("q_attn"), place.child("c_attn"), place.child("c_proj")
    if query is None or fused is None or output is None:
        return _self_attention(place)
    views = {
        "query": view_of(place.join("q_attn"), query),
        "key": view_of(place.join("c_attn"), fused, chunk=(0, 2)),
        "value": view_of(place.join("c_attn"), fused, chunk=(1, 2)),
        "output": view_of(place.join("c_proj"), output),
    }
    return attention_role(place, views)


FAMILIES.register("gpt2")(Family(_attention, feedforward_named("c_fc", "c_proj")))
