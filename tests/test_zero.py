"""DeepSpeed ZeRO: every verb works under stages 1 and 2 or refuses by name, and refuses stage 3."""

from functools import partial

import pytest
import torch
from tests.support.zero import copied_, in_parts_
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.words import WordCertificate, read_in_windows

BATCH = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
SETS = ("orthogonal", "spectral", "columns")


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def constrained(to):
    options = {"batch": BATCH, "bound": 0.1} if to == "logits" else {"where": ("query", "key")}
    return lambda model: wp.constrain_(model, sgd(model), to=to, **options)


VERBS = {
    "find_roles": wp.find_roles,
    "find_roles, names": lambda model: wp.find_roles(model, run=False),
    "find_roles, patterns": lambda model: wp.find_roles(model, where={"query": "*linear1.weight"}),
    "measure": wp.measure,
    "measure, batch": lambda model: wp.measure(model, BATCH),
    "Monitor": lambda model: wp.Monitor(model, sgd(model)),
    "penalty": lambda model: wp.OrthogonalityPenalty(model, key=1.0),
    "penalty of affinities": lambda model: wp.OrthogonalityPenalty(model, affinity=1.0),
    "t_fixup_": wp.t_fixup_,
    "dt_fixup_": lambda model: wp.dt_fixup_(model, [BATCH]),
    "remove_norms_": wp.remove_norms_,
    "certify": lambda model: wp.certify(model, seq_len=4),
    "certify, a layer": lambda model: wp.certify(model.layers[0].linear1, seq_len=4),
    "attack": lambda model: wp.lipschitz_lower_bound(model, (4, 8), steps=1),
    "parameter_groups": lambda model: wp.parameter_groups(model, 0.1, where=("query",)),
    **{f"constrain_, {to}": constrained(to) for to in (*SETS, "logits")},
    "constrain_, patterns": lambda model: wp.constrain_(model, sgd(model), where="*linear1.weight"),
    "WordCertificate": lambda model: WordCertificate(model, None),
    "read_in_windows": lambda model: read_in_windows(model, None, ["a text"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_stage_3_is_refused_by_every_verb(verb):
    expected = r"^\w+: DeepSpeed ZeRO-3 keeps these weights in parts.*Train with ZeRO stage 1 or 2"
    with pytest.raises(ConfigError, match=expected):
        VERBS[verb](in_parts_(encoder()))


def trained(model, optimizer, penalty=None):
    loss = model(BATCH).square().mean()
    (loss if penalty is None else loss + penalty()).backward()
    optimizer.step()


MADE_BEFORE = {
    "penalty": lambda model: wp.OrthogonalityPenalty(model, key=1.0),
    "penalty, accumulate_": lambda model: wp.OrthogonalityPenalty(model, key=1.0).accumulate_,
    "penalty of affinities": lambda model: wp.OrthogonalityPenalty(model, affinity=1.0),
    "Monitor": lambda model: wp.Monitor(model).step,
    "Monitor, no vital signs": lambda model: wp.Monitor(model, vitals=False).step,
    "measure of roles": lambda model: partial(wp.measure, model, roles=wp.find_roles(model)),
}


@pytest.mark.parametrize("name", MADE_BEFORE)
def test_stage_3_after_a_verb_is_refused_by_its_next_call(name):
    model = encoder()
    call = MADE_BEFORE[name](model)
    in_parts_(model)
    with pytest.raises(ConfigError, match="DeepSpeed ZeRO-3 keeps these weights in parts"):
        call()


@pytest.mark.parametrize("to", [*SETS, "logits"])
def test_a_constraint_that_zero_would_lose_ends_the_step(to):
    """The optimizer steps flat copies, so the constraint was lost without a message."""
    model = encoder()
    optimizer = sgd(model)
    options = {"batch": BATCH, "bound": 0.1} if to == "logits" else {"where": ("query", "key")}
    wp.constrain_(model, optimizer, to=to, **options)
    step = copied_(model, optimizer)
    model(BATCH).square().mean().backward()
    before = [weight.clone() for weight in model.parameters()]
    expected = r"SGD now steps other tensors than these constrained weights.*(?s:.*)self_attn"
    with pytest.raises(ConfigError, match=expected):
        step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("to", [*SETS, "logits"])
def test_a_constraint_after_zero_is_refused(to):
    model = encoder()
    optimizer = sgd(model)
    copied_(model, optimizer)
    options = {"batch": BATCH, "bound": 0.1} if to == "logits" else {"where": ("query", "key")}
    with pytest.raises(ConfigError, match="in_proj_weight"):
        wp.constrain_(model, optimizer, to=to, **options)


def test_a_monitor_leaves_out_what_zero_hides_and_says_it_once(caplog):
    def numbers(is_copied):
        model = encoder()
        optimizer = sgd(model)
        step = copied_(model, optimizer) if is_copied else optimizer.step
        rows = []
        with wp.Monitor(model, optimizer, every=1) as monitor:
            for _ in range(2):
                model(BATCH).square().mean().backward()
                step()
                rows.append(monitor.step())
        return rows

    plain = numbers(is_copied=False)
    copied = numbers(is_copied=True)
    assert caplog.text.count("no grad_norm and update: DeepSpeed ZeRO steps copies") == 1
    for row, expected in zip(copied[:1], plain[:1], strict=True):
        left_out = expected.keys() - row.keys()
        assert {name.rpartition("/")[2] for name in left_out} == {"grad_norm", "update"}
        assert row == pytest.approx({name: expected[name] for name in row}, rel=1e-5)


def test_drawing_weights_after_zero_is_refused():
    for verb in ("t_fixup_", "dt_fixup_"):
        model = encoder()
        copied_(model, sgd(model))
        with pytest.raises(ConfigError, match=r"before deepspeed.initialize"):
            VERBS[verb](model)


def test_gradients_after_zero_took_them_are_refused():
    model = encoder()
    penalty = wp.OrthogonalityPenalty(model, key=1.0)
    copied_(model, sgd(model))
    with pytest.raises(ConfigError, match=r"engine\.backward\(loss \+ penalty\(\)\)"):
        penalty.accumulate_()
    assert model.layers[0].self_attn.in_proj_weight.grad is None


def test_a_penalty_under_stages_1_and_2_is_that_of_one_process():
    plain = encoder()
    copied = encoder()
    optimizer = sgd(plain)
    step = copied_(copied, sgd(copied))
    penalties = [wp.OrthogonalityPenalty(model, key=1.0, affinity=0.1) for model in (plain, copied)]
    for _ in range(3):
        for model, penalty, move in zip(
            (plain, copied), penalties, (optimizer.step, step), strict=True
        ):
            (model(BATCH).square().mean() + penalty()).backward()
            move()
            model.zero_grad()
    for weight, other in zip(plain.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(weight, other)


def test_saved_and_loaded_weights_are_whole_again(tmp_path):
    """The advice of the refusal: load the saved model into one process."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8)).save_pretrained(
        tmp_path
    )
    assert wp.measure(BertForSequenceClassification.from_pretrained(tmp_path)).rows
