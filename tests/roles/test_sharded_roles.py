"""`find_roles` after `fully_shard` answers as before it, on every rank and without a collective."""

import functools
import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from tests.roles.test_wrapped import FAMILIES, batch_of, layers_of, output_of
from tests.support.hooks import torch_state
from tests.support.instants import at_operation, chosen, operations, spread, traced
from tests.support.one_mesh import one_mesh
from tests.support.zoo import ZOO, D, F, V
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.roles import CallWatch, LiveParts

pytestmark = pytest.mark.slow  # the whole table

FAMILIES = {**FAMILIES, "gpt2": ZOO["gpt2"].build}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


@pytest.fixture
def mesh():
    with one_mesh() as line:
        yield line


class Collectives(TorchDispatchMode):
    """Counts collectives; `CommDebugMode` fails if a module is called outside its model."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def built(name):
    torch.manual_seed(0)
    return FAMILIES[name]().eval()


def by_layer(model, **options):
    for layers in layers_of(model):
        for layer in layers:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def copy_of(tensor):
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model):
    """Objects and bits of everything that a call might change."""
    tables = ("_forward_hooks", "_forward_pre_hooks")
    parts = [*model.named_modules(remove_duplicate=False)]
    named = [
        (f"{path}.{name}", tensor)
        for path, part in parts
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    return {
        "objects": [(name, id(tensor), type(tensor)) for name, tensor in named],
        "bits": {name: copy_of(tensor) for name, tensor in named if not tensor.is_meta},
        "learns": [(name, tensor.requires_grad, tensor.grad is None) for name, tensor in named],
        "modes": [(path, type(part), part.training) for path, part in parts],
        "attributes": [(path, sorted(vars(part))) for path, part in parts],
        "hooks": [
            (path, table, [(number, id(hook)) for number, hook in vars(part)[table].items()])
            for path, part in parts
            for table in tables
        ],
        "torch": torch_state(),
        "random": {"torch": torch.get_rng_state()},
        "python": random.getstate(),
    }


def differing(state, other):
    def same(one, two):
        if isinstance(one, dict) and all(isinstance(v, torch.Tensor) for v in one.values()):
            return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        return one == two

    return [name for name in state if not same(state[name], other[name])]


def find_roles_quietly(model, batch):
    """Roles of a model, after a check that looking changed nothing and sent nothing."""
    before = state_of(model)
    with Collectives() as sent:
        roles = wp.find_roles(model, batch)
    assert differing(before, state_of(model)) == []
    assert sent.count == 0
    return roles


def check_step(model, batch):
    """A step of the sharded model still gathers its weights, and gives each a gradient."""
    with Collectives() as sent:
        output_of(model.train(), batch).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > 0
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    assert dist.get_world_size() == 1 or sent.count > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_roles_are_those_before(name, mesh):
    model = built(name)
    batch = batch_of(name)
    expected = wp.find_roles(model, batch)
    output = output_of(model, batch)
    assert expected.attention
    assert expected.feedforward
    by_layer(model, mesh=mesh)
    roles = find_roles_quietly(model, batch)
    assert roles == expected
    for weight, plain in zip(roles.weights(), expected.weights(), strict=True):
        assert weight.view.owner is plain.view.owner
        assert weight.view.shape == plain.view.shape
        assert isinstance(weight.view.parameter, DTensor)
    assert torch.equal(output_of(model, batch), output)
    check_step(model, batch)
    assert (
        find_roles_quietly(model.eval(), batch) == expected
    )  # the root is whole now, as after every forward


def unsharded(model, mesh):
    for part in by_layer(model, mesh=mesh).modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    return model


def after_a_forward(model, mesh):
    by_layer(model, mesh=mesh, reshard_after_forward=False)
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None])
    return model


def in_half(model, mesh):
    """The root is gathered in half precision already, the layers are not."""
    by_layer(model, mesh=mesh, mp_policy=HALF)
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None])
    return model


def in_one_group(model, mesh):
    fully_shard([*layers_of(model)[0]], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model, mesh):
    for layers in layers_of(model):
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer)
    return by_layer(model, mesh=mesh)


def with_a_method(model, mesh):
    """A forward that calls a method which gathers by itself."""
    by_layer(model, mesh=mesh)
    layer = layers_of(model)[0][0]
    kind = type(layer)
    kind.compute = kind.forward
    kind.forward = lambda self, *args, **named: self.compute(*args, **named)
    register_fsdp_forward_method(layer, "compute")
    return model


def of_the_root_alone(model, mesh):
    return fully_shard(model, mesh=mesh)


def linears(model, mesh):
    for part in model.modules():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    return of_the_root_alone(model, mesh)


ROUTES = {
    "unsharded": unsharded,
    "after a forward": after_a_forward,
    "in half precision": in_half,
    "in one group": in_one_group,
    "checkpointed": checkpointed,
    "with a method": with_a_method,
    "root alone": of_the_root_alone,
    "every Linear": linears,
    "compiled": lambda model, mesh: torch.compile(by_layer(model, mesh=mesh), backend="eager"),
    "offloaded": lambda model, mesh: by_layer(
        model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "hybrid": lambda model, mesh: by_layer(
        model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    ),
    "cut by columns": lambda model, mesh: by_layer(
        model, mesh=mesh, shard_placement_fn=lambda part: Shard(part.ndim - 1)
    ),
}


def plain_names(roles):
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.")
    return str(functools.reduce(lambda text, name: text.replace(name, ""), wrappers, str(roles)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ROUTES)
def test_roles_are_those_before_in_every_state(route, mesh):
    model = built("phi3")
    batch = batch_of("phi3")
    expected = wp.find_roles(model, batch)
    sharded = ROUTES[route](model, mesh)
    assert plain_names(find_roles_quietly(sharded, batch)) == plain_names(expected)
    if "compiled" not in route:
        check_step(sharded, batch)


def test_a_tied_weight_and_a_part_of_a_model(mesh):
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=D, n_layer=2, n_head=4, vocab_size=V)).eval()
    batch = batch_of("gpt2")
    expected = wp.find_roles(model, batch), wp.find_roles(model.transformer, batch)
    fully_shard(model, mesh=mesh)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (
        find_roles_quietly(model, batch),
        find_roles_quietly(model.transformer, batch),
    ) == expected
    assert model.lm_head.weight is model.transformer.wte.weight


def test_names_alone_read_classes_that_fully_shard_renamed(mesh):
    sizes = {"d_model": D, "decoder_layers": 1, "decoder_ffn_dim": F, "decoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=V, tie_word_embeddings=False, **sizes)
    model = hf.BartForCausalLM(config)
    expected = wp.find_roles(model, run=False)
    for part in model.modules():
        if part._parameters:
            fully_shard(part, mesh=mesh)
    assert wp.find_roles(model, run=False) == expected


def doubled(_, __, output):
    return 2 * output


def test_a_hook_of_the_user_is_named_as_before_and_those_of_fsdp_never_are(mesh):
    models = [built("llama") for _ in range(2)]
    linears(models[1], mesh)
    batch = batch_of("llama")
    watches = []
    for model in models:
        roles = wp.find_roles(model, batch)
        assert roles.notes == ()
        watches.append(CallWatch(model, [weight.view for weight in roles.weights()]))
        model.layers[0].mlp.down_proj.register_forward_hook(doubled)
    changes = [watch.changes() for watch in watches]
    assert "doubled" in changes[0][0]
    assert changes[1] == changes[0]
    plain, sharded = (wp.find_roles(model, batch) for model in models)
    assert "doubled" in plain.notes[0]
    assert sharded == plain
    assert sharded.feedforward[0].down.deviation == plain.feedforward[0].down.deviation


def test_sharding_later_is_no_change_of_the_model(mesh):
    model = built("llama")
    batch = batch_of("llama")
    views = [weight.view for weight in wp.find_roles(model, batch).weights()]
    parts = LiveParts(model, dict(model.named_modules()))
    watch = CallWatch(model, views)
    linears(model, mesh)
    assert watch.changes() == parts.changes() == []


def on_the_meta_device(model, mesh):
    return by_layer(model.to("meta"), mesh=mesh)


def in_tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"layers.*.mlp.up_proj": ColwiseParallel()})


def in_both(model, _):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    return by_layer(in_tensor_parallel(model, mesh["inner"]), mesh=mesh["outer"])


def by_hand(model, mesh):
    up = model.layers[1].mlp.up_proj
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Shard(0)]))
    return model


BY_NAME = {
    on_the_meta_device: "weights are on the meta device",
    in_tensor_parallel: "layers.0.mlp.up_proj.weight and 1 other weights are not cut by FSDP2 alone",
    in_both: "layers.0.mlp.up_proj.weight and 1 other weights are not cut by FSDP2 alone",
    by_hand: "layers.1.mlp.up_proj.weight is not cut by FSDP2 alone",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut", BY_NAME)
def test_by_name_with_the_reason(cut, mesh):
    model = built("llama")
    expected = wp.find_roles(model, run=False)
    roles = find_roles_quietly(cut(model, mesh), batch_of("llama"))
    assert roles.attention == expected.attention
    assert roles.feedforward == expected.feedforward
    (note,) = roles.notes
    assert note.startswith(f"found by name; nothing was run: {BY_NAME[cut]}")


@pytest.mark.filterwarnings("ignore")
def test_by_name_inside_a_mode_that_follows_calls(mesh):
    """A sharded layer that it hooks is no layer that computes something else."""
    model = by_layer(built("llama"), mesh=mesh)
    batch = batch_of("llama")
    with CommDebugMode() as mode:
        with torch.no_grad():
            output_of(model, batch)
        (note,) = wp.find_roles(model, batch).notes
    assert "call find_roles outside CommDebugMode" in note
    assert mode.get_total_counts() == 0
    assert wp.find_roles(model, batch).notes == ()


def test_by_name_if_whole_weights_are_too_large(mesh, monkeypatch):
    model = built("llama")
    batch = batch_of("llama")
    expected = wp.find_roles(model, batch)
    size = sum(parameter.nbytes for parameter in model.parameters())
    by_layer(model, mesh=mesh)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(memory // (2 * size)))
    assert find_roles_quietly(model, batch) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(memory // size))
    (note,) = find_roles_quietly(model, batch).notes
    assert "more than half of the 0.0 GB of cpu; call find_roles before fully_shard" in note


def test_an_end_at_any_operation_restores_everything(mesh):
    model = by_layer(built("llama"), mesh=mesh)
    batch = batch_of("llama")
    expected = wp.find_roles(model, batch)
    before = state_of(model)
    count = operations(lambda: wp.find_roles(model, batch))
    for number in spread(count, 24):
        with pytest.raises((RuntimeError, ConfigError)):
            at_operation(lambda: wp.find_roles(model, batch), number)
        assert differing(before, state_of(model)) == [], number
    assert wp.find_roles(model, batch) == expected


@pytest.mark.slow
def test_an_interrupt_at_any_line_restores_everything(mesh):
    model = by_layer(built("llama"), mesh=mesh)
    batch = batch_of("llama")
    expected = wp.find_roles(model, batch)
    before = state_of(model)
    places = traced(lambda: wp.find_roles(model, batch))
    inside = [n for n, (file, _) in enumerate(places, 1) if file.endswith("_stand_ins.py")]
    everywhere = chosen(places, 60)
    for number in sorted({*inside[:: max(1, len(inside) // 60)], *everywhere}):
        with pytest.raises(KeyboardInterrupt):
            traced(lambda: wp.find_roles(model, batch), number)
        assert differing(before, state_of(model)) == [], places[number - 1]
    assert wp.find_roles(model, batch) == expected


def odd(name):
    """Sizes that ranks cut unevenly; of three experts the last of four ranks has none."""
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    sizes |= {"vocab_size": 31, "pad_token_id": 0}
    if name == "llama":
        return hf.LlamaModel(hf.LlamaConfig(hidden_size=9, intermediate_size=7, **sizes)).eval()
    # Experts are multiplied in groups, which needs rows of whole 16 bytes.
    sizes |= {"hidden_size": 12, "intermediate_size": 20, "num_local_experts": 3}
    return hf.MixtralModel(hf.MixtralConfig(**sizes)).eval()


def in_turns(model, batch, rank, shard):
    """Compare each rank's roles with those before; each looks while the others wait."""
    expected = wp.find_roles(model, batch)
    shard(model)
    for turn in range(dist.get_world_size()):
        if turn == rank:
            assert find_roles_quietly(model, batch) == expected, type(model)
        dist.barrier()
    check_step(model, batch)


def work(rank, store, world):
    torch.set_num_threads(1)
    wait = timedelta(seconds=100)
    start = {"init_method": f"file://{store}", "rank": rank, "world_size": world, "timeout": wait}
    dist.init_process_group("gloo", **start)
    if world == 2:
        mesh = init_device_mesh("cpu", (2,))
        for name in FAMILIES:
            in_turns(built(name), batch_of(name), rank, functools.partial(by_layer, mesh=mesh))
        for name in ("llama", "mixtral"):
            in_turns(odd(name), batch_of(name), rank, functools.partial(by_layer, mesh=mesh))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        in_turns(odd("mixtral"), batch_of("mixtral"), rank, functools.partial(by_layer, mesh=mesh))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_answers_alone(world, tmp_path):
    mp.spawn(work, args=(str(tmp_path / "store"), world), nprocs=world)
