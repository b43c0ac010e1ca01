"""Roles from one forward pass: many families that no file of the library names, rows by head, and
what must not change."""

import copy

import pytest
import torch
from tests.support.many_families import BATCHES, FAMILIES, REFUSED, batch_of
from torch import nn
from torch.nn import functional as F

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.roles import find_roles

EVEN = "0:8 8:16 16:24 24:32"
PAIR = "0:8 8:16"


def even(query, key, value, output, keys=EVEN):
    return {
        "query": f"{query} {EVEN}", "key": f"{key} {keys}", "value": f"{value} {keys}",
        "output": output,
    }  # fmt: skip


LLAMA = even("q_proj", "k_proj", "v_proj", "o_proj", PAIR)
MLP = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
NEOX = {
    "query": "query_key_value 0:8 24:32 48:56 72:80",
    "key": "query_key_value 8:16 32:40 56:64 80:88",
    "value": "query_key_value 16:24 40:48 64:72 88:96",
    "output": "dense",
    "up": "dense_h_to_4h",
    "down": "dense_4h_to_h",
}
BLOCKS = {
    "query": f"Wqkv {EVEN}",
    "key": "Wqkv 32:40 40:48 48:56 56:64",
    "value": "Wqkv 64:72 72:80 80:88 88:96",
}

# The last layer, as in its code: matrix, then the rows of each head (of each part, if the
# matrix has two).
TRUTH = {
    "modernbert": {**BLOCKS, "output": "Wo", "gate": "Wi 0:48", "up": "Wi 48:96", "down": "Wo"},
    "deberta-v2": {
        **even("self.query_proj", "self.key_proj", "self.value_proj", "output.dense"),
        "up": "intermediate.dense",
        "down": "output.dense",
    },
    "albert": {**even("query", "key", "value", "dense"), "up": "ffn", "down": "ffn_output"},
    "gpt-neox": NEOX,
    "falcon": {
        **NEOX,
        "query": f"query_key_value {EVEN}",
        "key": "query_key_value 32:40",
        "value": "query_key_value 40:48",
    },
    "falcon-grouped": {
        **NEOX,
        "query": "query_key_value 0:8 8:16 32:40 40:48",
        "key": "query_key_value 16:24 48:56",
        "value": "query_key_value 24:32 56:64",
    },
    "gpt-bigcode": {
        "query": f"c_attn {EVEN}", "key": "c_attn 32:40", "value": "c_attn 40:48",
        "output": "c_proj", "up": "c_fc", "down": "c_proj",
    },
    "olmo2": {**LLAMA, **MLP},
    "glm4": {**LLAMA, "gate": "gate_up_proj 0:48", "up": "gate_up_proj 48:96", "down": "down_proj"},
    "mixtral": {
        **LLAMA, "gate": "gate_up_proj[2] 0:48", "up": "gate_up_proj[2] 48:96",
        "down": "down_proj[2]",
    },
    "gpt-oss": {
        **LLAMA,
        "gate": "gate_up_proj[2] " + " ".join(f"{row}:{row + 1}" for row in range(0, 96, 2)),
        "up": "gate_up_proj[2] " + " ".join(f"{row}:{row + 1}" for row in range(1, 96, 2)),
        "down": "down_proj[2]",
    },
    "deepseek-v3": {
        "query": "q_b_proj 0:10 10:20 20:30 30:40",
        "key": "kv_b_proj 0:6 16:22 32:38 48:54",
        "value": "kv_b_proj 6:16 22:32 38:48 54:64",
        "output": "o_proj",
        **MLP,
    },
    "whisper": {
        **even("q_proj", "k_proj", "v_proj", "out_proj"), "up": "fc1", "down": "fc2",
    },
}  # fmt: skip


def roles_of(name):
    model = FAMILIES[name]()
    return model, find_roles(model, BATCHES[name]() if name in BATCHES else None)


def label_of(view, path, heads=()):
    entry = "" if view.expert is None else f"[{view.expert}]"
    name = view.parameter_name.removeprefix(f"{path}.").removesuffix(".weight") + entry
    spans = [span for head in heads for span in head] if heads else view.spans or ()
    return " ".join([name, *(f"{start}:{stop}" for start, stop in spans)])


