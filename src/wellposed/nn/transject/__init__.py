"""TransJect: attention through a spectrum, orthogonal maps, injective embeddings."""

from wellposed.nn.transject._block import TransJectBlock as TransJectBlock
from wellposed.nn.transject._gram import DrawnSpectrum as DrawnSpectrum
from wellposed.nn.transject._gram import ExpertMixture as ExpertMixture
from wellposed.nn.transject._gram import Gating as Gating
from wellposed.nn.transject._gram import GramAttention as GramAttention
from wellposed.nn.transject._gram import GramSpectrum as GramSpectrum
from wellposed.nn.transject._gram import LearnedSpectrum as LearnedSpectrum
from wellposed.nn.transject._gram import TransJectCache as TransJectCache
from wellposed.nn.transject._parts import ORTHOGONAL_WEIGHTS as ORTHOGONAL_WEIGHTS
from wellposed.nn.transject._parts import InjectiveEmbedding as InjectiveEmbedding
from wellposed.nn.transject._parts import InjectiveResidual as InjectiveResidual
from wellposed.nn.transject._parts import OrthogonalFeedForward as OrthogonalFeedForward
from wellposed.nn.transject._parts import OrthogonalLinear as OrthogonalLinear
from wellposed.nn.transject._parts import PositionKind as PositionKind
from wellposed.nn.transject._parts import ResidualStart as ResidualStart
from wellposed.nn.transject._parts import orthogonal_patterns as orthogonal_patterns
from wellposed.nn.transject._stack import TransJectOutput as TransJectOutput
from wellposed.nn.transject._stack import TransJectStack as TransJectStack
