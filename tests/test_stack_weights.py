"""Weights that tools parametrise, adapt, prune, quantise or average: each verb says what is true."""

import copy
import itertools

import peft
import pytest
import torch
from tests.support.close import assert_close
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    BertConfig,
    BertModel,
    MixtralConfig,
    MixtralModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

import wellposed as wp
from wellposed.errors import CheckpointError, ConfigError
from wellposed.models import load_saved_model

pytestmark = pytest.mark.slow  # the whole table

COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}
"""What makes a layer compute its weight from others at each call."""
ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=["query"]),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["query"]),
    "oft": peft.OFTConfig(oft_block_size=8, target_modules=["query"]),
    "boft": peft.BOFTConfig(boft_block_size=8, target_modules=["query"]),
    "hra": peft.HRAConfig(r=4, target_modules=["query"]),
}
IDS = torch.arange(5)[None]
MERGES = [
    *itertools.product(COMPUTED, ["lora"], [False, True]),
    *itertools.product(COMPUTED, ["dora"], [True]),
    *itertools.product(["spectral_norm"], ["oft", "boft", "hra"], [False]),
]


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(num_hidden_layers=1, vocab_size=20, **sizes)).eval()


def adapted(model, config):
    """Return a model with adapters of random numbers."""
    model = peft.get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def computed(layer):
    """Return the matrix of a layer, from its outputs."""
    return (layer(torch.eye(32)) - layer(torch.zeros(1, 32))).T.double()


def row_of(measured, role):
    (row,) = [row for row in measured.rows if row["role"] == role]
    return row


def distance(matrix):
    gram = matrix @ matrix.T
    return float((gram - torch.eye(32)).square().sum())


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2))


@pytest.mark.filterwarnings("ignore")  # of peft, and of torch at its old functions
@pytest.mark.parametrize(("kind", "adapter", "safe"), MERGES)
def test_an_adapter_that_a_merge_would_lose_is_named(kind, adapter, safe):
    """PEFT adds to a weight that the layer computes anew at its next call."""
    base = bert()
    COMPUTED[kind](base.encoder.layer[0].attention.self.query)
    model = adapted(base.eval(), ADAPTERS[adapter])
    query = model.base_model.model.encoder.layer[0].attention.self.query
    before = computed(query)
    measured = wp.measure(model, IDS)
    assert row_of(measured, "query")["sigma_max"] == pytest.approx(norm(before), rel=1e-4)
    (note,) = [note for note in measured.notes if "merging" in note]
    assert "attention.self.query: merging its adapters would lose them" in note
    assert note in wp.find_roles(model, IDS).notes
    penalty = wp.OrthogonalityPenalty(model, query=1.0, form="gram_squared")
    assert float(penalty().detach()) == pytest.approx(distance(before), rel=1e-3)
    certificate = wp.certify(query, seq_len=3)
    assert "merging would lose them" in certificate.uncertified[0].reason
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"query\.base_layer\.weight"):
        wp.constrain_(model, optimizer, where="*query.base_layer.weight")

    model.merge_adapter(safe_merge=safe)
    after = computed(query)
    assert norm(after - before) > 0.01
    measured = wp.measure(model, IDS)
    assert row_of(measured, "query")["sigma_max"] == pytest.approx(norm(after), rel=1e-4)
    (note,) = [note for note in measured.notes if "merged" in note]
    assert "attention.self.query: its merged adapters are lost" in note
    penalty = wp.OrthogonalityPenalty(model, query=1.0, form="gram_squared")
    with torch.no_grad():
        assert float(penalty()) == pytest.approx(distance(after), rel=1e-3)
    with pytest.raises(ConfigError, match="frozen"):
        penalty()

    model.unmerge_adapter()
    plain = model.merge_and_unload(safe_merge=safe)
    assert_close(computed(plain.encoder.layer[0].attention.self.query), after, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("name", ADAPTERS)
def test_verbs_on_adapted_layers_take_the_matrix_that_is_computed(name):
    model = adapted(bert(), ADAPTERS[name])
    query = model.base_model.model.encoder.layer[0].attention.self.query
    matrix = computed(query)
    penalty = wp.OrthogonalityPenalty(model, query=1.0, form="gram_squared")
    value = penalty()
    assert float(value.detach()) == pytest.approx(distance(matrix), rel=1e-3)
    value.backward()
    trained = [p for p in query.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.norm() > 0 for p in trained)

    certificate = wp.certify(query, seq_len=3)
    assert certificate.total == float("inf")
    assert "merge_and_unload" in certificate.uncertified[0].reason
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with pytest.raises(ConfigError, match="query"):
        wp.constrain_(model, optimizer, where="*query.base_layer.weight", to="spectral")

    merged = model.merge_and_unload().encoder.layer[0].attention.self.query
    certificate = wp.certify(merged, seq_len=3)
    assert certificate.total == pytest.approx(norm(matrix), rel=1e-3)


class AttentionAndLinear(nn.Module):
    """Torch's attention, which reads the weight of `out_proj`, and a layer that is called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.attention(x, x, x)[0])


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("target", ["out_proj", "attention"])
def test_adapters_on_the_output_layer_of_torchs_attention_are_refused(target):
    """On `out_proj` they change nothing, on the attention the output in another way than the rest."""
    model = adapted(AttentionAndLinear(), peft.LoraConfig(r=2, target_modules=[target]))
    x = torch.randn(2, 3, 16)
    output = model(x)
    with model.disable_adapter():
        is_ignored = torch.equal(model(x), output)
    assert is_ignored == (target == "out_proj")
    for call in (
        lambda: wp.measure(model, x),
        lambda: wp.OrthogonalityPenalty(model, attention=1.0, batch=x),
    ):
        with pytest.raises(ConfigError, match="torch's attention does not call this layer"):
            call()


class Scaled(nn.Linear):
    """A layer as those of quantisation: its call computes with more than its weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x):
        return nn.functional.linear(x, self.scale * self.weight, self.bias)