@pytest.mark.parametrize("name", TRUTH)
def test_the_last_layer_is_what_its_code_says(name):
    _, roles = roles_of(name)
    part = roles.attention[-1]
    network = roles.feedforward[-1]
    rows = {
        role: label_of(getattr(part, role), part.path, part.heads.get(role))
        for role in ("query", "key", "value", "output")
    }
    views = {"up": network.up, "gate": network.gate, "down": network.down}
    rows |= {role: label_of(view, network.path) for role, view in views.items() if view}
    assert rows == TRUTH[name]
    assert part.kind == ("cross" if name == "whisper" else "self")
    assert part.num_heads == 4
    assert part.num_key_value_heads == len(part.heads["key"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_found_whole_or_refused_by_name(name):
    reason = REFUSED.get((name, "find_roles"), "")
    if name == "squeezebert":
        with pytest.raises(RoleNotFoundError, match=reason):
            roles_of(name)
        return
    model, roles = roles_of(name)
    if name == "xlnet":
        assert any(reason in note for note in roles.notes)
        assert not roles.attention
        assert "layer.0.rel_attn.q (32, 4, 8)" in roles.unnamed
        return
    convolved = "the pass does not show it: stages.0.blocks.0.mlp, stages.1.blocks.0.mlp"
    assert (convolved in "".join(roles.notes)) if name == "segformer" else not roles.notes
    assert not roles.loose
    assert len({part.path for part in roles.attention}) == len(roles.attention) > 0
    assert len(roles.feedforward) >= len([p for p in roles.attention if p.kind == "self"])
    for part in roles.attention:
        for role in ("query", "key", "value"):
            rows = [row for view in part.by_head(role) for row in rows_of(view)]
            assert sorted(rows) == rows_of(getattr(part, role))
    named = {weight.view.parameter_name for weight in roles.weights()}
    listed = {line.split(" ")[0].split("[")[0] for line in roles.unnamed}
    assert named | listed >= {n for n, p in model.named_parameters() if p.ndim >= 2}


def rows_of(view):
    spans = view.spans or ((0, view.shape[0]),)
    return [row for start, stop in spans for row in range(start, stop)]


def test_latent_attention_names_both_factors():
    _, roles = roles_of("deepseek-v3")
    part = roles.attention[-1]
    assert [(role, label_of(view, part.path)) for role, view in part.extra_projections] == [
        ("key", "kv_a_proj_with_mqa 8:12"),
        ("latent", "q_a_proj"),
        ("latent", "kv_a_proj_with_mqa 0:8"),
    ]
    assert len(roles.feedforward) == 1 + 4 + 1  # dense; routed experts and the shared one


@pytest.mark.parametrize("name", ["gpt-neox", "gpt-oss", "deepseek-v3", "gpt-bigcode"])
def test_the_gradient_of_a_view_lands_in_its_rows(name):
    _, roles = roles_of(name)
    for weight in roles.weights():
        view = weight.view
        parameter = weight.view.parameter
        seed = torch.randn(view.shape)
        (gradient,) = torch.autograd.grad((view.tensor() * seed).sum(), parameter)
        assert torch.equal(view.matrix_in(gradient), seed)
        assert gradient.ne(0).sum() == seed.ne(0).sum()


@pytest.mark.parametrize("name", ["bloom", "whisper", "mixtral"])
@pytest.mark.parametrize("change", ["frozen", "half", "train"])
def test_nothing_of_the_model_changes(name, change):
    model = FAMILIES[name]()
    if change == "half":
        model.to(torch.bfloat16)
    model.train(change == "train").requires_grad_(change != "frozen")
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    batch = batch_of(name, model)
    if change == "half":
        batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    random = torch.get_rng_state()
    roles = find_roles(model, batch)
    assert torch.equal(torch.get_rng_state(), random)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad == (change != "frozen") for p in model.parameters())
    _, plain = roles_of(name)
    assert [w.view.label for w in roles.weights()] == [w.view.label for w in plain.weights()]


def in_layers(*names, layers="layers", count=2):
    return {f"{layers}.{layer}.{name}" for layer in range(count) for name in names}


LLAMAS = {"input_layernorm", "post_attention_layernorm"}
# Norms and tables of positions, as the code of each family says; ALBERT's layer is used twice.
NORMS = {
    "albert": (
        {"embeddings.LayerNorm"}
        | {
            f"encoder.albert_layer_groups.0.albert_layers.0.{name}"
            for name in ("full_layer_layer_norm", "attention.LayerNorm")
        },
        {"embeddings.position_embeddings.weight"},
    ),
    "qwen3": (
        {"norm", *in_layers(*LLAMAS, "self_attn.q_norm", "self_attn.k_norm")}, set(),
    ),
    "dinov2": (
        {"layernorm", *in_layers("norm1", "norm2", layers="encoder.layer")},
        {"embeddings.position_embeddings"},
    ),
    "t5": (
        {f"{stack}.final_layer_norm" for stack in ("encoder", "decoder")}
        | {
            f"{stack}.block.{block}.layer.{part}.layer_norm"
            for stack, parts in (("encoder", 2), ("decoder", 3))
            for block in range(2)
            for part in range(parts)
        },
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_and_tables_of_positions_are_those_of_the_code(name):
    _, roles = roles_of(name)
    norms, positions = NORMS[name]
    assert set(roles.norms) == norms
    assert {table.weight.parameter_name for table in roles.positions} == positions
    assert not roles.not_added
    assert not roles.inline_norms


class Scaled(nn.Module):
    """A norm by another name."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.gain * x / x.square().mean(-1, keepdim=True).sqrt()


class Placed(nn.Module):
    """Tables, norms and a block that no name tells."""

    def __init__(self):
        super().__init__()
        self.where = nn.Parameter(torch.randn(9, 16))
        self.words = nn.Embedding(11, 16)
        self.kinds = nn.Embedding(2, 16)
        self.order = nn.Embedding(9, 16)
        self.first = Scaled()
        self.squash = nn.Tanh()
        self.inner = nn.Sequential(nn.LayerNorm(16))
        self.block = Custom()

    def forward(self, ids):
        x = self.words(ids) + self.order(torch.arange(ids.shape[1])) + self.kinds(ids * 0)
        x = self.first(x + self.where[: ids.shape[1]])
        return self.block(self.inner(self.squash(x)))


def test_norms_and_positions_of_nobodys_names():
    roles = find_roles(Placed(), torch.arange(8)[None])
    assert roles.norms == ("first", "inner.0")
    assert roles.inline_norms == ("block",)
    assert [(table.kind, table.weight.parameter_name) for table in roles.embeddings] == [
        ("position", "where"), ("token", "words.weight"), ("token", "kinds.weight"),
        ("position", "order.weight"),
    ]  # fmt: skip
    assert not roles.not_added


class Custom(nn.Module):
    """A Transformer with names of its own, an in-place edit, and a weight that is not used."""

    def __init__(self, *, skip=False):
        super().__init__()
        self.skip = skip
        self.a = nn.Linear(16, 48)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 24)
        self.d = nn.Linear(24, 16)
        self.lost = nn.Linear(16, 16)

    def forward(self, x):
        if not self.skip:
            mixed = self.a(x)
            mixed += 0.0
            # (tokens, heads, [value, query, key], width): rows of each head lie together
            v, q, k = mixed.unflatten(-1, (2, 3, 8)).transpose(-4, -3).unbind(-2)
            weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            heads = torch.einsum("bhij,bhjd->bihd", weights, v)
            x = x + self.b(heads.flatten(-2))
        return x + self.d(F.gelu(self.c(F.layer_norm(x, (16,)))))


def test_a_model_of_nobodys_names_needs_a_batch():
    with pytest.raises(RoleNotFoundError, match="Give a batch"):
        find_roles(Custom())
    roles = find_roles(Custom(), torch.randn(2, 5, 16))
    (part,) = roles.attention
    assert label_of(part.value, "") == "a 0:8 24:32"
    assert [view.spans for view in part.by_head("query")] == [((8, 16),), ((32, 40),)]
    assert part.path == ""
    assert roles.unnamed == ("lost.weight (16, 16)",)
    ends = [w.view for w in roles.weights() if w.role.startswith("feed")]
    assert [label_of(view, "") for view in ends] == ["c", "d"]


def test_a_batch_that_cannot_be_run_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match=r"(?s)Custom fails on the batch.*float32 \(2, 5, 7\)"):
        find_roles(Custom(), torch.randn(2, 5, 7))
    with pytest.raises(ConfigError, match="batch: received int"):
        find_roles(Custom(), 3)


def test_a_layer_that_this_batch_does_not_reach_is_named():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
            self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])

        def forward(self, x):
            return self.layers[0](x)

    roles = find_roles(Half(), torch.randn(2, 5, 16))
    assert [part.path for part in roles.attention] == ["layers.0.self_attn", "layers.1.self_attn"]
    (note,) = roles.notes
    assert "not reached by this batch" in note
    assert "layers.1.self_attn" in note


def test_names_that_the_pass_contradicts_are_shown_beside_it():
    class Swapped(nn.Module):
        """Llama's names; the key projection makes the values."""

        def __init__(self):
            super().__init__()
            self.num_heads = 2
            self.q_proj = nn.Linear(8, 8)
            self.k_proj = nn.Linear(8, 8)
            self.v_proj = nn.Linear(8, 8)
            self.o_proj = nn.Linear(8, 8)

        def forward(self, x):
            parts = [layer(x) for layer in (self.q_proj, self.v_proj, self.k_proj)]
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
            mixed = F.scaled_dot_product_attention(q, k, v)
            return self.o_proj(mixed.transpose(1, 2).flatten(2))

    roles = find_roles(Swapped(), torch.randn(2, 5, 8))
    assert "key is k_proj.weight by name, v_proj.weight in the pass" in "".join(roles.notes)
    assert roles.attention[0].key.parameter_name == "v_proj.weight"
    patterns = {name: f"{name[0]}_proj.weight" for name in ("query", "output")}
    patterns |= {"key": "v_proj.weight", "value": "k_proj.weight"}
    (part,) = find_roles(Swapped(), torch.randn(2, 5, 8), where=patterns).attention
    names = part.key.parameter_name, part.value.parameter_name
    assert names == ("v_proj.weight", "k_proj.weight")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_own_attention_is_seen_inside(batch_first):
    model = nn.Transformer(16, 2, 1, 1, 24, batch_first=batch_first)
    pair = (torch.randn(3, 5, 16), torch.randn(3, 4, 16))
    roles = find_roles(model, pair if batch_first else tuple(x.transpose(0, 1) for x in pair))
    named = [weight.view.label for weight in find_roles(model).weights()]
    assert [weight.view.label for weight in roles.weights()] == named
    assert [part.kind for part in roles.attention] == ["self", "self", "cross"]
    assert roles.attention[0].heads["key"] == (((16, 24),), ((24, 32),))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_named_beside_the_weights_that_they_adapt():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query_key_value", "dense", "dense_h_to_4h"])
    model = peft.get_peft_model(FAMILIES["gpt-neox"](), config)
    roles = find_roles(model)
    _, plain = roles_of("gpt-neox")

    def short(weights):
        names = [w.view.label.removeprefix("base_model.model.") for w in weights]
        return [name.replace(".base_layer", "") for name in names]

    weights = [w for w in roles.weights() if w.role != "adapter"]
    assert short(weights) == short(list(plain.weights()))
    assert sum(w.role == "adapter" for w in roles.weights()) == 2 * 2 * 3
    assert not roles.unnamed


def test_compiled_and_wrapped_models_are_looked_into():
    model = Custom()
    compiled = torch.compile(model)
    (part,) = find_roles(compiled, torch.randn(2, 5, 16)).attention
    assert part.query.owner is model.a
    meta = FAMILIES["gpt-neox"]().to("meta")
    with pytest.raises(RoleNotFoundError, match="no attention"):
        find_roles(meta)


def test_layers_that_run_without_gradients_are_seen():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Custom()

        def forward(self, x):
            with torch.no_grad():
                return self.inner(x)

    roles = find_roles(Frozen(), torch.randn(2, 5, 16))
    assert [view.spans for view in roles.attention[0].by_head("key")] == [((16, 24),), ((40, 48),)]
    assert len(roles.feedforward) == 1


class Rectified(nn.Module):
    """Queries behind a ReLU that is closed for some rows, and a gated network with ReLU."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.both = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)
        with torch.no_grad():
            self.both.bias[3] = -100.0

    def forward(self, x):
        parts = (layer(x).unflatten(-1, (2, 4)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(F.relu(q), k, v)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.relu(gate) * up)


def test_a_row_that_an_activation_hides_is_never_left_out_in_silence():
    model = Rectified()
    x = torch.randn(4, 9, 8)
    (network,) = find_roles(model, x).feedforward
    assert (network.gate.spans, network.up.spans) == (((0, 12),), ((12, 24),))
    assert find_roles(model, x).attention[0].query.spans is None
    with torch.no_grad():
        model.q.bias[2] = -100.0
    roles = find_roles(model, x)
    assert not roles.attention
    assert "its query is no product with one parameter" in "".join(roles.notes)


class Saturated(nn.Module):
    """A network with the activation in its own code."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(0.5 * h * (1 + torch.tanh(h)))


@pytest.mark.parametrize("rows", [0, 6, 12])
def test_an_activation_that_is_flat_in_some_rows_is_no_gate(rows):
    torch.manual_seed(0)
    model = Saturated()
    with torch.no_grad():
        model.up.bias.zero_()
        model.up.bias[:rows] = 20.0
    (network,) = find_roles(model, torch.randn(2, 5, 8)).feedforward
    assert (network.up.label, network.gate, network.down.label) == (
        "up.weight",
        None,
        "down.weight",
    )
