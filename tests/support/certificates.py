"""What certificates say, part by part."""

from wellposed.certification import certify


def rows(module, seq_len=4, **asked):
    """Return the rows of the certificate of a module, by path."""
    return {row.path: row for row in certify(module, seq_len=seq_len, **asked).layers}


def why(module, seq_len=4, **asked):
    """Return why a module has no certificate: the reason of the first part without a bound."""
    return certify(module, seq_len=seq_len, **asked).uncertified[0].reason
