"""Models of torch that nobody here wrote, two layers each, as torch initialises them."""

import torch
from torch import nn

from wellposed.certification import certify

from .sample import MAX_TOKENS

WIDTH = 16
LAYERS = 2


def _torch_encoder(*, norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


FAMILIES = {
    "torch.nn": {
        "TransformerEncoder, norm_first": lambda: _torch_encoder(norm_first=True),
        "TransformerEncoder": lambda: _torch_encoder(norm_first=False),
        "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    }
}


def models():
    """Yield family, class and model, in eval mode, the same at each call."""
    for family, builders in FAMILIES.items():
        for name, build in builders.items():
            torch.manual_seed(0)
            yield family, name, build().eval()


def certificates(model):
    """Return the certificates on all inputs and on the unit ball."""
    everywhere = certify(model, seq_len=MAX_TOKENS, cross_check=False)
    return everywhere, certify(model, seq_len=MAX_TOKENS, radius=1.0, cross_check=False)


def table():
    """Return what `certify` answers for each, as a Markdown table."""
    rows = ["| family | model | `certify` |", "|---|---|---|"]
    for family, name, model in models():
        everywhere, on_a_ball = certificates(model)
        if everywhere.label != "uncertified":
            answer = "bound on all inputs"
        elif on_a_ball.label != "uncertified":
            answer = "bound on a ball: give `radius=`"
        else:
            answer = f"refused: {on_a_ball.uncertified[0].reason}"
        rows.append(f"| {family} | `{name}` | {answer} |")
    return "\n".join(rows)
