"""No verb leaves anything on torch's stacks, and what is read of odd models carries its own name."""

import copy
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import wellposed as wp
from wellposed.errors import WellposedError


class Two(nn.Module):
    """Two attentions and a feed-forward network in one module; ``log`` keeps what a reader would."""

    eager = False
    log = None
    raises: ClassVar[dict[int, Any]] = {}  # the number of a call of attention -> what it raises

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.layers = nn.ModuleDict({f"{n}{i}": nn.Linear(8, 8) for i in "01" for n in "qkvo"})
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        with torch.no_grad():
            self.layers["q1"].weight *= 30.0
        self.calls = 0

    def attend(self, x, query, key):
        names = (f"q{query}", f"k{key}", f"v{key}")
        q, k, v = (self.layers[n](x).unflatten(-1, (2, 4)).transpose(1, 2) for n in names)
        if self.log is not None:
            self.log.setdefault(f"q{query}", []).append((q @ k.mT / 2).detach())
        mixed = (
            (q @ k.mT / 2).softmax(-1) @ v
            if self.eager
            else F.scaled_dot_product_attention(q, k, v)
        )
        self.calls += 1
        if self.calls in self.raises:
            raise self.raises[self.calls]
        return self.layers[f"o{query}"](mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(x, 0, 0)
        x = x + self.attend(x, 1, 1)
        return x + self.down(F.gelu(self.up(x)))


class Eager(Two):
    eager = True


class SharedKeys(Two):
    def attend(self, x, query, key):
        return super().attend(x, query, 0)


class Recursive(Two):
    def forward(self, x, left=1):
        x = super().forward(x)
        return self(x, left - 1) if left else x


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = Two()

    def forward(self, x):
        return self.inner(self.inner(self.first(x)))


class Recomputed(Around):
    reentrant = False

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    reentrant = True


MODELS = (Two, Eager, SharedKeys, Recursive, Around, Recomputed, Reentrant)
X = torch.linspace(-2, 2, 2 * 5 * 8).reshape(2, 5, 8).sin()


def train(model, *makers):
    """One step with what the makers attach, which is removed whatever happens."""
    attached = []
    try:
        attached += (make(model) for make in makers)
        model.train()
        loss = model(X).square().mean()
        penalties = [item for item in attached if isinstance(item, wp.OrthogonalityPenalty)]
        (loss + sum(penalty() for penalty in penalties)).backward()
        for item in attached:
            if isinstance(item, wp.Monitor):
                item.step()
    finally:
        for item in attached:
            item.remove()


def monitor(model):
    return wp.Monitor(model, every=1, weights=False, batch=X)


def penalty(model):
    return wp.OrthogonalityPenalty(model, affinity=1.0, batch=X)


def constrained(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return wp.constrain_(model, optimizer, batch=X, **options)


VERBS = {
    "find_roles": lambda m: wp.find_roles(m, X),
    "measure": lambda m: wp.measure(m, X),
    "Monitor": lambda m: train(m, monitor),
    "penalty": lambda m: train(m, penalty),
    "several": lambda m: train(m, monitor, penalty, penalty, monitor),
    "constrain_": lambda m: train(m, constrained),
    "logits": lambda m: train(m, partial(constrained, to="logits", bound=1.0)),
    "certify": lambda m: wp.certify(m, seq_len=5),
    "attack": lambda m: wp.lipschitz_lower_bound(m, X.shape, restarts=1, steps=2),
    "t_fixup_": lambda m: wp.t_fixup_(m, batch=X),
    "dt_fixup_": lambda m: wp.dt_fixup_(m, [X]),
}  # fmt: skip


def left(model):
    """Return the state of torch and of the model that a verb could leave changed."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return (
        _get_current_function_mode_stack(), _get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
        torch.backends.mha.get_fastpath_enabled(), dynamo and dynamo._stance.stance,
        [len(getattr(part, table)) for part in model.modules() for table in tables],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_left_when_a_verb_returns_or_raises(verb, model):
    torch.compiler.set_stance("default")
    for raised in (None, 1, 2, 4, 6, 9, 13):
        net = model()
        two = next(part for part in net.modules() if isinstance(part, Two))
        two.raises = {raised: ValueError("boom")}
        before = left(net)
        refused = [
            WellposedError,
            *[ValueError] * bool(raised),
            *[RuntimeError] * (model is Reentrant),
        ]
        with suppress(*refused):
            VERBS[verb](net)
        assert left(net) == before


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_each_head_has_its_own_numbers_under_its_own_name(model, threads):
    net = model().train()
    two = next(part for part in net.modules() if isinstance(part, Two))
    first = monitor(net)
    second = monitor(net)
    runs = [threading.Thread(target=lambda: net(X).sum().backward()) for _ in range(threads)]
    for act in (threading.Thread.start, threading.Thread.join):
        for run in runs:
            act(run)
    numbers = first.step()
    assert numbers == second.step()
    reference = copy.deepcopy(net).double()
    for part in reference.modules():
        if isinstance(part, Two):
            part.log = {}
            log = part.log
    reference(X.double())
    prefix = "".join(f"{name}." for name, part in net.named_modules() if part is two and name)
    for query, logits in log.items():
        for head in (0, 1):
            every = torch.cat([logit[:, head] for logit in logits])
            weights = every.softmax(-1)
            name = f"vital/encoder.0@{prefix}layers.{query}.weight.head{head}"
            assert numbers[f"{name}/logit_max"] == pytest.approx(every.max().item(), rel=1e-4)
            entropy = -(weights * weights.log()).sum(-1).mean() / torch.tensor(5.0).log()
            assert numbers[f"{name}/entropy"] == pytest.approx(entropy.item(), rel=1e-3, abs=1e-6)
    for watcher in (first, second):
        watcher.remove()


def test_what_an_interrupt_left_notes_nothing_more_and_goes_with_the_next_pass():
    net = Two()
    watching = monitor(net)
    net.raises = {net.calls + 1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        net(X)
    query = torch.randn(1, 2, 5, 4)
    output = weakref.ref(F.scaled_dot_product_attention(query, query, query))
    assert output() is None
    watching.step()
    assert _get_current_function_mode_stack() == []
    watching.remove()


def test_a_pass_with_fewer_calls_than_roles_is_told_not_guessed(caplog):
    net = Two()
    watching = monitor(net)
    net.attend(X, 1, 1)
    forward = net.forward
    net.forward = lambda x: net.attend(x, 1, 1)
    net(X)
    net.forward = forward
    assert not any("head" in name for name in watching.step())
    assert "changed in place: encoder.0@layers.q0.weight, encoder.0@layers.q1.weight" in caplog.text
    watching.remove()


@pytest.mark.parametrize("query", ["q0", "q1"])
def test_logits_of_one_of_two_attentions_in_a_module_are_refused(query):
    with pytest.raises(WellposedError, match="does not scale its logits"):
        constrained(Two(), where=f"*{query}*", to="logits", bound=1.0)
