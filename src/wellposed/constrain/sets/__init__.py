"""Sets of matrices by the name that ``constrain_(to=)`` gives; each file registers its own."""

from wellposed.constrain.sets import _columns as _columns
from wellposed.constrain.sets import _orthogonal as _orthogonal
from wellposed.constrain.sets import _spectral as _spectral
