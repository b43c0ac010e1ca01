"""Small modules of every class that `certify` has a rule for, with random weights, so that a test
can walk over rules.

A rule that is registered for a new class needs a line here.
"""

import torch
from torch import nn

from wellposed import models
from wellposed import nn as ours
from wellposed.initialize import RemovedNorm
from wellposed.models import TransJectConfig, WellposedConfig

from .sample import ALL_NORMS, MAX_TOKENS, Sample, awake


def _config(width, **options):
    sizes = {
        "hidden_size": width, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 2 * width,
        "vocab_size": 11, "max_position_embeddings": MAX_TOKENS, "num_labels": 3, "layer_norm_eps": 0.1,
        "attention": "l2_tied",
    }  # fmt: skip
    return WellposedConfig(**{**sizes, **options})


def _transject_config(width, **options):
    sizes = {
        "hidden_size": width, "num_hidden_layers": 2, "vocab_size": 11, "max_position_embeddings": MAX_TOKENS,
        "num_labels": 3, "spectrum_norm": "trace", "residual": "sigmoid",
    }  # fmt: skip
    return TransJectConfig(**{**sizes, **options})


def _plain(build, **options):
    return Sample(lambda width: awake(build(width)), **options)


def _attention(kind, heads=2, *, needs_ball=False, norms=ALL_NORMS, **options):
    return _plain(lambda width: kind(width, heads, **options), needs_ball=needs_ball, norms=norms, takes_mask=True,
                  takes_causal=True)  # fmt: skip


def _block(kind, *, needs_ball=False, **options):
    return _plain(lambda width: kind(_config(width, **options)), needs_ball=needs_ball, takes_mask=True,
                  takes_causal=True)  # fmt: skip


def _model(kind, *, needs_ball=False, **options):
    return _plain(lambda width: kind(_config(width, **options)), keeps_width=False, needs_ball=needs_ball,
                  takes_mask=True)  # fmt: skip


def _transject(kind, *, certifiable=True, **options):
    return _plain(lambda width: kind(_transject_config(width, **options)), keeps_width=False, certifiable=certifiable,
                  norms=("tok", 2), takes_mask=True)  # fmt: skip


def _transject_stack(*, certifiable=True, **options):
    settings = {"spectrum_norm": "trace", "residual": "sigmoid", **options}
    return _plain(lambda width: ours.TransJectStack(width, 2, **settings), keeps_width=False, certifiable=certifiable,
                  norms=("tok", 2), takes_mask=True)  # fmt: skip


def _contraction(width, **options):
    settings = {"contractive": 0.9, "max_tokens": MAX_TOKENS, **options}
    return ours.L2SelfAttention(width, 2, **settings)


def _shared_twice(width):
    layer = nn.Linear(width, width)
    return nn.Sequential(layer, nn.Tanh(), layer)


def _encoder_layer(*, needs_ball=False, **options):
    sizes = {"batch_first": True, "layer_norm_eps": 0.1, "dropout": 0.1, **options}
    build = lambda width: nn.TransformerEncoderLayer(width, 2, 2 * width, **sizes)  # noqa: E731
    return _plain(build, needs_ball=needs_ball)


def _ball_block(width, residual, **options):
    block = ours.Block(_config(width, norm="none"))
    block.attention = ours.BallAttention(width, 2, **options)
    block.feedforward = ours.MaxMinFeedForward(width, 2 * width)
    block.attention_residual = residual()
    block.feedforward_residual = residual()
    return block


_TRANSJECT = {
    "gram by its trace": {},
    "gram by its maximum": {"spectrum_norm": "max"},
    "learnt spectrum": {"spectrum": "random"},
    "gates that follow the input": {"num_experts": 2, "gating": "normalized"},
    "rezero": {"residual": "rezero"},
    "dropout": {"dropout": 0.1},
}
_CAUSAL_TRANSJECT = {"spectrum": "random", "is_causal": True}
_POOLED = {"num_experts": 2, "gating": "pooled"}

_BLOCKS = [
    {"norm": "none"}, {"norm": "pre"}, {"norm": "post"}, {"norm": "none", "residual": "rezero"},
    {"attention": "l2_contractive", "norm": "none"}, {"attention": "l2_contractive", "lipschitz_norm": "2"},
    {"attention": "cosine"}, {"attention": "cosine", "norm": "none", "activation": "relu"},
    {"dropout": 0.1, "attention_dropout": 0.1, "norm": "pre"}, {"query_width": 2, "norm": "pre"},
    {"norm": "dyt"}, {"norm": "derf"},
]  # fmt: skip
_BALL = [
    {"attention": "dot_product", "norm": "none"}, {"attention": "dot_product", "norm": "post", "qk_norm": True},
]  # fmt: skip

