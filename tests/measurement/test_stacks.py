"""The launches and transfers of a measured step; numbers of stacks are those of each weight."""

import math
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.measurement import Monitor

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def llama(layers):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": layers}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model, optimizer):
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def launches(layers, **options):
    model, optimizer = llama(layers)
    monitor = Monitor(model, optimizer, **options) if options else None
    for _ in range(2):
        with Launches() as counted:
            step(model, optimizer)
            if monitor is not None:
                monitor.step()
    return counted.count


@pytest.mark.parametrize(
    ("options", "once", "a_layer"),
    [
        ({}, 300, 14),
        ({"weights": False}, 100, 10),
        ({"weights": False, "softmax_sensitivity": True}, 100, 10),
    ],
)
def test_launches_of_a_measured_step_do_not_grow_with_its_layers(options, once, a_layer):
    few, many = (launches(n, every=1, **options) - launches(n) for n in (1, 4))
    assert many <= once + 4 * a_layer
    assert many - few <= 3 * 2


def test_nothing_is_read_from_the_device_but_by_one_transfer(monkeypatch):
    model, optimizer = llama(2)
    monitor = Monitor(model, optimizer, every=1)
    transfers = []

    def moved(tensors):
        transfers.append(len(tensors))
        until_moved.close()  # what comes after it is on the CPU
        return [torch.rand(tensor.shape, dtype=torch.float64) for tensor in tensors]

    with ExitStack() as until_moved:
        mode = until_moved.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for module in model.modules():
            for name, tensor in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(mode.from_tensor(tensor.detach())))
            for name, tensor in module.named_buffers(recurse=False):
                setattr(module, name, mode.from_tensor(tensor))
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        model.model(input_ids=IDS).last_hidden_state.square().sum().backward()
        optimizer.step()
        with pytest.raises(DataDependentOutputException):
            next(model.parameters()).sum().item()
        monkeypatch.setattr("wellposed.measurement._monitor.transferred", moved)
        # A small eigenvalue problem on the CPU, of what was moved.
        ritz = "_ritz", lambda _stack, _vectors, among, _inside: among[:, 0, 0]
        monkeypatch.setattr(monitor._condition, *ritz)
        numbers = monitor.step()
    assert len(transfers) == 1
    monkeypatch.undo()
    assert Monitor(llama(2)[0], vitals=False).step().keys() < numbers.keys()


SPECTRA = {
    "even": lambda n: torch.linspace(0, 1, n),
    "orthogonal": torch.ones,
    "nearly orthogonal": lambda n: 1 + 0.03 * torch.rand(n),
    "one above": lambda n: torch.ones(n).index_fill(0, torch.tensor(0), 1.05),
    "two kinds": lambda n: 1 + 0.05 * (torch.arange(n) % 2),
    "one": lambda n: torch.zeros(n).index_fill(0, torch.tensor(0), 3.0),
    "tiny": lambda n: 1e-20 * torch.rand(n),
    "huge": lambda n: 1e15 * torch.rand(n),
    "zero": torch.zeros,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, None])
def test_numbers_of_stacks_are_those_of_each_weight(dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)
    model = nn.TransformerEncoder(layer, len(SPECTRA), enable_nested_tensor=False)
    model.layers.append(nn.TransformerEncoderLayer(48, 4, 1, batch_first=True))  # of one row
    weights = {}
    for part, values in zip(model.layers, SPECTRA.values(), strict=False):
        for _, weight in roles(part):
            left, _, right = torch.linalg.svd(torch.randn(weight.shape), full_matrices=False)
            weight.copy_((left * values(len(right))) @ right)
    for i, part in enumerate(model.layers):
        part.to(dtype or (torch.float32, torch.bfloat16)[i % 2])
        weights |= {f"cond/encoder.{i}.{role}": weight for role, weight in roles(part)}
    monitor = Monitor(model, vitals=False, every=1)
    for drift in (0.0, 0.05, 0.05):
        for weight in weights.values():
            weight.add_(torch.randn_like(weight) * drift * weight.double().square().mean().sqrt())
        numbers = monitor.step()
        for name, weight in weights.items():
            compare(name, weight, numbers)


def roles(part):
    fused = part.self_attn.in_proj_weight.detach().chunk(3)
    rest = (part.self_attn.out_proj, part.linear1, part.linear2)
    names = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")
    return zip(names, (*fused, *(layer.weight.detach() for layer in rest)), strict=True)


def compare(name, weight, numbers):
    matrix = weight.double() if len(weight) <= weight.shape[1] else weight.double().mT
    gram = matrix @ matrix.mT
    top = torch.linalg.matrix_norm(matrix, 2).item()
    off = (gram - gram.diagonal().diag()).abs().max().item()
    assert numbers[f"{name}/orthogonality_error"] == pytest.approx(off, rel=1e-4, abs=2e-6 * top**2)
    assert (1 - 1e-2) * top <= numbers[f"{name}/sigma_max"] <= (1 + 1e-5) * top
    if not top:
        assert f"{name}/stable_rank" not in numbers
        return
    rank = gram.trace().item() / top**2
    assert rank * (1 - 1e-5) <= numbers[f"{name}/stable_rank"] <= rank * 1.021
    apart = 1 - (gram.trace() / torch.linalg.matrix_norm(gram)) ** 2 / len(gram)
    logged = numbers[f"{name}/scale_free_orthogonality_error"]
    assert logged == pytest.approx(math.sqrt(max(0.0, apart.item())), rel=1e-4, abs=2e-6)
