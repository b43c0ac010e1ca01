"""One way to build a small module of a class, and how to call it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed import models as wm
from wellposed.linalg import Norm
from wellposed.nn import InjectiveResidual, ReZeroResidual

ALL_NORMS = ("tok", "inf", 2)
MAX_TOKENS = 64
"""Longest sequence that every sample takes."""


@dataclass(frozen=True)
class Sample:
    """One way to build a module of a class, for inputs (batch, tokens <= 64, width)."""

    build: Callable[[int], nn.Module]
    """width, a multiple of 8 -> module in eval mode, float32; weights come from torch's global
    generator."""
    keeps_width: bool = True
    """A tensor (batch, tokens, width) comes out when it is called with one: it may be a part of a
    composition."""
    needs_ball: bool = False
    """There is a bound only with ``radius=``."""
    certifiable: bool = True
    """False: the rule refuses whatever is asked."""
    norms: tuple[Norm, ...] = ALL_NORMS
    """Norms in which there is a bound."""
    two_inputs: bool = False
    """``forward`` reads two: the rule refuses, or `output_of` moves both."""
    takes_mask: bool = False
    """``forward`` takes ``key_padding_mask``, bool (batch, tokens), True = padding (models:
    ``attention_mask``)."""
    takes_causal: bool = False
    """``forward`` takes ``is_causal``; without it the module is what its options say."""
    tokens: int | None = None
    """It takes this many tokens and no other number."""
    in_float32: bool = False
    """It computes in float32 in any dtype, so slopes over the short steps of float64 are
    rounding."""
    runs_alone: bool = True
    """False: it runs inside its model only, which hands it more than hidden states."""

    @property
    def attackable(self):
        """Whether there is a certificate that covers a call."""
        return self.certifiable and self.runs_alone


def output_of(module, x, **options):
    """Call a module of any sample with embedded tokens and return the tensor that its certificate
    speaks of."""
    if isinstance(module, wm.PairHead):
        out = module(x[:, 0], x[:, -1], **options)
    elif isinstance(
        module,
        (wm.WellposedForSequencePairClassification, wm.TransJectForSequencePairClassification),
    ):
        half = x.shape[1] // 2
        out = module(inputs_embeds=x[:, :half], inputs_embeds_pair=x[:, half:], **options)
    elif hasattr(module, "get_input_embeddings"):
        out = module(inputs_embeds=x, **options)
    else:
        out = module(*[x] * (3 if isinstance(module, nn.MultiheadAttention) else 1), **options)
    if isinstance(out, (Tensor, tuple)):
        return out[0] if isinstance(out, tuple) else out
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def awake(module):
    """Move what starts at zero or one (residual scales, gains, biases) to random values; return it
    in eval mode."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, InjectiveResidual):
                part.weight.normal_()
            elif isinstance(part, ReZeroResidual):
                part.scale.normal_()
            gain = getattr(part, "weight", None)
            if type(part).__name__.endswith(("Norm", "Tanh")) and gain is not None:
                gain.uniform_(-1.5, 1.5)
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[2] in ("bias", "in_proj_bias"):
                parameter.normal_(std=0.3)
    return module.eval()
