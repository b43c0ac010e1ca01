"""Measurements against numpy, against slow attention written out, and the promise to leave the
model alone."""

import math

import numpy as np
import pytest
import torch
import transformers
from tests.support.penalized import Hidden
from torch import nn

from tests.support import hugging_face as hf
from wellposed.errors import ConfigError, ConvergenceError, RoleNotFoundError
from wellposed.measurement import measure
from wellposed.text_table import format_number

WIDTH = 16
HEADS = 2
ROLES = ["query", "key", "value", "output", "feedforward_in", "feedforward_out"]


def encoder(layers=2, **options):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for parameter in model.parameters():  # the layers start as copies of each other
        nn.init.normal_(parameter, std=0.3)
    return model


def slow_error(weight):
    """max off-diagonal |W W^T|, of the smaller side, by two loops."""
    if weight.shape[0] > weight.shape[1]:
        weight = weight.T
    rows = range(len(weight))
    return max(abs(float(weight[i] @ weight[j])) for i in rows for j in rows if i != j)


def weights_of(layer):
    fused = layer.self_attn.in_proj_weight
    query, key, value = fused.chunk(3)
    named = {
        "query": query,
        "key": key,
        "value": value,
        "output": layer.self_attn.out_proj.weight,
        "feedforward_in": layer.linear1.weight,
        "feedforward_out": layer.linear2.weight,
    }
    return {name: weight.detach().double().numpy() for name, weight in named.items()}


def test_every_role_of_every_layer_against_numpy():
    model = encoder()
    measurement = measure(model)
    places = [(row["layer"], row["role"]) for row in measurement.rows]
    assert sorted(places) == sorted((layer, role) for layer in (0, 1) for role in ROLES)
    for index, layer in enumerate(model.layers):
        for role, weight in weights_of(layer).items():
            (row,) = measurement.find(layer=index, role=role)
            values = np.linalg.svd(weight, compute_uv=False)
            assert (row["rows"], row["cols"]) == weight.shape
            assert row["sigma_max"] == pytest.approx(values[0], rel=1e-12)
            assert row["sigma_min"] == pytest.approx(values[-1], rel=1e-9)
            assert row["condition_number"] == pytest.approx(values[0] / values[-1], rel=1e-9)
            assert row["stable_rank"] == pytest.approx(
                np.linalg.norm(weight) ** 2 / values[0] ** 2, rel=1e-12
            )
            assert row["singular_values"] == pytest.approx(values.tolist(), rel=1e-9)
            # float32 dot products of length <= 24
            assert row["orthogonality_error"] == pytest.approx(slow_error(weight), rel=1e-5)
            # the same number from the singular values: 1 - (sum s^2)^2 / (n sum s^4)
            angle = (values**2).sum() ** 2 / (len(values) * (values**4).sum())
            assert row["scale_free_orthogonality_error"] == pytest.approx(
                math.sqrt(1 - angle), rel=1e-5
            )
            assert row["sigma_max_status"] == "exact"


def test_without_spectra_the_largest_value_is_a_lower_estimate():
    model = encoder()
    exact = measure(model)
    quick = measure(model, spectra=False)
    for a, b in zip(exact.rows, quick.rows, strict=True):
        assert b["sigma_max"] <= a["sigma_max"] * (1 + 1e-5)
        assert b["sigma_max"] >= a["sigma_max"] * (1 - 2e-3)
        assert b["stable_rank"] == pytest.approx(a["stable_rank"], rel=5e-3)
        assert b["sigma_min"] is b["condition_number"] is None
        assert b["sigma_max_status"] == "empirical"
        assert "singular_values" not in b
        assert b["orthogonality_error"] == pytest.approx(a["orthogonality_error"], rel=1e-5)


def slow_attention(layer, x, padding):
    """Entropy (batch, heads, queries) and output of self-attention, in float64, one head and query
    at a time."""
    fused = layer.self_attn.in_proj_weight
    bias = layer.self_attn.in_proj_bias
    query, key, value = (x.double() @ fused.double().T + bias.double()).chunk(3, -1)
    batch, tokens, _ = x.shape
    size = WIDTH // HEADS
    entropy = torch.zeros(batch, HEADS, tokens, dtype=torch.float64)
    mixed = torch.zeros(batch, tokens, WIDTH, dtype=torch.float64)
    for b in range(batch):
        for h in range(HEADS):
            part = slice(h * size, (h + 1) * size)
            for i in range(tokens):
                logits = torch.stack(
                    [query[b, i, part] @ key[b, j, part] / math.sqrt(size) for j in range(tokens)]
                )
                weights = logits.masked_fill(padding[b], -math.inf).softmax(-1)
                entropy[b, h, i] = -sum(float(p) * math.log(p) for p in weights if p > 0)
                mixed[b, i, part] = weights @ value[b, :, part]
    output = (
        mixed @ layer.self_attn.out_proj.weight.double().T + layer.self_attn.out_proj.bias.double()
    )
    return entropy, output


