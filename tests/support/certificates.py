"""What certificates say, part by part."""

from __future__ import annotations

from typing import Any

from torch import nn

from wellposed.certification import CertifiedLayer, certify


def rows(module: nn.Module, seq_len: int = 4, **asked: Any) -> dict[str, CertifiedLayer]:
    """Return the rows of the certificate of a module, by path."""
    return {row.path: row for row in certify(module, seq_len=seq_len, **asked).layers}


def why(module: nn.Module, seq_len: int = 4, **asked: Any) -> str:
    """Return why a module has no certificate: the reason of the first part without a bound."""
    return certify(module, seq_len=seq_len, **asked).uncertified[0].reason