def test_what_is_put_on_the_output_layer_of_torchs_attention_has_no_effect():
    """Neither a class of its own nor a hook changes what attention reads there."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    plain = layer(x)
    weight = layer.self_attn.out_proj.weight
    layer.self_attn.out_proj = Scaled(16, 16)
    layer.self_attn.out_proj.weight = weight
    layer.self_attn.out_proj.bias.data.zero_()
    layer.self_attn.out_proj.register_forward_hook(lambda *_: torch.zeros(()))
    assert_close(layer(x), plain)
    measured = wp.measure(layer, x)
    assert row_of(measured, "output")["sigma_max"] == pytest.approx(norm(weight), rel=1e-6)
    assert not [note for note in measured.notes if "out_proj" in note]

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    handle = wp.constrain_(layer, optimizer, where="*out_proj", to="spectral", bound=0.5)
    layer(x).square().sum().backward()
    optimizer.step()
    assert norm(layer.self_attn.out_proj.weight) <= 0.5 + 1e-6
    handle.remove()


@pytest.mark.filterwarnings("ignore")  # of torch at its old functions
@pytest.mark.parametrize("kind", ["old weight_norm", "old spectral_norm", "pruned"])
def test_hooks_that_never_run_on_the_output_layer_of_attention_are_refused(kind):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    COMPUTED[kind](layer.self_attn.out_proj)
    x = torch.randn(2, 3, 16)
    layer(x).square().sum().backward()
    for source in layer.self_attn.out_proj.parameters():
        source.data.mul_(2)  # a step, which the attention does not see
    with pytest.raises(ConfigError, match=r"out_proj.* never runs again"):
        wp.measure(layer, x)


def test_the_current_parametrisation_on_the_output_layer_of_attention_is_read():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    parametrizations.spectral_norm(layer.self_attn.out_proj)
    layer.eval()
    (row,) = [row for row in wp.measure(layer).rows if row["role"] == "output"]
    assert row["sigma_max"] == pytest.approx(norm(layer.self_attn.out_proj.weight), rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # of peft
def test_a_wrapper_that_passes_on_attributes_has_no_roles_of_its_own():
    """PEFT's models pass on every attribute; each weight has one row, with a name of the model."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = peft.get_peft_model(layer, peft.LoraConfig(r=2, target_modules=["linear1"]))
    names = dict(model.named_parameters())
    for batch in (None, torch.randn(2, 3, 16)):
        rows = wp.measure(model, batch).rows
        roles = [row["role"] for row in rows if row["role"] != "adapter"]
        assert sorted(roles) == sorted(set(roles))
        assert {row["parameter"] for row in rows} <= names.keys()


@pytest.mark.parametrize("seed", range(4))
def test_the_norm_of_spectral_norm_at_construction_is_measured(seed):
    """Fifteen power iterations leave it above 1; a certificate is of what is computed."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(64, 2, 64)
    parametrizations.spectral_norm(layer.linear1)
    row = row_of(wp.measure(layer), "feedforward_in")
    layer.eval()
    true = norm(layer.linear1.weight)
    assert true > 1.0001
    assert row["sigma_max"] == pytest.approx(true, rel=1e-9)
    certificate = wp.certify(nn.Sequential(layer.linear1), seq_len=3)
    assert true <= certificate.total < 1.001 * true


class TiedModel(nn.Module):
    """A table, a layer, and a head that is the table."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids)))


