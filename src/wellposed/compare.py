"""The name that 0.3 had for `wellposed_lab.compare`."""

from wellposed.lazy import moved_package

__getattr__ = moved_package(__name__, "wellposed_lab.compare")
