"""Self- and cross-attention: dot product, L2, cosine, nGPT, and on the unit ball."""

from wellposed.nn.attention._ball import BallAttention as BallAttention
from wellposed.nn.attention._ball import BallCrossAttention as BallCrossAttention
from wellposed.nn.attention._ball import BallEmbedding as BallEmbedding
from wellposed.nn.attention._ball import BallProjection as BallProjection
from wellposed.nn.attention._ball import UnitEmbedding as UnitEmbedding
from wellposed.nn.attention._ball import project_to_ball as project_to_ball
from wellposed.nn.attention._dot_product import CosineCrossAttention as CosineCrossAttention
from wellposed.nn.attention._dot_product import CosineSelfAttention as CosineSelfAttention
from wellposed.nn.attention._dot_product import CrossAttention as CrossAttention
from wellposed.nn.attention._dot_product import DotProductAttention as DotProductAttention
from wellposed.nn.attention._dot_product import InverseDAttention as InverseDAttention
from wellposed.nn.attention._heads import HeadProjections as HeadProjections
from wellposed.nn.attention._heads import split_heads as split_heads
from wellposed.nn.attention._l2 import L2SelfAttention as L2SelfAttention
from wellposed.nn.attention._l2_bound import UnitWeights as UnitWeights
from wellposed.nn.attention._l2_bound import l2_attention_refusal as l2_attention_refusal
from wellposed.nn.attention._masks import AttentionMask as AttentionMask
from wellposed.nn.attention._masks import PaddingMask as PaddingMask
from wellposed.nn.attention._masks import attention_mask as attention_mask
from wellposed.nn.attention._masks import memory_mask as memory_mask
from wellposed.nn.attention._ngpt import NGPTAttention as NGPTAttention
