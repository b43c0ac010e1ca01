"""By whatever route a step came: after it every weight is in its set, measured by a float64 SVD, or a
word of ours names it."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from tests.support.constrained import Mixed, distance
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError

pytestmark = pytest.mark.slow  # the whole table

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 8e-3}


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody else."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(moment.lerp(p.grad, 0.1).sign_(), alpha=self.param_groups[0]["lr"])
                moment.lerp_(p.grad, 0.01)


class DecayedByHand(torch.optim.AdamW):
    """A subclass whose step continues after that of its base: torch runs the hooks around both."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.999)


def in_groups(parameters):
    groups = [{"params": [p], "lr": 1e-2 / (1 + k)} for k, p in enumerate(parameters)]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def made(kind, **options):
    return lambda parameters: kind(parameters, **{"lr": 1e-2, **options})


OPTIMIZERS = {
    "sgd": made(torch.optim.SGD, weight_decay=0.1),
    "momentum": made(torch.optim.SGD, momentum=0.9),
    "foreach": made(torch.optim.AdamW, foreach=True),
    "fused": made(torch.optim.AdamW, fused=True),
    "amsgrad": made(torch.optim.Adam, amsgrad=True),
    "decayed": in_groups,
    "rmsprop": made(torch.optim.RMSprop, momentum=0.5),
    "nadam": made(torch.optim.NAdam),
    "radam": made(torch.optim.RAdam),
    "adamax": made(torch.optim.Adamax),
    "adagrad": made(torch.optim.Adagrad),
    "adadelta": made(torch.optim.Adadelta, lr=1.0),
    "asgd": made(torch.optim.ASGD),
    "rprop": made(torch.optim.Rprop),
    "adafactor": made(torch.optim.Adafactor),
    "muon": made(torch.optim.Muon, weight_decay=0.0),
    "lion": Lion,
    "subclass": made(DecayedByHand),
}


class Run:
    """A model, its optimizer and the constraint, driven by gradients that are not skew."""

    def __init__(self, kind, to="orthogonal", dtype=torch.float32):
        torch.manual_seed(0)
        self.options = (kind, to, dtype)
        self.to = to
        self.handle = None
        self.model = Mixed(8).to(dtype)
        self.model.add_module("twin", nn.Linear(8, 8, dtype=dtype))  # square ones that are stacked
        self.optimizer = OPTIMIZERS[kind]([p for p in self.model.parameters() if p.ndim == 2])
        self.generator = torch.Generator().manual_seed(1)

    def hold(self):
        self.handle = constrain_(self.model, self.optimizer, nn.Linear, to=self.to)
        return self

    def step(self, steps):
        for _ in range(steps):
            for p in self.model.parameters():
                p.grad = self.noise(p)
            self.optimizer.step()
            if self.handle is not None and self.handle.active:
                self.check()
        return self

    def noise(self, like):
        return torch.randn(like.shape, generator=self.generator).to(like.dtype)

    def check(self):
        errors = {
            path: distance(self.model.get_parameter(path), self.to) for path in self.handle.paths
        }
        assert max(errors.values()) <= TOLERANCE[self.options[2]], errors
        assert self.handle.error().by_path == pytest.approx(errors, rel=1e-3, abs=1e-7)

    def load(self, other):
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        return self

    def freed(self):
        """The run without the constraint, after it was held."""
        other = Run(*self.options).load(self.hold().step(3))
        other.model.load_state_dict(self.model.state_dict())
        return other.step(4)

    def alter(self, change):
        """Change gradients by a hook that is registered after the constraint's."""
        groups = self.hold().optimizer.param_groups
        parameters = [weight for group in groups for weight in group["params"]]
        self.optimizer.register_step_pre_hook(lambda *_: [change(p) for p in parameters] and None)
        return self


def loaded_with_weights(run):
    free = run.freed()
    run.model.load_state_dict(free.model.state_dict())
    return run.load(free)


def copied_and_attached(run):
    run.hold().step(3)
    originals = run.model, run.optimizer, run.handle
    run.model, run.optimizer, run.handle = copy.deepcopy(originals)
    run.step(3).handle.attach()
    run.handle.attach()  # twice is once
    return run


def removed(run):
    run.hold().step(3).handle.remove()
    return run.step(3)


def attached_again(run):
    removed(run).handle.attach()
    return run


def with_edited_moments(run):
    for state in run.hold().step(2).optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 2:
                value.add_(torch.rand(value.shape).to(value.dtype))
    return run


def with_late_gradients(run):
    """A later hook takes the place of gradients that were not there when ours ran."""
    run.optimizer.register_step_pre_hook(lambda *_: run.optimizer.zero_grad())
    return run.alter(lambda p: setattr(p, "grad", run.noise(p)))


