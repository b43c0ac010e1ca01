"""An exception or a signal at any call or line of attach, step and remove: every weight is that of
before or after, and the next step works."""

import signal
import statistics
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from tests.support.instants import exits
from tests.support.tables import WHOLE, pairs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wellposed.constrain
from wellposed.constrain import constrain_

FOLDER = str(Path(wellposed.constrain.__file__).parent)
OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.02),  # decays by default
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.02),
}
SETS = {
    "orthogonal": {"to": "orthogonal"},
    "spectral": {"to": "spectral", "bound": 0.5},
    "surely inside": {"to": "spectral", "bound": 9.0},
    "columns": {"to": "columns", "bound": 0.5},
    "logits": {"to": "logits", "bound": 0.01},
}
DTYPES = (torch.float32, torch.bfloat16)
EXCEPTIONS = (KeyboardInterrupt, torch.OutOfMemoryError)
pytestmark = [
    pytest.mark.slow,  # the whole table
    pytest.mark.filterwarnings("ignore::wellposed.constrain.ConstraintWarning"),
]


class Attention(nn.Module):
    """Two heads of width 4, and a rectangular layer."""

    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.register_module(name, nn.Linear(8, 8, bias=False))
        self.up = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.up(self.output(mixed.transpose(1, 2).flatten(2)))


