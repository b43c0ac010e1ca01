"""Costs of a step of a constraint on an accelerator: launches and reads do not grow with the weights."""

import math
import sys
from collections import Counter

import pytest
import torch
from tests.support.constrained import distance, same_state
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError
from wellposed.linalg import Workspace, cap_spectral_norms_

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "equal", "nonzero")


class Reads(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or str(func).startswith(("aten.detach", "aten.lift_fresh"))):
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def built(to, layers, *, batched=True, decay=0.0):
    torch.manual_seed(0)
    shapes = [(16, 16), (16, 24), (24, 16)] * layers
    model = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "weight_decay": decay}]
    optimizer = torch.optim.SGD(groups, lr=1.0, foreach=True)
    return model, optimizer, constrain_(model, optimizer, where="*", to=to, batched=batched)


def step(model, optimizer, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator) * size / 8.0
    with Launches() as launches, Reads() as reads:
        optimizer.step()
    return launches.calls.total(), reads.count


LARGE = [("orthogonal", 0.3, 70), ("spectral", 0.05, 105), ("columns", 0.3, 55)]
SMALL = [("orthogonal", 1e-3, 55), ("spectral", 1e-3, 105)]


@pytest.mark.parametrize(("to", "size", "most"), [*SMALL, *LARGE])
def test_a_step_waits_once_whatever_the_number_of_weights(to, size, most):
    counts = []
    for layers in (2, 8):
        model, optimizer, _ = built(to, layers)
        run = [step(model, optimizer, size, seed) for seed in range(12)]
        counts.append(sorted(run)[6])
        assert max(distance(weight, to) for weight in model.parameters()) <= 1e-5
    # Of a batch in which not all are outside, those that are outside are picked, by one launch more each time.
    assert abs(counts[0][0] - counts[1][0]) <= 8 * (to == "spectral")
    assert [reads for _, reads in counts] == [1, 1]
    assert max(launches for launches, _ in counts) <= most


@pytest.mark.filterwarnings("ignore::wellposed.constrain.ConstraintWarning")
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_wrong_guesses_are_done_again(to):
    """Steps jump, edits go through ``data``, and after one a step breaks off.

    Weights of one shape that decay and not are in one batch before the step, and in two after it.
    Spectral steps that are ahead look three rungs higher, of seventeen.
    """
    runs = []
    for batched in (False, True):
        model, optimizer, handle = built(to, 2, batched=batched, decay=0.01)
        for seed, size in enumerate([1e-3, 1e-3, 0.5, 1e-3, 8.0, 0.05, 0.05, 1e-3]):
            if seed in (3, 6):
                model[0].weight.data.mul_(1.01)
            if seed == 6:
                handle._before_step(optimizer, (optimizer,), {})
            step(model, optimizer, size, seed)
            assert max(distance(weight, to) for weight in model.parameters()) <= 1e-5
        runs.append(model.state_dict())
    for name, value in runs[0].items():
        torch.testing.assert_close(
            runs[1][name], value, atol=2e-2 if to == "spectral" else 1e-4, rtol=0
        )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConvergenceError, match=r"0\.weight(.|\n)*5\.weight"):
        step(model, optimizer, math.nan)
    if to == "orthogonal":
        assert same_state({"0": before["0.weight"]}, {"0": model[0].weight})


class Blind(Workspace):
    """Guesses for a device that has no numbers: a read of it is an error."""

    is_ahead = True

    def guess(self, name, count):
        return [3.0] * count

    def bounds(self, name, values, *, guess=None, **_):
        return [3.0] * values.numel() if guess is None else guess


def test_an_accelerator_is_given_few_products_and_one_factor():
    weights = [torch.empty(768, 768, device="meta") for _ in range(72)]
    work = Blind()
    work.is_ahead = True
    with Launches() as launches:
        cap_spectral_norms_(weights, workspace=work)
    assert launches.calls["aten.linalg_cholesky_ex.default"] == 1
    assert launches.calls.total() <= 70


def python_calls(layers, decay):
    """The calls of functions of ours in one step of square weights."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)
    constrain_(model, optimizer, where="*")
    calls = Counter()

    def count(frame, event, _):
        calls[event] += "/wellposed/" in frame.f_code.co_filename.replace("\\", "/")

    before = sys.getprofile()
    for last in (False, False, True):
        for weight in model.parameters():
            weight.grad = torch.randn(16, 16)
        sys.setprofile(count if last else before)
        optimizer.step()
        sys.setprofile(before)
    return calls["call"]


@pytest.mark.parametrize(("decay", "most"), [(0.0, 45), (0.1, 105)])
def test_a_small_weight_costs_few_calls_of_python(decay, most):
    """At width 128 they cost as much as its products. Counted: 39 and 95 a weight."""
    few, many = python_calls(2, decay), python_calls(12, decay)
    assert (many - few) / 10 <= most
    assert few <= 250 + 2 * most
