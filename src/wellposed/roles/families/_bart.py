"""BART, Marian and kin: ``self_attn`` and ``encoder_attn`` with ``{q,k,v,out}_proj``; the layer
holds ``fc{1,2}``."""

from wellposed.roles.families._family import FAMILIES, Family, attention_named, feedforward_named

FAMILIES.register("bart")(
    Family(
        attention_named("q_proj", "k_proj", "v_proj", "out_proj"), feedforward_named("fc1", "fc2")
    )
)
