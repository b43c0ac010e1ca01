"""A configuration whose every value is checked, when it is made and again when a model is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from wellposed.models._config_checks import refuse_config, unknown_keys


class CheckedConfig(PreTrainedConfig):
    """What the configurations of all families share: bad values, and keys that nobody reads, in one error."""

    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that another family has, and what to do without them here."""

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = unknown_keys(self, kwargs, self.absent_keys)
        super().__post_init__(**kwargs)
        self.check(unknown)

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no model can be built from."""
        refuse_config(self, [*(problems or []), *self.problems()])

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        return []
