"""Every rule that asks what a weight or a module is, met with what is not quite of that class: right, or
refused by name."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, decay_groups
from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError
from wellposed.nn.invertible import refuse_randomness

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
SIZES |= {"intermediate_size": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 8}
MIXED = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "head_dim": 4,
          "num_experts_per_tok": 2}  # fmt: skip


class Low(nn.Linear):
    """A subclass counts as its class."""


class Grid(nn.Module):
    """Positions of two dimensions, tokens in bags, and a head tied to them, around a plain layer."""

    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 8)
        self.rows = nn.Parameter(torch.randn(4, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12)
        self.norm = nn.LayerNorm((4, 8))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.bags.weight

    def forward(self, ids):
        return self.head(self.norm(self.layer(self.bags(ids[..., None])[None] + self.rows)))


# Which parameters Muon steps; those behind ^ are stored (in, out).
MUON = {
    "gpt2": (
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2)),
        {f"^transformer.h.0.{name}.weight" for name in (
            "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    ),
    "bert": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**SIZES)),
        {f"bert.encoder.layer.0.{name}.weight" for name in (
            *(f"attention.self.{role}" for role in ("query", "key", "value")),
            "attention.output.dense", "intermediate.dense", "output.dense")},
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MIXED)),
        {*(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
         *(f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))},
    ),
    "gpt-oss": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**MIXED)),
        {*(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
         *(f"^model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))},
    ),
    "grid": (Grid, {f"layer.{name}" for name in (
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUON)
def test_muon_steps_hidden_matrices_as_their_layers_apply_them(name):
    build, expected = MUON[name]
    torch.manual_seed(0)
    model = build()
    batch = torch.randint(9, (4,)) if name == "grid" else None
    optimizer = MuonAndAdamW(model, lr=1e-2, weight_decay=0.1, batch=batch)
    before = {path: weight.detach().clone() for path, weight in model.named_parameters()}
    names = {id(weight): path for path, weight in model.named_parameters()}
    taken = [group for group in optimizer.param_groups if group["method"] == "muon"]
    marks = {names[id(p)]: "^" * group["transposed"] for group in taken for p in group["params"]}
    assert {mark + path for path, mark in marks.items()} == expected
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    after = dict(model.named_parameters())
    for path, mark in marks.items():
        stack = [w[path] if w[path].ndim == 3 else w[path][None] for w in (before, after)]
        grads = after[path].grad.reshape(stack[0].shape)
        for old, new, grad in zip(*stack, grads, strict=True):
            plain = nn.Parameter((old.mT if mark else old).clone())
            plain.grad = (grad.mT if mark else grad).clone()
            torch.optim.Muon([plain], lr=1e-2, weight_decay=0.1).step()
            assert torch.equal(plain.mT if mark else plain, new), path


def test_what_muon_cannot_take_is_refused_by_name():
    model = MUON["mixtral"][0]()
    named = MuonAndAdamW(model, muon="re:.*down_proj")
    assert [tuple(weight.shape) for weight in named.param_groups[0]["params"]] == [(3, 8, 12)]
    with pytest.raises(ConfigError, match=r"matrices and stacks.*norm.weight \(8,\)"):
        MuonAndAdamW(model, muon="model.norm")
    with pytest.raises(ConfigError, match=r"received \(2,\)"):
        named.add_param_group({"params": [nn.Parameter(torch.ones(2))], "method": "muon"})
    unknown = "'heads' is no role, and matches no module"
    with pytest.raises(RoleNotFoundError, match=unknown):
        MuonAndAdamW(model, muon="heads")
    with pytest.raises(ConfigError, match=r"fails on the batch(.|\n)*name the matrices with muon="):
        MuonAndAdamW(model, batch={"ids": 1})


def test_norms_and_biases_of_any_shape_do_not_decay():
    for name, undecayed in {
        "grid": {"norm.weight", "norm.bias"},
        "gpt-oss": {f"model.layers.0.mlp.experts.{part}_proj_bias" for part in ("gate_up", "down")},
    }.items():
        model = MUON[name][0]()
        decays, free = decay_groups(model, 0.1)
        names = {id(weight): path for path, weight in model.named_parameters()}
        assert undecayed <= {names[id(weight)] for weight in free["params"]}
        assert {weight.ndim for weight in decays["params"]} <= {2, 3}
    flat = nn.Linear(2, 2)
    flat.__class__ = type("Flat", (FullyShardedDataParallel,), {"__init__": None})
    with pytest.raises(ConfigError, match="the model is a FullyShardedDataParallel"):
        decay_groups(flat, 0.1)


class Noisy(nn.Dropout):
    """A subclass of what drops."""


class Paths(nn.Module):
    """What timm and transformers call drop paths: a rate in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.1

    def forward(self, x):
        return x


@pytest.mark.parametrize("part", [nn.Dropout(0.1), nn.AlphaDropout(0.1), Noisy(0.1), Paths(), nn.RReLU(),
                                  nn.MultiheadAttention(8, 2, 0.1), nn.LSTM(8, 8, 2, dropout=0.1)])  # fmt: skip
def test_whatever_is_random_in_training_is_refused_where_a_map_runs_twice(part):
    model = nn.Sequential(nn.Linear(8, 8), part)
    with pytest.raises(
        ConfigError, match=r"drop at random in training:\n.*1: (dropout 0.1|slopes)"
    ):
        refuse_randomness(model, "inversion")
    refuse_randomness(model.eval(), "inversion")


@pytest.mark.parametrize("call", [wp.find_roles, MuonAndAdamW, lambda m: wp.parameter_groups(m, 0.1),
                                  lambda m: wp.certify(m, seq_len=4), wp.measure, wp.t_fixup_,
                                  wp.OrthogonalityPenalty])  # fmt: skip
def test_lazy_layers_are_refused_by_name(call):
    with pytest.raises(ConfigError, match=r"lazy layers have no shape yet: 1.weight, 1.bias; run"):
        call(nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8)))


def test_rules_look_through_wrappers_of_data_parallel_and_bags():
    model = Grid()
    batch = torch.randint(9, (4,))
    wrapped = nn.DataParallel(model)
    for verb in (lambda m: [view.view.parameter for view in wp.find_roles(m, batch).weights()],
                 lambda m: [p for g in MuonAndAdamW(m, batch=batch).param_groups for p in g["params"]]):  # fmt: skip
        assert list(map(id, verb(wrapped))) == list(map(id, verb(model)))
    tables = [table.weight.parameter_name for table in wp.find_roles(model, batch).embeddings]
    assert tables == ["rows", "bags.weight"]
    with pytest.raises(
        ShapeError, match=r"bags\.weight: an embedding of 9 vectors in 8 dimensions"
    ):
        wp.constrain_(model, torch.optim.SGD(model.parameters(), 0.1), where="bags")
