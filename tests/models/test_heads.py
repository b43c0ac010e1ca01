"""Heads of all families: what they take, return and lose; and classifiers of pairs, with the bound of both
vectors moving."""

import inspect
import math

import pytest
import torch
from tests.support.close import within
from tests.support.tiny import tiny
from tests.support.transject import IDS, MASK
from torch.testing import assert_close
from transformers import modeling_outputs as outputs

import wellposed as wp
from wellposed import models
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError

SIZES = {"vocab_size": 13, "hidden_size": 8, "num_labels": 3}
CONFIGS = {
    "wellposed": models.WellposedConfig(**SIZES, num_attention_heads=2),
    "transject": models.TransJectConfig(**SIZES, num_experts=2, reconstruction_weight=0.5),
}
LANGUAGE = (
    "input_ids attention_mask position_ids | past_key_values inputs_embeds labels use_cache"
    " output_hidden_states output_attentions logits_to_keep num_items_in_batch"
)
CLASSES = (
    "input_ids attention_mask position_ids | inputs_embeds labels output_hidden_states"
    " output_attentions"
)
PAIRS = (
    "input_ids attention_mask input_ids_pair attention_mask_pair | inputs_embeds inputs_embeds_pair"
    " labels"
)
TOKENS = f"{CLASSES} logits_to_keep num_items_in_batch"
KINDS = {
    "causal_lm": (LANGUAGE, outputs.CausalLMOutputWithPast, IDS),
    "masked_lm": (TOKENS, outputs.MaskedLMOutput, IDS.where(IDS % 2 == 1, -100)),
    "token_classification": (
        TOKENS,
        outputs.TokenClassifierOutput,
        (IDS % 3).where(IDS != 0, -100),
    ),
    "sequence_classification": (CLASSES, outputs.SequenceClassifierOutput, torch.tensor([2, 0])),
    "sequence_pair_classification": (PAIRS, outputs.SequenceClassifierOutput, torch.tensor([2, 0])),
}
ROWS = [(family, kind) for family in CONFIGS for kind in KINDS]
OF_TOKENS = [row for row in ROWS if "sequence" not in row[1]]


def class_of(family, kind):
    return models.ARCHITECTURES.get(family).kinds[kind]


def slow_loss(logits, labels, kind):
    """The mean of -log softmax over the labels that count, one at a time, in float64."""
    if kind == "causal_lm":
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    pairs = zip(logits.double().flatten(0, -2), labels.flatten().tolist(), strict=True)
    terms = [row.logsumexp(0) - row[label] for row, label in pairs if label != -100]
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("family", "kind"), ROWS)
def test_arguments_are_written_out_as_the_trainer_reads_them(family, kind):
    cls = class_of(family, kind)
    places, keywords = (part.split() for part in KINDS[kind][0].split("|"))
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == places
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(keywords)
    assert all(p.annotation is not p.empty and p.default in (None, 0) for p in parameters)
    assert cls.forward.__doc__ is not None
    assert cls.config_class is type(CONFIGS[family])
    assert cls.can_generate() == (kind == "causal_lm")


@pytest.mark.parametrize(("family", "kind"), ROWS)
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_that_of_the_logits(family, kind, training):
    class Renamed(class_of(family, kind)):
        """A user's class, whose name does not tell transformers which loss it has."""

    model = Renamed(CONFIGS[family]).train(training)
    _, output_class, labels = KINDS[kind]
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    if "pair" in kind:
        inputs |= {"input_ids_pair": IDS.flip(0), "attention_mask_pair": MASK.flip(0)}
    output = model(**inputs)
    assert type(output) is (models.TransJectHeadOutput if family == "transject" else output_class)
    expected = slow_loss(output.logits, labels, kind).float()
    added = getattr(output, "auxiliary_loss", None)
    assert (added is not None) == (family == "transject" and training)
    assert_close(output.loss, expected if added is None else expected + added)


@pytest.mark.parametrize(("family", "kind"), OF_TOKENS)
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(family, kind):
    model = class_of(family, kind)(CONFIGS[family]).train()
    ids = torch.randint(1, 13, (4, 6))
    items = ids[:, 1:].numel() if kind == "causal_lm" else ids.numel()
    output = model(input_ids=ids, labels=ids % 3, num_items_in_batch=items)
    options = {"num_items_in_batch": items}
    parts = [model(input_ids=row, labels=row % 3, **options).loss for row in ids.split(1)]
    assert_close(sum(parts), output.loss)
    assert_close(output.loss, model(input_ids=ids, labels=ids % 3).loss)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "kind"), OF_TOKENS)
