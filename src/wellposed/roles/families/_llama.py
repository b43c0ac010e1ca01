"""Llama, Mistral, Qwen and kin: ``self_attn.{q,k,v,o}_proj`` (grouped heads) and a gated
``mlp``."""

from wellposed.roles.families._family import FAMILIES, Family, attention_named, feedforward_named

FAMILIES.register("llama")(
    Family(
        attention_named("q_proj", "k_proj", "v_proj", "o_proj"),
        feedforward_named(up="up_proj", down="down_proj", gate="gate_proj"),
    )
)
