"""Initial weights: T-Fixup and DT-Fixup, which need no normalisation, and mimetic attention."""

from wellposed.initialize._factors import dt_fixup_factor as dt_fixup_factor
from wellposed.initialize._factors import t_fixup_decoder_factor as t_fixup_decoder_factor
from wellposed.initialize._factors import t_fixup_encoder_factor as t_fixup_encoder_factor
from wellposed.initialize._factors import t_fixup_factor as t_fixup_factor
from wellposed.initialize._fixup import dt_fixup_ as dt_fixup_
from wellposed.initialize._fixup import t_fixup_ as t_fixup_
from wellposed.initialize._mimetic import mimetic_ as mimetic_
from wellposed.initialize._norms import remove_norms_ as remove_norms_
from wellposed.initialize._norms import remove_recorded_norms_ as remove_recorded_norms_
from wellposed.initialize._report import InitializationReport as InitializationReport
from wellposed.initialize._report import InitializedWeight as InitializedWeight
from wellposed.nn import RemovedNorm as RemovedNorm
