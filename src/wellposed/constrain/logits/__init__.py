"""QK-clip, ``constrain_(to="logits")``: rows of queries and keys are scaled by head."""

from wellposed.constrain.logits._attach import constrain_logits as constrain_logits
