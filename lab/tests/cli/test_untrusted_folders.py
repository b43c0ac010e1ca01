"""A folder from somewhere else: none of its code runs, no pickle is read, and a mistyped path is
never looked up."""

import ast
import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.edited import edited
from tests.support.words import python, succeed

TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "code.T"]}, "tokenizer_class": "T"}
MODEL = {"auto_map": {"AutoConfig": "code.C"}, "model_type": "unheard_of"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "values"), [("tokenizer_config.json", TOKENIZER), ("config.json", MODEL)]
)
def test_code_of_a_folder_never_runs_whatever_standard_input_says(foreign, tmp_path, file, values):
    ran = tmp_path / "it-ran"
    (foreign / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n", encoding="utf-8")
    with edited(foreign / file) as config:
        config.update(values)
    done = python("-m wellposed predict", [foreign], "--input -", input="y\ny\ny\n")
    assert not ran.exists()
    assert done.returncode == 1
    assert "which wellposed never runs" in done.stderr
    assert done.stderr.count("\n") == 1


def test_pickled_weights_are_refused_with_the_way_to_convert_them(foreign, cli):
    import transformers
    from safetensors.torch import load_file

    torch.save(load_file(foreign / "model.safetensors"), foreign / "pytorch_model.bin")
    (foreign / "model.safetensors").unlink()
    message = cli("measure", [foreign], status=1).err
    assert "pytorch_model.bin" in message
    assert "AutoModelForSequenceClassification.from_pretrained" in message
    assert message.count("\n") == 1
    # The advice holds: what it says makes a folder that loads.
    kind = transformers.AutoModelForSequenceClassification
    kind.from_pretrained(str(foreign), use_safetensors=False).save_pretrained(str(foreign))
    succeed("measure", [foreign])


def test_no_call_of_from_pretrained_is_outside_the_one_loader():
    import wellposed

    source = Path(wellposed.__file__).parent
    calls = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert set(calls) == {"models/_loading.py"}


@pytest.mark.parametrize(
    "name", ["runs/imbd", "./imbd", "/imbd", "~/imbd", "a/b/c", "runs/imbd/", "no such model"]
)
def test_a_mistyped_path_is_never_looked_up_on_the_hub(small_run, tmp_path, monkeypatch, cli, name):
    shutil.copytree(small_run, tmp_path / "runs" / "imdb")
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    message = cli(["measure", name], status=1).err
    assert "no such folder" in message
    assert ("runs/imdb" in message) == name.startswith("runs/")
    assert "notes" not in message


def test_a_hub_name_is_one_line_offline(small_run, tmp_path, monkeypatch, cli):
    shutil.copytree(small_run, tmp_path / "imdb")
    monkeypatch.chdir(tmp_path)
    for name in ("imbd", "nobody-at-all/nothing"):
        message = cli(["measure", name], status=1).err
        assert name in message
        assert "no folder has that name either" in message
        assert message.count("\n") == 1
        assert ("nearest: imdb" in message) == (name == "imbd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["measure nobody-at-all/x", "train text_classification --data hf:nobody-at-all/x"]
)
def test_without_a_network_the_hub_is_tried_once(words, tmp_path):
    """Hugging Face alone prints a notice for every try, five after the first."""
    nowhere = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = python("-m wellposed", words, env={**os.environ, **nowhere}, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"wellposed: {words.rsplit(maxsplit=1)[-1]}: ")
    assert "hub cannot be reached, or HF_HUB_OFFLINE=1 forbids" in done.stderr
    assert done.stderr.count("\n") == 1
