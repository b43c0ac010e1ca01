"""DistilBERT: ``attention.{q,k,v,out}_lin`` and ``ffn.lin{1,2}``."""

from wellposed.roles.families._family import FAMILIES, Family, attention_named, feedforward_named

FAMILIES.register("distilbert")(
    Family(attention_named("q_lin", "k_lin", "v_lin", "out_lin"), feedforward_named("lin1", "lin2"))
)
