from wellposed.call_checks import explain_failures_of
from wellposed.functional._affinity import affinity_penalty as affinity_penalty
from wellposed.functional._affinity import (
    affinity_penalty_from_logits as affinity_penalty_from_logits,
)
from wellposed.functional._as_dot_product import check_padding_shape as check_padding_shape
from wellposed.functional._as_dot_product import common_shift as common_shift
from wellposed.functional._as_dot_product import cosine_attention as cosine_attention
from wellposed.functional._as_dot_product import l2_attention as l2_attention
from wellposed.functional._as_dot_product import l2_vectors as l2_vectors
from wellposed.functional._as_dot_product import normalized_vectors as normalized_vectors
from wellposed.functional._batched_penalties import (
    batched_gram_penalties as batched_gram_penalties,
)
from wellposed.functional._diagnostics import attention_entropy as attention_entropy
from wellposed.functional._diagnostics import softmax_sensitivity as softmax_sensitivity
from wellposed.functional._gram import check_spectrum as check_spectrum
from wellposed.functional._gram import folding_pays as folding_pays
from wellposed.functional._gram import gram_attention as gram_attention
from wellposed.functional._gram import per_token as per_token
from wellposed.functional._masks import MASKED_ROW as MASKED_ROW
from wellposed.functional._masks import mask_limit as mask_limit
from wellposed.functional._masks import unattended as unattended
from wellposed.functional._orthogonality import OrthogonalityErrors as OrthogonalityErrors
from wellposed.functional._orthogonality import orthogonality_error as orthogonality_error
from wellposed.functional._orthogonality import orthogonality_errors as orthogonality_errors
from wellposed.functional._penalties import check_weights as check_weights
from wellposed.functional._penalties import gram_penalties as gram_penalties
from wellposed.functional._penalties import gram_penalty as gram_penalty
from wellposed.functional._penalties import qr_penalty as qr_penalty
from wellposed.functional._softmax_norm import softmax_jacobian_norm as softmax_jacobian_norm
from wellposed.functional._softmax_norm import softmax_norm_penalty as softmax_norm_penalty
from wellposed.functional._softmax_norm import (
    softmax_norm_penalty_from_logits as softmax_norm_penalty_from_logits,
)

explain_failures_of(__name__)
