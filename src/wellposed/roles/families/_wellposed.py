"""Our own models: ``attention.{q,k,v,o}_proj`` and ``feedforward.{up,down}_proj``."""

from wellposed.roles.families._family import FAMILIES, Family, attention_named, feedforward_named

FAMILIES.register("wellposed")(
    Family(
        attention_named("q_proj", "k_proj", "v_proj", "o_proj"),
        feedforward_named("up_proj", "down_proj"),
    )
)
