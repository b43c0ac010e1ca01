"""Every verb, ended at any instant: the model is as before or as after, hooks and modes too, and it works again."""

import signal
import threading
import time

import pytest
import torch
import transformers as hf
from tests.support.hooks import hooks_of, torch_state
from tests.support.instants import at_operation, chosen, operations, spread, traced
from tests.support.tables import WHOLE
from torch import nn

import wellposed as wp
from wellposed.integrations import set_attention_
from wellposed.interrupts import Undo, all_or_nothing, uninterrupted
from wellposed.models import WindowsForSequenceClassification

pytestmark = pytest.mark.slow  # the whole table

SIZES = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WINDOWS = {"window_words": 1, "word_tokens": 2, "frame": [[1], [2]], "frozen": True}
TOKENS = torch.ones(2, 3, 8)
MOST = 100 if WHOLE else 12
"""Instants at which a verb is ended, from the first to the last."""


def bert():
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES)).train()


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))


def measured_step(model):
    """A whole measured step under a monitor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with wp.Monitor(model, optimizer, every=1) as monitor:
        with torch.enable_grad():
            model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sorted(monitor.step())


def penalised(model):
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, attention=1.0)
    try:
        with torch.enable_grad():
            output = model(TOKENS)
            value = penalty().item()
            del output
            return value
    finally:
        penalty.remove()


def t_fixup(model):
    torch.manual_seed(1)
    return wp.t_fixup_(model).norms_removed


VERBS = {
    "find_roles": (layer, lambda m: str(wp.find_roles(m, TOKENS))),
    "find_roles, bert": (bert, lambda m: str(wp.find_roles(m))),
    "measure": (layer, lambda m: str(wp.measure(m, TOKENS).rows)),
    "certify": (net, lambda m: wp.certify(m, seq_len=2).total),
    "Monitor": (layer, measured_step),
    "penalty": (layer, penalised),
    "t_fixup_": (layer, t_fixup),
    "dt_fixup_": (layer, lambda m: wp.dt_fixup_(m, [TOKENS], seed=3).mu),
    "remove_norms_": (bert, lambda m: wp.remove_norms_(m)),
    "read in windows": (
        bert,
        lambda m: type(WindowsForSequenceClassification.around(m, 0, **WINDOWS)).__name__,
    ),
    "set_attention_": (bert, lambda m: set_attention_(m, "wellposed_cosine")),
}


def state_of(model):
    """Weights bit for bit, modules and modes, hooks, what the configuration records, and torch's own state."""
    config = getattr(model, "config", None)
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "modes": [(path, type(m).__name__, m.training) for path, m in model.named_modules()],
        "attributes": [(path, sorted(vars(m))) for path, m in model.named_modules()],
        "learns": [weight.requires_grad for weight in model.parameters()],
        "config": None if config is None else (config.to_dict(), config._attn_implementation),
        "hooks": hooks_of(model),
        "torch": torch_state(),
    }


def differing(state, other):
    return [name for name, value in state.items() if not same(value, other[name])]


def same(value, other):
    if (
        not isinstance(value, dict)
        or not value
        or not isinstance(next(iter(value.values())), torch.Tensor)
    ):
        return value == other
    return value.keys() == other.keys() and all(
        torch.equal(value[name], other[name]) for name in value
    )


def check(name, number, end):
    """End a verb by ``end(call, number)``; compare its model with an untouched and a finished one."""
    make, verb = VERBS[name]
    model = make()
    finished = make()
    before = state_of(model)
    result = verb(finished)
    after = state_of(finished)
    try:
        end(lambda: verb(model), number)
    except (KeyboardInterrupt, RuntimeError) as error:
        raised = repr(error)
    else:
        raised = ""
    ended = state_of(model)
    which = (name, number, raised)
    assert not (differing(ended, before) and differing(ended, after)), (
        *which,
        differing(ended, before),
    )
    is_after = bool(differing(ended, before))
    again = verb(model)
    assert differing(state_of(model), after) == [], which
    assert is_after or str(again) == str(result), which


@pytest.mark.parametrize("name", VERBS)
def test_an_error_at_any_operation(name):
    make, verb = VERBS[name]
    model = make()
    for number in spread(operations(lambda: verb(model)), MOST):
        check(name, number, at_operation)


