"""Phi-3 and kin: ``qkv_proj`` fused over grouped heads and a merged ``gate_up_proj``."""

from wellposed.roles._roles import AttentionRole, FeedForwardRole
from wellposed.roles._site import Site, attention_role
from wellposed.roles._views import WeightView, view_of
from wellposed.roles.families._family import FAMILIES, Family


def _attention(site: Site) -> AttentionRole | None:
    fused, output, heads = site.child("qkv_proj"), site.child("o_proj"), site.num_heads()
    if fused is None or output is None or heads is None:
        return None
    whole, out = view_of(site.join("qkv_proj"), fused), view_of(site.join("o_proj"), output)
    width = out.shape[1]  # query rows: heads * head_dim
    shared = (whole.shape[0] - width) // 2  # key rows, and as many value rows

    def rows(start: int, stop: int) -> WeightView:
        return WeightView(whole.owner_path, whole.owner, whole.attribute, (start, stop), whole.transposed)

    views = {"query": rows(0, width), "key": rows(width, width + shared), "value": rows(width + shared, whole.shape[0])}
    return attention_role(site, {**views, "output": out})


def _feedforward(site: Site) -> FeedForwardRole | None:
    merged, down = site.child("gate_up_proj"), site.child("down_proj")
    if merged is None or down is None:
        return None
    gate, up = (view_of(site.join("gate_up_proj"), merged, chunk=(index, 2)) for index in range(2))
    return FeedForwardRole(site.path, site.stack, site.layer, up, view_of(site.join("down_proj"), down), gate)


FAMILIES.register("phi3")(Family(_attention, _feedforward))
