"""Constrains plain parameters (orthogonal, spectral norm, columns, logits) by optimizer hooks."""

from wellposed.constrain import sets  # noqa: F401  (each file registers its set)
from wellposed.constrain._attach import constrain_ as constrain_
from wellposed.constrain._groups import MuonAndAdamW as MuonAndAdamW
from wellposed.constrain._groups import decay_groups as decay_groups
from wellposed.constrain._groups import parameter_groups as parameter_groups
from wellposed.constrain._handle import Constraint as Constraint
from wellposed.constrain._options import Set as Set
from wellposed.constrain._options import SetOptions as SetOptions
from wellposed.constrain._report import ConstraintErrors as ConstraintErrors
from wellposed.constrain._report import ConstraintReport as ConstraintReport
from wellposed.constrain._report import ConstraintWarning as ConstraintWarning
from wellposed.constrain._select import select_weights as select_weights
from wellposed.constrain._set import SETS as SETS
from wellposed.constrain._set import MatrixSet as MatrixSet
from wellposed.constrain._set import NearestMatrices as NearestMatrices
from wellposed.constrain._set import ZeroColumns as ZeroColumns
from wellposed.constrain._sigma_reparam import SigmaReparametrized as SigmaReparametrized
from wellposed.constrain._sigma_reparam import sigma_reparam_ as sigma_reparam_
from wellposed.constrain._start import ConstrainedWeight as ConstrainedWeight
from wellposed.constrain._weight_slice import WeightSlice as WeightSlice
from wellposed.removed_names import removed_names

__getattr__ = removed_names(__name__, {"OrthogonalityErrors": "use ConstraintErrors"})
