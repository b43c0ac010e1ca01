"""Variants of Sengupta et al. (2023): TransJect, with an estimated and a learnt spectrum, and orthogonal weights alone.

``rezero``, the paper's other baseline, is in `wellposed.recipes.variants`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wellposed.recipes.variants import VARIANTS, post_ln
from wellposed.training.config import ConstrainOptions, ModelOptions, RunConfig, TrainOptions

TRANSFORMER_WEIGHTS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.up_proj", "*.down_proj")
# Those of wellposed.nn.ORTHOGONAL_WEIGHTS that are there, named again since that module imports torch.
TRANSJECT_WEIGHTS = ("*.left", "*.right", "*.up_proj", "*.down_proj")
SPECTRUM_WEIGHTS = ("*.basis",)
EMBEDDING = ("*.embeddings.token",)
KEPT = (
    "hidden_size", "num_hidden_layers", "num_experts", "spectrum_norm", "position", "pooling", "dropout",
    "tie_word_embeddings",
)  # fmt: skip
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
    return _held(_transject(base, "gram", rate), TRANSJECT_WEIGHTS + SPECTRUM_WEIGHTS + EMBEDDING)


@VARIANTS.register("transject_random")
def transject_random(base: RunConfig, rate: float = RATE) -> RunConfig:
    """TransJect with a learnt vector as the spectrum; learning rate 5 (or value) x the base's."""
    return _held(_transject(base, "random", rate), TRANSJECT_WEIGHTS + EMBEDDING)


def _transject(base: RunConfig, spectrum: Literal["gram", "random"], rate: float) -> RunConfig:
    """Keep what TransJect has too (`KEPT`); all options it lacks are at their defaults."""
    plain = ModelOptions()
    model = ModelOptions(
        architecture="transject",
        residual="rezero",
        # No heads: the default says nothing, and neither does one, where the width cannot have the default's four.
        num_attention_heads=1 if base.model.hidden_size % plain.num_attention_heads else plain.num_attention_heads,
        spectrum=spectrum,
        **{name: getattr(base.model, name) for name in KEPT},
    )
    return replace(base, model=model, train=_faster(base.train, rate))


def _faster(options: TrainOptions, rate: float) -> TrainOptions:
    """Scale the learning rate, and gamma, which the schedule kim2021 reads in its place."""
    return replace(options, learning_rate=rate * options.learning_rate, gamma=rate * options.gamma)


def _held(config: RunConfig, weights: tuple[str, ...]) -> RunConfig:
    embeddings = "fit" if EMBEDDING[0] in weights else "refuse"
    return replace(config, constrain=ConstrainOptions(",".join(weights), embeddings))
