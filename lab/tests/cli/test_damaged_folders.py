"""Every file of a finished run, damaged in several ways: each command ends with one line, or with
the true numbers."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tables import WHOLE
from tests.support.words import succeed
from tools.faults.damage import DAMAGES

from wellposed_lab.cli.main import main

FILES = (
    "config.toml", "env.json", "metrics.jsonl", "result.json", "measure-initial.json", "measure-final.json",
    "manifest.json", "final/config.json", "final/model.safetensors", "final/tokenizer.json",
    "final/tokenizer_config.json", "final/manifest.json",
)  # fmt: skip


def reads(command, file):
    """Return whether ``command`` reads ``file``; the others are run once, to see that they do
    not."""
    both = file in ("config.toml", "manifest.json")
    return both or file.startswith("final/") != (command == "report")


def commands(run, out, examples=0):
    return {
        "measure": ["measure", str(run)],
        "certify": ["certify", str(run), "--examples", str(examples), "--attack-steps", "1"],
        "predict": ["predict", str(run), "--text", "a good film x"],
        "report": ["report", str(run), "--out", str(out)],
    }


def answers(run, out, capsys, examples, file):
    answer_of = {}
    for name, words in commands(run, out, examples).items():
        if not reads(name, file):
            continue
        out.unlink(missing_ok=True)
        capsys.readouterr()
        status = main(words)
        captured = capsys.readouterr()
        page = out.read_text(encoding="utf-8") if name == "report" and out.exists() else ""
        answer_of[name] = (status, captured.out + page, captured.err)
    return answer_of


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory):
    return Path(shutil.copytree(small_run, tmp_path_factory.mktemp("damage") / "run"))


def damages_of(file, manifests):
    """Return every second kind of damage, the others without manifests; all if tables are run whole."""
    start = (FILES.index(file) + manifests) % 2
    return [*DAMAGES.items()] if WHOLE else [*DAMAGES.items()][start::2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "manifests"),
    [(file, True) for file in FILES]
    + [(file, False) for file in FILES if not file.endswith("manifest.json")],
)
def test_damage_is_one_line_or_changes_nothing(run, tmp_path, capsys, file, manifests):
    """Without manifests a changed digit cannot be told from a true one, but nothing may end in a
    traceback."""
    undamaged = (run / file).read_bytes()
    paths = (run / "manifest.json", run / "final/manifest.json")
    originals = {path: path.read_bytes() for path in paths}
    # Certified accuracy reads the configuration of the data.
    examples = 4 if file == "config.toml" else 0
    before = answers(run, tmp_path / "page.html", capsys, examples, "config.toml")
    assert {name: status for name, (status, _, _) in before.items()} == dict.fromkeys(before, 0)
    try:
        if not manifests:
            for path in originals:
                path.unlink()
        for what, damage in damages_of(file, manifests):
            (run / file).write_bytes(damage(undamaged, random.Random(0)) or b"")
            refused = 0
            read = "config.toml" if what == "cut" else file
            answer_of = answers(run, tmp_path / "page.html", capsys, examples, read)
            for name, (status, out, err) in answer_of.items():
                where = f"{name} with {file} {what}"
                refused += status != 0
                if status:
                    assert status in (1, 2), where
                    assert (status, out) == (1, "") or not manifests, where
                    loose = not manifests or file.endswith("manifest.json")
                    assert Path(file).name in err or loose, where
                    several = name == "report" or file == "config.toml"
                    assert err.count("\n") == 1 or several, f"{where}: {err}"
                    assert len(err) < 2000, where
                elif manifests:
                    assert out == before[name][1], where
            assert refused or not manifests, f"{file} {what}: every command went on"
    finally:
        (run / file).write_bytes(undamaged)
        for path, data in originals.items():
            path.write_bytes(data)


def test_a_missing_tensor_is_named_with_and_without_a_manifest(run, tmp_path, capsys):
    """Hugging Face draws it at random, and the certificate was one of random weights."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    file = folder / "final/model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.0.feedforward.up_proj.weight"
    others = {name: tensor for name, tensor in tensors.items() if name != lost}
    save_file(others, file, metadata={"format": "pt"})
    assert main(["certify", str(folder), "--examples", "0"]) == 1
    message = capsys.readouterr().err
    assert "model.safetensors" in message
    assert "expected" in message
    (folder / "final/manifest.json").unlink()
    for name, words in commands(folder, tmp_path / "page.html").items():
        if name != "report":
            assert main(words) == 1
            captured = capsys.readouterr()
            assert lost in captured.err
            assert captured.out == ""
    save_file({**tensors, "model.foreign": torch.ones(2)}, file, metadata={"format": "pt"})
    assert main(["measure", str(folder)]) == 1
    assert "model.foreign" in capsys.readouterr().err
    save_file(tensors, file, metadata={"format": "pt"})
    succeed(["measure", str(folder)])


@pytest.mark.slow
def test_a_copy_of_final_and_a_folder_without_manifests_load(run, tmp_path, capsys):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    succeed(["measure", str(folder)])
    table = capsys.readouterr().out
    succeed(["measure", str(folder / "final")])
    assert capsys.readouterr().out == table
    (folder / "final/manifest.json").unlink()
    (folder / "manifest.json").unlink()
    succeed(["measure", str(folder)])
    assert capsys.readouterr().out == table
    succeed(["report", str(folder), "--out", str(tmp_path / "page.html")])
