"""Our L2 attention: where it is tied, one projection is query and key; with free values it is the value as well."""

from wellposed.roles._roles import AttentionRole
from wellposed.roles._site import Site, attention_role
from wellposed.roles.families._family import FAMILIES, Family, linear_views

_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def _attention(site: Site) -> AttentionRole | None:
    if not isinstance(getattr(site.module, "tied", None), bool):
        return None
    views = linear_views(site, _NAMES)
    if not {"query", "output"} <= views.keys():
        return None
    key = views.get("key", views["query"])
    return attention_role(site, {**views, "key": key, "value": views.get("value", key)})


FAMILIES.register("wellposed l2")(Family(_attention, feedforward=lambda _: None))
