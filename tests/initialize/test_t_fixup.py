"""T-Fixup on every family: factors, what is left alone, norms, and what is refused."""

import copy
import itertools
import logging

import pytest
import torch
from tests.support.initialized import (
    ALL,
    ENCODER_DECODER,
    ENCODER_ONLY,
    PLAIN,
    SPECIAL,
    D,
    bart,
    batch_for,
    bert,
    gpt2,
    ours,
)
from tests.support.many_families import FAMILIES
from torch import nn
from transformers import BertModel

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.initialize import t_fixup_
from wellposed.models import WellposedConfig, WellposedForCausalLM, WellposedForSeq2SeqLM
from wellposed.roles import find_roles

SCALED = {"value", "output", "feedforward_in", "feedforward_out"}


def snapshot(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_role(model, *roles):
    return {
        weight.view.parameter_name + str(weight.view.rows): weight.view.tensor().detach().clone()
        for weight in find_roles(model).weights()
        if weight.role in roles
    }


@pytest.mark.parametrize("name", ALL)
def test_every_family_by_the_rule(name):
    """Factors, draws and sizes of every row; the norms are gone with their parameters."""
    two = name in ENCODER_DECODER
    model = ENCODER_DECODER[name](2, 5) if two else ENCODER_ONLY[name](3)
    for parameter in model.parameters():  # Hugging Face's start
        if parameter.ndim > 1 and parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
    report = t_fixup_(model)
    one = (6 * 3) ** -0.25
    factors = {"encoder": 0.67 * 2**-0.25, "decoder": (9 * 5) ** -0.25} if two else {}
    scaled = [row for row in report.rows if row.role in SCALED]
    assert len(scaled) == (2 * 4 + 5 * 6 if two else 3 * 4)
    stacks = (factors or report.factors).keys() - {"embeddings"}
    assert {(row.stack, row.role) for row in scaled} == {*itertools.product(stacks, SCALED)}
    for row in scaled:
        assert row.factor == pytest.approx(factors.get(row.stack or "", one), abs=1e-6)
        # float32 rounding of each entry, averaged: far below 1e-6
        assert row.std_after / row.std_before == pytest.approx(row.factor, abs=1e-6)
    tables = [row for row in report.rows if row.role == "token_embedding"]
    assert [row.factor for row in tables] == pytest.approx([(9 * 2) ** -0.25 if two else one])
    unscaled = [row for row in report.rows if row.role in ("query", "key")]
    assert len(unscaled) == 2 * len(find_roles(model).attention)
    assert all(row.drawn and row.factor == 1.0 for row in unscaled)
    for weight in by_role(model, "query", "key").values():
        variance = 2 / sum(weight.shape)
        # 5 standard errors of the variance of n uniform numbers, whose fourth moment is 9/5 of the
        # squared second
        spread = 5 * (0.8 / weight.numel()) ** 0.5
        assert weight.double().square().mean().item() == pytest.approx(variance, rel=spread)
        assert weight.abs().max() <= (3 * variance) ** 0.5 * (1 + 1e-6)
    assert report.norms_removed
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    model(**batch_for(model))[0].square().mean().backward()
    trained = ((key, value) for key, value in model.named_parameters() if value.requires_grad)
    unused = [key for key, value in trained if value.grad is None]
    assert [key for key in unused if "pooler" not in key] == []


@pytest.mark.parametrize("name", ["bert", "gpt2", "marian"])
def test_what_exclude_names_and_biases_are_untouched_bit_for_bit(name):
    model = ALL[name]()
    unchanged = by_role(model, "query", "key")
    before = snapshot(model)
    report = t_fixup_(model, exclude=("query", "key"))
    after = by_role(model, "query", "key")
    assert unchanged
    assert all(torch.equal(unchanged[key], after[key]) for key in unchanged)
    left = [row for row in report.rows if row.role in ("query", "key")]
    assert all(not row.drawn and row.factor == 1.0 for row in left)
    count = sum(not row.drawn for row in report.rows)
    assert f"left as they were: {count} (query, key" in report.table()
    vectors = (key for key, value in model.state_dict().items() if value.ndim == 1)
    biases = [key for key in vectors if key.endswith("bias")]
    assert biases
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in biases)


def test_exclude_takes_patterns_on_names_of_any_weight_also_of_tied_ones():
    model = gpt2()
    before = snapshot(model)
    report = t_fixup_(model, exclude=("*.h.0.attn.c_attn.weight", "lm_head.weight"))
    undrawn = {row.name for row in report.rows if not row.drawn}
    assert undrawn == {"transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"}
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in undrawn)
    other = "transformer.h.1.attn.c_attn.weight"
    assert not torch.equal(model.get_parameter(other), before[other])


