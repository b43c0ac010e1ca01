"""Conditions of an inverse and of a determinant: one map at every evaluation, and of each example."""

from __future__ import annotations

from torch import nn

from wellposed.errors import ConfigError, listed


def refuse_randomness(module: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a part draws random numbers: two evaluations would be two maps."""
    drawn = []
    for path, part in module.named_modules():
        label = path or type(part).__name__
        rate_of = {name: rate for name, rate in vars(part).items() if "drop" in name}
        if isinstance(part, nn.modules.dropout._DropoutNd):
            rate_of["dropout"] = part.p
        rates = {float(rate) for rate in rate_of.values() if isinstance(rate, int | float)}
        rate = max(rates, default=0.0)
        if part.training and rate > 0:
            drawn.append(f"{label}: dropout {rate}")
        if part.training and isinstance(part, nn.RReLU):
            drawn.append(f"{label}: slopes between {part.lower} and {part.upper}")
    if drawn:
        raise ConfigError(
            f"{what} needs the same map at every evaluation, but these parts drop at random in"
            f" training:\n{listed(drawn)}\nset their dropout to 0, or call eval()"
        )


def refuse_statistics(module: nn.Module, what: str) -> None:
    """Raise `ConfigError` if a part reads the statistics of the batch: examples are not apart."""
    kind = nn.modules.batchnorm._BatchNorm
    norms = [(path, part) for path, part in module.named_modules() if isinstance(part, kind)]
    mixing = [
        f"{path}: {type(n).__name__}" for path, n in norms if n.training or n.running_mean is None
    ]
    if mixing:
        raise ConfigError(
            f"{what} needs a map of each example by itself, but these parts read the statistics of"
            f" the batch:\n{listed(mixing)}\ncall eval(), or use another norm"
        )
