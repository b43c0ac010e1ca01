"""The ways to train of `frontier/methods`: each attaches to a model, and says what is left to merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wellposed import presets

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BETAS = (0.9, 0.99)
"""Of Adam, as in nanoGPT's small setting."""
RADIUS = 2.0
"""Of spectral sets, in units of the root mean square."""
SCION_RADIUS = 10.0
"""Of Scion's hidden matrices; its head has `SCION_HEAD`."""
SCION_HEAD = 300.0
STRENGTH = 1e-4
"""Of the orthogonality penalty."""
JASMIN = 1e-2


@dataclass
class Attached:
    """A method on one model."""

    optimizer: Optimizer
    handle: Any = None
    """Result of `constrain_`, if there is a set."""
    penalty: Callable[[], Any] | None = None
    """Added to the loss of each step."""


Attach = Callable[["nn.Module", float, float], Attached]
"""Function of a model, a rate and a decay."""


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    attach: Attach
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of our model; a method with options is for our model alone."""
    rates: float = 1.0
    """Its rates in units of AdamW's."""
    merges: bool = True
    """Whether the trained model is plain: nothing is left at inference."""
    reads_decay: bool = True


def adamw(model: nn.Module, rate: float, decay: float, **chosen: Any) -> Attached:
    """AdamW, with decay on free matrices alone."""
    import torch

    from wellposed.constrain import parameter_groups

    groups = parameter_groups(model, decay, **chosen)
    return Attached(torch.optim.AdamW(groups, lr=rate, betas=BETAS))


def muon(model: nn.Module, rate: float, decay: float, **chosen: Any) -> Attached:
    """Muon on hidden matrices, at rates that fit AdamW, which steps the rest."""
    from wellposed.constrain import MuonAndAdamW

    options = {"weight_decay": decay, "adjust_lr_fn": "match_rms_adamw", "betas": BETAS}
    return Attached(MuonAndAdamW(model, lr=rate, adamw_lr=rate, **options, **chosen))


def constrained(to: str, start: Attach = adamw, **options: Any) -> Attach:
    """Return the method that keeps every matrix of the layers in a set."""

    def attach(model: nn.Module, rate: float, decay: float) -> Attached:
        from wellposed.constrain import constrain_

        attached = start(model, rate, decay)
        where = {} if to == "logits" else {"where": "layers"}
        attached.handle = constrain_(model, attached.optimizer, to=to, **where, **options)
        return attached

    return attach


def on_the_manifold(model: nn.Module, rate: float, decay: float) -> Attached:
    """Muon on orthogonal weights: a tangent step of a spectral budget."""
    from wellposed.constrain import constrain_

    attached = muon(model, rate, decay, where="layers")
    attached.handle = constrain_(model, attached.optimizer, where="layers", to="orthogonal")
    return attached


def scion(model: nn.Module, rate: float, decay: float) -> Attached:
    """Scion; its balls are the decay."""
    from wellposed.optim import Scion

    del decay
    optimizer = Scion(model, lr=min(rate, 1.0), radius=SCION_RADIUS, head_radius=SCION_HEAD)
    optimizer.shrink_into_balls_()
    return Attached(optimizer)


def sigma_reparam(model: nn.Module, rate: float, decay: float) -> Attached:
    """Every matrix of the layers with a learnt spectral norm."""
    from wellposed.constrain import sigma_reparam_

    sigma_reparam_(model, gain=1.0)
    return adamw(model, rate, decay)


def mimetic(model: nn.Module, rate: float, decay: float) -> Attached:
    """Attention that begins near multiples of the identity."""
    from wellposed.initialize import mimetic_

    mimetic_(model)
    return adamw(model, rate, decay)


def orthogonality_penalty(model: nn.Module, rate: float, decay: float) -> Attached:
    """A penalty on all matrices of the layers."""
    from wellposed.penalize import OrthogonalityPenalty

    attached = adamw(model, rate, decay)
    attached.penalty = OrthogonalityPenalty(model, attention=STRENGTH, feedforward=STRENGTH)
    return attached


def jasmin(model: nn.Module, rate: float, decay: float) -> Attached:
    """A penalty on the norm of the softmax Jacobian."""
    from wellposed.penalize import OrthogonalityPenalty

    attached = adamw(model, rate, decay)
    form = {"affinity": "jasmin"}
    attached.penalty = OrthogonalityPenalty(model, affinity=JASMIN, form=form)
    return attached


def ngpt(model: nn.Module, rate: float, decay: float) -> Attached:
    """The weights of nGPT on the sphere; its states are options of the model."""
    from wellposed.constrain import constrain_

    attached = adamw(model, rate, decay)
    where = ("layers", "token_embedding")
    attached.handle = constrain_(model, attached.optimizer, where=where, to="hypersphere")
    return attached


RMS: Mapping[str, Any] = {"bound": f"rms:{RADIUS:g}"}
BASELINES = ("AdamW", "Muon")
"""Every other method is compared with the better of these."""
METHODS: Mapping[str, Method] = {
    "AdamW": Method(adamw),
    "Muon": Method(muon),
    "spectral cap": Method(constrained("spectral", **RMS)),
    "spectral cap, Muon": Method(constrained("spectral", muon, **RMS)),
    "soft cap": Method(constrained("spectral_soft", **RMS)),
    "hammer": Method(constrained("spectral_hammer", **RMS)),
    "spectral sphere, Muon": Method(constrained("spectral_sphere", muon, **RMS), reads_decay=False),
    "Muon on the manifold": Method(on_the_manifold, reads_decay=False),
    "Scion": Method(scion, rates=0.3, reads_decay=False),
    "QK-clip": Method(constrained("logits", bound=30.0)),
    "sigmaReparam": Method(sigma_reparam),
    "orthogonality penalty": Method(orthogonality_penalty),
    "JaSMin": Method(jasmin),
    "mimetic": Method(mimetic),
    "qk-norm": Method(adamw, {"qk_norm": True}, merges=False),
    "nGPT": Method(ngpt, presets.ngpt(), merges=False, reads_decay=False),
    "DyT": Method(adamw, {"norm": "dyt"}, merges=False),
    "Derf": Method(adamw, {"norm": "derf"}, merges=False),
    "ReZero": Method(adamw, {"norm": "none", "residual": "rezero"}, merges=False),
    "T-Fixup": Method(adamw, {"norm": "none", "init": "t_fixup"}),
}
"""Methods by the name in the table."""
