"""Building blocks of Transformers: attentions, feed-forwards, residuals, positions, and stacks of
them.

Every attention, ours or registered by a user, is called as
``attention(x, *, key_padding_mask=None, is_causal=False, cache=None) -> Tensor``:

- ``x`` is (batch, tokens, width), and so is what comes back.
- ``key_padding_mask`` is bool (batch, keys), True = padding, or a finished `AttentionMask`, or None.
  Hugging Face's ``attention_mask`` says the opposite (1 = real token): pass ``attention_mask == 0``.
- ``is_causal`` keeps a token from later ones.
- ``cache`` is a `LayerCache` of earlier keys and values, in generation.

`attention_mask` makes of the two what ``scaled_dot_product_attention`` takes; a padded token sees
itself alone, so that no row is empty. A cross-attention takes ``(x, memory, *, key_padding_mask=None,
cache=None)``, and `memory_mask` makes its mask.
"""

from wellposed.nn._registry import ATTENTIONS as ATTENTIONS
from wellposed.nn._registry import CROSS_ATTENTIONS as CROSS_ATTENTIONS
from wellposed.nn._registry import FEEDFORWARDS as FEEDFORWARDS
from wellposed.nn._registry import NORMS as NORMS
from wellposed.nn._registry import RESIDUALS as RESIDUALS
from wellposed.nn._registry import LayerBuilder as LayerBuilder
from wellposed.nn._registry import LayerCache as LayerCache
from wellposed.nn._registry import MemoryCache as MemoryCache
from wellposed.nn._registry import NormPlacement as NormPlacement
from wellposed.nn.attention.ball import BallAttention as BallAttention
from wellposed.nn.attention.ball import BallCrossAttention as BallCrossAttention
from wellposed.nn.attention.ball import BallEmbedding as BallEmbedding
from wellposed.nn.attention.ball import BallProjection as BallProjection
from wellposed.nn.attention.ball import UnitEmbedding as UnitEmbedding
from wellposed.nn.attention.ball import project_to_ball as project_to_ball
from wellposed.nn.attention.dot_product import CosineCrossAttention as CosineCrossAttention
from wellposed.nn.attention.dot_product import CosineSelfAttention as CosineSelfAttention
from wellposed.nn.attention.dot_product import CrossAttention as CrossAttention
from wellposed.nn.attention.dot_product import DotProductAttention as DotProductAttention
from wellposed.nn.attention.dot_product import InverseDAttention as InverseDAttention
from wellposed.nn.attention.l2 import L2SelfAttention as L2SelfAttention
from wellposed.nn.attention.l2_bound import l2_attention_refusal as l2_attention_refusal
from wellposed.nn.attention.masks import AttentionMask as AttentionMask
from wellposed.nn.attention.masks import PaddingMask as PaddingMask
from wellposed.nn.attention.masks import attention_mask as attention_mask
from wellposed.nn.attention.masks import memory_mask as memory_mask
from wellposed.nn.block import Block as Block
from wellposed.nn.block import DecoderBlock as DecoderBlock
from wellposed.nn.block import DynamicTanh as DynamicTanh
from wellposed.nn.block import NoNorm as NoNorm
from wellposed.nn.block import PostNorm as PostNorm
from wellposed.nn.block import PreNorm as PreNorm
from wellposed.nn.block import TransformerStack as TransformerStack
from wellposed.nn.feedforward import ACTIVATIONS as ACTIVATIONS
from wellposed.nn.feedforward import MLP as MLP
from wellposed.nn.feedforward import MaxMin as MaxMin
from wellposed.nn.feedforward import MaxMinFeedForward as MaxMinFeedForward
from wellposed.nn.feedforward import unit_gelu as unit_gelu
from wellposed.nn.invertible.blocks import AdditiveCoupling as AdditiveCoupling
from wellposed.nn.invertible.blocks import InvertibleResidual as InvertibleResidual
from wellposed.nn.invertible.blocks import ReversibleSequential as ReversibleSequential
from wellposed.nn.invertible.blocks import frozen as frozen
from wellposed.nn.invertible.inversion import Inversion as Inversion
from wellposed.nn.positions import POSITIONS as POSITIONS
from wellposed.nn.positions import LearnedPositions as LearnedPositions
from wellposed.nn.positions import NoPositions as NoPositions
from wellposed.nn.positions import SinusoidalPositions as SinusoidalPositions
from wellposed.nn.residual import BudgetResidual as BudgetResidual
from wellposed.nn.residual import ConvexResidual as ConvexResidual
from wellposed.nn.residual import PlainResidual as PlainResidual
from wellposed.nn.residual import ReZeroResidual as ReZeroResidual
from wellposed.nn.transject.block import TransJectBlock as TransJectBlock
from wellposed.nn.transject.gram import ExpertMixture as ExpertMixture
from wellposed.nn.transject.gram import GramAttention as GramAttention
from wellposed.nn.transject.gram import GramSpectrum as GramSpectrum
from wellposed.nn.transject.gram import LearnedSpectrum as LearnedSpectrum
from wellposed.nn.transject.gram import TransJectCache as TransJectCache
from wellposed.nn.transject.parts import ORTHOGONAL_WEIGHTS as ORTHOGONAL_WEIGHTS
from wellposed.nn.transject.parts import InjectiveEmbedding as InjectiveEmbedding
from wellposed.nn.transject.parts import InjectiveResidual as InjectiveResidual
from wellposed.nn.transject.parts import OrthogonalFeedForward as OrthogonalFeedForward
from wellposed.nn.transject.parts import OrthogonalLinear as OrthogonalLinear
from wellposed.nn.transject.parts import orthogonal_patterns as orthogonal_patterns
from wellposed.nn.transject.stack import TransJectOutput as TransJectOutput
from wellposed.nn.transject.stack import TransJectStack as TransJectStack
from wellposed.tensor_calls import explain_failures_of

explain_failures_of(__name__)
