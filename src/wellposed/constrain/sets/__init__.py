"""Sets of matrices by the name that ``constrain_(to=)`` gives; each file registers its own."""

from wellposed.constrain.sets import _columns as _columns
from wellposed.constrain.sets import _hammer as _hammer
from wellposed.constrain.sets import _hypersphere as _hypersphere
from wellposed.constrain.sets import _orthogonal as _orthogonal
from wellposed.constrain.sets import _rows as _rows
from wellposed.constrain.sets import _soft as _soft
from wellposed.constrain.sets import _spectral as _spectral
from wellposed.constrain.sets import _sphere as _sphere
