"""Models of the user's that a run starts from: what is read bit for bit, what is drawn, what is refused."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.edited import edited

import wellposed as wp
from wellposed.errors import CheckpointError, ConfigError, ShapeError
from wellposed_lab.training.start import start_model

SMALL = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
)
CLASSES = "sequence_classification"
NAMES = dict(enumerate("abc"))
LABELS = {"num_labels": 3, "id2label": NAMES, "label2id": {"a": 0, "b": 1, "c": 2}}


@pytest.fixture
def body(tmp_path):
    """A BERT without a head."""
    config = transformers.BertConfig(**SMALL, max_position_embeddings=24)
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_body_is_read_bit_for_bit_and_the_head_is_drawn(body):
    start = start_model(body, CLASSES, LABELS)
    saved = load_file(body / "model.safetensors")
    state = start.model.state_dict()
    assert all(torch.equal(state[f"bert.{name}"], tensor) for name, tensor in saved.items())
    assert set(start.new_weights) == {"classifier.weight", "classifier.bias"}
    assert start.model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert start.model.training


def test_another_head_that_was_saved_is_named_as_left_out(tmp_path):
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    start = start_model(tmp_path, CLASSES, LABELS)
    assert any(name.startswith("cls.predictions") for name in start.left_out)
    assert all("pooler" in name or "classifier" in name for name in start.new_weights)


def test_a_configuration_alone_gives_random_weights_with_the_vocabulary_of_the_data(body):
    wanted = {**LABELS, "vocab_size": 71, "pad_token_id": 0}
    for source, scratch in ((body / "config.json", False), (body, True)):
        start = start_model(source, CLASSES, wanted, from_scratch=scratch)
        assert start.model.get_input_embeddings().weight.shape == (71, 16)
        assert len(start.new_weights) == len(list(start.model.named_parameters()))


def test_a_tensor_of_the_body_that_is_gone_is_an_error(body):
    path = body / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.0.attention.self.query.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    message = r"lacks bert\.encoder\.layer[.]0[.].*query\.weight of the body"
    with pytest.raises(CheckpointError, match=message):
        start_model(body, CLASSES, LABELS)


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForMaskedLM])
@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_body_that_was_saved_with_a_parametrised_weight_is_an_error(kind, wrap, tmp_path):
    model = kind(transformers.BertConfig(**SMALL))
    bert = getattr(model, "bert", model)
    getattr(torch.nn.utils.parametrizations, wrap)(bert.encoder.layer[1].output.dense)
    model.save_pretrained(tmp_path)
    message = r"encoder\.layer\.1\.output\.dense\.weight was saved while.*remove_parametrizations"
    with pytest.raises(CheckpointError, match=message):
        start_model(tmp_path, CLASSES, LABELS)


@pytest.mark.parametrize(("entry", "valid"), [("num_labels", False), ("num_hidden_layers", True)])
def test_a_size_without_end_is_refused_beside_weights_without_tensors(body, entry, valid):
    weights = body / "model.safetensors"
    save_file({}, weights) if valid else weights.write_bytes(b"cut")
    with edited(body / "config.json") as config:
        config[entry] = 10**9
    with pytest.raises(CheckpointError, match=f"config.json: {entry} = 1000000000"):
        start_model(body, CLASSES, LABELS)


MISFITS = [
    ("seq2seq_lm", {}, ConfigError, "a bert model has no head for seq2seq lm"),
    ("sequence_pair_classification", {}, ConfigError, "no head 'sequence_pair_class"),
    (CLASSES, {"vocab_size": 51}, ShapeError, r"51 tokens .* embedding 50 rows"),
    (CLASSES, {"max_position_embeddings": 25}, ConfigError, "--max-length 24"),
]


@pytest.mark.parametrize(("kind", "wanted", "error", "message"), MISFITS)
def test_what_does_not_fit_is_refused(body, kind, wanted, error, message):
    with pytest.raises(error, match=message):
        start_model(body, kind, {**LABELS, **wanted} if kind == CLASSES else wanted)


def test_labels_that_differ_need_a_new_head(tmp_path):
    config = transformers.BertConfig(
        **SMALL, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="labels no, yes and the data a, b, c; give --new-head"):
        start_model(tmp_path, CLASSES, LABELS)
    start = start_model(tmp_path, CLASSES, LABELS, new_head=True)
    assert set(start.new_weights) == {"classifier.weight", "classifier.bias"}
    same = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    assert start_model(tmp_path, CLASSES, same).new_weights == ()


def test_a_run_starts_from_a_model_without_norms(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    wp.t_fixup_(model)
    model.bert.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("body", "whole"):
        start = start_model(tmp_path / folder, CLASSES, {"vocab_size": 40})
        assert not any("LayerNorm" in name for name, _ in start.model.named_parameters())
        models = (start.model.eval(), model.eval())
        states = [
            net.bert(input_ids=torch.tensor([[3, 1, 4, 1]])).last_hidden_state for net in models
        ]
        assert torch.equal(*states)
