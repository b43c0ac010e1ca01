"""A folder from somewhere else: none of its code runs, no pickle is read, and a mistyped path is
never looked up."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.words import succeed

from wellposed.cli import main

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from wellposed.cli import main; sys.exit(main(sys.argv[1:]))",
]


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


@pytest.mark.parametrize("kind", ["tokenizer", "model"])
def test_code_of_a_folder_never_runs_whatever_standard_input_says(
    small_run: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_run / "final", folder, ignore=shutil.ignore_patterns("manifest.json"))
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'it-ran')!r}, 'w').close()\n", encoding="utf-8"
    )
    if kind == "tokenizer":
        edit(
            folder / "tokenizer_config.json",
            auto_map={"AutoTokenizer": [None, "code.T"]},
            tokenizer_class="T",
        )
    else:
        edit(folder / "config.json", auto_map={"AutoConfig": "code.C"}, model_type="unheard_of")
    done = subprocess.run(
        [*COMMAND, "predict", str(folder), "--input", "-"],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "it-ran").exists()
    assert done.returncode == 1
    assert "which wellposed never runs" in done.stderr
    assert done.stderr.count("\n") == 1


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "model"
    shutil.copytree(small_run / "final", folder, ignore=shutil.ignore_patterns("manifest.json"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert main(["measure", str(folder)]) == 1
    message = capsys.readouterr().err
    assert "pytorch_model.bin" in message
    assert "AutoModelForSequenceClassification.from_pretrained" in message
    assert message.count("\n") == 1
    # The advice holds: what it says makes a folder that loads.
    import transformers

    transformers.AutoModelForSequenceClassification.from_pretrained(
        str(folder), use_safetensors=False
    ).save_pretrained(str(folder))
    succeed(["measure", str(folder)])


def test_no_call_of_from_pretrained_is_outside_the_one_loader() -> None:
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
    ("name", "nearest"),
    [
        ("runs/imbd", "runs/imdb"),
        ("./imbd", None),
        ("/imbd", None),
        ("~/imbd", None),
        ("a/b/c", None),
        ("runs/imbd/", "runs/imdb"),
        ("no such model", None),
    ],
)
def test_a_mistyped_path_is_never_looked_up_on_the_hub(
    small_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    nearest: str | None,
) -> None:
    shutil.copytree(small_run, tmp_path / "runs" / "imdb")
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    assert main(["measure", name]) == 1
    message = capsys.readouterr().err
    assert "no such folder" in message
    assert (nearest or "") in message
    assert "notes" not in message


def test_a_hub_name_is_one_line_offline(
    small_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(small_run, tmp_path / "imdb")
    monkeypatch.chdir(tmp_path)
    for name in ("imbd", "nobody-at-all/nothing"):
        assert main(["measure", name]) == 1
        message = capsys.readouterr().err
        assert name in message
        assert "no folder has that name either" in message
        assert message.count("\n") == 1
        assert ("nearest: imdb" in message) == (name == "imbd")


@pytest.mark.slow
def test_without_a_network_the_hub_is_tried_once(tmp_path: Path) -> None:
    """Hugging Face alone prints a notice for every try, five after the first."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [*COMMAND, "measure", "nobody-at-all/nothing"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("wellposed: nobody-at-all/nothing: ")
    assert done.stderr.count("\n") == 1
