"""The rules of certificates by kind of layer; each file registers its own on import."""

from wellposed.certification.rules import (  # noqa: F401
    _bounded_attention,
    _convolutions,
    _gated,
    _huggingface,
    _ours,
    _rotary,
)
from wellposed.certification.rules._attention_weights import AttentionWeights as AttentionWeights
from wellposed.certification.rules._blocks import mean_pooling as mean_pooling
from wellposed.certification.rules._blocks import of_one_vector as of_one_vector
from wellposed.certification.rules._blocks import one_token as one_token
from wellposed.certification.rules._bounded_attention import (
    cosine_attention_bound as cosine_attention_bound,
)
from wellposed.certification.rules._dot_product import (
    dot_product_ball_bound as dot_product_ball_bound,
)
from wellposed.certification.rules._torch_layers import layer_norm_bound as layer_norm_bound
