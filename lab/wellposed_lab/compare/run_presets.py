"""Named configurations from other packages: ``--preset NAME``."""

from __future__ import annotations

from collections.abc import Callable

from wellposed.errors import ConfigError
from wellposed.install_line import install_line
from wellposed.registry import Registry
from wellposed_lab.training.config import RunConfig

RUN_PRESETS: Registry[Callable[[], RunConfig]] = Registry(
    "preset", entry_points="wellposed.presets"
)


def run_preset(name: str) -> RunConfig:
    """Return a preset; an unknown one (nearest listed), or none installed, is a `ConfigError`."""
    if not RUN_PRESETS.names():
        raise ConfigError(
            f"--preset {name}: no presets are installed; for those of papers run:"
            f" {install_line('wellposed-studies')}"
        )
    return RUN_PRESETS.get(name)()
