"""Phi-3 and kin: ``qkv_proj`` fused over grouped heads and a merged ``gate_up_proj``."""

from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole, FeedForwardRole
from wellposed.roles._views import WeightView, view_of
from wellposed.roles.families._family import FAMILIES, Family


def _attention(place: LocatedModule) -> AttentionRole | None:
    fused, output = place.child("qkv_proj"), place.child("o_proj")
    if fused is None or output is None:
        return None
    whole, out = view_of(place.join("qkv_proj"), fused), view_of(place.join("o_proj"), output)
    width = out.shape[1]  # query rows: heads * head_dim
    shared = (whole.shape[0] - width) // 2  # key rows, and as many value rows

    def rows(start: int, stop: int) -> WeightView:
        return WeightView(
            whole.owner_path, whole.owner, whole.attribute, (start, stop), whole.transposed
        )

    views = {
        "query": rows(0, width),
        "key": rows(width, width + shared),
        "value": rows(width + shared, whole.shape[0]),
    }
    return attention_role(place, {**views, "output": out})


def _feedforward(place: LocatedModule) -> FeedForwardRole | None:
    merged, down = place.child("gate_up_proj"), place.child("down_proj")
    if merged is None or down is None:
        return None
    gate, up = (view_of(place.join("gate_up_proj"), merged, chunk=(index, 2)) for index in range(2))
    return FeedForwardRole(
        place.path, place.stack, place.layer, up, view_of(place.join("down_proj"), down), gate
    )


FAMILIES.register("phi3")(Family(_attention, _feedforward))
