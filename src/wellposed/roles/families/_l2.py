"""Our L2 attention: where it is tied, one projection is query and key; with free values it is the
value as well."""

from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole
from wellposed.roles.families._family import FAMILIES, Family, linear_views

_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def _attention(place: LocatedModule) -> AttentionRole | None:
    if not isinstance(getattr(place.module, "tied", None), bool):
        return None
    views = linear_views(place, _NAMES)
    if not {"query", "output"} <= views.keys():
        return None
    key = views.get("key", views["query"])
    return attention_role(place, {**views, "key": key, "value": views.get("value", key)})


FAMILIES.register("wellposed l2")(Family(_attention, feedforward=lambda _: None))
