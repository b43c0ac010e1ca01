"""Random modules that `certify` accepts, each with a norm, length, mask, ball and scales: one case
per number."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.sample import ALL_NORMS, output_of
from tests.support.samples import ACTIVATIONS, SAMPLES
from torch import Tensor, nn

from wellposed.linalg import Norm
from wellposed.nn import AttentionMask, InvertibleResidual, ReversibleSequential

TOKENS = (1, 2, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
ACCEPTED = [
    (kind, sample) for kind, samples in SAMPLES.items() for sample in samples if sample.attackable
]
KINDS = list(dict.fromkeys(kind for kind, _ in ACCEPTED))
# Sample scalar nonlinearities less: they are many and simple.
WEIGHTS = [1 if kind in ACTIVATIONS else 4 for kind in KINDS]


@dataclass(frozen=True)
class Case:
    """One module and one question: is ``|f(X) - f(Y)| <= certify(module, **asked).total |X -
    Y|``?"""

    number: int
    seed: int
    parts: tuple[str, ...]
    """Class names; one for a single module."""
    module: nn.Module
    norm: Norm
    tokens: int
    width: int
    radius: float | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    """Arguments of `certify` besides norm, length and ball."""
    forward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `forward`: masks."""
    real: Tensor | None = None
    """Tokens that count if the certificate does not cover padding."""
    scales: tuple[float, float] = (0.1, 10.0)

    @property
    def attacked(self):
        """The certified module."""
        return self.module if self.real is None else RealTokens(self.module, self.real)

    @property
    def dtype(self):
        """Short name of the module's dtype."""
        parameter = next(self.module.parameters(), None)
        return str(torch.float32 if parameter is None else parameter.dtype).removeprefix("torch.")

    def __str__(self):
        ball = "" if self.radius is None else f", tokens within {self.radius:.3g}"
        asked = (f"{name}={value}" for name, value in self.asked.items())
        more = "".join(f", {option}" for option in (*self.forward_kwargs, *asked))
        sizes = f"norm {self.norm}, {self.dtype}, N = {self.tokens}, D = {self.width}"
        return f"{' + '.join(self.parts)}: {sizes}{ball}{more}"


class RealTokens(nn.Module):
    """Wrap a module so that its outputs at padded tokens are zero."""

    def __init__(self, module, real):
        super().__init__()
        self.module = module
        self.real = real

    def forward(self, x, **options):
        y = output_of(self.module, x, **options)
        return y if y.ndim == 2 else y * self.real.unsqueeze(-1).to(y)


def draw(seed, number):
    """Return case ``number`` of a seed, always the same."""
    dice = random.Random(f"{seed}/{number}")
    torch.manual_seed(dice.getrandbits(48))
    shapes = ("alone",) * 6 + ("chain",) * 3 + ("twice", "residual", "stack")
    shape = dice.choice(shapes)
    width = dice.choice((8, 16))
    parts, module, outer = _module(dice, shape, width)
    tokens = parts[0][1].tokens or max(dice.choice(TOKENS), 2 if parts[0][1].two_inputs else 1)
    forward_kwargs, asked, real = _mask(dice, outer, parts, tokens)
    needs_ball = any(part[1].needs_ball for part in parts)
    radius = 10 ** dice.uniform(-1, 1) if needs_ball or dice.random() < 0.2 else None
    if dice.random() < 0.3 and not any(part[1].in_float32 for part in parts):
        module = module.double()
    _scale(dice, module)
    names = [kind.__name__ for kind, _ in parts]
    root = type(module).__name__
    return Case(
        number,
        seed,
        tuple(names if names == [root] else [root, *dict.fromkeys(names)]),
        module.eval(),
        dice.choice([norm for norm in ALL_NORMS if all(norm in part[1].norms for part in parts)]),
        tokens,
        width,
        radius,
        asked,
        forward_kwargs,
        real,
        dice.choice(((0.1, 10.0), (0.1, 10.0), (1e-3, 1e3))),
    )


def _module(dice, shape, width):
    """Return the parts, the module, and the sample whose options its `forward` takes (or None)."""
    if shape == "alone":
        (kind,) = dice.choices(KINDS, WEIGHTS)
        part = (kind, dice.choice([sample for sample in SAMPLES[kind] if sample.attackable]))
        return [part], part[1].build(width), part[1]
    count = 1 if shape == "residual" else dice.randint(2, 4) if shape == "chain" else 2
    parts = [_layer(dice) for _ in range(count)]
    layers = [sample.build(width) for _, sample in parts]
    if shape == "residual":
        return parts, InvertibleResidual(layers[0]), parts[0][1]
    if shape == "stack":
        blocks = [InvertibleResidual(layer) for layer in layers]
        return parts, ReversibleSequential([*blocks, blocks[0]]), None
    # A layer that is used twice counts twice.
    return parts, nn.Sequential(*layers, *(layers[:1] if shape == "twice" else [])), None


def _layer(dice):
    while True:
        (kind,) = dice.choices(KINDS, WEIGHTS)
        samples = [sample for sample in SAMPLES[kind] if sample.attackable and sample.keeps_width]
        if samples:
            return kind, dice.choice(samples)


def _mask(dice, outer, parts, tokens):
    """Draw a mask for the module, the matching arguments of `certify`, and the tokens that may
    move."""
    if outer is None or not outer.takes_mask:
        return {}, {}, None
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    kinds = ("none", "padding", "causal", "padding, causal", "any")
    kind = dice.choice(kinds if outer.takes_causal else kinds[:2])
    if kind == "any":
        mask = torch.rand(1, 1, tokens, tokens, generator=generator) < dice.random()
        return {"key_padding_mask": AttentionMask(mask | torch.eye(tokens).bool(), False)}, {}, None
    pattern = "causal" if "causal" in kind else "full"
    forward_kwargs = {"is_causal": True} if "causal" in kind else {}
    asked = {"mask": pattern} if outer.takes_causal and dice.random() < 0.7 else {}
    if "padding" not in kind:
        return forward_kwargs, {**asked, "min_tokens": tokens}, None
    padded = torch.rand(1, tokens, generator=generator) < 0.4
    padded[0, dice.randrange(tokens)] = False
    name = parts[0][0].__name__
    if name.endswith(("Model", "LM", "Classification")):
        forward_kwargs["attention_mask"] = (~padded).long()
    else:
        forward_kwargs["key_padding_mask"] = padded
    # Certificates of TransJect do not cover padded tokens.
    real = ~padded[0] if name.startswith("TransJect") else None
    return forward_kwargs, {**asked, "min_tokens": int((~padded).sum())}, real


@torch.no_grad()
def _scale(dice, module):
    """Scale weights: not at all, all by one factor, each by its own, 1e-3 to 1e3, or 1e-12 to
    1e12."""
    kind = dice.choice(("as drawn", "as drawn", "one", "each", "extreme"))
    largest = 12.0 if kind == "extreme" else 3.0
    common = dice.uniform(-largest, largest)
    for name, parameter in module.named_parameters():
        exponent = dice.uniform(-largest, largest)
        # A basis that is not orthogonal is refused.
        if parameter.ndim >= 2 and "basis" not in name and kind != "as drawn":
            parameter.mul_(10 ** (common if kind == "one" else exponent))
