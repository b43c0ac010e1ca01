"""Old names of `wellposed_lab.compare.run_presets`, each with a warning."""

from wellposed.lazy import renamed

_NEW = "wellposed_lab.compare.run_presets"
__getattr__ = renamed(
    __name__, {"NAMED": f"{_NEW}.RUN_PRESETS", "named_config": f"{_NEW}.run_preset"}
)