def test_a_tied_head_is_moved_to_the_nearest_orthogonal_matrix_and_not_to_minus_one():
    """`parametrizations.orthogonal` stores reflections where the embedding was."""
    torch.manual_seed(0)
    model = TiedModel()
    before = model.embedding.weight.detach().clone()
    overwritten = copy.deepcopy(model)
    parametrizations.orthogonal(overwritten.head)
    table = overwritten.embedding.weight
    assert_close(table[:, :12], -torch.eye(12), rtol=0, atol=1e-5)
    optimizer = torch.optim.AdamW(overwritten.parameters())
    with pytest.raises(ConfigError, match=r"head\.weight"):
        wp.constrain_(overwritten, optimizer, where="head")

    optimizer = torch.optim.AdamW(model.parameters())
    handle = wp.constrain_(model, optimizer, where="head")
    assert model.head.weight is model.embedding.weight
    (row,) = handle.report.rows
    assert {row.path, *row.also} == {"embedding.weight", "head.weight"}
    left, _, right = torch.linalg.svd(before.double(), full_matrices=False)
    assert_close(model.embedding.weight.double(), left @ right, rtol=0, atol=1e-5)


def constrained_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    wp.constrain_(layer, optimizer, where=["linear1", "linear2"])
    return layer, optimizer


def quantised(layer):
    torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8, inplace=True)


def trained_for_quantisation(layer):
    layer.linear1.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    layer.linear1 = torch.ao.nn.qat.Linear.from_float(layer.linear1)


REWRITERS = {
    **{kind: lambda layer, wrap=wrap: wrap(layer.linear1) for kind, wrap in COMPUTED.items()},
    "torch.ao, quantised": quantised,
    "torch.ao, trained for quantisation": trained_for_quantisation,
}


@pytest.mark.filterwarnings("ignore")  # of torch at its old functions
@pytest.mark.parametrize("kind", REWRITERS)
def test_a_constrained_weight_that_another_tool_takes_over_is_named_at_the_next_step(kind):
    layer, optimizer = constrained_layer()
    REWRITERS[kind](layer)
    layer.train()
    layer(torch.randn(2, 3, 8)).square().sum().backward()
    with pytest.raises(ConfigError, match=r"pruning, quantisation[^$]*linear1\.weight"):
        optimizer.step()


class Packed(torch.Tensor):
    """A weight that computes nothing itself, as quantised ones, whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in {torch.isfinite, torch.Tensor.sum, torch.Tensor.float}:
            raise NotImplementedError(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


class PackedParameter(Packed, nn.Parameter):
    """The same as a parameter."""


def test_certify_names_weights_that_compute_nothing_themselves():
    linear = nn.Linear(4, 4)
    linear._parameters["weight"] = torch.Tensor._make_subclass(PackedParameter, torch.eye(4), False)
    certificate = wp.certify(nn.Sequential(linear, nn.ReLU()), seq_len=3)
    assert certificate.total == float("inf")
    assert "its weight is a" in certificate.uncertified[0].reason


@pytest.mark.filterwarnings("ignore")  # of torch at its old functions
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_folder_that_was_saved_with_a_computed_weight_is_refused(kind, tmp_path):
    """transformers draws the layer at random; only a table in its log names it."""
    model = bert()
    COMPUTED[kind](model.encoder.layer[0].output.dense)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"output\.dense\.weight.*remove_parametrizations"):
        load_saved_model(tmp_path)


SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}
SWIN = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2]}
RENAMED = {
    "ViT": lambda: ViTModel(ViTConfig(**IMAGE)),
    "ViTMAE": lambda: ViTMAEModel(ViTMAEConfig(**IMAGE)),
    "Swin": lambda: SwinModel(SwinConfig(**SWIN, window_size=2)),
    "Mixtral": lambda: MixtralModel(
        MixtralConfig(**SMALL, num_key_value_heads=1, vocab_size=20, num_local_experts=2)
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_numbers_of_a_file_with_other_names_are_those_of_the_model_in_memory(name, tmp_path):
    model = RENAMED[name]().eval()
    model.save_pretrained(tmp_path)
    rows = wp.measure(model).rows
    assert wp.measure(load_saved_model(tmp_path)).rows == rows
    names = dict(model.named_parameters())
    assert {row["parameter"].partition("[")[0] for row in rows} <= names.keys()


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)])
def test_an_average_of_constrained_weights_is_measured_as_it_is(average):
    """The average of orthogonal matrices is none; whole numbers are averaged, and cut."""
    layer, optimizer = constrained_layer()
    layer.register_buffer("steps", torch.tensor(0))
    averaged = AveragedModel(layer, multi_avg_fn=average, use_buffers=True)
    for _ in range(4):
        optimizer.zero_grad()
        layer(torch.randn(2, 3, 8)).pow(3).sum().backward()
        optimizer.step()
        layer.steps += 1
        averaged.update_parameters(layer)
    assert int(layer.steps) == 4 > int(averaged.module.steps)
    assert row_of(wp.measure(layer), "feedforward_in")["orthogonality_error"] < 1e-6
    row = row_of(wp.measure(averaged), "feedforward_in")
    matrix = averaged.module.linear1.weight.detach().double()
    gram = matrix.T @ matrix
    off = float((gram - torch.diag(gram.diagonal())).abs().max())
    assert row["orthogonality_error"] == pytest.approx(off, rel=1e-4)
    assert off > 1e-5