def test_a_weight_that_is_query_and_key_is_left_under_either_role():
    for role in ("query", "key"):
        model = ours(attention="l2_tied", norm="none")
        before = by_role(model, "query", "key")
        t_fixup_(model, exclude=role)
        after = by_role(model, "query", "key")
        assert before
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_fused_projections_of_torch_are_drawn_one_by_one():
    model = nn.Transformer(16, 4, 2, 3, 24, batch_first=True)
    t_fixup_(model)
    assert not any("norm" in name for name, _ in model.named_parameters())
    value = model.encoder.layers[0].self_attn.in_proj_weight[2 * 16 :]
    # Xavier of each projection by itself, not of the fused 3d x d matrix: bound sqrt(6 / 2d)
    assert value.abs().max().item() == pytest.approx(0.67 * 2**-0.25 * (3 / 16) ** 0.5, rel=0.05)
    # trains, and evaluates without the fused path that would read the norms
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for mode in (True, False):
        assert model.train(mode)(x, x, src_key_padding_mask=padding).isfinite().all()
    with torch.no_grad():
        assert model(x, x, src_key_padding_mask=padding).isfinite().all()


def test_tied_embedding_is_scaled_once_and_shared_takes_the_encoders_depth():
    model = bart(2, 5)
    report = t_fixup_(model)
    shared = [row for row in report.rows if row.role == "token_embedding"]
    assert [row.name for row in shared] == ["model.shared.weight"]
    assert shared[0].factor == pytest.approx((9 * 2) ** -0.25, abs=1e-6)
    table = model.model.shared.weight
    assert table is model.lm_head.weight
    assert table is model.model.decoder.embed_tokens.weight
    assert table[3:].std().item() == pytest.approx(
        shared[0].factor * D**-0.5, rel=0.15
    )  # 432 draws


def test_separate_embeddings_take_their_own_depth():
    model = bart(2, 5)
    model.model.decoder.embed_tokens = nn.Embedding(30, D, padding_idx=0)
    tables = (row for row in t_fixup_(model).rows if row.role == "token_embedding")
    factors = {row.name: row.factor for row in tables}
    assert factors["model.shared.weight"] == pytest.approx((9 * 2) ** -0.25)
    assert factors["model.decoder.embed_tokens.weight"] == pytest.approx((9 * 5) ** -0.25)


def test_padding_rows_stay_zero_and_frozen_sinusoids_stay():
    model = ENCODER_DECODER["marian"]()
    sinusoids = model.model.encoder.embed_positions.weight.clone()
    t_fixup_(model)
    assert model.model.shared.weight[SPECIAL["pad_token_id"]].abs().max() == 0
    assert torch.equal(model.model.encoder.embed_positions.weight, sinusoids)


@pytest.mark.parametrize(
    "options", [{}, {"norm": "pre"}, {"qk_norm": True}, {"norm": "pre", "qk_norm": True}]
)
def test_our_models_save_and_load_without_their_norms(options, tmp_path):
    model = ours(**options)
    t_fixup_(model)
    model.save_pretrained(tmp_path)
    loaded = WellposedForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.norm, loaded.config.qk_norm) == ("none", False)
    assert snapshot(loaded).keys() == snapshot(model).keys()
    batch = batch_for(model)
    assert torch.equal(model.eval()(**batch).logits, loaded.eval()(**batch).logits)


