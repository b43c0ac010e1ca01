"""Attention that something scales: gates, temperatures, norms. Each layout is found with the rows that its
code says, or refused by name, and the verbs act on these rows alone."""

import copy

import pytest
import torch
from tests.roles.test_layouts import D, H, T, merged, split
from tests.roles.test_oracle import check
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.roles import find_roles

W = D // H
LAYOUTS = {}


class Gated(nn.Module):
    """Weights of attention, of its gates, and a feed-forward network behind it."""

    def __init__(self):
        super().__init__()
        for name in ("wq", "wk", "wv", "wo", "wg", "before_gate", "query_2", "key_2"):
            setattr(self, name, nn.Linear(D, D, bias=False))
        self.by_head = nn.Linear(D, H)
        self.by_token = nn.Linear(D, 1)
        self.query_norm = nn.RMSNorm(W)
        self.key_norm = nn.RMSNorm(W)
        self.head_norm = nn.LayerNorm(W)
        self.groups = nn.GroupNorm(H, D)
        self.fused = nn.Linear(D, 4 * D, bias=False)
        self.key_value = nn.Linear(D, D, bias=False)
        self.query_gate = nn.Linear(D, 2 * D, bias=False)
        self.sink = nn.Parameter(torch.randn(H))
        self.share = nn.Parameter(torch.rand(H, 1, 1))
        self.up = nn.Linear(D, 24)
        self.down = nn.Linear(24, D)

    def forward(self, x):
        x = x + self.mix(F.layer_norm(x, (D,)))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (D,)))))

    def heads(self, x):
        return split(self.wq(x)), split(self.wk(x)), split(self.wv(x))

    def attend(self, x):
        return merged(F.scaled_dot_product_attention(*self.heads(x)))

    def grouped(self, y):
        return self.groups(y.flatten(0, 1)).view_as(y)


def block(first, heads=H, pace=W):
    """Return the rows of each head, from a first row on, ``pace`` rows apart."""
    return [list(range(first + head * pace, first + head * pace + W)) for head in range(heads)]


def gated(**fused):
    """Register a layout; by keyword, roles in another weight than their own, with their rows."""

    def register(mix):
        kind = type(mix.__name__, (Gated,), {"mix": mix})
        plain = {"query": ("wq", block(0)), "key": ("wk", block(0)), "value": ("wv", block(0))}
        LAYOUTS[mix.__name__] = kind, {**plain, **fused}
        return kind

    return register


@gated()
def gate_a_unit(self, x):
    return self.wo(self.attend(x) * self.wg(x).sigmoid())


@gated()
def gate_by_silu_from_the_left(self, x):
    return self.wo(F.silu(self.wg(x)) * self.attend(x))


@gated()
def gate_a_head(self, x):
    y = F.scaled_dot_product_attention(*self.heads(x))
    return self.wo(merged(y * self.by_head(x).sigmoid().mT[..., None]))


@gated()
def gate_in_place(self, x):
    y = self.attend(x).clone()[:]  # a view
    y *= self.wg(x).sigmoid()
    return self.wo(y)


@gated()
def gates_a_head_and_a_unit(self, x):
    y = F.scaled_dot_product_attention(*self.heads(x)) * self.by_head(x).sigmoid().mT[..., None]
    return self.wo(merged(y) * self.wg(x).sigmoid())


@gated()
def gate_after_the_output(self, x):
    return self.wo(self.attend(x)) * self.wg(x).sigmoid()


@gated()
def gate_of_two_layers(self, x):
    return self.wo(self.attend(x) * self.wg(F.silu(self.before_gate(x))).sigmoid())


@gated()
def gate_that_reads_the_attention(self, x):
    y = self.attend(x)
    return self.wo(y * self.wg(F.silu(self.before_gate(y))).sigmoid())


@gated()
def gate_of_the_values(self, x):
    q, k, v = self.heads(x)
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v * F.silu(split(self.wg(x))))))


@gated()
def gate_of_the_keys(self, x):
    q, k, v = self.heads(x)
    return self.wo(merged(F.scaled_dot_product_attention(q, k * split(self.wg(x)).sigmoid(), v)))


@gated()
def temperature_a_token(self, x):
    q, k, v = self.heads(x)
    q = q * F.softplus(self.by_token(x))[:, None]
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v)))


@gated()
def temperature_that_is_not_squashed(self, x):
    q, k, v = self.heads(x)
    q = q * (1 + self.by_token(x))[:, None]
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v)))


@gated()
def temperature_that_divides(self, x):
    q, k, v = self.heads(x)
    q = q / (1 + self.by_head(x).exp()).mT[..., None]
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v)))


@gated()
def norms_of_query_and_key(self, x):
    q, k, v = self.heads(x)
    q = self.query_norm(q)
    k = self.key_norm(k)
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v)))


@gated()
def norm_over_heads_and_a_gate(self, x):
    return self.wo(F.silu(self.wg(x)) * self.grouped(self.attend(x)))


@gated()
def sink(self, x):
    q, k, v = self.heads(x)
    logits = torch.cat([q @ k.mT / 2, self.sink[:, None, None].expand(len(x), H, T, 1)], -1)
    return self.wo(merged(logits.softmax(-1)[..., :-1] @ v) * self.wg(x).sigmoid())


@gated()
def differential(self, x):
    q, k, v = self.heads(x)
    one = (q @ k.mT / 2).softmax(-1)
    two = (split(self.query_2(x)) @ split(self.key_2(x)).mT / 2).softmax(-1)
    return self.wo(merged(self.head_norm((one - self.share * two) @ v)) * self.wg(x).sigmoid())


