"""Certificates: Lipschitz bounds of any module that hold, and an attack that tries to break
them."""

# The names of `wellposed.attack` are here too, as they were before it was a package of its own.
from wellposed.attack import LowerBound as LowerBound
from wellposed.attack import PatchGrid as PatchGrid
from wellposed.attack import lipschitz_lower_bound as lipschitz_lower_bound
from wellposed.attack import patch_grid as patch_grid
from wellposed.attack import perturbation_size as perturbation_size
from wellposed.attack import steepest_direction as steepest_direction

# Every file with rules is named, since a rule exists only once its file is imported.
from wellposed.certification import (  # noqa: F401
    _blocks,
    _bounded,
    _hf,
    _transject,
)
from wellposed.certification._attention import AttentionWeights as AttentionWeights
from wellposed.certification._attention import dot_product_ball_bound as dot_product_ball_bound
from wellposed.certification._blocks import gated_feedforward_bound as gated_feedforward_bound
from wellposed.certification._blocks import layer_norm_bound as layer_norm_bound
from wellposed.certification._blocks import mean_pooling as mean_pooling
from wellposed.certification._blocks import of_one_vector as of_one_vector
from wellposed.certification._blocks import one_token as one_token
from wellposed.certification._bounded import (
    ball_cross_attention_bounds as ball_cross_attention_bounds,
)
from wellposed.certification._bounded import cosine_attention_bound as cosine_attention_bound
from wellposed.certification._bounded import (
    cosine_cross_attention_bounds as cosine_cross_attention_bounds,
)
from wellposed.certification._certificate import Certificate as Certificate
from wellposed.certification._certificate import CertifiedLayer as CertifiedLayer
from wellposed.certification._certify import certify as certify
from wellposed.certification._rules import LayerBound as LayerBound
from wellposed.certification._rules import Site as Site
from wellposed.certification._rules import certifiable_classes as certifiable_classes
from wellposed.certification._rules import inherit_rule as inherit_rule
from wellposed.certification._rules import register_rule as register_rule
from wellposed.certification._transject import token_distance_bounds as token_distance_bounds
from wellposed.functional import softmax_sensitivity as softmax_jacobian_bound  # noqa: F401
from wellposed.linalg import kim2021_bound as kim2021_bound
from wellposed.tensor_calls import explain_failures_of

explain_failures_of(__name__)
