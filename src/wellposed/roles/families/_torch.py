"""`torch.nn.MultiheadAttention` (fused or separate projections) and the `torch.nn` Transformer layers."""

from torch import nn

from wellposed.roles._roles import AttentionRole
from wellposed.roles._site import Site, attention_role
from wellposed.roles._views import WeightView, chunked, view_of
from wellposed.roles.families._family import FAMILIES, Family, feedforward_named


def _attention(site: Site) -> AttentionRole | None:
    module = site.module
    if not isinstance(module, nn.MultiheadAttention):
        return None
    roles = ("query", "key", "value")
    if module.in_proj_weight is not None:
        fused = WeightView(site.path, module, "in_proj_weight")
        views = {role: chunked(fused, (index, 3)) for index, role in enumerate(roles)}
    else:
        views = {role: WeightView(site.path, module, f"{role[0]}_proj_weight") for role in roles}
    return attention_role(site, {**views, "output": view_of(site.join("out_proj"), module.out_proj)})


FAMILIES.register("torch")(Family(_attention, feedforward_named("linear1", "linear2")))
