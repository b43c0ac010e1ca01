"""The version of this package; the build reads it here."""

__version__ = "0.4.0"