@torch.no_grad()
def test_attention_and_norms_of_a_torch_layer_with_padding():
    model = encoder(1)
    x = torch.randn(2, 6, WIDTH)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    measurement = measure(model, {"src": x, "src_key_padding_mask": padding})
    layer = model.layers[0]
    entropy, output = slow_attention(layer, x, padding)
    real = ~padding
    attention, block = measurement.activations
    assert (attention["path"], attention["kind"]) == ("layers.0.self_attn", "attention")
    expected = [(entropy[:, h][real]).mean().item() for h in range(HEADS)]
    assert attention["attention_entropy"] == pytest.approx(expected, rel=1e-5)
    lengths = output.norm(dim=-1)[real]
    assert attention["mean_norm"] == pytest.approx(lengths.mean().item(), rel=1e-5)
    assert attention["max_norm"] == pytest.approx(lengths.max().item(), rel=1e-5)
    outputs = model.eval()(x, src_key_padding_mask=padding).norm(dim=-1)[real]
    assert (block["kind"], block["attention_entropy"]) == ("layer", None)
    assert block["mean_norm"] == pytest.approx(outputs.mean().item(), rel=1e-4)
    assert measurement.notes == []


@torch.no_grad()
def test_padding_and_layout_change_nothing():
    model = encoder(2)
    x = torch.randn(1, 5, WIDTH)
    padded = torch.cat([x, torch.randn(1, 3, WIDTH)], 1)
    mask = torch.tensor([[False] * 5 + [True] * 3])
    plain = measure(model, x).activations
    masked = measure(model, {"src": padded, "src_key_padding_mask": mask}).activations
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.batch_first = False
    columns = {"src": padded.transpose(0, 1), "src_key_padding_mask": mask}
    turned = measure(model, columns).activations
    for a, b, c in zip(plain, masked, turned, strict=True):
        for name in (
            *("mean_norm", "max_norm", "attention_entropy"),
            *("attention_sensitivity", "affinity_orthogonality_error"),
        ):
            if a[name] is None:
                assert a["kind"] == "layer"
                continue
            assert b[name] == pytest.approx(a[name], rel=1e-4)
            assert c[name] == pytest.approx(a[name], rel=1e-4)


def hugging_face(name, implementation):
    torch.manual_seed(3)
    config, kind = (
        (hf.bert_config, transformers.BertModel)
        if name == "bert"
        else (hf.llama_config, transformers.LlamaForCausalLM)
    )
    sizes = {"vocab_size": 40, "initializer_range": 0.5}
    return kind._from_config(config(WIDTH, **sizes), attn_implementation=implementation).eval()


