"""Certificates of torch encoders: padding, and what the fused kernel of eval mode reads."""

import math

import pytest
import torch
import transformers
from tests.support.certificates import why
from tests.support.sample import ALL_NORMS, awake
from torch import nn

from tests.support import hugging_face as hf
from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.models import embedding_radius, input_vectors

WIDTH = 8
TOKENS = 5


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.T5ForConditionalGeneration, hf.t5_config),
        (transformers.BartForConditionalGeneration, hf.bart_config),
    ],
)
def test_vectors_of_tokens_are_as_long_as_the_model_makes_them(kind, config):
    """BART multiplies the rows of its table by sqrt(d) if configured."""
    encoder = awake(kind(config(WIDTH, scale_embedding=True))).get_encoder()
    ids = torch.arange(encoder.config.vocab_size)[:, None]
    vectors = input_vectors(encoder, ids).detach()
    assert torch.equal(encoder(inputs_embeds=vectors)[0], encoder(input_ids=ids)[0])
    assert embedding_radius(encoder) == pytest.approx(float(vectors.norm(dim=-1).max()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bias", [True, False])
def test_an_encoder_of_torch_with_padding(bias):
    """This includes the fused kernel of eval mode, which cuts out padded tokens."""
    options = {"batch_first": True, "bias": bias, "layer_norm_eps": 0.1}
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, **options)
    encoder = awake(nn.TransformerEncoder(layer, 2, enable_nested_tensor=bias))
    padded = torch.arange(TOKENS)[None] >= 2
    options = {"restarts": 4, "steps": 15, "forward_kwargs": {"src_key_padding_mask": padded}}
    for norm in ALL_NORMS:
        certificate = certify(encoder, seq_len=TOKENS, norm=norm, radius=2.0)
        attack = lipschitz_lower_bound(encoder, (TOKENS, WIDTH), norm=norm, radius=2.0, **options)
        assert 0 < attack.ratio(certificate) <= 1 + 1e-9


def test_the_fused_kernel_goes_by_a_flag():
    """It runs a GELU if the layer was built with one, even if ``activation`` was replaced since."""
    layer = awake(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, activation="gelu"))
    before = certify(layer, seq_len=TOKENS, radius=1.0).total
    layer.activation = nn.Identity()
    after = certify(layer, seq_len=TOKENS, radius=1.0, cross_check=False).total
    assert after == pytest.approx(before, rel=1e-9)


def test_a_part_that_the_fused_kernel_does_not_call_is_refused():
    """With a map by 0.001 in place of a dropout, the constant was 0.001 times that of the kernel."""
    layer = awake(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True))
    layer.dropout2 = awake(nn.Linear(WIDTH, WIDTH))
    assert "its dropout2 is a Linear" in why(layer, radius=1.0)
    layer.self_attn.num_heads = 1  # the kernel needs an even number
    by_one = certify(layer, seq_len=TOKENS, radius=1.0).total
    layer.self_attn.num_heads = 2
    layer.activation_relu_or_gelu = 0
    assert max(by_one, certify(layer, seq_len=TOKENS, radius=1.0).total) < math.inf
