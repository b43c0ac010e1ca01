"""The form "jasmin" of affinities against eager attention weights, on several kinds of attention."""

import pytest
import torch
import transformers as hf
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
SIZES |= {"intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = torch.arange(3, 19).reshape(2, 8)


def built(family, kernel):
    torch.manual_seed(0)
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, attn_implementation=kernel))
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **NO_DROPOUT, attn_implementation=kernel))


def by_hand(weights, real):
    """Sum over layers and heads, mean over the batch, of the mean over real queries."""
    total = 0.0
    for layer in weights:
        for example, rows in zip(layer.double(), real, strict=True):
            for head in example:
                top = head[rows].sort(-1, descending=True).values
                bounds = top[:, 0] * (1 - top[:, 0] + top[:, 1])
                total += float(bounds.mean()) / len(layer)
    return total


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_penalty_is_that_of_the_attention_weights(family, kernel):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    eager = built(family, "eager").eval()
    weights = eager(input_ids=IDS, attention_mask=mask, output_attentions=True).attentions
    model = built(family, kernel).eval()
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, form={"affinity": "jasmin"})
    output = model(input_ids=IDS, attention_mask=mask)
    value = penalty()
    assert output is not None  # it keeps the graph of the attention
    real = mask.bool()
    assert value.item() == pytest.approx(by_hand([w.detach() for w in weights], real), rel=1e-4)
    value.backward()
    assert sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters()) >= 4
    assert penalty.terms().keys() == {f"affinity.{s}.{n}" for s, n in STACKS[family]}


STACKS = {"llama": [("decoder", 0), ("decoder", 1)], "bert": [("encoder", 0), ("encoder", 1)]}


def test_training_lowers_it():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = 3 * torch.randn(4, 6, 8)
    penalty = wp.OrthogonalityPenalty(layer, affinity=1.0, form={"affinity": "jasmin"})
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    values = []
    for _ in range(30):
        output = layer(x)
        optimizer.zero_grad()
        value = penalty()
        (value + 0 * output.sum()).backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.7 * values[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": {"affinity": "jazmin"}}, "nearest: jasmin"),
        ({"form": "jazmin"}, "nearest: jasmin"),
        ({"form": "gram"}, "form of affinity 'gram'"),
        ({"form": "jasmin", "attention": 1.0}, r"form=\{'affinity': 'jasmin'\}"),
        ({"form": {"affinity": "jasmin"}, "estimator": "probes"}, "no estimate by probes"),
    ],
)
def test_other_names_and_probes_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        wp.OrthogonalityPenalty(nn.TransformerEncoderLayer(8, 2, 16), affinity=1.0, **options)


@pytest.mark.parametrize(
    ("form", "alike"),
    [("jasmin", {"affinity": "jasmin"}), ("paper", {}), ("gram_squared", {})],
)
def test_one_name_for_all_strengths_is_that_of_affinities_penalised_alone(form, alike):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(5, 3, 8)
    values = []
    for asked in (form, alike):
        penalty = wp.OrthogonalityPenalty(layer, affinity=1.0, form=asked)
        output = layer(x)
        values.append(penalty().item() + 0 * output.sum().item())
        penalty.remove()
    assert values[0] == pytest.approx(values[1])
