"""Adapters for other libraries; importing this gives transformers, if installed, our attention."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from wellposed.errors import ConfigError
from wellposed.lazy import import_on_first_use

if TYPE_CHECKING:
    from wellposed.integrations._attention_interface import register_attention as register_attention
    from wellposed.integrations._attention_interface import set_attention_ as set_attention_
    from wellposed.integrations._hf_trainer import MonitorCallback as MonitorCallback
else:
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "_attention_interface": "register_attention set_attention_",
            "_hf_trainer": "MonitorCallback",
        },
        gone={
            "penalized_loss": "write penalty.attach(trainer)",
            "ConditionCallback": "use MonitorCallback, whose every= counts steps of the optimizer",
            "ConditionMetrics": "call wellposed.Monitor.step()",
            "LightningConditionCallback": "log wellposed.Monitor.step() in the module",
        },
    )

# Users of Lightning may not have transformers; `register_attention` names what is missing.
with suppress(ConfigError):
    from wellposed.integrations._attention_interface import register_attention

    register_attention()
