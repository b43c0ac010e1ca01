"""QK-clip, ``constrain_(to="logits")``: rows of queries and keys are scaled by head."""

from wellposed.constrain.logits._held import Logits as Logits
from wellposed.constrain.logits._held import attention_of as attention_of
from wellposed.constrain.logits._held import check_not_compiled as check_not_compiled
from wellposed.constrain.logits._held import head_rows as head_rows
from wellposed.constrain.logits._trial import held_logits as held_logits
