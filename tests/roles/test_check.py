"""Odd models: each part is right, or the check of `find_roles` refuses it by name."""

import copy

import pytest
import torch
from tests.roles.test_layouts import D, H, Layout, T, merged, split
from tests.support.many_families import GROUPED, VISION
from tests.support.many_families import PLAIN as PLAIN_SIZES
from tests.support.many_families import model as of_transformers
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.errors import RoleNotFoundError, ShapeError
from wellposed.roles import find_roles

SDPA = F.scaled_dot_product_attention


class Odd(Layout):
    """A layout beside a feed-forward network, and what only some layouts need."""

    def __init__(self):
        super().__init__()
        self.compress = nn.Parameter(torch.randn(T, 3))
        self.by_head = nn.Parameter(torch.randn(H, D, D // H))
        self.over_heads = nn.Linear(H, 9)
        self.again = nn.Linear(9, H)
        self.over_tokens = nn.Linear(T, 9)
        self.back = nn.Linear(9, T)
        self.latent = nn.Linear(D, 6)
        self.latent_up = nn.Linear(6, D)
        self.wide = nn.Linear(D, 2 * D)
        self.gate = nn.Linear(D, 24)
        self.norms = nn.ModuleList([nn.RMSNorm(D), nn.LayerNorm(D)])
        self.register_buffer("coordinates", torch.randn(T, T, H))

    def end(self, x):
        return x + self.down(F.gelu(self.up(x)))


def odd(mix):
    """Return a model whose attention part is ``mix``, before a plain feed-forward network."""

    def forward(self, x):
        return self.end(x + mix(self, x))

    return type(mix.__name__, (Odd,), {"forward": forward})


@odd
def linear(self, x):
    q, k, v = self.heads(x)
    return self.d(merged(F.elu(q) @ (k.mT @ v)))


@odd
def linear_tied(self, x):
    k = self.a(x)
    return self.d(k.sigmoid() * (k * k.sigmoid()).cumsum(1))


@odd
def shifted_network(self, x):
    before = 0.5 * (x + F.pad(x, (0, 0, 1, -1)))
    return self.b(F.relu(self.a(before)).square())


@odd
def head_mixers(self, x):
    q, k, v = self.heads(x)
    weights = self.over_heads((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
    return self.d(merged(self.again(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v))


@odd
def linformer(self, x):
    k, v = (torch.einsum("btd,tk->bkd", part(x), self.compress) for part in (self.b, self.c))
    return self.d(merged(SDPA(split(self.a(x)), split(k), split(v))))


@odd
def shifted_keys(self, x):
    q, k, v = self.heads(x)
    return self.d(merged(SDPA(q, (k + k.roll(1, -2)) / 2, v)))


@odd
def channels(self, x):
    q, k, v = (part.mT for part in self.heads(x))
    return self.d(merged(((F.normalize(q) @ F.normalize(k).mT).softmax(-1) @ v).mT))


@odd
def token_mixer(self, x):
    return self.back(F.gelu(self.over_tokens(F.layer_norm(x, (D,)).mT))).mT


@odd
def gated_by_tokens(self, x):
    h = F.gelu(self.a(x))
    return self.d(h * h.mean(1, keepdim=True).sigmoid())


@odd
def units_mixed(self, x):
    return self.d(self.a(x).softmax(-1))


@odd
def matrix_per_head(self, x):
    q = torch.einsum("btd,hde->bhte", x, self.by_head)
    return self.d(merged(SDPA(q, split(self.b(x)), split(self.c(x)))))


@odd
def plain(self, x):
    return self.d(merged(SDPA(*self.heads(x))))


@odd
def normed(self, x):
    q, k = (split(norm(part(x))) for norm, part in zip(self.norms, (self.a, self.b), strict=True))
    return self.d(merged(SDPA(q, k, split(self.c(x)))))


@odd
def position_network(self, x):
    q, k, v = self.heads(x)
    bias = self.again(F.relu(self.over_heads(self.coordinates))).permute(2, 0, 1)
    return self.d(merged((q @ k.mT + bias).softmax(-1) @ v))


@odd
def latent(self, x):
    c = self.latent(x)
    k = torch.cat([split(self.latent_up(c)), split(self.b(x))], -1)
    return self.d(merged(SDPA(split(self.wide(x)), k, split(self.c(x)))))


@odd
def scaled_positions(self, x):
    position = torch.arange(T * D).reshape(1, T, D).sin().expand(x.shape)
    q = split(self.a(x + position * self.f(F.relu(self.e(x)))))
    return self.d(merged(SDPA(q, split(self.b(x)), split(self.c(x)))))


@odd
def fourier(self, x):
    return torch.fft.fft2(x).real


@odd
def without_gradient(self, x):
    h = self.a(x)
    return self.b(h * torch.ones_like(h)) + self.d(self.c(x) * self.c(x).detach().sigmoid())


REFUSED = {
    linear: ["multiplied without a softmax", "linear"],
    linear_tied: ["up a.weight, down d.weight"],
    shifted_network: ["up a.weight, down b.weight", "reads at one place moves with several tokens"],
    head_mixers: ["up over_heads.weight, down again.weight"],
    linformer: ["key b.weight", "its key at", "its value at"],
    shifted_keys: ["query a.weight, key b.weight", "its key at"],
    channels: ["its query at", "its key at", "its value at"],
    token_mixer: ["up over_tokens.weight, down back.weight"],
    gated_by_tokens: ["up a.weight, down d.weight", "d.weight reads"],
    units_mixed: ["up a.weight, down d.weight"],
    matrix_per_head: ["its query is no product with one parameter", "b.weight, c.weight"],
}
"""Model -> what its notes say of the part that is neither attention nor feed-forward."""
PLAIN = ("a.weight", "b.weight", "c.weight", "d.weight")
RIGHT = {
    plain: PLAIN,
    normed: PLAIN,
    position_network: PLAIN,
    scaled_positions: PLAIN,
    latent: ("wide.weight", "latent_up.weight", "c.weight", "d.weight"),
    fourier: None,
}
"""Model -> its query, key, value and output."""


def labels(part):
    return tuple(getattr(part, role).label for role in ("query", "key", "value", "output"))


def networks(roles):
    return [(part.up.label, part.down.label) for part in roles.feedforward]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_part_that_the_check_contradicts_is_left_out_and_said(kind):
    model = kind()
    x = torch.randn(2, T, D)
    roles = find_roles(model, x)
    assert not roles.attention
    assert networks(roles) == [("up.weight", "down.weight")]
    notes = "\n".join(roles.notes)
    assert all(words in notes for words in REFUSED[kind])
    missing = {
        name for name in "abcd" if not any(f"{name}.weight" in label for label in roles.unnamed)
    }
    assert missing <= {weight.view.parameter_name[0] for weight in roles.loose}


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_part_that_the_check_confirms_is_whole(kind):
    roles = find_roles(kind(), torch.randn(2, T, D))
    assert [labels(part) for part in roles.attention] == ([RIGHT[kind]] if RIGHT[kind] else [])
    assert networks(roles) == [("up.weight", "down.weight")]
    assert not roles.notes


def test_factors_without_a_gradient_hide_no_network():
    parts = networks(find_roles(without_gradient(), torch.randn(2, T, D)))
    assert parts[0] == ("a.weight", "b.weight")


class Owner(nn.Module):
    """Its first layer makes the keys and values of all (as YOCO does)."""

    def __init__(self, *, first):
        super().__init__()
        self.a = nn.Linear(D, D)
        self.d = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D) if first else None

    def forward(self, x, kv):
        kv = kv if self.kv is None else [split(part) for part in self.kv(x).chunk(2, -1)]
        return x + self.d(merged(SDPA(split(self.a(x)), *kv))), kv


class AcrossLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Owner(first=layer == 0) for layer in range(2)])

    def forward(self, x):
        kv = None
        for layer in self.layers:
            x, kv = layer(x, kv)
        return x


def test_keys_of_another_layer_leave_the_path_of_their_reader():
    roles = find_roles(AcrossLayers(), torch.randn(2, T, D))
    assert [(part.path, part.layer) for part in roles.attention] == [
        ("layers.0", 0),
        ("layers.1", 1),
    ]
    assert {part.key.label for part in roles.attention} == {"layers.0.kv.weight[0:16]"}


class QueryAndGate(nn.Module):
    """Qwen3-Next's attention: rows of `q_proj` are by head a query and a gate of the output."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.head_dim = D // H
        self.q_proj = nn.Linear(D, 2 * D)
        self.k_proj = nn.Linear(D, D)
        self.v_proj = nn.Linear(D, D)
        self.o_proj = nn.Linear(D, D)

    def forward(self, x):
        q, gate = self.q_proj(x).unflatten(-1, (H, -1)).chunk(2, -1)
        mixed = SDPA(q.transpose(1, 2), split(self.k_proj(x)), split(self.v_proj(x)))
        return x + self.o_proj(merged(mixed) * gate.flatten(-2).sigmoid())


@pytest.mark.parametrize("named", [False, True])
def test_a_pass_that_is_confirmed_beats_names(named):
    patterns = {role: f"{role[0]}_proj.weight" for role in ("query", "key", "value", "output")}
    options = {"where": patterns} if named else {}
    roles = find_roles(QueryAndGate(), torch.randn(2, T, D), **options)
    (part,) = roles.attention
    assert (part.num_heads, part.head_dim) == (H, D // H)
    assert part.query.label == "q_proj.weight[0:4, 8:12, 16:20, 24:28]"
    assert not roles.notes
    with pytest.raises(ShapeError, match="8 heads of 16 / 4 values do not make"):
        find_roles(QueryAndGate())
    with pytest.raises(ShapeError, match="8 heads"):
        find_roles(QueryAndGate(), where=patterns)


class FusedGate(nn.Module):
    """EVA02's network: gate and up are one weight, `fc1`, with a norm before `fc2`."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(D, 48), "fc2": nn.Linear(24, D)})
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        x = x + self.attn(x, x, x)[0]
        gate, up = self.mlp["fc1"](x).chunk(2, -1)
        return x + self.mlp["fc2"](self.norm(F.silu(gate) * up))


def test_a_gate_that_no_name_tells_is_seen_or_unnamed():
    (part,) = find_roles(FusedGate(), torch.randn(2, T, D)).feedforward
    assert (part.gate.label, part.up.label) == ("mlp.fc1.weight[0:24]", "mlp.fc1.weight[24:48]")
    alone = find_roles(FusedGate())
    assert not alone.feedforward
    assert "mlp.fc1.weight (48, 16)" in alone.unnamed
    assert "found by name; nothing was run: no batch was given" in alone.notes


@pytest.mark.parametrize(("check", "passes"), [(False, 1), (True, 3)])
def test_the_check_takes_two_passes_and_leaves_the_model_as_it_was(check, passes):
    model = plain()
    x = torch.randn(2, T, D)
    count = [0]
    state = copy.deepcopy(model.state_dict())

    def fail(*_):
        count[0] += 1
        if count[0] > passes:
            raise RuntimeError("one pass too many")

    model.register_forward_pre_hook(fail)
    find_roles(model, x, check=check)
    assert count == [passes]
    if check:
        count[0] = 1
        assert "not checked: it fails with moved rows" in "".join(find_roles(model, x).notes)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_that_was_given_is_not_asked_for():
    with pytest.raises(RoleNotFoundError) as caught:
        find_roles(nn.Linear(3, 3), torch.randn(2, 3))
    assert "Give a batch" not in str(caught.value)


def test_a_verb_that_selects_a_refused_part_says_why():
    model = linear()
    x = torch.randn(2, T, D)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RoleNotFoundError, match="multiplied without a softmax"):
        wp.constrain_(model, optimizer, where="query", batch=x)
    with pytest.raises(RoleNotFoundError, match="multiplied without a softmax"):
        wp.OrthogonalityPenalty(model, query=1.0, batch=x, form="gram")


MODELS_OF_TRANSFORMERS = {
    "minimax": of_transformers(
        "MiniMax",
        GROUPED,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=2,
        block_size=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3-next": of_transformers(
        "Qwen3Next",
        GROUPED,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "gemma3n": of_transformers(
        "Gemma3nText",
        GROUPED,
        head_dim=8,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=40,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0, 0.0, 0.0],
    ),
    "dinov2-swiglu": of_transformers(
        "Dinov2",
        VISION,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        use_swiglu_ffn=True,
    ),
    "rwkv": of_transformers(
        "Rwkv", vocab_size=40, hidden_size=32, num_hidden_layers=2, context_length=32
    ),
    "nystromformer": of_transformers(
        "Nystromformer", PLAIN_SIZES, num_landmarks=4, segment_means_seq_len=8
    ),
    "convnext": of_transformers(
        "ConvNext", image_size=32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "diffllama": of_transformers("DiffLlama", GROUPED, head_dim=8),
    "hiera": of_transformers(
        "Hiera",
        image_size=[32, 32],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        num_query_pool=1,
    ),
    "jetmoe": of_transformers(
        "JetMoe", GROUPED, num_local_experts=2, num_experts_per_tok=1, kv_channels=8
    ),
}
OF_TRANSFORMERS = {
    "minimax": (1, 4, "up layers.0.self_attn.output_gate.weight"),
    "qwen3-next": (1, 8, "without a softmax, not read as attention: layers.0.linear_attn"),
    "gemma3n": (4, 4, ""),
    "dinov2-swiglu": (2, 2, ""),
    "rwkv": (0, 0, "reads at one place moves with several tokens"),
    "nystromformer": (2, 2, "found by name; the pass does not show it"),
    "convnext": (0, 2, ""),
    "diffllama": (4, 2, "v_proj.weight[0:8] in the pass"),
    "hiera": (1, 2, "attention encoder.stages.1.layers.0.attn: refused"),
    "jetmoe": (0, 0, "its query is no product with one parameter"),
}
"""Model -> number of attention and feed-forward parts, and the note."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS_OF_TRANSFORMERS)
def test_odd_models_of_transformers_are_right_or_refused(name):
    attention, networks_, note = OF_TRANSFORMERS[name]
    model = MODELS_OF_TRANSFORMERS[name]()
    images = {"pixel_values": torch.randn(1, 3, 32, 32)}
    if name == "rwkv":
        with pytest.raises(RoleNotFoundError, match=note):
            find_roles(model)
        return
    roles = find_roles(model, images if name == "hiera" else None)
    assert (len(roles.attention), len(roles.feedforward)) == (attention, networks_)
    assert (note in "\n".join(roles.notes)) if note else not roles.notes
    if name == "gemma3n":
        assert [part.path for part in roles.attention] == [
            f"layers.{i}.self_attn" for i in range(4)
        ]
        keys = [part.key.owner_path for part in roles.attention]
        assert keys == [f"layers.{i}.self_attn.k_proj" for i in (0, 1, 0, 1)]
