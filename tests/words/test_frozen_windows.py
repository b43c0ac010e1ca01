"""Frozen windows remember features of one body: any change of it is a new body."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from tests.support.tokenizer_folders import bert_words
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from wellposed.errors import ConfigError
from wellposed.words import WordCertificate, read_in_windows

WORDS = ("oil", "win", "bank", "goal", "x")
TEXTS = ["oil win bank", "goal x", "bank oil"]


def frozen_windows(seed=0):
    torch.manual_seed(seed)
    tokenizer = bert_words(WORDS)
    sizes: dict = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 16, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(max_position_embeddings=8, **sizes))
    # Large weights, so that any change shows.
    for weight in model.parameters():
        weight.data.mul_(8)
    return read_in_windows(model, tokenizer, TEXTS, 1, frozen=True).eval(), tokenizer


def inputs(tokenizer):
    windows, _ = frozen_windows()
    encode = WordCertificate(windows, tokenizer, max_length=8).encode
    return nn.utils.rnn.pad_sequence(encode(TEXTS), batch_first=True)


def body(windows):
    return windows.model.bert


def loaded(windows):
    other, _ = frozen_windows(1)
    windows.load_state_dict(other.state_dict())


def assigned(windows):
    other, _ = frozen_windows(1)
    windows.load_state_dict(other.state_dict(), assign=True)


@torch.no_grad()
def edited(windows):
    body(windows).encoder.layer[0].output.dense.weight.mul_(-1)


def set_data(windows):
    """Twice, so that the first memory is free again."""
    for _ in range(2):
        weight = body(windows).encoder.layer[0].output.dense.weight
        weight.data = torch.randn_like(weight)
        gc.collect()


def stepped(windows):
    weight = body(windows).embeddings.word_embeddings.weight.requires_grad_()
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=3.0).step()


def swapped(windows):
    windows.model = frozen_windows(1)[0].model


def swapped_part(windows):
    body(windows).encoder.layer[1].intermediate.intermediate_act_fn = nn.Tanh()


def fewer_layers(windows):
    del body(windows).encoder.layer[1]


def other_eps(windows):
    body(windows).encoder.layer[0].output.LayerNorm.eps = 1e4


def other_mode(windows):
    body(windows).eval()
    for part in body(windows).modules():
        part.training = isinstance(part, nn.Dropout)


def hooked(windows):
    body(windows).encoder.register_forward_hook(lambda *call: None)
    layer = body(windows).encoder.layer[0]
    layer.register_forward_hook(lambda module, args, output: 2 * output)


def merged(windows):
    """As PEFT merges: the sum is written through `.data`, and the layer notes the adapter."""
    config = LoraConfig(target_modules=["query"], init_lora_weights=False, lora_alpha=200)
    inject_adapter_in_model(config, windows.model)
    windows(input_ids=torch.tensor([[windows.config.word_mark, 1]]))
    for part in windows.modules():
        if isinstance(part, LoraLayer):
            part.merge()


CHANGES = [
    loaded, assigned, edited, set_data, stepped, swapped, swapped_part, fewer_layers, other_eps, hooked, merged,
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_body_gives_its_own_answers(change, training):
    windows, tokenizer = frozen_windows()
    ids = inputs(tokenizer)
    before = windows(input_ids=ids).logits
    assert torch.equal(windows(input_ids=ids).logits, before)
    change(windows)
    windows.train(training)
    for part in windows.head.modules():
        part.training = False
    changed = windows(input_ids=ids).logits
    fresh = copy.deepcopy(windows)
    assert torch.equal(fresh(input_ids=ids).logits, changed), "of a model that remembers nothing"
    assert (changed - before).abs().max() > 1e-3


def test_dropout_that_was_switched_on_is_drawn_anew():
    windows, tokenizer = frozen_windows()
    ids = inputs(tokenizer)
    before = windows(input_ids=ids).logits
    other_mode(windows)
    assert not torch.equal(windows(input_ids=ids).logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_another_body(dtype):
    windows, tokenizer = frozen_windows()
    ids = inputs(tokenizer)
    windows(input_ids=ids)
    windows.to(dtype)
    changed = windows(input_ids=ids).logits
    assert torch.equal(copy.deepcopy(windows)(input_ids=ids).logits, changed)
    windows.float()
    assert windows(input_ids=ids).logits.dtype == torch.float32


def test_a_certificate_is_of_the_weights_that_it_copies():
    """Also after an edit through `.data`, which torch does not count."""
    windows, tokenizer = frozen_windows()
    WordCertificate(windows, tokenizer, max_length=8).hold(batches(tokenizer), 2)
    windows(input_ids=inputs(tokenizer))
    body(windows).encoder.layer[0].output.dense.weight.data.mul_(-1)
    certificate = WordCertificate(windows, tokenizer, max_length=8)
    votes = certificate.reader.read(**batches(tokenizer)[0])[0]
    slow = copy.deepcopy(windows).double().votes(**batches(tokenizer)[0])
    real = slow.sum(-1, keepdim=True) != 0
    torch.testing.assert_close(votes, slow.sum(1) / real.sum(1))


def batches(tokenizer):
    ids = inputs(tokenizer)
    return [{"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long()}]


def test_an_unchanged_body_is_read_once():
    windows, tokenizer = frozen_windows()
    ids = inputs(tokenizer)
    calls = []
    original = type(body(windows)).forward
    windows(input_ids=ids)
    try:
        type(body(windows)).forward = lambda *args, **named: (
            calls.append(1) or original(*args, **named)
        )
        windows(input_ids=ids)
        windows.train()(input_ids=ids)
        assert not calls
        edited(windows)
        windows(input_ids=ids)
        assert calls
    finally:
        type(body(windows)).forward = original


def replaced_forward(part):
    call = part.forward
    part.forward = lambda *args, **named: call(*args, **named)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "path", ["", "model", "model.bert.encoder.layer.0", "model.bert.pooler.activation"]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.register_forward_hook(lambda *_: None),
        lambda part: part.register_forward_pre_hook(lambda *_: None),
        replaced_forward,
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_a_hook_or_another_forward_of_any_part_is_refused_by_name(change, path, frozen):
    torch.manual_seed(0)
    tokenizer = bert_words(WORDS)
    sizes: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=16, **sizes)
    model = BertForSequenceClassification(config)
    windows = read_in_windows(model, tokenizer, TEXTS, 1, frozen=frozen)
    WordCertificate(windows, tokenizer, max_length=8)
    change(windows.get_submodule(path))
    with pytest.raises(ConfigError, match=path or "the model"):
        WordCertificate(windows, tokenizer, max_length=8)
