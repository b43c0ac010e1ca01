"""Attention, activations, low precision and words, as real libraries compute them."""

import logging
import math

import pytest
import torch
from tests.support.close import assert_close
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    PreTrainedTokenizerFast,
)

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.functional import gram_penalty, orthogonality_error, qr_penalty
from wellposed.linalg import (
    certified_spectral_norm,
    infinity_norm,
    isometry_error,
    largest_singular_value,
    nearest_orthogonal,
    singular_values,
)
from wellposed.words import WordCertificate, read_in_windows


def test_the_slopes_of_both_formulas_of_gelu_are_covered():
    """In evaluation torch's layer computes the exact one, also if it was built with the other."""
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, "activation": nn.GELU("tanh")}
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options)
    x = torch.randn(64, 3, 16)
    with torch.no_grad():
        trained = layer.train()(x)
        evaluated = layer.eval()(x)
    assert float((trained - evaluated).abs().max()) > 5e-5  # far above rounding

    certificate = wp.certify(layer, seq_len=3, radius=1.0)
    (bound,) = [row.lipschitz for row in certificate.layers if row.module == "GELU"]
    points = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    for formula in ("none", "tanh"):
        values = nn.functional.gelu(points, approximate=formula)
        slopes = values.diff() / points.diff()
        assert float(slopes.abs().max()) <= bound


def padded_batch():
    torch.manual_seed(0)
    padding = torch.tensor([[False] * 4, [True] * 4])
    return torch.randn(2, 4, 16), padding


@pytest.mark.parametrize("training", [True, False])
def test_a_sequence_of_padding_alone_adds_nothing(training):
    """Torch's layer returns NaN for it, in evaluation without gradients alone."""
    x, padding = padded_batch()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).train(training)
    with torch.no_grad():
        has_nan = bool(layer(x, src_key_padding_mask=padding).isnan().any())
    assert has_nan == (not training)

    penalty = wp.OrthogonalityPenalty(layer, affinity=1.0, batch=x)
    output = layer(x, src_key_padding_mask=padding)  # whose graph has the affinities
    value = penalty()
    (gradient,) = torch.autograd.grad(value, layer.self_attn.in_proj_weight)
    output = layer(x[:1])
    assert output.isfinite().all()
    alone = penalty()
    (expected,) = torch.autograd.grad(alone, layer.self_attn.in_proj_weight)
    assert_close(2 * value, alone, rtol=1e-5, atol=0)  # the mean of two sequences
    assert_close(2 * gradient, expected, rtol=1e-4, atol=1e-6)
    penalty.remove()

    batch = {"src": x, "src_key_padding_mask": padding}
    both = wp.measure(layer, batch)
    first = wp.measure(layer, {"src": x[:1]})
    for row, other in zip(both.activations, first.activations, strict=True):
        for number in ("max_norm", "attention_entropy", "affinity_orthogonality_error"):
            expected = other[number]
            assert row[number] == (None if expected is None else pytest.approx(expected, rel=1e-4))

    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    monitor = wp.Monitor(layer, optimizer, every=1, batch=x)
    layer(x, src_key_padding_mask=padding)[0].square().sum().backward()
    optimizer.step()
    numbers = monitor.step()
    assert not monitor.alarms
    assert all(math.isfinite(value) for value in numbers.values())
    monitor.remove()


class Attention(nn.Module):
    """Four heads of width 8, with fewer heads of keys and of values."""

    def __init__(self, keys, values):
        super().__init__()
        sizes = {"query": 4, "key": keys, "value": values, "output": 4}
        for name, heads in sizes.items():
            self.register_module(name, nn.Linear(32, 8 * heads))

    def heads(self, x):
        layers = (self.query, self.key, self.value)
        return [layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in layers]

    def forward(self, x):
        mixed = scaled_dot_product_attention(*self.heads(x), enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("keys", "values"), [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)])