class Trial:
    """A constrained model after one step, with gradients for the next."""

    def __init__(self, to, optimizer, dtype, *, is_attached=True):
        torch.manual_seed(0)
        self.model = Attention().to(dtype)
        self.x = torch.randn(2, 3, 8, dtype=dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.options = {**SETS[to], "batch": self.x}
        if to != "logits":
            self.options |= {"where": ["query", "key", "up"]}
        self.handle = None
        if is_attached:
            self.attach()
            self.backward()
            self.optimizer.step()
        self.backward()

    def attach(self):
        self.handle = constrain_(self.model, self.optimizer, **self.options)

    def backward(self):
        self.optimizer.zero_grad()
        self.model(self.x).float().square().sum().backward()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def hooks(self):
        optimizer = self.optimizer
        tables = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        modules = list(self.model.modules())
        return (
            [len(table) for table in tables],
            sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
            "step" in vars(optimizer),
        )


class RaiseAtCall(TorchDispatchMode):
    """Raises instead of the k-th operation."""

    def __init__(self, k, error):
        super().__init__()
        self.left = k
        self.error = error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error("injected")
        return func(*args, **(kwargs or {}))


class RaiseAtLine:
    """Raises at the k-th line that is run in the package, as a signal would."""

    def __init__(self, k, error):
        self.left = k
        self.error = error

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.follow)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def follow(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(FOLDER) else None

    def line(self, frame, event, _):
        # Python looks for no signal where a ``with`` block calls ``__exit__``.
        if event == "line" and frame.f_lasti not in exits(frame.f_code):
            self.left -= 1
            if self.left == 0:
                raise self.error("injected")
        return self.line


def length_of(case, act, injector, **options):
    """How many calls or lines an act has."""
    trial = Trial(*case, **options)
    with injector(0, KeyboardInterrupt) as counted:
        act(trial)
    return -counted.left


def interrupted(case, act, injector, k, error, **options):
    trial = Trial(*case, **options)
    before = trial.weights()
    hooks = trial.hooks()
    with pytest.raises(error, match="injected"), injector(k, error):
        act(trial)
    return trial, before, hooks


def tolerance(trial):
    return max(1e-5, *(weight.set.tolerance for weight in trial.handle.weights))


def check_weights(trial, before, after, label):
    """Each is that of before or of after, bit for bit; free ones are torch's own."""
    constrained = {part.parameter_name for weight in trial.handle.weights for part in weight.slices}
    assert constrained
    for name, weight in trial.weights().items():
        assert weight.isfinite().all(), (label, name)
        is_whole = torch.equal(weight, before[name]) or torch.equal(weight, after[name])
        assert is_whole or name not in constrained, (label, name)


def check_goes_on(trial, label):
    trial.optimizer.step()  # the same gradients once more
    trial.backward()
    trial.optimizer.step()
    for name, weight in trial.weights().items():
        assert weight.isfinite().all(), (label, name)
    if trial.options["to"] != "logits":
        assert trial.handle.error().worst <= tolerance(trial), label


def step(trial):
    trial.optimizer.step()


def attach(trial):
    trial.attach()


def remove(trial):
    trial.handle.remove()


def finished(case, act, **options):
    trial = Trial(*case, **options)
    act(trial)
    return trial


def points(total, fraction):
    """Return where to raise: at all, or at an even part from the first to the last."""
    stride = max(1, round(1 / fraction))
    return sorted({*range(1, total + 1, stride), total} - {0})


def check_steps(case, injector, fraction):
    after = finished(case, step).weights()
    for k in points(length_of(case, step, injector), fraction):
        error = EXCEPTIONS[k % 2]
        trial, before, hooks = interrupted(case, step, injector, k, error)
        label = f"{case}, {k}"
        check_weights(trial, before, after, label)
        assert trial.hooks() == hooks, label
        if trial.options["to"] != "logits":
            assert trial.handle.error().worst <= tolerance(trial), label
        check_goes_on(trial, label)


def check_attach(case, injector, fraction):
    for k in points(length_of(case, attach, injector, is_attached=False), fraction):
        trial, before, hooks = interrupted(
            case, attach, injector, k, EXCEPTIONS[k % 2], is_attached=False
        )
        for name, weight in trial.weights().items():
            assert torch.equal(weight, before[name]), (case, k, name)
        assert trial.hooks() == hooks, (case, k)
        trial.attach()
        check_goes_on(trial, (case, k))


def check_remove(case, injector, fraction):
    for k in points(length_of(case, remove, injector), fraction):
        trial, before, _ = interrupted(case, remove, injector, k, EXCEPTIONS[k % 2])
        for name, weight in trial.weights().items():
            assert torch.equal(weight, before[name]), (case, k, name)
        trial.handle.remove()
        assert not trial.handle.active
        assert trial.hooks() == ([0, 0], 0, False)
        trial.optimizer.step()
        trial.attach()
        trial.backward()
        check_goes_on(trial, (case, k))


ACTS = {"attach": check_attach, "step": check_steps, "remove": check_remove}


FRACTIONS = {("attach", RaiseAtCall): 0.01, ("attach", RaiseAtLine): 0.01}
FRACTIONS |= {("step", RaiseAtCall): 0.2, ("step", RaiseAtLine): 0.03}


@pytest.mark.parametrize(
    ("to", "optimizer", "dtype", "act", "injector"),
    pairs(SETS, OPTIMIZERS, DTYPES, ACTS, (RaiseAtCall, RaiseAtLine)),
    ids=str,
)
def test_calls_and_lines_may_raise(to, optimizer, dtype, act, injector):
    fraction = FRACTIONS.get((act, injector), 1.0)
    ACTS[act]((to, optimizer, dtype), injector, fraction)


class Breaks(torch.optim.AdamW):
    """Raises before or after its own step."""

    moment = None

    def step(self, closure=None):
        if self.moment == "before":
            raise KeyboardInterrupt("injected")
        loss = super().step(closure)
        if self.moment == "after":
            raise KeyboardInterrupt("injected")
        return loss


def raising(*_):
    raise KeyboardInterrupt("injected")


def broken_by(trial, route):
    """Make the next step raise by a route; return what mends it."""
    optimizer = trial.optimizer
    if route in ("before", "after"):
        optimizer.moment = route
        return lambda: setattr(optimizer, "moment", None)
    if route == "pre-hook":
        return optimizer.register_step_pre_hook(raising).remove
    if route == "post-hook":
        return optimizer.register_step_post_hook(raising).remove
    if route == "first post-hook":
        hook = optimizer.register_step_post_hook(raising)
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        return hook.remove
    assert route == "closure"
    return lambda: None


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize(
    "route", ["before", "after", "pre-hook", "post-hook", "first post-hook", "closure"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to", ["orthogonal", "columns"])
def test_routes_by_which_a_step_breaks(to, dtype, route, is_scheduled, monkeypatch):
    # Hooks run around the step of the base class too, so one that raises there is inside a step.
    kind = torch.optim.AdamW if route == "post-hook" else Breaks
    monkeypatch.setitem(OPTIMIZERS, "breaks", lambda weights: kind(weights, lr=0.02))
    trial = Trial(to, "breaks", dtype)
    if is_scheduled:  # it patches the step of the optimizer
        torch.optim.lr_scheduler.ConstantLR(trial.optimizer)
    before = trial.weights()
    mend = broken_by(trial, route)
    with pytest.raises(KeyboardInterrupt, match="injected"):
        trial.optimizer.step(*([raising] if route == "closure" else []))
    is_after = route == "post-hook"  # it runs after the constraint has ended the step
    for weight in trial.handle.weights:
        now = trial.model.get_parameter(weight.path)
        assert torch.equal(now, before[weight.path]) != is_after, weight.path
    assert trial.handle.error().worst <= tolerance(trial)
    mend()
    check_goes_on(trial, route)


@pytest.mark.parametrize("when", ["made before", "made after"])
def test_a_scheduler_and_the_guard_leave_the_step_as_it_was(when):
    trial = Trial("spectral", "sgd", torch.float32, is_attached=False)
    plain = type(trial.optimizer).step
    if when == "made before":
        scheduler = torch.optim.lr_scheduler.StepLR(trial.optimizer, 1)
        trial.attach()
    else:
        trial.attach()
        scheduler = torch.optim.lr_scheduler.StepLR(trial.optimizer, 1)
    trial.optimizer.step()
    scheduler.step()
    trial.handle.remove()
    trial.optimizer.step()
    scheduler.step()
    assert type(trial.optimizer).step is plain
    assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.01)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_was_bound_before_is_named_once(when):
    trial = Trial("spectral", "sgd", torch.float32, is_attached=False)
    step = trial.optimizer.step
    trial.attach()
    if when == "after":
        step = trial.optimizer.step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
        step()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (when == "before")
    assert all("Compile or bind optimizer.step after constrain_" in text for text in texts)


def test_handles_share_one_guard_and_end_in_any_order():
    trial = Trial("spectral", "sgd", torch.float32)
    other = constrain_(trial.model, trial.optimizer, where="value", to="columns")
    step_of = trial.optimizer.step
    trial.handle.remove()
    assert trial.optimizer.step == step_of
    other.remove()
    assert "step" not in vars(trial.optimizer)


def test_a_second_step_takes_the_way_of_the_first():
    """With SGD a step is a function of weight and gradient; both are those of before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constrain_(model, optimizer, where="0", gain=0.7)
    gradient = torch.randn(6, 6).double()
    model[0].weight.grad = gradient.clone()
    optimizer.step()
    start = model[0].weight.detach().clone()

    model[0].weight.grad = gradient.clone()
    optimizer.step()
    expected = model[0].weight.detach().clone()

    with torch.no_grad():
        model[0].weight.copy_(start)
    model[0].weight.grad = gradient.clone()
    hook = optimizer.register_step_pre_hook(raising)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    assert torch.equal(model[0].weight, start)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=0, atol=1e-12)


def test_warnings_that_are_errors_come_after_the_step():
    trial = Trial("orthogonal", "sgd", torch.float32)
    trial.optimizer.param_groups[0]["lr"] = 5.0
    for weight in trial.handle.weights:  # a step of several radians
        weight.parameter.grad = torch.randn_like(weight.parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(wellposed.constrain.ConstraintWarning, match="radian"):
            trial.optimizer.step()
    assert trial.handle.error().worst <= tolerance(trial)
    trial.optimizer.param_groups[0]["lr"] = 0.05
    check_goes_on(trial, "warning")


def test_half_a_state_of_a_first_step_is_dropped():
    """Torch makes a state entry by entry, and takes one that is not empty for a whole one."""
    trial = Trial("spectral", "adamw", torch.float32, is_attached=False)
    trial.attach()
    total = length_of_first_step()
    for k in points(total, 1.0 if WHOLE else 0.2):
        trial = Trial("spectral", "adamw", torch.float32, is_attached=False)
        trial.attach()
        with pytest.raises(torch.OutOfMemoryError), RaiseAtCall(k, torch.OutOfMemoryError):
            trial.optimizer.step()
        check_goes_on(trial, k)


def length_of_first_step():
    trial = Trial("spectral", "adamw", torch.float32, is_attached=False)
    trial.attach()
    with RaiseAtCall(0, KeyboardInterrupt) as counted:
        trial.optimizer.step()
    return -counted.left


def seconds_of_a_step(trial):
    """The median of a few, so that most random instants below it fall into a step."""
    seconds = []
    for _ in range(5):
        trial.backward()
        begun = time.perf_counter()
        trial.optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signals_at_random_instants(to, dtype):
    trial = Trial(to, "adamw", dtype)
    generator = torch.Generator().manual_seed(0)
    longest = seconds_of_a_step(trial)
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    caught = 0
    try:
        for _ in range(120):
            trial.backward()
            before = trial.weights()
            delay = float(torch.rand((), generator=generator)) * longest + 1e-5
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                trial.optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught += 1
            assert trial.handle.error().worst <= tolerance(trial)
            for weight in trial.handle.weights:
                now = trial.model.get_parameter(weight.path).detach().float()
                then = before[weight.path].float()
                assert float((now - then).norm()) <= 0.5 * float(then.norm()), weight.path
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert caught > 20