@pytest.mark.parametrize(
    ("name", "implementation", "real_tokens"),
    [("bert", "sdpa", 1), ("bert", "eager", 5), ("llama", "sdpa", 5), ("llama", "eager", 5)],
)
@torch.no_grad()
def test_hugging_face_attention_equals_the_weights_the_model_returns(
    name, implementation, real_tokens
):
    """Grouped keys, rotary positions, causal and padding masks: everything that the model puts into
    its weights."""
    batch = {
        "input_ids": torch.randint(1, 40, (2, 7)),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    batch["attention_mask"][1, real_tokens:] = 0  # a lone token has no pair: an error of 0
    activations = measure(hugging_face(name, implementation), batch).activations
    weights = hugging_face(name, "eager")(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    rows = [row for row in activations if row["kind"] == "attention"]
    assert len(rows) == 2
    for row, layer in zip(rows, weights, strict=True):
        entropy = torch.special.entr(layer.double()).sum(-1)
        expected = [entropy[:, h][real].mean().item() for h in range(HEADS)]
        assert row["attention_entropy"] == pytest.approx(expected, rel=1e-4)
        gram = layer.double() @ layer.double().mT
        pairs = real[:, None, :, None] & real[:, None, None, :] & ~torch.eye(7, dtype=torch.bool)
        errors = torch.where(pairs, gram, 0.0).amax((-2, -1)).mean(0)
        assert row["affinity_orthogonality_error"] == pytest.approx(errors.tolist(), rel=1e-4)
        assert max(expected) < 1.6  # below ln 7: the weights are not uniform


def test_translation_models_measure_both_stacks():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 24, batch_first=True)
    measurement = measure(model, (torch.randn(2, 6, WIDTH), torch.randn(2, 4, WIDTH)))
    kinds = [(row["stack"], row["kind"]) for row in measurement.activations]
    assert ("decoder", "cross_attention") in kinds
    assert ("encoder", "attention") in kinds
    assert all(
        row["attention_entropy"] for row in measurement.activations if "attention" in row["kind"]
    )


def test_attention_that_cannot_be_seen_is_said():
    measurement = measure(nn.Sequential(Hidden()), torch.randn(1, 3, 8))
    (row,) = measurement.activations
    assert row["attention_entropy"] is None
    assert row["affinity_orthogonality_error"] is None
    assert row["mean_norm"] > 0
    assert any(
        note.startswith("attention weights were not seen in 0: ") for note in measurement.notes
    )


def test_all_broken_weights_are_named():
    model = encoder()
    with torch.no_grad():
        model.layers[0].linear1.weight[0, 0] = math.nan
        model.layers[1].self_attn.in_proj_weight[0, 0] = math.inf
    with pytest.raises(
        ConvergenceError,
        match=r"layers\.1\.self_attn\.in_proj_weight[\s\S]*layers\.0\.linear1\.weight",
    ):
        measure(model)


def test_other_bad_input():
    with pytest.raises(RoleNotFoundError):
        measure(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="received str"):
        measure(encoder(), "a sentence")
    with pytest.raises(ConfigError, match="received str; load it first"):
        measure("bert")
    with pytest.raises(ConfigError, match="keyword of measure 'batchs'; nearest: batch"):
        measure(encoder(), batchs=torch.ones(2, 5, WIDTH))
    with pytest.raises(ConfigError, match=r"fails on the batch: [\s\S]*float32 \(2, 5, 17\)"):
        measure(encoder(), torch.ones(2, 5, WIDTH + 1))


@pytest.mark.slow
def test_a_compiled_model_is_measured_as_the_model_it_compiles():
    model = encoder(1)
    assert measure(torch.compile(model)).rows == measure(model).rows


def test_what_is_printed_is_what_an_svd_prints():
    """Also if the squares of the smallest lose their digits, as in every fourth square weight of
    width 768."""
    model = encoder()
    with torch.no_grad():
        for ratio, layer in zip((1e-6, 1e-9), model.layers, strict=True):
            weight = layer.linear1.weight.double()
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
            values[-1] = ratio
            layer.linear1.weight = nn.Parameter((left * values) @ right)
    measured = measure(model)
    for index, layer in enumerate(model.layers):
        for role, weight in weights_of(layer).items():
            (row,) = measured.find(layer=index, role=role)
            values = np.linalg.svd(weight, compute_uv=False)
            ratio = values[0] / values[-1]
            printed = [format_number(float(value)) for value in (values[0], values[-1], ratio)]
            names = ("sigma_max", "sigma_min", "condition_number")
            assert [format_number(row[name]) for name in names] == printed
            off = np.abs(np.array(row["singular_values"]) - values).max()
            assert off <= row["singular_value_error"] + 1e-15 < 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (40, 90), (200, 150)])
@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize("kind", ["gaussian", "decaying", "lower rank"])
def test_every_singular_value_is_within_a_millionth_of_the_largest(kind, scale, shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    if kind != "gaussian":
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        places = torch.arange(len(values), dtype=torch.float64)
        values = 10.0 ** (-0.3 * places) if kind == "decaying" else (places < 3).double()
        matrix = (left * values) @ right
    layer = nn.TransformerEncoderLayer(shape[1], 1, shape[0]).double()
    with torch.no_grad():
        layer.linear1.weight.copy_(matrix * scale)
    (row,) = [row for row in measure(layer).rows if row["role"] == "feedforward_in"]
    true = torch.linalg.svdvals(matrix) * scale
    values = torch.tensor(row["singular_values"], dtype=torch.float64)
    assert float((values - true).abs().max()) <= 1e-6 * float(true[0])
