"""The manifests of final/ and of a run are written with it and true until the run continues. A best
checkpoint may be damaged; final/ names the classes of this package."""

import json
import shutil
from hashlib import sha256

import pytest
import torch
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import final, flip, rows, same
from safetensors.torch import load_file

from wellposed.errors import CheckpointError
from wellposed.models import build_model, load_saved_model
from wellposed_lab.training.folder.manifest import verify_final, verify_run_file
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.folder.save import MODULE, name_our_classes


def test_manifests_hold_size_and_digest_of_every_file(tmp_path):
    out = tmp_path / "run"
    assert read_result(tmp_path) is None
    result = stub.run(stub.make_config(), out)
    assert read_result(out) == result
    for folder in (out, out / "final"):
        files = json.loads((folder / "manifest.json").read_text())["files"]
        contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        del contents["manifest.json"]
        contents.pop("README.md", None)  # the model card is for its readers to change
        assert files.keys() == contents.keys()
        for name, data in contents.items():
            assert files[name] == {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    verify_final(out / "final")
    for name in ("result.json", "metrics.jsonl", "env.json", "config.toml"):
        verify_run_file(out / name)
        flip(out / name)
        expected = rf"{name}: SHA-256 is \w+, expected \w+ \(altered\); restore it"
        with pytest.raises(CheckpointError, match=expected):
            verify_run_file(out / name)
    with pytest.raises(CheckpointError, match=r"result\.json: SHA-256"):
        read_result(out)
    flip(out / "final" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: SHA-256 is \w+, expected \w+"):
        verify_final(out / "final")
    verify_final(out / "final", weights=False)


def test_a_run_going_on_has_no_manifest(tmp_path, monkeypatch):
    """Files grow while a run continues, and a kill must leave no manifest that they contradict."""
    out = tmp_path / "run"
    config = stub.make_config()
    stub.run(config, out)
    shutil.rmtree(out / "final")
    has_manifest = []

    class Watching(stub.StubTask):
        def collate(self, examples):
            has_manifest.append((out / "manifest.json").exists())
            return super().collate(examples)

    stub.run(config, out, resume="auto", task=Watching())
    assert has_manifest
    assert not any(has_manifest)
    for name in json.loads((out / "manifest.json").read_text())["files"]:
        verify_run_file(out / name)


def test_a_run_ends_with_the_last_weights_where_the_best_are_damaged(tmp_path, capsys):
    """One flipped bit in the best checkpoint made a run impossible to finish, however often it was
    resumed."""
    out = tmp_path / "run"
    config = stub.make_config(learning_rate=2.0)
    best = stub.run(config, out).result["train_info"]["best_step"]
    assert best < 12
    last = load_file(out / "checkpoint-12" / "model.safetensors")
    shutil.rmtree(out / "final")
    (out / "result.json").unlink()
    flip(out / f"checkpoint-{best}" / "model.safetensors")
    result = stub.run(config, out, resume="auto", progress=True)
    assert result.status == "success"
    reason = result.result["train_info"]["reason"]
    assert reason in capsys.readouterr().err
    assert f"of step {best}, are lost; those of step 12 are used" in reason
    assert f"checkpoint-{best}/model.safetensors: SHA-256" in reason
    assert result.result["train_info"]["best_step"] == 12
    # The numbers on valid are those of the weights that are left.
    of_last = [row for row in rows(out, "valid") if row["step"] == 12]
    nats = result.result["results"]["stub"]["nats,valid"]
    assert nats == pytest.approx(of_last[0]["nats"], rel=1e-6)
    assert same(final(out), last)


def test_a_damaged_record_of_starts_is_one_message(tmp_path):
    out = tmp_path / "run"
    config = stub.make_config()
    stub.run(config, out)
    shutil.rmtree(out / "final")
    for content in ("", "[]", '{"starts": 5}', "{", "null", "[" * 100_000):
        (out / "manifest.json").unlink(missing_ok=True)
        (out / "env.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"env\.json: not a record of earlier starts"):
            stub.run(config, out, resume="auto")
    (out / "env.json").unlink()
    assert stub.run(config, out, resume="auto").status == "success"


KINDS = [
    ("wellposed", "causal_lm"),
    ("wellposed", "sequence_classification"),
    ("wellposed", "sequence_pair_classification"),
    ("wellposed", "seq2seq_lm"),
    ("transject", "sequence_classification"),
    ("transject", "causal_lm"),
]


@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_every_class_is_named_and_loads(architecture, kind, tmp_path):
    sizes = {"hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1}
    model = build_model(architecture, kind, **sizes)
    model.save_pretrained(tmp_path)
    name_our_classes(tmp_path, model)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    classes = (type(instance).__name__ for instance in (model, model.config))
    assert sorted(named.values()) == sorted(f"{MODULE}.{name}" for name in classes)
    namespace = {}
    exec((tmp_path / f"{MODULE}.py").read_text(), namespace)
    assert namespace[type(model).__name__] is type(model)
    loaded = load_saved_model(tmp_path)
    assert type(loaded) is type(model)
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
