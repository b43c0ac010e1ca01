"""The model of `measure`, `certify` and `predict`: a folder or a config.json, as the first word or
after `--from`."""

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    make_checkpoint(folder)
    return folder


@pytest.mark.parametrize("command", [["measure"], ["certify", "--seq-len", "8"]])
def test_a_folder_is_the_same_as_the_first_word_and_after_from(bert, command, cli):
    name, *more = command
    first = cli([name, bert, *more]).out
    assert first == cli(command, "--from", [bert]).out == cli(command, [f"--from={bert}"]).out != ""


@pytest.mark.parametrize("command", [["measure"], ["certify", "--seq-len", "8"]])
def test_a_config_alone_is_a_model_with_random_weights_and_says_so(bert, command, cli):
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        captured = cli([*command, "--from", str(bert / "config.json")])
        outputs.append(captured.out)
        assert "config.json: random weights of a BertModel (seed 0)" in captured.err
    assert outputs[0] == outputs[1]


def test_a_folder_with_a_head_and_a_tokenizer_labels_texts(bert, tmp_path, cli):
    model = transformers.BertForSequenceClassification
    model.from_pretrained(bert, id2label={0: "bad", 1: "good"}).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    output = cli(["predict", "--from", str(tmp_path), "--text", "w1 good w2"]).out
    assert output.split("\t")[0] in ("bad", "good")
