"""`sweep --from` and `sweep --import`: the grid on an encoder of the user's."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import transformers
from tests.support.minbert import WORDS, write_minbert
from tests.support.tokenizer_folders import bert_words, byte_level_bpe

from wellposed.cli import main

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PLUGIN = """
import transformers

class OwnConfig(transformers.BertConfig):
    model_type = "own-encoder"

class OwnModel(transformers.BertModel):
    config_class = OwnConfig

transformers.AutoConfig.register("own-encoder", OwnConfig)
transformers.AutoModel.register(OwnConfig, OwnModel)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "rows").mkdir()
    write_minbert(folder / "rows")
    tokenizer = bert_words(WORDS)
    tokenizer.save_pretrained(folder / "bert")
    config = transformers.BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(folder / "bert")
    return folder


def _words(files: Path, source: Path | str, out: Path, *more: str) -> list[str]:
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(files / "rows"),
        "--scale",
        "toy",
        "--seeds",
        "1",
        "--quiet",
    ]
    return [*words, "--cells", "key:1e-2", "--from", str(source), "--out", str(out), *more]


def _trial(out: Path, cell: str = "key-1e-2") -> dict:
    return json.loads((out / "trials" / cell / "seed-0.json").read_text())


@pytest.mark.parametrize("source", ["bert", "bert/config.json", "bare/config.json"])
def test_the_grid_is_trained_on_an_encoder_of_the_users(
    files: Path, tmp_path: Path, source: str
) -> None:
    if source.startswith("bare"):
        (files / "bare").mkdir(exist_ok=True)
        shutil.copy(
            files / "bert" / "config.json", files / "bare"
        )  # no tokenizer: word pieces of the train rows
    assert main(_words(files, files / source, tmp_path)) == 0
    trial = _trial(tmp_path)
    body = transformers.BertModel.from_pretrained(files / "bert").num_parameters()
    heads = 7 * (SIZES["hidden_size"] + 1)
    assert trial["status"] == "success"
    assert (trial["parameters"] == body + heads) != source.startswith(
        "bare"
    )  # word pieces make another embedding
    assert json.loads((tmp_path / "sweep.json").read_text())["settings"]["encoder"] == str(
        files / source
    )


def test_models_of_another_kind_are_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level_bpe(WORDS)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(files / "gpt2")
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(files / "gpt2")
    short = transformers.BertConfig(
        **SIZES, vocab_size=len(bert_words(WORDS)), max_position_embeddings=8
    )
    bert_words(WORDS).save_pretrained(files / "short")
    transformers.BertModel(short).save_pretrained(files / "short")
    refused = {
        "gpt2": "a GPT2Model is no encoder whose first token sees all others",
        "short": "the rows have up to 16 tokens and the encoder has 8 positions",
        "nothing": "no such folder",
    }
    capsys.readouterr()
    for name, says in refused.items():
        assert main(_words(files, files / name, tmp_path / name)) != 0
        message = capsys.readouterr().err
        assert says in message
        assert message.count("\n") == 1
        assert not (tmp_path / name).exists(), "so that the same --out serves the next try"


def test_code_of_the_users_runs_in_every_process_and_is_recorded(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    own = tmp_path / "own"
    shutil.copytree(files / "bert", own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(
        json.dumps({**config, "model_type": "own-encoder", "architectures": ["OwnModel"]})
    )
    assert main(_words(files, own, tmp_path / "without")) != 0
    assert "own-encoder" in capsys.readouterr().err
    plugin = tmp_path / "my.py"
    plugin.write_text(PLUGIN)
    words = _words(files, own, tmp_path / "with", "--import", str(plugin), "--jobs", "2")
    assert main(words) == 0
    recorded = {str(plugin.resolve()): sha256(plugin.read_bytes()).hexdigest()}
    assert (
        json.loads((tmp_path / "with" / "sweep.json").read_text())["settings"]["imports"]
        == recorded
    )
    assert (
        _trial(tmp_path / "with")["imports"]
        == _trial(tmp_path / "with", "baseline")["imports"]
        == recorded
    )
