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
    said = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        captured = cli([*command, "--from", str(bert / "config.json")])
        said.append(captured.out)
        assert "config.json: random weights of a BertModel (seed 0)" in captured.err
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["predict", "--from", "{bert}/config.json", "--text", "a"],
            "a config.json holds no weights",
        ),
        (["measure"], "give a model, as the first word or with --from"),
        (["measure", "{bert}", "--from", "{bert}"], "give a model, as the first word or with"),
        (["certify", "--from", "{bert}/no-such"], "no such folder"),
        (["measure", "--from", "{bert}/broken.json"], "broken.json"),
    ],
)
def test_what_is_no_model_is_one_line(bert, words, says, cli):
    (bert / "broken.json").write_text(
        '{"model_type": "bert", "hidden_size": 15, "num_attention_heads": 2}'
    )
    message = cli([word.format(bert=bert) for word in words], status=None).err
    assert says in message
    assert message.count("\n") == 1


def test_a_folder_with_a_head_and_a_tokenizer_labels_texts(bert, tmp_path, cli):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        bert, id2label={0: "bad", 1: "good"}
    )
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    said = cli(["predict", "--from", str(tmp_path), "--text", "w1 good w2"]).out
    assert said.split("\t")[0] in ("bad", "good")
