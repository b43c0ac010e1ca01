"""Metric names are public: this file pins them."""

import copy
import math
from functools import partial

import pytest
import torch
from tests.support.one_mesh import one_mesh
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.measurement import Monitor, measure

QUICK = ["scale_free_orthogonality_error", "orthogonality_error", "sigma_max", "stable_rank"]
SELF = ["query", "key", "value", "output"]
FEEDFORWARD = ["feedforward_in", "feedforward_out"]


def test_names_of_an_encoder():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    )
    expected = {
        f"cond/encoder.{i}.{role}/{number}"
        for i in (0, 1)
        for role in SELF + FEEDFORWARD
        for number in QUICK
    }
    assert set(Monitor(model, every=5).step()) == expected


def test_names_of_cross_attention():
    model = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
    names = set(Monitor(model).step())
    assert {f"cond/decoder.0.cross_{role}/sigma_max" for role in SELF} <= names
    assert {f"cond/decoder.0.{role}/sigma_max" for role in SELF} <= names
    assert len(names) == (6 + 10) * len(QUICK)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2)
        )


def test_weights_that_would_share_a_name_carry_their_path():
    names = set(Monitor(Towers()).step())
    assert "cond/encoder.0.query@left.self_attn/sigma_max" in names
    assert "cond/encoder.0.query@right.self_attn/sigma_max" in names


def test_values_are_those_of_measure_and_come_every_k_steps():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    monitor = Monitor(model, every=3)
    steps = [monitor.step() for _ in range(7)]
    assert [bool(step) for step in steps] == [True, False, False, True, False, False, True]
    for row in measure(model).rows:
        for number in QUICK:
            logged = steps[0][f"cond/encoder.0.{row['role']}/{number}"]
            assert logged == pytest.approx(row[number], rel=1e-2)


def test_bad_input():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    for every in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="every = "):
            Monitor(model, every=every)
    monitor = Monitor(model)
    with torch.no_grad():
        model.linear1.weight[0, 0] = torch.nan
    with pytest.raises(ConvergenceError, match=r"linear1\.weight"):
        monitor.step()


class Reference(nn.Module):
    """One layer whose attention is written out, so that a reader sees every number."""

    eager = causal = False

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x, mask=None):
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        if self.eager:
            logits = q @ k.mT / 2
            is_bool = mask is not None and mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask
            mixed = logits.softmax(-1) @ v
        else:
            attend = nn.functional.scaled_dot_product_attention
            mixed = attend(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def numbers_of(model, passes):
    """Compute the numbers of passes in float64 without hooks, from the (input, mask) of each."""
    exact = copy.deepcopy(model).double()
    logits = []
    outputs = []
    with torch.no_grad():
        for x, mask in passes:
            x = x.double()
            q, k = (
                f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (exact.q_proj, exact.k_proj)
            )
            is_open = torch.ones(1, 1, 1, x.shape[1]) if mask is None else mask
            every = q @ k.mT / 2
            logits.append((every, is_open.bool().expand_as(every)))
            outputs.append(exact(x, None if mask is None else mask.bool()).flatten())
    numbers = {}
    for head in (0, 1):
        total = most = 0.0
        largest = -math.inf
        for every, is_open in logits:
            for row, keys in zip(
                every[:, head].flatten(0, 1), is_open[:, head].flatten(0, 1), strict=True
            ):
                if keys.any():
                    weights = row[keys].softmax(-1)
                    total -= sum(w * math.log(w) for w in weights.tolist() if w)
                    most += math.log(int(keys.sum()))
                    largest = max(largest, row[keys].max().item())
        numbers[f"vital/encoder.0.head{head}/logit_max"] = largest
        numbers[f"vital/encoder.0.head{head}/entropy"] = total / most
    y = torch.cat(outputs)
    z = (y - y.mean()) / y.std(correction=0)
    numbers["vital/encoder.0/activation_max"] = y.abs().max().item()
    numbers["vital/encoder.0/activation_rms"] = y.square().mean().sqrt().item()
    numbers["vital/encoder.0/kurtosis"] = (z**4).mean().item()
    return numbers


BATCHES = [
    torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(s)) * 4.0 ** (1 - s)
    for s in range(3)
]


def plain(model, optimizer, x=None):
    for batch in BATCHES:
        model(batch).square().sum().backward()
    optimizer.step()


def evaluated(model, optimizer):
    with torch.no_grad():
        model(1e3 * BATCHES[0])
    with torch.inference_mode():
        model(1e3 * BATCHES[0])
    plain(model, optimizer)


def by_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = sum(model(batch).square().sum() for batch in BATCHES)
        loss.backward()
        return loss

    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # of the step before
    optimizer.step(closure)


