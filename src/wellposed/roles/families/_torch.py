"""`torch.nn.MultiheadAttention` (fused or separate projections) and the `torch.nn` Transformer
layers."""

from torch import nn

from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole
from wellposed.roles._views import WeightView, chunked, view_of
from wellposed.roles.families._family import FAMILIES, Family, feedforward_named


def _attention(place: LocatedModule) -> AttentionRole | None:
    module = place.module
    if not isinstance(module, nn.MultiheadAttention):
        return None
    roles = ("query", "key", "value")
    if module.in_proj_weight is not None:
        fused = WeightView(place.path, module, "in_proj_weight")
        views = {role: chunked(fused, (index, 3)) for index, role in enumerate(roles)}
    else:
        views = {role: WeightView(place.path, module, f"{role[0]}_proj_weight") for role in roles}
    return attention_role(
        place, {**views, "output": view_of(place.join("out_proj"), module.out_proj)}
    )


FAMILIES.register("torch")(Family(_attention, feedforward_named("linear1", "linear2")))