@gated(key=("key_value", block(0, 2)), value=("key_value", block(8, 2)))
def gate_of_grouped_heads(self, x):
    k, v = split(self.key_value(x), 4).chunk(2, 1)
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    y = merged(F.scaled_dot_product_attention(split(self.wq(x)), k, v))
    return self.wo(y * self.wg(x).sigmoid())


FUSED = {
    "query": ("fused", block(0)),
    "key": ("fused", block(D)),
    "value": ("fused", block(2 * D)),
}


@gated(**FUSED)
def gate_in_the_fused_weight(self, x):
    q, k, v, gate = self.fused(x).chunk(4, -1)
    y = merged(F.scaled_dot_product_attention(split(q), split(k), split(v)))
    return self.wo(y * gate.sigmoid())


@gated(**FUSED)
def gate_of_the_values_in_the_fused_weight(self, x):
    q, k, v, gate = map(split, self.fused(x).chunk(4, -1))
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v * gate.sigmoid())))


@gated(query=("query_gate", block(0, pace=2 * W)))
def gate_between_the_query_rows(self, x):
    q, gate = self.query_gate(x).unflatten(-1, (H, -1)).chunk(2, -1)
    _, k, v = self.heads(x)
    y = merged(F.scaled_dot_product_attention(q.transpose(1, 2), k, v))
    return self.wo(y * gate.flatten(-2).sigmoid())


def made(name):
    torch.manual_seed(0)
    return LAYOUTS[name][0]().eval(), torch.randn(2, T, D), LAYOUTS[name][1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_heads_are_those_of_the_code(name):
    model, x, truth = made(name)
    roles = find_roles(model, x)
    (part,) = roles.attention
    assert not roles.notes
    assert not roles.loose
    for role, (weight, heads) in truth.items():
        assert getattr(part, role).parameter_name == f"{weight}.weight"
        rows = [[row for span in spans for row in range(*span)] for spans in part.heads[role]]
        assert rows == heads, role
    assert part.output.label == "wo.weight"
    (network,) = roles.feedforward
    assert (network.up.label, network.down.label) == ("up.weight", "down.weight")
    if "gate" in name and "fused" not in name and "query_rows" not in name:
        assert any(word.startswith(("wg", "by_head")) for word in roles.unnamed)


COMPOSED = {"sink", "differential"}
"""Layouts that call no function of torch for attention, which the oracle watches."""


@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - COMPOSED))
def test_moving_a_row_moves_its_head_alone(name, monkeypatch):
    model, x, _ = made(name)

    def run(model):
        model(x)

    run.batch = x
    check(model, run, monkeypatch)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_constraint_holds_these_rows_and_no_gate(name):
    model, x, truth = made(name)
    free = copy.deepcopy(model)
    for trained, hold in ((model, True), (free, False)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        if hold:
            where = ("query", "key", "value", "output")
            wp.constrain_(trained, optimizer, where=where, per="head", batch=x)
        trained(x).square().mean().backward()
        optimizer.step()

    constrained = {"wo": [[*range(D)]]}
    for weight, heads in truth.values():
        constrained.setdefault(weight, []).extend(heads)
    for weight, heads in constrained.items():
        matrix = model.get_parameter(f"{weight}.weight").detach().double()
        for rows in heads:
            values = torch.linalg.svdvals(matrix[rows])
            torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    for weight in ("wg", "by_head", "by_token", "before_gate"):
        matrix = model.get_parameter(f"{weight}.weight").detach()
        assert torch.linalg.svdvals(matrix).sub(1).abs().max() > 0.05
    others = set(range(4 * D)) - {row for rows in constrained.get("fused", []) for row in rows}
    if "fused" in constrained:
        assert torch.linalg.svdvals(model.fused.weight.detach()[sorted(others)]).min() < 0.9


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_penalty_reaches_these_rows_and_no_gate(name):
    model, x, truth = made(name)
    penalty = wp.OrthogonalityPenalty(
        model, query=1.0, key=1.0, attention=1.0, attention_mode="separate", batch=x, form="gram"
    )
    penalty().backward()
    expected = {"wo": {*range(D)}}
    for weight, heads in truth.values():
        expected.setdefault(weight, set()).update(row for rows in heads for row in rows)
    extra = {"query_2", "key_2"} if name == "differential" else set()
    for path, module in model.named_children():
        if not isinstance(module, nn.Linear) or path in extra:
            continue
        gradient = module.weight.grad
        moved = set() if gradient is None else set(gradient.any(-1).nonzero().flatten().tolist())
        assert moved == expected.get(path, set()), path


def value_of_two(self, x):
    q, k, v = self.heads(x)
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v * split(self.wg(x)))))


def gate_of_the_query(self, x):
    q, k, v = self.heads(x)
    return self.wo(merged(F.scaled_dot_product_attention(q, k, v) * q.sigmoid()))


def sum_with_the_attention(self, x):
    return self.wo(self.attend(x) + self.wg(x))


@pytest.mark.parametrize(
    ("mix", "note"),
    [
        (value_of_two, "its value is no product with one parameter"),
        (gate_of_the_query, "moves with several tokens, heads or units of attention"),
        (sum_with_the_attention, "its output is no product with one parameter"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_factors_of_which_each_may_be_the_gate_are_said_by_name(mix, note):
    model = type(mix.__name__, (Gated,), {"mix": mix})().eval()
    roles = find_roles(model, torch.randn(2, T, D))
    assert not roles.attention
    assert note in "\n".join(roles.notes)