def scaled(model, optimizer, *, unscaled=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in BATCHES:
        scaler.scale(model(batch).square().sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def lowered(model, optimizer):
    with torch.autocast("cpu", torch.bfloat16):
        plain(model, optimizer)


def recomputed(model, optimizer):
    for batch in BATCHES:
        checkpoint(model, batch, use_reentrant=False).square().sum().backward()
    optimizer.step()


def without_sync(model, optimizer):
    with one_mesh():
        wrapped = nn.parallel.DistributedDataParallel(model)
        with wrapped.no_sync():
            for batch in BATCHES[:2]:
                wrapped(batch).square().sum().backward()
        wrapped(BATCHES[2]).square().sum().backward()
        optimizer.step()


def accelerated(model, optimizer):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(3 * model(batch).square().sum())
            optimizer.step()


ROUTES = (
    plain,
    evaluated,
    by_closure,
    scaled,
    partial(scaled, unscaled=True),
    lowered,
    recomputed,
    without_sync,
    accelerated,
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_every_micro_batch_counts_by_every_route_of_a_step(route, fused):
    torch.manual_seed(0)
    model = Reference()
    expected = numbers_of(model, [(batch, None) for batch in BATCHES])
    before = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    sum(exact(batch.double()).square().sum() for batch in BATCHES).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    monitor = Monitor(model, optimizer, every=1, weights=False)
    route(model, optimizer)
    numbers = monitor.step()
    monitor.remove()
    for name in ("query", "value"):
        layer = f"{name[0]}_proj"
        old, new = (getattr(m, layer).weight.detach() for m in (before, model))
        expected[f"vital/encoder.0.{name}/grad_norm"] = (
            getattr(exact, layer).weight.grad.norm().item()
        )
        expected[f"vital/encoder.0.{name}/update"] = ((new - old).norm() / old.norm()).item()
    close = {"rel": 0.05, "abs": 0.02} if route is lowered else {"rel": 1e-4}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, **close)


LEAST = {kind: torch.finfo(getattr(torch, kind)).min for kind in ("float32", "float16", "bfloat16")}
MASKS = {"bool": None, "-inf": -math.inf, "-1e4": -1e4, "-1e9": -1e9, **LEAST}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_keys_that_a_mask_closes_do_not_count(kind, eager):
    model = Reference()
    keep = torch.ones(3, 1, 6, 6, dtype=torch.bool).tril()
    keep[1, ..., 4:] = False
    keep[2, :, 3] = MASKS[kind] is None  # a query without a key is no number there
    keep[2, :, 3, 1:] = False
    expected = numbers_of(model, [(BATCHES[1], keep)])
    model.eager = eager
    closed = MASKS[kind]
    mask = keep if closed is None else torch.where(keep, 0.0, closed)
    assert heads_of_step(model, mask) == pytest.approx(of_heads(expected), rel=1e-4)


def test_later_keys_of_a_causal_call_do_not_count():
    model = Reference()
    earlier = torch.ones(3, 1, 6, 6, dtype=torch.bool).tril()
    expected = of_heads(numbers_of(model, [(BATCHES[1], earlier)]))
    model.causal = True
    assert heads_of_step(model) == pytest.approx(expected, rel=1e-4)


def of_heads(numbers):
    return {name: numbers[name] for name in numbers if name.endswith(("/logit_max", "/entropy"))}


def heads_of_step(model, mask=None):
    monitor = Monitor(model, every=1, weights=False)
    model(BATCHES[1], mask)
    numbers = monitor.step()
    monitor.remove()
    return of_heads(numbers)


def test_a_step_that_is_skipped_other_optimizers_and_logits_that_are_not_numbers():
    model = Reference()
    other = Reference()
    both = nn.Sequential(model, other)
    first, second = (torch.optim.AdamW(part.parameters(), lr=0.1, fused=True) for part in both)
    monitor = Monitor(both, first, every=1, weights=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(both(BATCHES[1]).square().sum()).backward()
    scaler.step(first)
    scaler.step(second)
    steps = {
        name.split("/")[1] for name in monitor.step() if name.endswith(("grad_norm", "update"))
    }
    assert steps == {f"encoder.0.{role}" for role in SELF}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(both(math.inf * BATCHES[1]).square().sum()).backward()
    scaler.step(first)
    numbers = monitor.step()
    assert not any(name.endswith(("grad_norm", "update")) for name in numbers)
    assert math.isnan(numbers["vital/encoder.0.head0/logit_max"])
    assert math.isnan(numbers["vital/encoder.0.head0/entropy"])
    monitor.remove()


def test_only_steps_that_are_due_and_passes_that_train_are_seen():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    monitor = Monitor(model, every=2, weights=False)
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, 8))
    assert monitor.step() == {}
    model.train()(torch.randn(1, 3, 8))
    assert monitor.step() == {}
    model(torch.randn(1, 3, 8))
    assert "vital/encoder.0.head1/logit_max" in monitor.step()
    monitor.remove()
    assert not any(module._forward_hooks for module in model.modules())


def test_alarms_come_before_the_loss_shows_it_and_name_the_place():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer, every=1, weights=False)
    x = torch.randn(4, 6, 16)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        monitor.step()

    step()
    assert monitor.alarms == []
    with torch.no_grad():
        model[0].self_attn.in_proj_weight[:32] *= 30
    step()
    step()
    assert [alarm.name.rpartition("/")[2] for alarm in monitor.alarms] == ["logit_max", "entropy"]
    assert monitor.alarms[0].step == 2  # said once for as long as it lasts
    assert "and 1 more" in str(monitor.alarms[0])
    with torch.no_grad():
        model[0].linear2.weight[0, 0] = torch.nan
    step()
    (alarm,) = [alarm for alarm in monitor.alarms if "NaN" in alarm.reason]
    assert (alarm.step, alarm.name) == (4, "0.linear2")
    with pytest.raises(ConfigError, match="nearest: logit_max"):
        Monitor(model, limits={"logits": 3.0})