ACTIVATIONS = [
    nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softsign, nn.Softshrink, nn.Tanhshrink, nn.SiLU, nn.Mish, nn.Hardswish, nn.SELU,
    nn.Sigmoid, nn.Softplus, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardtanh, nn.GELU, nn.ELU, nn.LeakyReLU, nn.PReLU,
]  # fmt: skip

SAMPLES = {
    nn.Linear: [
        _plain(lambda width: nn.Linear(width, width)),
        _plain(lambda width: nn.Linear(width, width, bias=False)),
        _plain(lambda width: nn.Linear(width, 2 * width), keeps_width=False),
        _plain(lambda width: nn.Linear(width, 3), keeps_width=False),
    ],
    ours.OrthogonalLinear: [_plain(ours.OrthogonalLinear)],
    nn.Conv1d: [
        _plain(lambda width: nn.Conv1d(5, 5, 3, padding=1), keeps_width=False, norms=("inf", 2), tokens=5),
        _plain(lambda width: nn.Conv1d(5, 10, 3, padding=1, stride=2, groups=5), keeps_width=False, norms=("inf", 2),
               tokens=5),
        _plain(lambda width: nn.Conv1d(5, 5, 3, padding=1, padding_mode="circular"), keeps_width=False,
               norms=("inf", 2), tokens=5),
    ],
    # It reads (batch, channels, height, width); tests/certification/test_convolutions.py attacks it.
    nn.Conv2d: [
        _plain(lambda width: nn.Conv2d(3, 3, 3), keeps_width=False, norms=("inf", 2), runs_alone=False),
    ],
    nn.Identity: [_plain(lambda width: nn.Identity())],
    RemovedNorm: [_plain(lambda width: RemovedNorm())],
    nn.Flatten: [_plain(lambda width: nn.Flatten(), keeps_width=False, certifiable=False)],
    nn.Dropout: [_plain(lambda width: nn.Dropout(0.1)), _plain(lambda width: nn.Dropout(0.0))],
    **{kind: [_plain(lambda width, kind=kind: kind())] for kind in ACTIVATIONS},
    # The threshold of torch's default, 20, is a jump that float64 sees.
    nn.Softplus: [_plain(lambda width: nn.Softplus(threshold=40))],
    nn.GELU: [_plain(lambda width: nn.GELU()), _plain(lambda width: nn.GELU(approximate="tanh"))],
    nn.ELU: [_plain(lambda width: nn.ELU()), _plain(lambda width: nn.ELU(alpha=2.5))],
    nn.LeakyReLU: [_plain(lambda width: nn.LeakyReLU()), _plain(lambda width: nn.LeakyReLU(-3.0))],
    nn.PReLU: [_plain(lambda width: nn.PReLU()), _plain(lambda width: nn.PReLU(init=-2.0))],
    nn.LayerNorm: [
        _plain(lambda width: nn.LayerNorm(width)),
        _plain(lambda width: nn.LayerNorm(width, eps=0.1, elementwise_affine=False)),
        _plain(lambda width: nn.LayerNorm(width, eps=0.1, bias=False)),
    ],
    nn.RMSNorm: [
        _plain(lambda width: nn.RMSNorm(width, eps=0.1)),
        _plain(lambda width: nn.RMSNorm(width, eps=1e-5, elementwise_affine=False)),
    ],
    ours.DynamicTanh: [_plain(ours.DynamicTanh), _plain(lambda width: ours.DynamicTanh(width, alpha=2.0))],
    ours.DynamicErf: [_plain(ours.DynamicErf), _plain(lambda width: ours.DynamicErf(width, alpha=2.0))],
    ours.PreNorm: [_plain(lambda width: ours.PreNorm(width, eps=0.1))],
    ours.PostNorm: [_plain(lambda width: ours.PostNorm(width, eps=0.1))],
    nn.MultiheadAttention: [
        _plain(lambda width: nn.MultiheadAttention(width, 2, batch_first=True), needs_ball=True,
               keeps_width=False),
        _plain(lambda width: nn.MultiheadAttention(width, 4, bias=False, batch_first=True), needs_ball=True,
               keeps_width=False),
        _plain(lambda width: nn.MultiheadAttention(width, 1), keeps_width=False, certifiable=False),
    ],
    nn.TransformerEncoderLayer: [
        _encoder_layer(needs_ball=True),
        _encoder_layer(needs_ball=True, activation=nn.GELU(approximate="tanh"), dropout=0.0, bias=False),
        _encoder_layer(norm_first=True, activation="gelu", layer_norm_eps=1e-5),
        _encoder_layer(norm_first=True, activation=torch.tanh),
    ],
    nn.TransformerEncoder: [
        _plain(lambda width: nn.TransformerEncoder(_encoder_layer(norm_first=False).build(width), 2,
                                                   nn.LayerNorm(width)), needs_ball=True),
        _plain(lambda width: nn.TransformerEncoder(_encoder_layer(norm_first=True).build(width), 2,
                                                   enable_nested_tensor=False)),
    ],
    nn.Sequential: [
        _plain(lambda width: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))),
        _plain(_shared_twice),
        _plain(lambda width: nn.Sequential()),
        _plain(lambda width: nn.Sequential(nn.LayerNorm(width, eps=0.1), nn.Sequential(nn.Linear(width, width)))),
    ],
    ours.MLP: [
        _plain(lambda width: ours.MLP(width, 2 * width)),
        _plain(lambda width: ours.MLP(width, 2 * width, activation="relu", bias=False)),
    ],
    ours.L2SelfAttention: [
        _attention(ours.L2SelfAttention),
        _attention(ours.L2SelfAttention, heads=1, bias=False),
        _attention(ours.L2SelfAttention, query_width=2),
        _attention(ours.L2SelfAttention, heads=4, init_scale=1.0, dropout=0.1),
        *(_attention(ours.L2SelfAttention, contractive=0.9, norm=norm, max_tokens=MAX_TOKENS) for norm in ALL_NORMS),
        # Without max_tokens the scale follows the length, and the layer promises its constant in
        # its own norm alone.
        _attention(ours.L2SelfAttention, contractive=0.5, heads=4, norms=("tok",)),
        _attention(ours.L2SelfAttention, contractive=0.9, query_width=2, norms=("tok",)),
    ],
    ours.CosineSelfAttention: [
        _attention(ours.CosineSelfAttention),
        _attention(ours.CosineSelfAttention, heads=1, eps=0.5, tau=4.0, bias=False),
        _attention(ours.CosineSelfAttention, heads=4, eps=0.1, nu=3.0, dropout=0.1),
    ],
    ours.CosineCrossAttention: [
        _plain(lambda width: ours.CosineCrossAttention(width, 2), certifiable=False, two_inputs=True, takes_mask=True)
    ],
    ours.DotProductAttention: [
        _attention(ours.DotProductAttention, needs_ball=True),
        _attention(ours.DotProductAttention, heads=1, needs_ball=True, bias=False),
        _attention(ours.DotProductAttention, needs_ball=True, qk_norm=True, eps=0.1),
        _attention(ours.DotProductAttention, heads=4, needs_ball=True, dropout=0.1),
    ],
    ours.InverseDAttention: [
        _attention(ours.InverseDAttention, needs_ball=True),
        _attention(ours.InverseDAttention, heads=1, needs_ball=True),
        _attention(ours.InverseDAttention, heads=4, needs_ball=True),
    ],
    ours.BallProjection: [_plain(ours.BallProjection), _plain(lambda width: ours.BallProjection(width, radius=0.3))],
    ours.MaxMin: [_plain(lambda width: ours.MaxMin())],
    ours.MaxMinFeedForward: [
        _plain(lambda width: ours.MaxMinFeedForward(width, 2 * width)),
        _plain(lambda width: ours.MaxMinFeedForward(width, 4, bias=False)),
    ],
    ours.BallEmbedding: [_plain(lambda width: ours.BallEmbedding(11, width), certifiable=False, two_inputs=True)],
    ours.UnitEmbedding: [_plain(lambda width: ours.UnitEmbedding(11, width), certifiable=False, two_inputs=True)],
    ours.BallAttention: [
        _attention(ours.BallAttention),
        _attention(ours.BallAttention, heads=1, temperature=0.3),
        _attention(ours.BallAttention, heads=4, temperature=5.0, unit_lipschitz=False),
        _attention(ours.BallAttention, temperature=1.0, unit_lipschitz=False, bias=True),
    ],
    ours.BallCrossAttention: [
        _plain(lambda width: ours.BallCrossAttention(width, 2), certifiable=False, two_inputs=True, takes_mask=True)
    ],
    ours.Block: [
        *(_plain(lambda width, residual=residual, options=options: _ball_block(width, residual, **options),
                 takes_mask=True, takes_causal=True)
          for residual, options in (
              (lambda: ours.ConvexResidual(0.7, divisor=0.5), {"bias": True}),
              (lambda: ours.BudgetResidual(4.0, blocks=2), {}),
          )),
        *(_block(ours.Block, **options) for options in _BLOCKS),
        *(_block(ours.Block, needs_ball=True, **options) for options in _BALL),
    ],
    ours.DecoderBlock: [_plain(lambda width: ours.DecoderBlock(_config(width)), certifiable=False, two_inputs=True)],
    ours.InvertibleResidual: [
        *(_plain(lambda width, norm=norm: ours.InvertibleResidual(_contraction(width, norm=norm)), takes_mask=True,
                 takes_causal=True) for norm in ALL_NORMS),
        _plain(lambda width: ours.InvertibleResidual(nn.Sequential(nn.Linear(width, width), nn.Tanh()))),
        # Vouched for, and true: the certificate of two sigmoids is 1/16, and they are never both steep.
        _plain(lambda width: ours.InvertibleResidual(nn.Sequential(nn.Sigmoid(), nn.Sigmoid()), lipschitz=0.06),
               norms=("inf", 2)),
    ],
    ours.ReversibleSequential: [
        _plain(lambda width: ours.ReversibleSequential(
            [ours.InvertibleResidual(_contraction(width)) for _ in range(2)]), takes_mask=True, takes_causal=True),
    ],
    ours.OrthogonalFeedForward: [
        _plain(ours.OrthogonalFeedForward),
        _plain(lambda width: ours.OrthogonalFeedForward(width, dropout=0.1)),
    ],
    ours.TransJectStack: [
        *(_transject_stack(**options) for options in _TRANSJECT.values()),
        _transject_stack(**_CAUSAL_TRANSJECT),
        _transject_stack(certifiable=False, **_POOLED),
    ],
    models.TransJectModel: [
        *(_transject(models.TransJectModel, **options) for options in _TRANSJECT.values()),
        _transject(models.TransJectModel, **_CAUSAL_TRANSJECT),
        _transject(models.TransJectModel, certifiable=False, **_POOLED),
    ],
    models.TransJectForSequenceClassification: [
        *(_transject(models.TransJectForSequenceClassification, **options) for options in _TRANSJECT.values()),
        *(_transject(models.TransJectForSequenceClassification, pooling=pooling) for pooling in ("first", "max")),
    ],
    models.TransJectForCausalLM: [_transject(models.TransJectForCausalLM, **_CAUSAL_TRANSJECT)],
    models.TransJectForMaskedLM: [
        *(_transject(models.TransJectForMaskedLM, **options) for options in _TRANSJECT.values()),
        _transject(models.TransJectForMaskedLM, certifiable=False, tie_word_embeddings=True),
    ],
    models.TransJectForTokenClassification: [_transject(models.TransJectForTokenClassification, dropout=0.1)],
    models.WellposedForMaskedLM: [_model(models.WellposedForMaskedLM, **options) for options in _BLOCKS[:2]],
    models.WellposedForTokenClassification: [
        *(_model(models.WellposedForTokenClassification, is_causal=causal, dropout=0.1) for causal in (True, False)),
    ],
    models.WellposedModel: [
        *(_model(models.WellposedModel, is_causal=index % 2 == 0, **options) for index, options in enumerate(_BLOCKS)),
        *(_model(models.WellposedModel, needs_ball=True, **options) for options in _BALL),
    ],
    models.WellposedForCausalLM: [
        *(_model(models.WellposedForCausalLM, **options) for options in _BLOCKS[:5]),
        _model(models.WellposedForCausalLM, tie_word_embeddings=False, position="sinusoidal", scale_embeddings=False),
        _model(models.WellposedForCausalLM, needs_ball=True, **_BALL[0]),
    ],
    models.WellposedForSequenceClassification: [
        *(_model(models.WellposedForSequenceClassification, **options) for options in _BLOCKS),
        *(_model(models.WellposedForSequenceClassification, pooling=pool, norm="none") for pool in ("first", "max")),
        _model(models.WellposedForSequenceClassification, is_causal=True, position="sinusoidal"),
        _model(models.WellposedForSequenceClassification, needs_ball=True, **_BALL[0]),
    ],
    models.WellposedForSequencePairClassification: [
        *(_plain(lambda width, options=options:
                 models.WellposedForSequencePairClassification(_config(width, **options)),
                 keeps_width=False, needs_ball=needs_ball, two_inputs=True)
          for options, needs_ball in (
              ({"norm": "none"}, True),
              ({"norm": "pre", "feedforward": "maxmin", "pooling": "first"}, False),
              ({"norm": "post", "pooling": "max"}, False),
              ({}, False),
          )),
    ],
    models.TransJectForSequencePairClassification: [
        *(_plain(lambda width, options=options: models.TransJectForSequencePairClassification(
                     _transject_config(width, **options)),
                 keeps_width=False, norms=("tok", 2), needs_ball=True, two_inputs=True)
          for options in (_TRANSJECT["gram by its trace"], {"pooling": "max", **_TRANSJECT["dropout"]})),
    ],
    models.PairHead: [
        _plain(lambda width: models.PairHead(width, 2 * width, 3), keeps_width=False, needs_ball=True, two_inputs=True),
        _plain(lambda width: models.PairHead(width, 2 * width, 3, dropout=0.1, unit_lipschitz=True), keeps_width=False,
               two_inputs=True),
    ],
}  # fmt: skip