def test_logits_of_a_token_are_linear_in_its_state_and_padding_changes_none(family, kind, tied):
    sizes = CONFIGS[family].to_diff_dict() | {"tie_word_embeddings": tied}
    model = class_of(family, kind)(type(CONFIGS[family])(**sizes)).double().eval()
    last = model.classifier if kind == "token_classification" else model.get_output_embeddings()
    shared = last.weight is model.get_input_embeddings().weight
    assert shared == (tied and kind != "token_classification")
    first = getattr(model, "projection", torch.nn.Identity())
    logits = model(input_ids=IDS, attention_mask=MASK).logits
    for row, length in enumerate(MASK.sum(1).tolist()):
        states = model.model(input_ids=IDS[row : row + 1, :length]).last_hidden_state[0]
        expected = first(states) @ last.weight.T + (0 if last.bias is None else last.bias)
        within(logits[row, :length], expected, 1e-12)


@pytest.mark.parametrize(("family", "kind"), OF_TOKENS)
def test_roles_penalties_and_orthogonal_weights_are_those_of_the_body(family, kind):
    model = class_of(family, kind)(CONFIGS[family])
    roles = wp.find_roles(model)
    if family == "wellposed":
        penalty = wp.OrthogonalityPenalty(model, affinity=1e-2)
        (model(input_ids=IDS, labels=IDS % 3).loss + penalty()).backward()
        assert len(roles.attention) == len(wp.find_roles(model.model).attention) > 0
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constraint = wp.constrain_(model, optimizer, where=model.orthogonal_patterns())
    model(input_ids=IDS, labels=IDS % 3).loss.backward()
    optimizer.step()
    assert constraint.error().worst < 1e-5


@pytest.mark.parametrize(("family", "kind"), OF_TOKENS)
def test_labels_that_do_not_fit_and_a_causal_reader_of_masks_are_refused(family, kind):
    model = class_of(family, kind)(CONFIGS[family])
    for labels in (IDS[0], IDS[:, :3], torch.full_like(IDS, 13), IDS.float()):
        with pytest.raises(ShapeError, match="labels: received"):
            model(input_ids=IDS, labels=labels)
    if kind == "masked_lm":
        with pytest.raises(ConfigError, match=f"{type(model).__name__}: received is_causal=True"):
            models.build_model(family, kind, is_causal=True)


def test_a_sequence_without_a_label_is_left_out():
    model = models.WellposedForSequenceClassification(CONFIGS["wellposed"]).eval()
    both = model(input_ids=IDS, attention_mask=MASK, labels=torch.tensor([2, -100])).loss
    one = model(input_ids=IDS[:1], attention_mask=MASK[:1], labels=torch.tensor([2])).loss
    assert_close(both, one)


NORMS = ["tok", 2, "inf"]


def features(x):
    """Return [a, b, a*b, a-b] of two tokens a, b; nothing shared with the library."""
    a = x[:, 0]
    b = x[:, 1]
    return torch.cat([a, b, a * b, a - b], -1)


def head_of(width, hidden, *, unit, seed=0):
    torch.manual_seed(seed)
    return models.PairHead(width, hidden, 3, unit_lipschitz=unit).double().eval()


def slope_of(head, norm, radius=None):
    """The factor of the hidden layer, out of the certificate."""
    layers = wp.certify(head, seq_len=2, norm=norm, radius=radius, cross_check=False).layers
    return math.prod(layer.lipschitz for layer in layers if layer.path in ("projection", "hidden"))


def size(x, norm):
    if norm == "tok":
        return x.norm(dim=-1).amax(-1)
    return x.flatten(1).norm(dim=-1) if norm == 2 else x.abs().flatten(1).amax(-1)