def test_the_model_and_the_step_are_as_without_a_monitor():
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = Monitor(model, optimizer, every=1) if watched else None
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16)).square().mean().backward()
            optimizer.step()
            if monitor is not None:
                monitor.step()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_of_a_compiled_model_a_measured_step_gives_the_same_numbers_and_no_new_graph(in_place):
    rows = []
    graphs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = runs = Reference()
        if compiled and in_place:
            model.compile(backend="eager")
        elif compiled:
            runs = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        monitor = Monitor(runs, optimizer, every=3, weights=False)
        counters.clear()
        for _ in range(7):
            runs(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
            rows.append(monitor.step())
            graphs.append(counters["stats"]["unique_graphs"])
            assert bool(model.q_proj._forward_hooks) == (monitor.steps % 3 == 0)
        monitor.remove()
    for plain, row in zip(rows[:7], rows[7:], strict=True):
        assert row == pytest.approx(plain, rel=1e-5)
    assert graphs == 7 * [0] + [0, *6 * [graphs[-1]]]
    assert graphs[-1] > 0


@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_of_sharded_weights_the_numbers_are_those_of_whole_ones(sizes):
    from torch.distributed.fsdp import fully_shard

    rows = []
    with one_mesh():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "parts")[-len(sizes) :])
        for cut in (False, True):
            torch.manual_seed(0)
            model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
            model = fully_shard(model, mesh=mesh) if cut else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            monitor = Monitor(model, optimizer, every=1)
            for _ in range(2):
                model(torch.randn(2, 5, 16)).square().mean().backward()
                optimizer.step()
                rows.append(monitor.step())
            monitor.remove()
    assert rows[2:] == [pytest.approx(row, rel=1e-5) for row in rows[:2]]


def test_norms_of_queries_and_keys_of_torchs_attention_and_huge_activations():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
    monitor = Monitor(model, every=1, weights=False)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        model.linear2.weight.mul_(1e25)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    output = model(x, src_key_padding_mask=padding).detach().double()
    numbers = monitor.step()
    query, key, _ = (
        (model.norm1(x) @ model.self_attn.in_proj_weight.mT + model.self_attn.in_proj_bias)
        .unflatten(-1, (3, 2, 4))
        .unbind(-3)
    )
    for name, vectors in (("query_norm", query), ("key_norm", key)):
        longest = vectors.norm(dim=-1).amax((0, 1))
        for head in (0, 1):
            logged = numbers[f"vital/encoder.0.head{head}/{name}"]
            assert logged == pytest.approx(longest[head].item(), rel=1e-5)
    logits = (query.transpose(1, 2) @ key.transpose(1, 2).mT / 2).masked_fill(
        padding[:, None, None], -torch.inf
    )
    logged = numbers["vital/encoder.0.head1/logit_max"]
    assert logged == pytest.approx(logits[:, 1].max().item(), rel=1e-5)
    z = (output - output.mean()) / output.std(correction=0)
    assert numbers["vital/encoder.0/kurtosis"] == pytest.approx((z**4).mean().item(), rel=1e-4)
    rms = output.square().mean().sqrt().item()
    assert numbers["vital/encoder.0/activation_rms"] == pytest.approx(rms, rel=1e-4)
