"""Scion against a slow reference by SVD in float64; its balls are held; groups, states and refusals."""

import copy
import logging
import math
import pickle

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.launches import Launches
from tests.support.one_mesh import one_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.linalg import near_polar_factors
from wellposed.optim import BALLS, Scion

SHAPES = [(6, 6), (12, 4), (4, 12), (5, 1), (1, 7)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
SIZES |= {"intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTRAL = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "head_dim": 8}


def seeded(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups(weights, norm="spectral", radius=2.0):
    return [{"params": weights, "norm": norm, "radius": radius}]


def farthest(gradient, norm):
    """The point of the unit ball with the largest product with a gradient, in float64."""
    gradient = gradient.double()
    if norm == "spectral":
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return math.sqrt(gradient.shape[0] / gradient.shape[1]) * left @ right
    if norm == "sign":
        return gradient.sign() / gradient.shape[1]
    length = gradient.square().sum(-1, keepdim=True).sqrt()
    return math.sqrt(gradient.shape[-1]) * gradient / length


@pytest.mark.parametrize("norm", BALLS)
@pytest.mark.parametrize("shape", [*SHAPES, (6,)])
def test_steps_are_those_of_the_reference(norm, shape):
    if len(shape) not in BALLS[norm].takes:
        pytest.skip("a vector has no such ball")
    weight = nn.Parameter(seeded(*shape).double())
    expected = weight.detach().clone()
    momentum = torch.zeros_like(expected)
    optimizer = Scion(groups([weight], norm), lr=0.1, momentum=0.7)
    for seed in range(5):
        weight.grad = seeded(*shape, seed=seed).double()
        optimizer.step()
        momentum = 0.7 * momentum + 0.3 * weight.grad
        expected = 0.9 * expected - 0.1 * 2.0 * farthest(momentum, norm)
    # Singular values of the step lie in [0.97, 1], those of the reference are 1.
    share = 0.2 * 0.03 * 5 * math.sqrt(shape[0]) if norm == "spectral" else 1e-12
    torch.testing.assert_close(weight.detach(), expected, atol=share, rtol=0)


@given(st.sampled_from(SHAPES), st.integers(-30, 30), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_singular_values_of_a_step_end_just_below_one(shape, power, seed):
    matrix = seeded(*shape, seed=seed) * 10.0**power
    factor = near_polar_factors(matrix).double()
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    diagonal = left.mT @ factor @ right.mT
    is_large = values >= 1e-2 * values.norm()
    assert torch.linalg.matrix_norm(factor, 2) <= 1 + 1e-6
    assert diagonal.diagonal()[is_large].min() >= 0.97
    assert (diagonal - diagonal.diagonal().diag()).abs().max() <= 1e-3


def test_zero_and_low_rank_gradients_stay_finite():
    low = seeded(6, 1) @ seeded(1, 6)
    factors = near_polar_factors(torch.stack([torch.zeros(6, 6), low]))
    assert factors[0].abs().max() == 0
    expected = low / torch.linalg.matrix_norm(low, 2)
    torch.testing.assert_close(factors[1], expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("norm", BALLS)
def test_the_step_holds_the_ball(norm):
    """Also along gradients that push every singular value, entry or row outwards."""
    weights = [nn.Parameter(seeded(*shape)) for shape in SHAPES]
    optimizer = Scion(groups(weights, norm), lr=0.2)
    moved = optimizer.shrink_into_balls_()
    assert max(moved.values()) > 0.01
    for seed in range(200):
        for weight in weights:
            noise = seeded(*weight.shape, seed=seed)
            weight.grad = -weight.detach() if seed % 3 else noise
        optimizer.step()
        assert max(optimizer.sizes().values()) <= 1 + 1e-5


def test_a_weight_outside_comes_nearer_and_is_never_moved_at_once():
    weight = nn.Parameter(10 * torch.eye(4))
    optimizer = Scion(groups([weight], radius=1.0), lr=0.1)
    weight.grad = -torch.eye(4)
    optimizer.step()
    assert 9.0 < optimizer.sizes()["group 0, parameter 0"] < 9.2


def model_of(kind):
    torch.manual_seed(0)
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL))
    config = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "n_positions": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**config, **ends, **drops))


def trained(model, optimizer, steps, start=0):
    for seed in range(start, start + steps):
        ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def matrices_of(name, tensor, kind):
    """The matrices (out, in) of a hidden weight, cut by hand."""
    if kind == "gpt2":
        return tensor.mT.chunk(3) if "c_attn" in name else [tensor.mT]
    if "experts" in name:
        halves = 2 if "gate_up" in name else 1
        return [part for expert in tensor for part in expert.chunk(halves)]
    return [tensor]


HIDDEN = {
    "gpt2": ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
    "mixtral": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                "experts.gate_up_proj", "experts.down_proj"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HIDDEN)
def test_fused_weights_and_experts_are_stepped_matrix_by_matrix(kind):
    model = model_of(kind)
    optimizer = Scion(model, lr=0.05, radius=2.0)
    ids = torch.arange(16).reshape(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.step()
    hidden = [name for name in before if name.endswith(HIDDEN[kind])]
    assert len(hidden) == 2 * len(HIDDEN[kind])
    for name in hidden:
        weight = model.get_parameter(name)
        parts = (matrices_of(name, part, kind) for part in (before[name], weight.grad, weight))
        for old, gradient, new in zip(*parts, strict=True):
            scale = 2.0 * math.sqrt(old.shape[0] / old.shape[1])
            expected = 0.95 * old - 0.05 * scale * near_polar_factors(gradient)
            torch.testing.assert_close(new.detach(), expected, atol=1e-5, rtol=0)


def test_each_parameter_has_the_ball_of_its_role():
    optimizer = Scion(model_of("gpt2"), radius=2.0, head_radius=30.0, embedding_radius=3.0)
    by_name = {
        optimizer._names[weight]: (group["norm"], group["radius"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    layer = "transformer.h.0."
    assert by_name["transformer.wte.weight"] == ("sign", 30.0)  # tied to the head
    assert by_name["transformer.wpe.weight"] == ("vectors", 3.0)
    assert by_name[f"{layer}attn.c_attn.weight"] == ("spectral", 2.0)
    assert by_name[f"{layer}attn.c_attn.bias"] == ("rms", 2.0)
    names = optimizer.sizes()
    assert f"{layer}attn.c_attn.weight[16:32]" in names
    other = Scion(model_of("gpt2"), norms={"*.c_fc.weight": "sign"}, head_radius=30.0)
    assert [len(g["params"]) for g in other.param_groups if g["norm"] == "sign"] == [3]


def llama(layers):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_hidden_layers": layers}))


def mixtral(layers):
    sizes = {**MIXTRAL, "num_hidden_layers": layers, "num_local_experts": 3 * layers}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes))


@pytest.mark.parametrize("build", [llama, mixtral])
def test_a_step_reads_nothing_and_has_launches_for_shapes_not_layers(build):
    counts = []
    for layers in (2, 5):
        model = build(layers)
        optimizer = Scion(model, lr=0.05, radius=2.0)
        trained(model, optimizer, 2)
        with Launches() as launches:
            optimizer.step()
        assert launches.reads == 0
        counts.append(launches.total)
    # Operations on lists are one launch on a GPU; the count here includes their parts.
    assert counts[0] == counts[1] <= 320


def test_a_run_that_resumes_continues_bit_for_bit():
    model = model_of("gpt2")
    optimizer = Scion(model, lr=0.05, radius=2.0)
    trained(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(model, optimizer, 3, start=3)
    other = model_of("gpt2")
    resumed = Scion(other, lr=0.5, radius=3.0)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    trained(other, resumed, 3, start=3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_step_alike(copied):
    model = model_of("gpt2")
    optimizer = Scion(model, lr=0.05, radius=2.0)
    trained(model, optimizer, 2)
    other, twin = copied((model, optimizer))
    trained(model, optimizer, 2, start=2)
    trained(other, twin, 2, start=2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_frozen_weights_stay_and_unused_ones_too():
    model = model_of("gpt2")
    model.transformer.h[0].requires_grad_(requires_grad=False)
    frozen = model.transformer.h[0].mlp.c_fc.weight
    before = frozen.clone()
    trained(model, Scion(model, lr=0.05, radius=2.0), 2)
    assert torch.equal(frozen, before)
    stepped, unused = (nn.Parameter(torch.eye(3)) for _ in range(2))
    optimizer = Scion(groups([stepped, unused, frozen]), lr=0.1)
    stepped.grad = torch.ones(3, 3)
    optimizer.step()
    assert torch.equal(unused, torch.eye(3))
    assert not torch.equal(stepped, torch.eye(3))


def test_groups_schedules_and_closures_are_those_of_torch():
    weight = nn.Parameter(seeded(4, 4))
    vector = nn.Parameter(seeded(4))
    named = [*groups([weight]), {"params": [vector], "norm": "rms", "radius": 1.0, "lr": 0.5}]
    optimizer = Scion(named, lr=0.1, ball=False)
    optimizer.add_param_group(
        {"params": [nn.Parameter(seeded(3, 3))], "norm": "sign", "radius": 1.0}
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = (weight @ vector).square().sum()
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25, 0.05]
    for _ in range(20):
        last = optimizer.step(closure).item()
        schedule.step()
    assert last < before


def test_a_set_of_constrain_holds_through_its_steps():
    model = model_of("gpt2")
    optimizer = Scion(model, lr=0.05, radius=4.0)
    handle = wp.constrain_(model, optimizer, to="spectral")
    trained(model, optimizer, 3)
    assert handle.error().worst == 0.0


def test_weights_of_16_bits_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        Scion(model_of("gpt2").bfloat16())
    assert "rounded away" in caplog.text


class Cube(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.cube = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x):
        return self.layer(x) + self.cube.sum()


def frozen_model():
    return model_of("gpt2").requires_grad_(requires_grad=False)


MATRIX = nn.Parameter(torch.eye(3))
REFUSED = {
    "cube": (lambda: Scion(Cube(), batch=torch.randn(2, 3, 8)), r"cube \(2, 3, 4\)"),
    "cube by name": (
        lambda: Scion(Cube(), batch=torch.randn(2, 3, 8), norms={"cube": "spectral"}), "cube"),
    "pattern": (lambda: Scion(model_of("gpt2"), norms={"h.9*": "sign"}), r"'h\.9\*' matches no"),
    "ball": (lambda: Scion(model_of("gpt2"), norms={"*": "spektral"}), "nearest: spectral"),
    "frozen": (lambda: Scion(frozen_model()), "no parameter trains"),
    "group without a norm": (lambda: Scion([MATRIX]), "names no norm"),
    "group without a radius": (lambda: Scion([{"params": [MATRIX], "norm": "sign"}]), "radius = None"),
    "decay": (lambda: Scion([{**groups([MATRIX])[0], "weight_decay": 0.1}]), "the ball is the decay"),
    "rate": (lambda: Scion(groups([MATRIX]), lr=1.5), "lr = 1.5"),
    "rate of a group": (lambda: Scion([{**groups([MATRIX])[0], "lr": -1.0}]), "lr = -1.0"),
    "tensor": (lambda: Scion([{**groups([MATRIX])[0], "lr": torch.ones(1)}]), "expected a number"),
    "momentum": (lambda: Scion(groups([MATRIX]), momentum=1.0), "momentum = 1.0"),
    "vector": (lambda: Scion(groups([nn.Parameter(torch.ones(3))])), "has 1 dimensions"),
    "stack": (lambda: Scion(groups([nn.Parameter(torch.ones(2, 3, 3))])), "stack of experts"),
    "complex": (lambda: Scion(groups([nn.Parameter(torch.eye(3) + 0j)])), "complex64"),
    "norms of groups": (lambda: Scion(groups([MATRIX]), norms={"*": "sign"}), "belongs to a model"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_parameter(case):
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_rate_that_a_schedule_sets_too_high_is_refused_before_the_step():
    weight = nn.Parameter(torch.eye(3))
    optimizer = Scion(groups([weight]), lr=0.1)
    optimizer.param_groups[0]["lr"] = 1.1
    weight.grad = torch.ones(3, 3)
    with pytest.raises(ConfigError, match=r"lr = 1\.1"):
        optimizer.step()
    assert torch.equal(weight, torch.eye(3))


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 4, sparse=True)
    optimizer = Scion(groups([table.weight], "vectors"))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse gradient"):
        optimizer.step()


def test_weights_in_shards_are_refused_by_name():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    with one_mesh() as mesh:
        fully_shard(layer, mesh=mesh)
        with pytest.raises(ConfigError, match=r"in_proj_weight \(24, 8\) is sharded"):
            Scion(layer)