def test_the_signal_keeps_its_size():
    layer = nn.TransformerEncoderLayer(32, 8, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 100, enable_nested_tensor=False)
    t_fixup_(model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = torch.randn(2, 16, 32)
    assert 1.0 <= (model(x).norm() / x.norm()).item() <= 1.15


class Extra(nn.Module):
    """A stack with a matrix that no family knows, and a norm that is no LayerNorm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
        self.layers[1].mystery = nn.Parameter(torch.ones(3, 4))
        self.batch_norm = nn.BatchNorm1d(8)


def refused(model, error, match, **options):
    before = snapshot(model)
    with pytest.raises(error, match=match):
        t_fixup_(model, **options)
    after = snapshot(model)
    assert before.keys() == after.keys(), "a refusal must leave the norms in place"
    assert all(torch.equal(before[key], after[key]) for key in before)


def frozen():
    model = bert()
    model.encoder.layer[0].attention.self.value.weight.requires_grad_(False)
    return model


def parametrized():
    model = bert()
    torch.nn.utils.parametrizations.orthogonal(model.encoder.layer[0].attention.self.value)
    return model


def shallow():
    model = bert(2)
    model.config.num_hidden_layers = 12
    return model


class Bare(nn.Module):
    """Attention without a residual sum."""

    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.mix(x, x, x)[0]


LIST = "*.attention.self.qury.weight"
REFUSED = [
    (Extra, RoleNotFoundError, r"layers\.1\.mystery \(3, 4\)", {}),
    (Extra, ConfigError, r"batch_norm \(BatchNorm1d\)", {"exclude": "*.mystery"}),
    (ours, ConfigError, "final_norm|attention_norm", {"remove_norms": False}),
    (bert, ConfigError, "exclude: .*(?s:.)*'qery'; nearest: query", {"exclude": ("qery", "key")}),
    (bert, ConfigError, r"nearest: .*attention\.self\.query\.weight", {"exclude": LIST}),
    (bert, ConfigError, r"'\*\.nrom'; nearest:", {"exclude": "*.nrom"}),
    (bert, ConfigError, "exclude: received 3", {"exclude": 3}),
    (bert, ConfigError, "'remove_norm'; nearest: remove_norms", {"remove_norm": True}),
    (frozen, ConfigError, "frozen", {}),
    (parametrized, ConfigError, "parametrized", {}),
    (shallow, ConfigError, "num_hidden_layers=12", {}),
    (lambda: nn.ModuleDict({"a": bert(), "b": bert(3)}), ConfigError, "found 2 stacks", {}),
    (lambda: FAMILIES["glm4"](), ConfigError, "gated feed-forward network is a product", {}),
    (lambda: FAMILIES["mixtral"](), ConfigError, r"expert[\s\S]*layers\.0\.mlp\.experts", {}),
    (Bare, ConfigError, "added to nothing", {"batch": torch.randn(2, 5, 8), "exclude": "up.*"}),
]


@pytest.mark.parametrize(("build", "error", "match", "options"), REFUSED)
def test_what_is_refused_changes_nothing(build, error, match, options):
    refused(build(), error, match, **options)


def test_what_holds_no_numbers_is_refused():
    with pytest.raises(ConfigError, match=r"expected a model .*from_pretrained\('bert'\)"):
        t_fixup_("bert")
    with torch.device("meta"), pytest.raises(ConfigError, match="meta device"):
        t_fixup_(nn.TransformerEncoderLayer(8, 2, 16))


def test_a_norm_that_is_no_layer_norm_stays_where_asked_for():
    report = t_fixup_(Extra(), exclude=("*.mystery", "batch_norm"))
    assert len(report.norms_removed) == 4


class Rescale(nn.Module):
    """A norm under a name of its own."""

    def __init__(self, eps):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        if eps:
            self.eps = 1e-6

    def forward(self, x):
        return self.gain * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


@pytest.mark.parametrize("eps", [True, False])
def test_a_norm_under_another_name_is_listed_and_stays_only_where_asked_for(eps):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model.norm1 = Rescale(eps)
    report = t_fixup_(copy.deepcopy(model), batch=torch.randn(2, 3, 8))
    assert report.norms_removed == ("norm1", "norm2")  # by what it computes
    if eps:
        refused(model, ConfigError, r"norm1 \(Rescale\)")
        report = t_fixup_(model, exclude="norm1")
    else:
        refused(model, RoleNotFoundError, r"norm1\.gain \(8,\)[\s\S]*torch\.nn\.Identity")
        report = t_fixup_(model, exclude="norm1.gain")
    assert report.norms_removed == ("norm2",)
    assert isinstance(model.norm1, Rescale)


@pytest.mark.parametrize("attention", ["cosine", "ball"])
def test_numbers_of_each_head_are_no_norm(attention):
    assert t_fixup_(ours(attention=attention, norm="none")).norms_removed == ()


def test_one_line_says_what_was_done_and_weights_of_a_checkpoint_are_warned_of(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="wellposed")
    model = bert()
    t_fixup_(model)
    (record,) = caplog.records
    assert record.getMessage() == "T-Fixup of BertModel: 16 of 16 weights drawn, 5 norms removed"
    bert().save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path)
    query = loaded.encoder.layer[0].attention.self.query.weight
    before = query.detach().clone()
    caplog.clear()
    report = t_fixup_(loaded)
    moved = float((query.detach() - before).norm() / before.norm())
    assert moved > 0.1
    name = "encoder.layer.0.attention.self.query.weight"
    (row,) = (row for row in report.rows if row.name == name)
    assert row.moved == pytest.approx(moved, rel=1e-5)
    (line,) = caplog.records
    assert "moved by" in line.getMessage()
    assert line.levelname == "WARNING"
    assert "16 of 16 by more than a tenth" in line.getMessage()
    caplog.clear()
    assert t_fixup_(loaded).norms_removed == ()  # a second call draws again


def test_half_precision():
    for row in t_fixup_(gpt2().bfloat16()).rows:
        if row.drawn:
            assert row.std_after / row.std_before == pytest.approx(row.factor, rel=2**-8)


def test_init_t_fixup_of_our_models():
    torch.manual_seed(3)
    built = ours(3, norm="none", init="t_fixup")
    torch.manual_seed(3)
    plain = ours(3, norm="none", init="xavier")
    # Xavier already, so left alone: the random numbers of a run are those of every earlier version
    for first, second in zip(built.model.layers, plain.model.layers, strict=True):
        assert torch.equal(first.attention.q_proj.weight, second.attention.q_proj.weight)
        assert torch.equal(first.attention.k_proj.weight, second.attention.k_proj.weight)
    drawn, full = (m.model.layers[1].attention.v_proj.weight.std() for m in (built, plain))
    ratio = drawn / full
    assert ratio.item() == pytest.approx((6 * 3) ** -0.25, rel=0.15)
    assert built.lm_head.weight is built.model.embeddings.token.weight
    with pytest.raises(ConfigError, match="norm='none'"):
        ours(init="t_fixup")
    normed = ours(norm="none", init="t_fixup", qk_norm=True)
    assert normed.model.layers[0].attention.q_norm is not None


IWSLT = {
    "vocab_size": 1000, "hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1024, "activation": "relu",
    "num_hidden_layers": 6, "norm": "none", "position": "sinusoidal",
}  # fmt: skip
# standard deviations at N = 6, d = 512, dff = 1024, and factors (appendix C and the authors' code)
TABLE = {
    ("encoder", "value"): (0.018919, 0.42809), ("encoder", "output"): (0.018919, 0.42809),
    ("encoder", "feedforward_in"): (0.015447, 0.42809), ("encoder", "feedforward_out"): (0.015447, 0.42809),
    ("decoder", "value"): (0.016303, 0.36889), ("decoder", "output"): (0.016303, 0.36889),
    ("decoder", "feedforward_in"): (0.013311, 0.36889), ("decoder", "feedforward_out"): (0.013311, 0.36889),
    (None, "token_embedding"): (0.016303, 0.36889), (None, "output_embedding"): (0.044194, 1.0),
}  # fmt: skip


def test_every_number_of_the_table_and_the_size_of_the_model():
    torch.manual_seed(0)
    model = WellposedForSeq2SeqLM(WellposedConfig(**IWSLT, tie_word_embeddings=False))
    report = t_fixup_(model)
    drawn_roles = set()
    for row in report.rows:
        if row.role in ("query", "key"):
            assert (row.factor, row.drawn) == (1.0, True)
            assert row.std_after == pytest.approx(0.044194, rel=0.01)
            continue
        std, factor = TABLE[row.stack, row.role]
        drawn_roles.add((row.stack, row.role))
        assert row.factor == pytest.approx(factor, abs=1e-5)
        assert row.std_after / row.std_before == pytest.approx(row.factor, abs=1e-6)
        assert row.std_after == pytest.approx(std, rel=0.01)
    assert drawn_roles == set(TABLE)
    tables = sum(p.numel() for p in model.parameters() if p.shape == (1000, 512))
    assert (
        sum(p.numel() for p in model.parameters()) - tables == 31_512_576
    )  # without the paper code's dead norms
    assert tables == 2 * 1000 * 512


@pytest.mark.slow
def test_thirty_and_thirty_layers_train_without_norm_and_without_warm_up():
    torch.manual_seed(0)
    config = WellposedConfig(
        **{**PLAIN, **SPECIAL, "hidden_size": 32, "num_hidden_layers": 30}, max_position_embeddings=16, norm="none",
        activation="relu", position="sinusoidal", init="t_fixup",
    )  # fmt: skip
    model = WellposedForSeq2SeqLM(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    source = torch.randint(3, PLAIN["vocab_size"], (8, 6))
    losses = []
    for _ in range(3):
        loss = model(input_ids=source, labels=source.flip(1)).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(PLAIN["vocab_size"]).log().item(), rel=0.2)
    assert losses[-1] < losses[0]
