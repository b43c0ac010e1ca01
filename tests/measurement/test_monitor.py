"""Metric names are public: this file pins them."""

import pytest
import torch
from tests.support.one_mesh import one_mesh
from tests.support.refusal import refuses
from torch import nn

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.measurement import Monitor, measure

QUICK = ["scale_free_orthogonality_error", "orthogonality_error", "sigma_max", "stable_rank"]
EXACT = [*QUICK, "sigma_min", "condition_number"]
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
    assert set(Monitor(model, spectra=True).step()) == {
        f"cond/encoder.{i}.{role}/{number}"
        for i in (0, 1)
        for role in SELF + FEEDFORWARD
        for number in EXACT
    }


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
    monitor = Monitor(model, every=3, spectra=True)
    steps = [monitor.step() for _ in range(7)]
    assert [bool(step) for step in steps] == [True, False, False, True, False, False, True]
    for row in measure(model).rows:
        for number in EXACT:
            assert steps[0][f"cond/encoder.0.{row['role']}/{number}"] == row[number]


def test_bad_input():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    for every in (0, -1, 2.5, True):
        refuses(ConfigError, "every = ", Monitor, model, every=every)
    monitor = Monitor(model)
    with torch.no_grad():
        model.linear1.weight[0, 0] = torch.nan
    refuses(ConvergenceError, r"linear1\.weight", monitor.step)


class Reference(nn.Module):
    """One layer whose attention is written out, so that a reader sees every number."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(8, 8, bias=False))

    def forward(self, x, causal=False):
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
def test_vital_signs_are_what_a_reader_would_compute(causal):
    model = Reference()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = Monitor(model, optimizer, every=1, weights=False)
    x = torch.randn(3, 6, 8)
    before = model.v_proj.weight.detach().clone()
    output = model(x, causal)
    output.square().sum().backward()
    gradient = model.v_proj.weight.grad.norm().item()
    optimizer.step()
    numbers = monitor.step()
    with torch.no_grad():
        model.v_proj.weight.copy_(before)
        for name in ("q_proj", "k_proj"):
            layer = getattr(model, name)
            layer.weight.add_(0.5 * layer.weight.grad)
    q, k = (
        (layer(x)).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (model.q_proj, model.k_proj)
    )
    logits = (q @ k.mT / 2).detach()
    keys = torch.arange(1, 7) if causal else torch.full((6,), 6)
    if causal:
        logits = logits.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(-1)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    for head in (0, 1):
        name = f"vital/encoder.0.head{head}/"
        assert numbers[name + "logit_max"] == pytest.approx(logits[:, head].max().item(), rel=1e-4)
        share = entropy[:, head].sum() / (3 * keys.log().sum())
        assert numbers[name + "entropy"] == pytest.approx(share.item(), rel=1e-4)
        assert numbers[name + "key_norm"] == pytest.approx(
            k[:, head].norm(dim=-1).max().item(), rel=1e-4
        )
    y = output.detach()
    assert numbers["vital/encoder.0/activation_max"] == pytest.approx(y.abs().max().item())
    z = (y - y.mean()) / y.std(correction=0)
    assert numbers["vital/encoder.0/kurtosis"] == pytest.approx((z**4).mean().item(), rel=1e-4)
    assert numbers["vital/encoder.0.value/grad_norm"] == pytest.approx(gradient, rel=1e-5)
    moved = 0.5 * gradient / before.norm().item()
    assert numbers["vital/encoder.0.value/update"] == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_of_padded_tokens_do_not_count(implementation):
    from tests.support.zoo import ZOO

    model = ZOO["bert"].build().train()
    model.set_attn_implementation(implementation)
    monitor = Monitor(model, every=1, weights=False)
    ids = torch.arange(3, 10)[None]
    alone = [model(input_ids=ids[:, :5]), monitor.step()][1]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    padded = [model(input_ids=ids, attention_mask=mask), monitor.step()][1]
    assert {name for name in alone if "head" in name} == {name for name in padded if "head" in name}
    assert all(value < 50 for name, value in padded.items() if name.endswith("logit_max"))
    assert all(0 < value <= 1.001 for name, value in padded.items() if name.endswith("entropy"))


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
    refuses(ConfigError, "nearest: logit_max", Monitor, model, limits={"logits": 3.0})


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


def test_a_model_in_distributed_data_parallel_gives_the_numbers_of_the_model():
    rows = []
    with one_mesh():
        for wrap in (nn.Sequential, nn.parallel.DistributedDataParallel):
            torch.manual_seed(0)
            model = wrap(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            monitor = Monitor(model, optimizer, every=1)
            model(torch.randn(2, 5, 16)).square().mean().backward()
            optimizer.step()
            rows.append(monitor.step())
    assert "vital/encoder.0.head1/logit_max" in rows[1]
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)


def test_of_a_compiled_model_a_step_that_is_measured_gives_the_same_numbers():
    rows = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        runs = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        monitor = Monitor(runs, optimizer, every=3, weights=False)
        for _ in range(4):
            runs(torch.randn(2, 5, 16)).square().mean().backward()
            optimizer.step()
            rows.append(monitor.step())
            assert bool(model.linear1._forward_hooks) == (monitor.steps == 3)
        monitor.remove()
    assert [bool(row) for row in rows] == 2 * [True, False, False, True]
    for plain, seen in zip(rows[:4], rows[4:], strict=True):
        assert seen == pytest.approx(plain, rel=1e-5)


def test_weights_that_are_cut_over_processes_are_refused():
    from torch.distributed.fsdp import fully_shard

    with one_mesh() as mesh:
        model = fully_shard(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), mesh=mesh)
        with pytest.raises(ConfigError, match=r"in_proj_weight and others are cut over processes"):
            Monitor(model, every=1)


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
            found = numbers[f"vital/encoder.0.head{head}/{name}"]
            assert found == pytest.approx(longest[head].item(), rel=1e-5)
    logits = (query.transpose(1, 2) @ key.transpose(1, 2).mT / 2).masked_fill(
        padding[:, None, None], -torch.inf
    )
    found = numbers["vital/encoder.0.head1/logit_max"]
    assert found == pytest.approx(logits[:, 1].max().item(), rel=1e-5)
    z = (output - output.mean()) / output.std(correction=0)
    assert numbers["vital/encoder.0/kurtosis"] == pytest.approx((z**4).mean().item(), rel=1e-4)
    rms = output.square().mean().sqrt().item()
    assert numbers["vital/encoder.0/activation_rms"] == pytest.approx(rms, rel=1e-4)