def scaled(run):
    """By a gradient scaler, which hands its scale to a fused step and divides before another."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = run.hold().optimizer.step

    def scale_and_step():
        for parameter in run.model.parameters():
            parameter.grad *= float(scaler.scale(torch.ones(())))
        run.optimizer.step = step
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.step = scale_and_step

    run.optimizer.step = scale_and_step
    return run


ROUTES = {
    "plain": Run.hold,
    "resumed free, held again": lambda run: run.freed().hold(),
    "its state loaded with its weights": loaded_with_weights,
    "its state loaded": lambda run: run.load(run.freed()),
    "a state that was never held": lambda run: run.hold().step(2).load(Run(*run.options).step(4)),
    "copied, attached": copied_and_attached,
    "removed, held again": lambda run: removed(run).hold(),
    "removed, attached": attached_again,
    "noise in a later hook": lambda run: run.alter(lambda p: p.grad.data.add_(run.noise(p))),
    "clipped in a later hook": lambda run: run.alter(lambda p: p.grad.clamp_(-0.3, 0.5)),
    "gradients of a later hook": with_late_gradients,
    "moments edited": with_edited_moments,
    "scaled": scaled,
}
SETS = [
    (kind, to, dtype)
    for to in ("spectral", "columns")
    for kind, dtype in (("decayed", torch.float32), ("momentum", torch.bfloat16))
]
DTYPES = [
    (kind, "orthogonal", dtype)
    for kind in ("momentum", "foreach", "adafactor")
    for dtype in (torch.float64, torch.bfloat16)
]
CASES = [(kind, "orthogonal", torch.float32) for kind in OPTIMIZERS]


@pytest.mark.filterwarnings("ignore::wellposed.constrain.ConstraintWarning")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", [*CASES, *SETS, *DTYPES], ids=str)
def test_a_weight_is_in_its_set_after_every_step(case, route):
    ROUTES[route](Run(*case)).step(12)


RESTARTED = ["resumed free, held again", "its state loaded", "a state that was never held"]


@pytest.mark.filterwarnings("ignore:.*one step or edit")
@pytest.mark.parametrize("kind", ["momentum", "foreach", "rmsprop", "lion"])
@pytest.mark.parametrize("route", [*RESTARTED, "copied, attached", "plain", "scaled"])
def test_moments_restart_if_a_free_step_changed_them(kind, route):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstraintWarning)  # a copy says that it is free
        run = ROUTES[route](Run(kind))
    restarts = route not in ("plain", "scaled")
    with pytest.warns(ConstraintWarning, match="restart from") if restarts else nullcontext():
        run.step(1)
    run.step(3)  # a second warning would be an error


def test_moments_of_another_set_restart():
    run = Run("foreach").hold().step(3)
    other = Run("foreach", "spectral").hold()
    with pytest.warns(ConstraintWarning, match=r"restart from zero:\s+square\.weight"):
        other.load(run).step(1)


EXACT = [(to, torch.float64) for to in ("orthogonal", "columns")] + [("orthogonal", torch.bfloat16)]


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Muon]
)
@pytest.mark.parametrize(("to", "dtype"), EXACT, ids=str)
def test_weight_decay_is_left_out_exactly_and_that_is_said_once(kind, to, dtype, caplog):
    results = []
    for decay in (0.0, 0.3):
        OPTIMIZERS["now"] = made(kind, weight_decay=decay, lr=0.05)
        run = Run("now", to, dtype).hold().step(5)
        results += [list(run.model.parameters())]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert caplog.text.count("weight decay is left out of the steps of 5 weights") == 1


@pytest.mark.parametrize("kind", ["Adafactor", "Lamb8bit", "LARS", "Prodigy"])
@pytest.mark.parametrize("to", ["orthogonal", "columns"])
def test_decay_of_a_step_that_depends_on_the_weight_is_refused_by_name(kind, to):
    OPTIMIZERS["now"] = made(type(kind, (torch.optim.Adafactor,), {}), weight_decay=0.1)
    with pytest.raises(
        ConfigError, match=rf"(?s)exactly.*square\.weight: weight_decay=0\.1 of {kind}"
    ):
        Run("now", to).hold()


def tied():
    model = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    return model


def untie(model, name):
    model[name].weight = nn.Parameter(model[name].weight.detach().clone())


CHANGES = {
    "untied": ("b", lambda model: untie(model, "b")),
    "the first of a tied pair": ("a", lambda model: untie(model, "a")),
    "replaced": ("c", lambda model: model.update({"c": nn.Linear(6, 6)})),
    "cut off": ("c", lambda model: model.pop("c")),
    "tied later": ("c", lambda model: setattr(model["c"], "weight", model["a"].weight)),
    "assigned": (
        "c",
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    ),
    "parametrised": ("c", lambda model: nn.utils.parametrizations.weight_norm(model["c"])),
    "wrapped": ("", lambda model: model.update({"c": nn.Sequential(model["c"])})),
    "checkpointed": ("", lambda model: apply_activation_checkpointing(model)),
    "compiled": ("", lambda model: model.update({"c": torch.compile(model["c"], backend="eager")})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_what_the_report_lists_is_what_the_model_has_or_an_error_names_it(to, change):
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    handle = constrain_(model, optimizer, nn.Linear, to=to)
    path, alter = CHANGES[change]
    alter(model)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    for act in (optimizer.step, handle.error, optimizer.step):
        named = pytest.raises(ConfigError, match=rf"no longer has(.|\n)* {path}\.weight")
        with named if path else nullcontext():
            act()
    handle.remove()
