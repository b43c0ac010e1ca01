"""A padded sequence costs what it costs alone, however a family masks its padding."""

import math
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, CodeGenConfig, GPT2Config, LlamaConfig, OPTConfig

from wellposed.penalize import OrthogonalityPenalty

MASKED = {
    "-inf": -math.inf, "lowest": torch.finfo(torch.float32).min, "half": -65504.0, "-1e9": -1e9, "-1e4": -1e4,
    "-1e3": -1e3,
}  # fmt: skip
REAL = 6
PADDED = 3
TOKENS = REAL + PADDED


def real_tokens(left):
    real = torch.arange(TOKENS) < REAL
    return real.flip(0) if left else real


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "bert": lambda: BertConfig(intermediate_size=16, **SIZES),
    "gpt2": lambda: GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2),
    "codegen": lambda: CodeGenConfig(
        vocab_size=30, n_embd=16, n_layer=2, n_head=4, rotary_dim=4, n_ctx=32
    ),
    "opt": lambda: OPTConfig(ffn_dim=16, word_embed_proj_dim=16, **SIZES),
    "llama": lambda: LlamaConfig(intermediate_size=16, num_key_value_heads=2, **SIZES),
}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_sequence_of_a_family_costs_what_it_costs_alone(family, implementation, left):
    if (family, implementation) == ("codegen", "sdpa"):
        pytest.skip("CodeGen has no such attention")
    torch.manual_seed(0)
    options = {} if family == "codegen" else {"attn_implementation": implementation}
    model = AutoModel.from_config(FAMILIES[family](), **options).eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    real = real_tokens(left)
    ids = torch.randint(3, 30, (1, TOKENS))
    position_ids = torch.where(real, real.cumsum(0) - 1, 0)[None]
    positions = {} if family == "opt" else {"position_ids": position_ids}

    def cost(chosen):
        named = {name: value[:, chosen] for name, value in positions.items()}
        output = model(ids[:, chosen], attention_mask=real[chosen].long()[None], **named)
        cost = penalty().detach()
        del output  # which keeps the graph alive
        return cost

    everything = torch.ones(TOKENS, dtype=torch.bool)
    torch.testing.assert_close(cost(everything), cost(real), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("left", [False, True])
def test_a_float_padding_mask_of_torch_removes_padding(kind, left):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    real = real_tokens(left)
    x = torch.randn(1, TOKENS, 16)
    output = model(x, src_key_padding_mask=torch.where(real, 0.0, MASKED[kind])[None])
    padded = penalty().detach()
    output = model(x[:, real])
    assert output.requires_grad
    torch.testing.assert_close(padded, penalty().detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [None, "bool", "float"])
@pytest.mark.parametrize("estimator", ["exact", "probes"])
def test_finite_numbers_of_a_padding_mask_of_torch_are_added_to_logits(estimator, causal):
    """The cost is that of the weights which torch returns, without those of masked tokens."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    penalty = OrthogonalityPenalty(model, affinity=1.0, estimator=estimator, num_probes=1000)
    real = real_tokens(left=False)
    x = torch.randn(1, TOKENS, 16)
    padding = torch.linspace(-3.0, 2.0, TOKENS).masked_fill(~real, -1e4)[None]
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    mask = {"bool": later, "float": torch.zeros(TOKENS, TOKENS).masked_fill(later, -math.inf)}.get(
        causal
    )
    masks = {"key_padding_mask": padding, "attn_mask": mask}
    with warnings.catch_warnings(action="ignore"):  # torch deprecates masks of two types
        _, weights = model.self_attn(x, x, x, average_attn_weights=False, **masks)
        output = model(x, src_mask=mask, src_key_padding_mask=padding)
    assert output.requires_grad
    affinity = weights[0][:, real][:, :, real].double()
    gram = affinity.mT @ affinity - torch.eye(REAL)
    expected = gram.square().sum().float()
    tolerance = 1e-4 if estimator == "exact" else 0.1
    torch.testing.assert_close(penalty().detach(), expected, rtol=tolerance, atol=tolerance)
