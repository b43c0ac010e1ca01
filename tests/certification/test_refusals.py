"""Modules without a bound are refused with a message that names the part and the reason."""

import math
from functools import partial

import pytest
import torch
from tests.support.samples import SAMPLES
from torch import nn
from transformers.models.bert import modeling_bert

from tests.support import hugging_face as hf
from wellposed import nn as wn
from wellposed.certification import certify
from wellposed.errors import NotLipschitzError
from wellposed.models import WellposedForSequenceClassification

CLASSIFIER = WellposedForSequenceClassification
OTHER_NORMS = (
    nn.BatchNorm2d(2),
    nn.RMSNorm(4),
    nn.LayerNorm((6, 4)),
    nn.LayerNorm(4, eps=0.0),
    nn.LayerNorm(4, eps=math.nan),
    None,
)


def put(module, path, part):
    """Return the module with the part at a path replaced."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)
    return module


def torch_attention(**options):
    return nn.MultiheadAttention(4, 2, **{"batch_first": True, **options}).eval()


def encoder_layer(activation="relu", **options):
    kind = nn.TransformerEncoderLayer
    return kind(8, 2, 8, batch_first=True, activation=activation, **options).eval()


def bert():
    return modeling_bert.BertModel(hf.bert_config(8)).eval()


def transject(**options):
    return wn.TransJectStack(4, 2, **{"spectrum_norm": "trace", **options}).double().eval()


def with_query_norm(norm):
    return lambda: put(wn.DotProductAttention(8, 2, qk_norm=True), "q_norm", norm)


def with_block_part(name):
    return lambda: put(SAMPLES[wn.Block][3].build(8), name, nn.Identity())


IN_PLACE = (nn.ELU(3.0, True), nn.SELU(True), nn.SiLU(True), nn.Dropout(0.9, True))
ACTIVATION = "the largest slope of the activation {} is unknown; use a torch.nn activation module"
L2 = "a part lacks what the rule of L2SelfAttention reads"
KINDS = ("residual", "norm")
RESIDUAL_BLOCK = [f"{part}_{kind}" for kind in KINDS for part in ("attention", "feedforward")]
ANYWHERE = [
    ("mixes tokens into one vector", nn.Flatten),
    ("a norm over 2 dimensions mixes tokens", lambda: nn.LayerNorm((3, 4))),
    *(("negative", partial(norm, 4, eps=-1e-3)) for norm in (nn.LayerNorm, nn.RMSNorm)),
    *(("eps > 0", partial(norm, 4, eps=0.0)) for norm in (nn.LayerNorm, nn.RMSNorm)),
    *(("inplace=False", wn.InvertibleResidual(nn.Sequential(part)).train) for part in IN_PLACE),
    ("on the meta device", nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).to("meta").eval),
    ("radius=1", lambda: wn.UnitEmbedding(5, 4)),
    (L2, lambda: put(wn.L2SelfAttention(8, 2).eval(), "q_proj", nn.Sequential(nn.Linear(8, 8)))),
    ("eval()", lambda: wn.L2SelfAttention(4, 2, dropout=0.3)),
    *((f"{name} is a Identity", with_block_part(name)) for name in RESIDUAL_BLOCK),
    ("models of transformers have no bound on all inputs", bert),
    ("pooling", lambda: put(SAMPLES[CLASSIFIER][0].build(8), "pool", len)),
    ("gating='normalized'", lambda: transject(num_experts=2)),
    ("causal", lambda: transject(is_causal=True)),
    ("dropout", lambda: transject(dropout=0.1).train()),
    ("dropout", lambda: wn.OrthogonalFeedForward(4, dropout=0.1)),
]
ON_A_BALL = [
    ("eval()", lambda: wn.DotProductAttention(4, 2, dropout=0.3)),
    ("no Lipschitz constant", lambda: wn.L2SelfAttention(4, 2, tied=False).eval()),
    ("have different", lambda: put(wn.L2SelfAttention(4, 2).eval(), "k_proj", nn.Linear(4, 4))),
    *(("LayerNorm(4) with eps > 0", with_query_norm(norm)) for norm in OTHER_NORMS),
    (ACTIVATION.format("sin"), lambda: encoder_layer(torch.sin)),
    (ACTIVATION.format("<lambda>"), lambda: encoder_layer(lambda x: x.square())),
    ("set batch_first = True", lambda: torch_attention(batch_first=False)),
    ("no self-attention", lambda: torch_attention(kdim=3)),
    ("a width of their own", lambda: torch_attention(kdim=3)),
    ("no bound is proved for the tokens that", lambda: torch_attention(add_bias_kv=True)),
    ("no bound is proved for the tokens that", lambda: torch_attention(add_zero_attn=True)),
    ("dropout on attention weights is on", lambda: torch_attention(dropout=0.1).train()),
]
REFUSED = [(*case, None) for case in ANYWHERE] + [(*case, 1.0) for case in ON_A_BALL]


@pytest.mark.parametrize(("words", "build", "radius"), REFUSED)
def test_what_has_no_bound_is_refused_in_words(words, build, radius):
    certificate = certify(build(), seq_len=4, radius=radius)
    assert (certificate.label, certificate.total) == ("uncertified", math.inf)
    assert words in certificate.uncertified[0].reason
    assert certificate.uncertified[0].reason in certificate.table()
    with pytest.raises(NotLipschitzError) as caught:
        certificate.require()
    assert words in str(caught.value)
