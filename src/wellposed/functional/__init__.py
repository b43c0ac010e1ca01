from wellposed.functional._affinity import affinity_penalty as affinity_penalty
from wellposed.functional._affinity import (
    affinity_penalty_from_logits as affinity_penalty_from_logits,
)
from wellposed.functional._diagnostics import attention_entropy as attention_entropy
from wellposed.functional._diagnostics import softmax_sensitivity as softmax_sensitivity
from wellposed.functional.as_dot_product import cosine_attention as cosine_attention
from wellposed.functional.as_dot_product import l2_attention as l2_attention
from wellposed.functional.gram import gram_attention as gram_attention
from wellposed.functional.orthogonality import orthogonality_error as orthogonality_error
from wellposed.functional.penalties import gram_penalty as gram_penalty
from wellposed.functional.penalties import qr_penalty as qr_penalty
from wellposed.tensor_calls import explain_failures_of

explain_failures_of(__name__)
