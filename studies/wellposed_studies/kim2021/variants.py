"""The LSTM of Kim et al. (2021), figure 4, as a variant; does not import torch."""

from __future__ import annotations

from dataclasses import replace

from wellposed.model_options import HeadOptions, read_by
from wellposed_lab.compare.variants import VARIANTS, post_ln
from wellposed_lab.training.config import RunConfig

read_by(architecture="lstm")(HeadOptions)  # accepted, so that it compares with a Transformer


@VARIANTS.register("lstm")
def lstm(base: RunConfig) -> RunConfig:
    """Language model by an LSTM of the same width and depth (Hochreiter & Schmidhuber 1997)."""
    config = post_ln(base)
    return replace(config, model=config.model.with_parts(architecture="lstm"))