@pytest.mark.parametrize("name", VERBS)
def test_ctrl_c_at_any_line(name):
    make, verb = VERBS[name]
    model = make()
    verb(make())  # imports
    for number in chosen(traced(lambda: verb(model)), MOST):
        check(name, number, traced)


def test_a_real_ctrl_c_waits_for_an_edit_and_stops_everything_else():
    events = []

    def sends():
        time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)
        events.append("sent")

    def edits():
        with uninterrupted():
            threading.Thread(target=sends).start()
            deadline = time.monotonic() + 5
            while "sent" not in events and time.monotonic() < deadline:
                time.sleep(0.01)
            events.append("edited")
        events.append("never")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        edits()
    assert events == ["sent", "edited"]
    assert signal.getsignal(signal.SIGINT) is before


def ended_elsewhere(inside):
    """Begin a block, run ``inside``, and end the block in another thread."""
    block = uninterrupted()
    block.__enter__()
    inside()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    time.sleep(0)  # Python runs handlers of the main thread between two of its operations


def nothing():
    pass


def interrupted_later(number):
    ended_elsewhere(nothing)
    signal.raise_signal(number)


def interrupted_in_a_later_block(number):
    ended_elsewhere(nothing)
    with uninterrupted():
        signal.raise_signal(number)


def interrupted_before_the_end(number):
    ended_elsewhere(lambda: signal.raise_signal(number))


def interrupted_in_an_outer_block(number):
    with uninterrupted():
        ended_elsewhere(lambda: signal.raise_signal(number))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "route",
    [
        interrupted_later,
        interrupted_in_a_later_block,
        interrupted_before_the_end,
        interrupted_in_an_outer_block,
    ],
)
def test_a_block_that_ends_in_another_thread_hides_no_signal(route, number):
    """As a block of a generator that is collected there; the next block restores the handlers."""
    calls = []

    def handle(number, frame):
        calls.append(number)
        raise KeyboardInterrupt

    before = signal.signal(number, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            route(number)
        assert calls == [number]
        with uninterrupted():
            pass
        assert signal.getsignal(number) is handle
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert calls == [number, number]
    finally:
        signal.signal(number, before)


def test_edits_that_raise_are_undone_in_other_threads_too():
    class Settings:
        depth = 1

    def edits():
        with all_or_nothing() as undo:
            undo.set(Settings, "depth", 2)
            undo.set(Settings, "width", 3)
            raise MemoryError

    def is_refused():
        with pytest.raises(MemoryError):
            edits()

    thread = threading.Thread(target=is_refused)
    thread.start()
    thread.join()
    assert Settings.depth == 1
    assert not hasattr(Settings, "width")


def test_undoing_tries_again_what_an_error_ended_and_runs_the_rest():
    undone = []
    errors = [OSError("on purpose")]

    def once():
        if errors:
            raise errors.pop()
        undone.append("second")

    undo = Undo()
    undo.later(undone.append, "first")
    undo.later(once)
    with pytest.raises(OSError, match="on purpose"):
        undo.run()
    assert undone == ["first", "second"]


class Fails(nn.Module):
    """A layer whose pass raises."""

    def __init__(self, error):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.error = error

    def forward(self, x):
        raise self.error


def certified_rule(error):
    class Part(nn.Linear):
        pass

    def rule(module, context):
        raise error

    wp.register_rule(Part)(rule)
    return wp.certify(nn.Sequential(Part(8, 8)), seq_len=2)


def crossed(error):
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_pre_hook(raises(error))
    return wp.certify(model, seq_len=2)


def raises(error):
    def hook(*_):
        raise error

    hook.observes_only = True
    return hook


ROUTES = {
    "rule of certify": certified_rule,
    "cross-check of certify": crossed,
    "measure": lambda error: wp.measure(nn.Sequential(layer(), Fails(error)), TOKENS),
    "find_roles": lambda error: wp.find_roles(Fails(error), TOKENS),
    "attack": lambda error: wp.lipschitz_lower_bound(Fails(error), (2, 8)),
}
EXHAUSTED = [
    MemoryError("on purpose"),
    RecursionError("on purpose"),
    torch.OutOfMemoryError("on purpose"),
    RuntimeError("CUDA out of memory, on purpose"),
]


@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("route", ROUTES)
def test_memory_that_runs_out_is_never_an_answer(route, error):
    with pytest.raises(type(error), match="on purpose") as raised:
        ROUTES[route](error)
    assert type(raised.value) is type(error)
