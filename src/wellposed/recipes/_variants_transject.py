"""Variants of Sengupta et al. (2023): TransJect, with an estimated and a learnt spectrum, and orthogonal weights alone.

``rezero``, the paper's other baseline, is in `wellposed.recipes.variants`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wellposed.recipes.variants import VARIANTS, _with_model, post_ln
from wellposed.training.config import ConstrainOptions, ModelOptions, RunConfig

TRANSFORMER_WEIGHTS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.up_proj", "*.down_proj")
# Those of wellposed.nn.ORTHOGONAL_WEIGHTS that are there, named again since that module imports torch.
TRANSJECT_WEIGHTS = ("*.left", "*.right", "*.up_proj", "*.down_proj")
SPECTRUM_WEIGHTS = ("*.basis",)
# Its weights can only turn, and its branches are divided by L and start from zero: at a Transformer's rate it learns
# too, but slowly (listops, 150 steps: 0.20 at 0.001, 0.30 at 0.003, 0.36 at 0.01; majority 0.12).
RATE = 5.0


@VARIANTS.register("orthogonal")
def orthogonal(base: RunConfig) -> RunConfig:
    """post_ln with every matrix of attention and feed-forward held orthogonal (Sengupta et al. 2023, sec. 4.2)."""
    return _held(post_ln(base), TRANSFORMER_WEIGHTS)


@VARIANTS.register("transject")
def transject(base: RunConfig, rate: float = RATE) -> RunConfig:
    """TransJect (Sengupta et al. 2023), tokens meeting in a Gram spectrum; learning rate 5 (or value) x the base's."""
    return _held(_transject(base, "gram", rate), TRANSJECT_WEIGHTS + SPECTRUM_WEIGHTS)


@VARIANTS.register("transject_random")
def transject_random(base: RunConfig, rate: float = RATE) -> RunConfig:
    """TransJect with a learnt vector as the spectrum; learning rate 5 (or value) x the base's."""
    return _held(_transject(base, "random", rate), TRANSJECT_WEIGHTS)


def _transject(base: RunConfig, spectrum: Literal["gram", "random"], rate: float) -> RunConfig:
    """Keep what TransJect has too: sizes, positions, pooling, experts; put the options it lacks to their defaults."""
    plain, given = ModelOptions(), base.model
    config = _with_model(
        base,
        architecture="transject",
        residual="rezero",
        # No heads: the default says nothing, and neither does one, where the width cannot have the default's four.
        num_attention_heads=1 if given.hidden_size % plain.num_attention_heads else plain.num_attention_heads,
        intermediate_size=plain.intermediate_size,
        activation=plain.activation,
        attention_dropout=plain.attention_dropout,
        init=plain.init,
        contractive=plain.contractive,
        lipschitz_norm=plain.lipschitz_norm,
        num_experts=given.num_experts,
        spectrum=spectrum,
        spectrum_norm=given.spectrum_norm,
    )
    return replace(config, train=replace(config.train, learning_rate=rate * config.train.learning_rate))


def _held(config: RunConfig, weights: tuple[str, ...]) -> RunConfig:
    return replace(config, constrain=ConstrainOptions(",".join(weights)))
