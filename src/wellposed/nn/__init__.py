"""Building blocks of Transformers: attentions, feed-forwards, residuals, and positions.

Every attention is called as ``attention(x, *, key_padding_mask=None, is_causal=False, cache=None)
-> Tensor``; `ATTENTIONS` describes the arguments. Padding is True in ``key_padding_mask``. Hugging
Face's ``attention_mask`` says the opposite (1 = real token): pass ``attention_mask == 0``.
"""

from wellposed.call_checks import explain_failures_of
from wellposed.nn._block import Block as Block
from wellposed.nn._block import DecoderBlock as DecoderBlock
from wellposed.nn._block import DynamicTanh as DynamicTanh
from wellposed.nn._block import NoNorm as NoNorm
from wellposed.nn._block import PostNorm as PostNorm
from wellposed.nn._block import PreNorm as PreNorm
from wellposed.nn._block import RemovedNorm as RemovedNorm
from wellposed.nn._block import build_layers as build_layers
from wellposed.nn._block import cross_attention_name as cross_attention_name
from wellposed.nn._block import run_block as run_block
from wellposed.nn._checks import INTEGERS as INTEGERS
from wellposed.nn._checks import Eps as Eps
from wellposed.nn._checks import on_host as on_host
from wellposed.nn._derf import DynamicErf as DynamicErf
from wellposed.nn._feedforward import ACTIVATIONS as ACTIVATIONS
from wellposed.nn._feedforward import MLP as MLP
from wellposed.nn._feedforward import MaxMin as MaxMin
from wellposed.nn._feedforward import MaxMinFeedForward as MaxMinFeedForward
from wellposed.nn._feedforward import unit_gelu as unit_gelu
from wellposed.nn._frozen import frozen as frozen
from wellposed.nn._ngpt import LearnedScale as LearnedScale
from wellposed.nn._ngpt import NGPTFeedForward as NGPTFeedForward
from wellposed.nn._ngpt import NGPTResidual as NGPTResidual
from wellposed.nn._ngpt import unit_vectors as unit_vectors
from wellposed.nn._positions import POSITIONS as POSITIONS
from wellposed.nn._positions import LearnedPositions as LearnedPositions
from wellposed.nn._positions import NoPositions as NoPositions
from wellposed.nn._positions import SinusoidalPositions as SinusoidalPositions
from wellposed.nn._positions import check_length as check_length
from wellposed.nn._registry import ATTENTIONS as ATTENTIONS
from wellposed.nn._registry import CROSS_ATTENTIONS as CROSS_ATTENTIONS
from wellposed.nn._registry import FEEDFORWARDS as FEEDFORWARDS
from wellposed.nn._registry import NORMS as NORMS
from wellposed.nn._registry import RESIDUALS as RESIDUALS
from wellposed.nn._registry import LayerBuilder as LayerBuilder
from wellposed.nn._registry import LayerCache as LayerCache
from wellposed.nn._registry import MemoryCache as MemoryCache
from wellposed.nn._registry import NormPlacement as NormPlacement
from wellposed.nn._residual import BudgetResidual as BudgetResidual
from wellposed.nn._residual import ConvexResidual as ConvexResidual
from wellposed.nn._residual import PlainResidual as PlainResidual
from wellposed.nn._residual import ReZeroResidual as ReZeroResidual
from wellposed.nn._sigma import SigmaReparam as SigmaReparam
from wellposed.nn.attention import AttentionMask as AttentionMask
from wellposed.nn.attention import BallAttention as BallAttention
from wellposed.nn.attention import BallCrossAttention as BallCrossAttention
from wellposed.nn.attention import BallEmbedding as BallEmbedding
from wellposed.nn.attention import BallProjection as BallProjection
from wellposed.nn.attention import CosineCrossAttention as CosineCrossAttention
from wellposed.nn.attention import CosineSelfAttention as CosineSelfAttention
from wellposed.nn.attention import CrossAttention as CrossAttention
from wellposed.nn.attention import DotProductAttention as DotProductAttention
from wellposed.nn.attention import InverseDAttention as InverseDAttention
from wellposed.nn.attention import L2SelfAttention as L2SelfAttention
from wellposed.nn.attention import NGPTAttention as NGPTAttention
from wellposed.nn.attention import PaddingMask as PaddingMask
from wellposed.nn.attention import UnitEmbedding as UnitEmbedding
from wellposed.nn.attention import attention_mask as attention_mask
from wellposed.nn.attention import l2_attention_refusal as l2_attention_refusal
from wellposed.nn.attention import memory_mask as memory_mask
from wellposed.nn.attention import project_to_ball as project_to_ball
from wellposed.nn.invertible import Inversion as Inversion
from wellposed.nn.invertible import InvertibleResidual as InvertibleResidual
from wellposed.nn.invertible import LogDeterminant as LogDeterminant
from wellposed.nn.invertible import ReversibleSequential as ReversibleSequential
from wellposed.nn.transject import ORTHOGONAL_WEIGHTS as ORTHOGONAL_WEIGHTS
from wellposed.nn.transject import DrawnSpectrum as DrawnSpectrum
from wellposed.nn.transject import ExpertMixture as ExpertMixture
from wellposed.nn.transject import GramAttention as GramAttention
from wellposed.nn.transject import GramSpectrum as GramSpectrum
from wellposed.nn.transject import InjectiveEmbedding as InjectiveEmbedding
from wellposed.nn.transject import InjectiveResidual as InjectiveResidual
from wellposed.nn.transject import LearnedSpectrum as LearnedSpectrum
from wellposed.nn.transject import OrthogonalFeedForward as OrthogonalFeedForward
from wellposed.nn.transject import OrthogonalLinear as OrthogonalLinear
from wellposed.nn.transject import TransJectBlock as TransJectBlock
from wellposed.nn.transject import TransJectCache as TransJectCache
from wellposed.nn.transject import TransJectOutput as TransJectOutput
from wellposed.nn.transject import TransJectStack as TransJectStack
from wellposed.nn.transject import orthogonal_patterns as orthogonal_patterns

explain_failures_of(__name__)
