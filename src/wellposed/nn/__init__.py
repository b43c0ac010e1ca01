"""Building blocks of Transformers: attentions, feed-forwards, residuals, positions and the stack made from them."""

from wellposed.nn._masks import AttentionMask as AttentionMask
from wellposed.nn._masks import PaddingMask as PaddingMask
from wellposed.nn._masks import attention_mask as attention_mask
from wellposed.nn._registry import ATTENTIONS as ATTENTIONS
from wellposed.nn._registry import FEEDFORWARDS as FEEDFORWARDS
from wellposed.nn._registry import NORMS as NORMS
from wellposed.nn._registry import RESIDUALS as RESIDUALS
from wellposed.nn._registry import LayerBuilder as LayerBuilder
from wellposed.nn._registry import LayerCache as LayerCache
