"""Certified accuracy is never above the accuracy under attack, and equal to it if the theory
says that it is."""

import pytest
import torch

from wellposed import models as wm
from wellposed.certification import certify
from wellposed.errors import ConfigError, DataError, ShapeError
from wellposed_lab.training.certified.accuracy import certified_accuracy

pytestmark = pytest.mark.slow  # the whole table


def make_model(attention):
    torch.manual_seed(0)
    sizes = {"num_labels": 3}
    config = wm.WellposedConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, attention=attention, norm="none",
        max_position_embeddings=10, pad_token_id=0, **sizes,
    )  # fmt: skip
    return wm.WellposedForSequenceClassification(config).eval()


def make_batches(model, count=12):
    """Labels are mostly what the model says, so that there is something to certify; some are wrong
    on purpose."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 20, (count, 10), generator=generator)
    mask = (torch.arange(10) < torch.randint(1, 11, (count, 1), generator=generator)).long()
    with torch.no_grad():
        labels = model(input_ids=ids * mask, attention_mask=mask).logits.argmax(-1)
    labels[:3] = (labels[:3] + 1) % 3
    columns = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    rows = [slice(start, start + 8) for start in range(0, count, 8)]
    return [{name: part[indices] for name, part in columns.items()} for indices in rows]


def assert_sound(curve):
    assert all(upper >= sure for sure, upper in zip(curve.certified, curve.attacked, strict=True))
    for values in (curve.certified, curve.attacked):
        assert values == sorted(values, reverse=True)
    assert curve.certified[0] == curve.attacked[0] == curve.clean == 9 / 12


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
@pytest.mark.parametrize("attention", ["l2_tied", "l2_contractive", "cosine"])
def test_attacked_accuracy_is_never_below_certified_accuracy(attention, norm):
    model = make_model(attention)
    certificate = certify(model, seq_len=10, norm=norm)
    curve = certified_accuracy(model, make_batches(model), certificate, attack_steps=6)
    assert_sound(curve)
    assert curve.certified[1] > 0.4
    assert curve.attacked[-1] < curve.clean


@pytest.mark.slow
def test_a_linear_model_attacked_at_its_certified_radius_breaks():
    """Without feed-forward and attention weights the margin is linear, so the radius of two classes
    is the distance."""
    model = make_model("l2_contractive")
    for name, parameter in model.named_parameters():
        if ".o_proj." in name or ".down_proj." in name:
            torch.nn.init.zeros_(parameter)
    batches = make_batches(model)
    radii = certify(model, seq_len=10, norm="tok")
    batch = batches[-1]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    smallest = radii.radius(logits, batch["labels"])[0].item()
    one = [{name: part[:1] for name, part in batch.items()}]
    sizes = [0.0, 0.98 * smallest, 1.02 * smallest]
    curve = certified_accuracy(model, one, radii, radii=sizes, attack_steps=25, restarts=2)
    assert curve.certified == curve.attacked == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
def test_no_radius_leaves_the_ball(norm):
    """The margin is raised so high that only the ball is left to limit the radius, and half the
    inputs lie outside."""
    model = make_model("dot_product")
    batches = make_batches(model)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([1e9, 0.0, 0.0]))
    for batch in batches:
        batch["labels"][:] = 0
    masks = torch.cat([batch["attention_mask"] for batch in batches])
    ids = torch.cat([batch["input_ids"] for batch in batches])
    vectors = wm.input_vectors(model, ids).detach().double()
    largest = (vectors.norm(dim=-1) * masks).amax(-1)
    ball = float(largest.median()) * (1 + 1e-9)
    certificate = certify(model, seq_len=10, norm=norm, radius=ball)
    room = ((ball - largest) / (8**0.5 if norm == "inf" else 1)).clamp_min(0)
    between = sorted({float(f"{size:.6g}") * 0.999 for size in room.tolist() if size > 1e-6})
    curve = certified_accuracy(model, batches, certificate, radii=[0.0, *between], attack_steps=1)
    expected = [float((room > radius).double().mean()) for radius in curve.radii[1:]]
    assert curve.certified[1:] == pytest.approx(expected)
    assert f"{int((largest > ball).sum())} of 12 inputs lie outside the ball" in curve.table()
    inside = certify(model, seq_len=10, norm=norm, radius=float(largest.max()) + 0.001)
    curve = certified_accuracy(model, batches, inside, radii=[0.0, 1e-6, 1.0], attack_steps=1)
    assert curve.certified[0] == curve.certified[1] > curve.certified[2] == 0
    assert "radii end at the ball" in curve.table()


def test_a_certificate_of_long_inputs_is_refused_for_short_ones():
    model = make_model("l2_contractive")
    batches = make_batches(model)
    lengths = batches[0]["attention_mask"].sum(-1)
    long = certify(model, seq_len=10, norm=2, min_tokens=10)
    short = int((lengths < 10).sum())
    message = rf"at least 10 real tokens, received {int(lengths.min())} \({short} of 8 inputs"
    with pytest.raises(ShapeError, match=message):
        certified_accuracy(model, batches, long)
    shortest = min(int(batch["attention_mask"].sum(-1).min()) for batch in batches)
    covered = certify(model, seq_len=10, norm=2, min_tokens=shortest)
    assert_sound(certified_accuracy(model, batches, covered, attack_steps=4))


FLOATS = torch.zeros(8)


@pytest.mark.parametrize(
    ("asked", "labels", "tokens", "error", "message"),
    [
        ({"radii": [0.2, 0.1]}, None, 10, ConfigError, r"certified.accuracy"),
        ({"radii": [-1.0]}, None, 10, ConfigError, r"certified.accuracy"),
        ({"radii": []}, None, 10, ConfigError, r"certified.accuracy"),
        ({"attack_steps": 0}, None, 10, ConfigError, r"certified.accuracy"),
        ({}, None, 10, DataError, "no examples"),
        ({}, FLOATS, 10, DataError, "class numbers"),
        ({}, FLOATS.long() - 1, 10, DataError, "class numbers"),
        ({}, FLOATS.long(), 4, ShapeError, "at most 4 tokens"),
    ],
)
def test_bad_arguments_and_data_are_refused(asked, labels, tokens, error, message):
    model = make_model("l2_contractive")
    batches = [] if labels is None else [{**make_batches(model)[0], "labels": labels}]
    with pytest.raises(error, match=message):
        certified_accuracy(model, batches, certify(model, seq_len=tokens), **asked)


def test_the_attack_runs_in_eval_mode_and_leaves_the_model_as_it_was():
    model = make_model("l2_contractive")
    batches = make_batches(model)
    certificate = certify(model, seq_len=10)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    asked = {"radii": [0.0, 0.01, 0.5], "attack_steps": 4}
    expected = certified_accuracy(model, batches, certificate, **asked)
    model.train()
    assert certified_accuracy(model, batches, certificate, **asked) == expected
    assert model.training
    assert next(model.parameters()).dtype == torch.float32


def test_radii_in_tokens_are_multiples_of_the_median_token_norm():
    model = make_model("l2_contractive")
    batches = make_batches(model)
    certificate = certify(model, seq_len=10)
    shares = [0.0, 0.01, 0.1]
    settings = {"in_tokens": True, "attack_steps": 3}
    curve = certified_accuracy(model, batches, certificate, radii=shares, **settings)
    real = [(b["input_ids"], b["attention_mask"].bool()) for b in batches]
    sizes = torch.cat([wm.input_vectors(model, ids)[mask] for ids, mask in real]).norm(dim=-1)
    assert curve.median_token == pytest.approx(float(sizes.detach().double().median()), rel=1e-6)
    assert curve.radii == pytest.approx([share * curve.median_token for share in shares])
    again = certified_accuracy(model, batches, certificate, radii=curve.radii, attack_steps=3)
    assert again == curve


TOKENS = 7
WORDS = 6


def language_model(seed, heads):
    torch.manual_seed(seed)
    config = wm.WellposedConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=16,
        max_position_embeddings=TOKENS, attention="ball", feedforward="maxmin", residual="convex", norm="none",
        unit_embeddings=True, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return wm.WellposedForCausalLM(config).double().eval()


def texts():
    ids = torch.randint(0, WORDS, (5, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def right_and_radii(model, batch):
    """One by one: whether the token after position i is predicted, and its certified radius."""
    certificate = certify(model, seq_len=TOKENS)
    right = []
    radii = []
    with torch.no_grad():
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            logits = model(input_ids=ids[None], attention_mask=mask[None]).logits[0]
            for i in range(int(mask.sum()) - 1):
                right.append(int(logits[i].argmax()) == int(ids[i + 1]))
                radii.append(float(certificate.radius(logits[i], ids[i + 1])))
    return right, radii


@pytest.mark.parametrize("heads", [1, 2])
def test_shares_are_those_of_the_predictions_one_by_one(heads):
    model = language_model(0, heads)
    batch = texts()
    right, radii = right_and_radii(model, batch)
    sizes = [0.0, 1e-3, 0.02, 0.1, 1.0]
    certificate = certify(model, seq_len=TOKENS)
    curve = certified_accuracy(model, [batch], certificate, radii=sizes, attack_steps=4)
    assert curve.predictions == len(right) == 4 * (TOKENS - 1) + 3
    assert curve.examples == 5
    for size, sure, upper in zip(sizes, curve.certified, curve.attacked, strict=True):
        certified = [ok and (r > size or size == 0) for ok, r in zip(right, radii, strict=True)]
        assert sure == pytest.approx(sum(certified) / len(certified))
        assert sure <= upper