@pytest.mark.parametrize("radius", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("norm", NORMS)
def test_the_constant_of_the_features_is_attained(norm, radius):
    head = head_of(4, 16, unit=False).requires_grad_(False)
    head.hidden.weight.copy_(torch.eye(16))
    end = radius * torch.tensor([[[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]], dtype=torch.float64)
    near = end * (1 - 1e-6)
    slope = float(size((features(end) - features(near))[:, None], norm) / size(end - near, norm))
    two = math.sqrt(3 + 2 * radius**2)
    expected = {"tok": math.sqrt(2) * two, 2: two, "inf": max(2, 2 * radius)}[norm]
    assert slope == pytest.approx(expected, rel=1e-4)
    assert slope <= slope_of(head, norm, radius) <= expected * (1 + 1e-5)


def test_a_unit_head_with_weights_of_norm_one_is_1_lipschitz():
    head = head_of(8, 12, unit=True)
    with torch.no_grad():
        for weight in (head.hidden.weight, head.output.weight):
            wp.linalg.cap_spectral_norm_(weight.mul_(50))
    certificate = wp.certify(head, seq_len=2, cross_check=False)
    assert certificate.total <= 1 + 1e-6
    assert head(torch.full((1, 8), 1e6).double(), torch.zeros(1, 8).double()).isfinite().all()


def test_a_model_of_pairs_without_a_ball_says_where_the_product_stands():
    options = {"norm": "none", "attention": "l2_tied"}
    kind = models.WellposedForSequencePairClassification
    model = tiny(kind, **options).eval()
    certificate = wp.certify(model, seq_len=4)
    assert certificate.total == math.inf
    assert [layer.path for layer in certificate.uncertified] == ["classifier"]
    message = r"classifier \(PairHead\): two inputs meet in a product"
    with pytest.raises(NotLipschitzError, match=message):
        certificate.require()
    on_a_ball = wp.certify(model, seq_len=4, radius=2.0)
    assert math.isfinite(on_a_ball.total)
    bound = wp.lipschitz_lower_bound(model, (8, 12), radius=2.0, restarts=2, steps=10)
    assert bound.ratio(on_a_ball) <= 1


def test_a_hook_on_the_head_and_an_odd_hidden_width_are_refused():
    head = head_of(4, 6, unit=True)
    head.hidden.register_forward_hook(lambda *_: None)
    assert "forward hook" in wp.certify(head, seq_len=2, cross_check=False).layers[0].reason
    with pytest.raises(ConfigError, match="even"):
        models.PairHead(4, 7, 2, unit_lipschitz=True)


def test_dropout_takes_features_apart_that_cancel_and_is_refused():
    """W_1 of -a and a - b + b is zero, and was certified to be with a half of them dropped."""
    head = models.PairHead(1, 1, 2, dropout=0.5, unit_lipschitz=False)
    head.hidden.weight.data[0] = torch.tensor([-1.0, 1.0, 0.0, 1.0])
    assert wp.certify(head.eval(), seq_len=2, radius=1.0).total == 0
    assert "dropout" in wp.certify(head.train(), seq_len=2, radius=1.0).layers[0].reason


FIRST = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
SECOND = torch.tensor([[5, 8, 9], [7, 9, 0]])
SIDES = ("input_ids", "attention_mask", "input_ids_pair", "attention_mask_pair")


def batch(first=FIRST, second=SECOND):
    return dict(zip(SIDES, (first, (first != 0).long(), second, (second != 0).long()), strict=True))


def build(**changes):
    return tiny(models.WellposedForSequencePairClassification, **changes).double().eval()


def run(model):
    return model(**batch()).logits


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
def test_the_logits_are_those_of_the_formula(pooling):
    model = build(pooling=pooling)
    pools = {"mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values, "first": lambda x: x[0]}
    weights = dict(model.named_parameters())
    for row in range(2):
        both = [ids[row][ids[row] != 0][None] for ids in (FIRST, SECOND)]
        a, b = (pools[pooling](model.model(input_ids=x).last_hidden_state[0]) for x in both)
        features = torch.cat([a, b, a * b, a - b])
        hidden = weights["classifier.hidden.weight"] @ features
        hidden = (hidden + weights["classifier.hidden.bias"]).clamp(min=0)
        expected = weights["classifier.output.weight"] @ hidden + weights["classifier.output.bias"]
        within(run(model)[row], expected, 1e-12)


def test_verbs_work_or_say_why_not():
    model = build()
    roles = wp.find_roles(model)
    assert len(roles.attention) == 2
    assert wp.measure(model, batch()).rows
    penalty = wp.OrthogonalityPenalty(model, affinity=1e-2, attention=1e-2)
    logits = run(model)
    assert penalty().item() > 0
    assert logits.isfinite().all()
    penalty.remove()
    certificate = wp.certify(model, seq_len=5)
    assert certificate.label == "uncertified"
    assert [layer.path for layer in certificate.uncertified][-1].endswith("attention")