def test_keys_and_values_may_have_different_numbers_of_heads(keys, values):
    """The kernel repeats the heads of each by itself."""
    torch.manual_seed(0)
    model = Attention(keys, values)
    x = torch.randn(2, 5, 32)
    roles = wp.find_roles(model, x)
    assert (roles.notes, roles.unnamed) == ((), ())
    (role,) = roles.attention
    views = {name: getattr(role, name).label for name in ("query", "key", "value", "output")}
    assert views == {name: f"{name}.weight" for name in views}
    assert {name: len(heads) for name, heads in role.heads.items()} == {
        "query": 4,
        "key": keys,
        "value": values,
    }
    query, key, _ = model.heads(x)
    logits = query @ key.repeat_interleave(4 // keys, 1).mT / 8**0.5
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean((0, 2))
    (row,) = wp.measure(model, x).activations
    assert row["attention_entropy"] == pytest.approx(entropy.tolist(), rel=1e-4)


def small_bert(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return BertConfig(num_hidden_layers=1, vocab_size=32, **sizes, **options)


def test_attention_is_read_where_a_model_returns_none():
    """With the default kernel ``output_attentions=True`` gives an empty tuple and a line in the log."""
    model = BertModel(small_bert()).eval()
    ids = torch.arange(5)[None]
    assert model(ids, output_attentions=True).attentions == ()
    entropies = [row["attention_entropy"] for row in wp.measure(model, ids).activations]
    model.set_attn_implementation("eager")
    (weights,) = model(ids, output_attentions=True).attentions
    expected = torch.special.entr(weights).sum(-1).mean((0, 2)).tolist()
    assert entropies[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["query", "key"])
def test_infinite_projections_are_noticed_although_the_kernel_may_hide_them(name, caplog):
    torch.manual_seed(0)
    model = Attention(4, 4).bfloat16()
    x = torch.randn(1, 3, 32).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = wp.Monitor(model, optimizer, every=1, batch=x, weights=False)
    with torch.no_grad():
        model.get_submodule(name).bias[:] = float("inf")
    model(x).float().nan_to_num().sum().backward()
    with caplog.at_level(logging.WARNING):
        monitor.step()
    assert f"{name}: the first module whose output held NaN, infinity" in caplog.text
    monitor.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_muon_leaves_the_space_of_its_gradient_and_the_monitor_has_its_length(dtype):
    """It iterates in bfloat16: the step of a gradient of rank one has full rank."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True).to(dtype)
    weight = model.linear1.weight
    optimizer = torch.optim.Muon([weight], lr=0.02, weight_decay=0.0, momentum=0.0)
    monitor = wp.Monitor(model, optimizer, every=1, weights=False)
    model(torch.randn(2, 3, 32, dtype=dtype)).sum().backward()
    left, right = torch.randn(2, 32, dtype=dtype)
    weight.grad = torch.outer(left, right)
    before = weight.detach().clone()
    optimizer.step()
    numbers = monitor.step()
    step = weight.detach() - before
    inside = (left @ step @ right) ** 2 / (left @ left) / (right @ right)
    assert float(1 - inside / step.square().sum()) > 0.5
    assert int(torch.linalg.matrix_rank(step.double())) > 16
    update = float(step.norm() / before.norm())
    assert numbers["vital/encoder.0.feedforward_in/update"] == pytest.approx(update, rel=1e-4)
    monitor.remove()


VERBS = {
    "certified_spectral_norm": certified_spectral_norm,
    "infinity_norm": infinity_norm,
    "isometry_error": isometry_error,
    "largest_singular_value": largest_singular_value,
    "nearest_orthogonal": nearest_orthogonal,
    "singular_values": singular_values,
    "gram_penalty": gram_penalty,
    "orthogonality_error": orthogonality_error,
    "qr_penalty": qr_penalty,
}
"""Verbs of a matrix; those of torch raise, or return garbage, in 16 bits."""
GRAMS = ("gram_penalty", "orthogonality_error", "qr_penalty")
"""Those that refuse float16 on a CPU."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(24, 16), (16, 16), (40, 130)], ids=str)
@pytest.mark.parametrize("name", VERBS)
def test_matrices_of_16_bits_are_cast_before_anything_is_computed(name, shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) / 4).to(dtype)
    with pytest.raises(RuntimeError):
        torch.linalg.matrix_norm(weight, 2, dtype=torch.float32)
    garbage = torch.linalg.matrix_exp(torch.eye(16, dtype=dtype))
    assert not torch.allclose(garbage.diagonal().float(), torch.tensor(math.e), rtol=0.1)
    expected = VERBS[name](weight.double())
    if dtype == torch.float16 and name in GRAMS:
        with pytest.raises(ConfigError, match="use bfloat16 or float32"):
            VERBS[name](weight)
        return
    value = VERBS[name](weight)
    is_rounded = isinstance(value, torch.Tensor) and value.dtype == dtype
    rtol = torch.finfo(dtype).eps if is_rounded else 1e-5
    as_double = [torch.as_tensor(number).double() for number in (value, expected)]
    assert_close(*as_double, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_weights_of_16_bits_are_projected_in_higher_precision(to, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dtype == torch.float16:  # on a CPU
        with pytest.raises(ConfigError, match="load it in float32 or bfloat16"):
            wp.constrain_(model, optimizer, where="0", to=to)
        return
    handle = wp.constrain_(model, optimizer, where="0", to=to)
    model[0].weight.grad = 0.01 * torch.randn(16, 24).to(dtype)
    optimizer.step()
    matrix = model[0].weight.detach().double()
    expected = {
        "orthogonal": lambda: (matrix @ matrix.T - torch.eye(16)).abs().max(),
        "spectral": lambda: torch.linalg.matrix_norm(matrix, 2) - 1,
        "columns": lambda: (matrix.T @ matrix - torch.eye(24)).diagonal().abs().max(),
    }[to]()
    assert float(expected) < 8 * torch.finfo(dtype).eps
    handle.remove()


WORDS = ["don", "'", "t", "stop", ",", "!", "cafe", "good", "bad", "film", "##s", "n"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def word_pieces():
    """BERT's tokenizer, with a vocabulary of a dozen words."""
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=32, **names)


def test_words_of_a_certificate_are_those_of_the_text(tmp_path):
    """BERT's tokenizer joins punctuation when it decodes, although told not to clean up."""
    (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL + WORDS))
    bert = BertTokenizer(str(tmp_path / "vocab.txt"), clean_up_tokenization_spaces=False)
    text = "Don't stop , good FILM !"
    ids = bert(text, add_special_tokens=False)["input_ids"]
    decoded = bert.decode(ids, clean_up_tokenization_spaces=False)
    assert decoded.split() != text.split()

    tokenizer = word_pieces()
    model = BertForSequenceClassification(small_bert()).eval()
    for words in (1, 2):
        windows = read_in_windows(model, tokenizer, [text], words)
        report = WordCertificate(windows, tokenizer).explain(text, 1)
        split = text.split()
        expected = [" ".join(split[at : at + words]) for at in range(0, len(split), words)]
        assert sorted(name for name, _ in report.shares) == sorted(expected)


def test_words_that_a_normaliser_takes_away_still_have_a_vote():
    """An accent alone is a word without a token, and its window is padding."""
    tokenizer = word_pieces()
    gone = "\u0301"
    assert tokenizer(gone, add_special_tokens=False)["input_ids"] == []
    model = BertForSequenceClassification(small_bert()).eval()
    windows = read_in_windows(model, tokenizer, ["good film"], 1).eval()
    certificate = WordCertificate(windows, tokenizer)
    report = certificate.explain(f"good {gone} film", 1)
    assert report.words == 3
    assert [name for name, _ in report.shares].count(gone) == 1
    assert all(math.isfinite(share) for _, share in report.shares)


def step_of(strict):
    """Return what is monitored and penalised in a step after an export; None: without one."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 16)
    plain = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, batch=x)
    wp.constrain_(model, optimizer, to="logits", bound=0.1, batch=x)
    with wp.Monitor(model, optimizer, every=1, batch=x) as monitor:
        if strict is not None:
            program = torch.export.export(model, (x,), strict=strict)
            assert_close(program.module()(x), plain)
            nodes = {str(node.target) for node in program.graph.nodes}
            assert not [name for name in nodes if "vector_norm" in name]  # of the monitor
        output = model(x)
        value = penalty()
        (output.pow(3).sum() + value).backward()
        optimizer.step()
        numbers = monitor.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return numbers, float(value.detach()), weights


@pytest.mark.filterwarnings("ignore")  # of torch, at an export in training
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_between_two_steps_changes_no_number(strict):
    """torch.export runs every hook, on tensors without values."""
    numbers, value, weights = step_of(None)
    others = step_of(strict)
    assert others[0] == pytest.approx(numbers, rel=1e-5)
    assert others[1] == pytest.approx(value, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(others[2], weights, strict=True))
