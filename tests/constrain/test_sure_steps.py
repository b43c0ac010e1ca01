"""Spectral weights that are surely inside need no product, whoever wrote to them since the last proof."""

import copy
import math

import pytest
import torch
from tests.support.constrained import distance
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError

SIDE = 48


class Factors(TorchDispatchMode):
    """Counts Cholesky factors: each is a proof."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "cholesky" in str(func)
        return func(*args, **(kwargs or {}))


def built(shape=(SIDE, SIDE), dtype=torch.float32, *, norm=0.5, lr=1.0, bound=1.0, **options):
    """A random weight of this norm, and plain gradient steps."""
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    with torch.no_grad():
        weight = torch.randn(shape, dtype=torch.float64)
        layer.weight.copy_(weight * (norm / torch.linalg.matrix_norm(weight, 2)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    handle = constrain_(layer, optimizer, where="*", to="spectral", bound=bound, **options)
    return layer, optimizer, handle


def moved(layer, optimizer, step):
    """Let a step add a matrix to the weight; return the number of proofs it took."""
    layer.weight.grad = -step.to(layer.weight.dtype)
    with Factors() as factors:
        optimizer.step()
    return factors.count


def random_step(size, layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    step = torch.randn(layer.weight.shape, generator=generator)
    return step * (size / torch.linalg.matrix_norm(step))


def top(weight):
    left, _, right = torch.linalg.svd(weight.detach().double())
    return torch.outer(left[:, 0], right[0])


KINDS = [
    ((SIDE, SIDE), torch.float32),
    ((SIDE, 24), torch.float32),
    ((24, SIDE), torch.bfloat16),
    ((SIDE, SIDE), torch.float64),
    ((300, 280), torch.float32),
]


@pytest.mark.parametrize(("shape", "dtype"), KINDS)
def test_small_steps_take_a_proof_now_and_then(shape, dtype):
    layer, optimizer, _ = built(shape, dtype)
    proofs = [moved(layer, optimizer, random_step(0.01, layer, seed)) > 0 for seed in range(20)]
    assert proofs[0]
    assert sum(proofs) <= 3
    assert distance(layer.weight, "spectral") == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("share", "is_proved"), [(0.999, False), (1.001, True), (3.0, True)])
def test_steps_just_below_and_above_the_room(dtype, share, is_proved):
    """A step along the largest singular vectors makes the norm as large as the triangle inequality allows."""
    layer, optimizer, handle = built(dtype=dtype)
    moved(layer, optimizer, random_step(1e-3, layer))
    proved = handle.weights[0].memory.proved_copy
    step = proved.matrix - layer.weight.detach() + top(proved.matrix) * share * (0.95 - proved.norm)
    if dtype == torch.bfloat16:  # the rounding of the entries lengthens the step
        step = step * (1.0 if is_proved else 0.99)
    assert (moved(layer, optimizer, step) > 0) is is_proved
    assert distance(layer.weight, "spectral") == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_never_passes_the_bound_however_the_steps_add_up(dtype):
    layer, optimizer, _ = built(dtype=dtype)
    proofs = 0
    for _ in range(60):
        proofs += moved(layer, optimizer, 0.02 * top(layer.weight)) > 0
        assert distance(layer.weight, "spectral") == 0.0
    assert 10 < proofs < 60
    assert torch.linalg.matrix_norm(layer.weight.detach().double(), 2) > 0.99


def load(layer, value):
    layer.load_state_dict({"weight": value.to(layer.weight.dtype)})


def write_data(layer, value):
    layer.weight.data.copy_(value)


def replace_data(layer, value):
    layer.weight.data = value.to(layer.weight.dtype)


@torch.no_grad()
def write_beside_the_counter(layer, value):
    numbers = layer.weight.detach().view(torch.uint8).numpy()
    numbers[...] = value.to(layer.weight.dtype).view(torch.uint8).numpy()


def frozen(layer, value):
    layer.weight.requires_grad_(False)
    layer.weight.copy_(value)
    layer.weight.requires_grad_(True)


WRITES = [load, write_data, replace_data, write_beside_the_counter, frozen]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("norm", [0.6, 1.0001, 1.3, 30.0])
def test_it_does_not_matter_who_wrote_to_the_weight(write, norm):
    layer, optimizer, _ = built()
    for seed in range(3):
        moved(layer, optimizer, random_step(1e-3, layer, seed))
    write(layer, top(layer.weight) * norm)
    moved(layer, optimizer, random_step(1e-4, layer))
    assert distance(layer.weight, "spectral") == 0.0
    if norm < 1.0:
        torch.testing.assert_close(
            torch.linalg.matrix_norm(layer.weight.detach(), 2).item(), norm, atol=1e-3, rtol=0
        )


def test_a_hook_that_writes_after_others_is_seen_at_the_next_step():
    layer, optimizer, _ = built()
    optimizer.register_step_post_hook(lambda *_: layer.weight.data.add_(top(layer.weight).float()))
    for seed in range(3):
        moved(layer, optimizer, random_step(1e-3, layer, seed))
        layer.weight.data.sub_(0.0)
    hooked = layer.weight.detach().clone()
    optimizer._optimizer_step_post_hooks.popitem()
    moved(layer, optimizer, torch.zeros_like(hooked))
    assert torch.linalg.matrix_norm(hooked, 2) > 1.2
    assert distance(layer.weight, "spectral") == 0.0


def test_weights_do_as_with_a_proof_at_every_step():
    """Steps from far inside to the bound and back: a copy saves proofs and changes no weight."""
    runs = []
    for is_kept in (True, False):
        layer, optimizer, handle = built(norm=0.3, lr=1.0)
        proofs = 0
        for seed in range(80):
            outwards = top(layer.weight) * (0.02 if seed < 50 else -0.02)
            proofs += moved(layer, optimizer, outwards + random_step(1e-3, layer, seed)) > 0
            if not is_kept:
                handle.weights[0].memory.proved_copy = None
        runs.append((layer.weight.detach().clone(), proofs))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] < 60 < 80 == runs[1][1]


def test_weights_at_the_bound_look_for_a_lower_norm_now_and_then():
    """Seldom while they stay there, and within seventeen steps after they left it."""
    tries = []
    layer, optimizer, handle = built(norm=1.0)
    for step in range(64):
        moved(layer, optimizer, 1e-3 * top(layer.weight))
        pause = handle.weights[0].memory.pause
        if pause.left == pause.last:  # a pause began
            tries.append(step)
    assert tries[:4] == [0, 2, 6, 14]
    assert len(tries) <= 7
    assert handle.weights[0].memory.proved_copy is None
    write_data(layer, 0.5 * layer.weight.detach())
    for step in range(64, 81):
        moved(layer, optimizer, random_step(1e-4, layer, step))
    assert handle.weights[0].memory.proved_copy is not None
    assert moved(layer, optimizer, random_step(1e-4, layer, 99)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_still_refused(bad):
    layer, optimizer, _ = built()
    for seed in range(3):
        moved(layer, optimizer, random_step(1e-3, layer, seed))
    before = layer.weight.detach().clone()
    step = torch.zeros_like(before)
    step[0, 0] = bad
    with pytest.raises(ConvergenceError, match="not finite"):
        moved(layer, optimizer, step)
    assert torch.equal(layer.weight, before)


def test_weights_at_the_bound_and_handles_that_read_nothing_keep_no_copy():
    layer, optimizer, handle = built(norm=1.0)
    moved(layer, optimizer, random_step(1e-3, layer))
    assert handle.weights[0].memory.proved_copy is None
    layer, optimizer, handle = built(batched=True)
    moved(layer, optimizer, random_step(1e-3, layer))
    assert handle.weights[0].memory.proved_copy is None


def test_a_copy_follows_its_handle_and_goes_with_it():
    layer, optimizer, handle = built()
    moved(layer, optimizer, random_step(1e-3, layer))
    model, _, other = copy.deepcopy((layer, optimizer, handle))
    write_data(layer, top(layer.weight) * 5.0)
    assert torch.equal(other.weights[0].memory.proved_copy.matrix, model.weight)
    handle.remove()
    assert handle.weights[0].memory.proved_copy is None


def test_a_weight_that_changed_its_kind_is_proved_again():
    layer, optimizer, handle = built()
    moved(layer, optimizer, random_step(1e-3, layer))
    layer.double()
    assert moved(layer, optimizer, random_step(1e-3, layer)) > 0
    assert handle.weights[0].memory.proved_copy.matrix.dtype == torch.float64
    assert distance(layer.weight, "spectral") == 0.0
