"""Certificates: Lipschitz bounds of any module that hold."""

from wellposed.call_checks import explain_failures_of
from wellposed.certification._as_called import uncertifiable_reason as uncertifiable_reason
from wellposed.certification._attained import attain as attain
from wellposed.certification._certificate import Certificate as Certificate
from wellposed.certification._certificate import CertifiedLayer as CertifiedLayer
from wellposed.certification._certified_bound import certified_bound as certified_bound
from wellposed.certification._certify import certify as certify
from wellposed.certification._layer_bound import LayerBound as LayerBound
from wellposed.certification._local_radius import local_radius as local_radius
from wellposed.certification._rules_by_class import certifiable_classes as certifiable_classes
from wellposed.certification._rules_by_class import inherit_rule as inherit_rule
from wellposed.certification._rules_by_class import register_rule as register_rule
from wellposed.certification._walk import RuleContext as RuleContext
from wellposed.certification.rules import AttentionWeights as AttentionWeights
from wellposed.certification.rules import cosine_attention_bound as cosine_attention_bound
from wellposed.certification.rules import dot_product_ball_bound as dot_product_ball_bound
from wellposed.certification.rules import layer_norm_bound as layer_norm_bound
from wellposed.certification.rules import mean_pooling as mean_pooling
from wellposed.certification.rules import of_one_vector as of_one_vector
from wellposed.certification.rules import one_token as one_token
from wellposed.removed_names import removed_names

explain_failures_of(__name__)

__getattr__ = removed_names(__name__, {"Site": "use RuleContext"})
