"""Building blocks of Transformers: attentions, feed-forwards, residuals, positions and the stack made from them."""

from wellposed.nn._block import Block as Block
from wellposed.nn._block import TransformerStack as TransformerStack
from wellposed.nn._block import run_block as run_block
from wellposed.nn._dot_product import DotProductAttention as DotProductAttention
from wellposed.nn._feedforward import ACTIVATIONS as ACTIVATIONS
from wellposed.nn._feedforward import MLP as MLP
from wellposed.nn._masks import AttentionMask as AttentionMask
from wellposed.nn._masks import PaddingMask as PaddingMask
from wellposed.nn._masks import attention_mask as attention_mask
from wellposed.nn._norm_placement import NoNorm as NoNorm
from wellposed.nn._norm_placement import PostNorm as PostNorm
from wellposed.nn._norm_placement import PreNorm as PreNorm
from wellposed.nn._positions import POSITIONS as POSITIONS
from wellposed.nn._positions import LearnedPositions as LearnedPositions
from wellposed.nn._positions import SinusoidalPositions as SinusoidalPositions
from wellposed.nn._positions import check_length as check_length
from wellposed.nn._registry import ATTENTIONS as ATTENTIONS
from wellposed.nn._registry import FEEDFORWARDS as FEEDFORWARDS
from wellposed.nn._registry import NORMS as NORMS
from wellposed.nn._registry import RESIDUALS as RESIDUALS
from wellposed.nn._registry import LayerBuilder as LayerBuilder
from wellposed.nn._registry import LayerCache as LayerCache
from wellposed.nn._registry import NormPlacement as NormPlacement
from wellposed.nn._residual import PlainResidual as PlainResidual
from wellposed.nn._residual import ReZeroResidual as ReZeroResidual
