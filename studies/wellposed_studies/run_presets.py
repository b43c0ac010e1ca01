"""Presets of runs of the five papers and of ours, one file a corpus.

Values that a paper leaves to its framework (Tensor2Tensor for Zhang, fairseq for Huang) are the
framework's public settings; each file names the values that neither fixes.
"""

from functools import partial
from pathlib import Path

from wellposed_lab.compare.run_presets import RUN_PRESETS
from wellposed_lab.training.config import RunConfig, read_toml

PRESETS = {path.stem: path for path in sorted(Path(__file__).parent.glob("presets/*.toml"))}
"""The file of each preset."""


def read_preset(path: Path) -> RunConfig:
    return RunConfig.from_dict(read_toml(path), where=str(path))


for _name, _path in PRESETS.items():
    RUN_PRESETS.register(_name)(partial(read_preset, _path))
