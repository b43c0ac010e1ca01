"""A saved model goes to the hub as it is; where it cannot, it is safe and the command to try again
is told."""

import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError
from tests.support.words import TINY, succeed
from tests.support.words import words as typed

SHORT = typed("--steps 2 --eval-every 2 --batch-size 4 --seq-len 24", TINY)


class Hub:
    """A hub that keeps what it is sent."""

    private: ClassVar[dict[str, bool]] = {}
    files: ClassVar[dict[str, bytes]] = {}
    refusal: ClassVar[Exception | None] = None

    def create_repo(self, name, *, private, exist_ok):
        if self.refusal is not None:
            raise self.refusal
        assert exist_ok
        self.private[name] = private

        class Address(str):
            repo_id = name

        return Address(f"https://hub.test/{name}")

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns):
        assert repo_id in self.private
        sent = [path for path in folder_path.iterdir() if path.name not in ignore_patterns]
        self.files.update({path.name: path.read_bytes() for path in sent})

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id):
        assert repo_id in self.private
        self.files[path_in_repo] = path_or_fileobj


@pytest.fixture
def hub(monkeypatch):
    for name, empty in (("private", {}), ("files", {}), ("refusal", None)):
        monkeypatch.setattr(Hub, name, empty)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "prose.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 60, encoding="utf-8")
    return ["train", "char_lm", "--data", str(text), *SHORT]


@pytest.fixture(scope="module")
def finished(words, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    succeed([*words, "--out", str(out)])
    return out


def test_a_finished_training_is_uploaded_with_its_card(hub, words, finished, cli):
    said = cli(words, "--out", [finished], "--resume auto --push-to-hub me/prose").out
    assert said.splitlines()[-1] == "https://hub.test/me/prose"
    assert hub.private == {"me/prose": True}
    final = {path.name: path.read_bytes() for path in (finished / "final").iterdir()}
    assert hub.files.keys() == final.keys()
    for name in final.keys() - {"README.md"}:
        assert hub.files[name] == final[name]
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/prose")' in card
    assert '"FOLDER"' not in card


def test_without_a_token_the_run_is_safe_and_the_command_told_works_later(
    hub, words, tmp_path, monkeypatch, cli
):
    refusal = LocalTokenNotFoundError("Token is required.\nMore about it.")
    monkeypatch.setattr(hub, "refusal", refusal)
    out = tmp_path / "my run"
    said = cli([*words, "--out", str(out), "--push-to-hub", "me/prose"], status=1)
    assert f"success: {out}" in said.out
    assert said.err.count("\n") == 1
    assert "LocalTokenNotFoundError: Token is required.; log in" in said.err
    again = shlex.split(said.err.partition("try again with: ")[2])
    monkeypatch.setattr(hub, "refusal", None)
    assert again[0] == "wellposed"
    succeed(again[1:])
    assert "model.safetensors" in hub.files


def test_the_verb_makes_a_public_repository_where_asked(hub, finished):
    succeed(["push", str(finished), "prose", "--public"])
    assert hub.private == {"prose": False}


def test_what_cannot_be_uploaded_is_refused_before_the_hub_is_asked(
    hub, words, finished, tmp_path, cli
):
    said = cli(words, "--push-to-hub me/my/prose --out", [tmp_path / "run"], status=2).err
    assert "expected NAME or OWNER/NAME" in said
    assert not (tmp_path / "run").exists()
    assert "no saved model there" in cli(["push", str(tmp_path), "me/prose"], status=1).err
    copy = Path(shutil.copytree(finished / "final", tmp_path / "final"))
    (copy / "model.safetensors").write_bytes(b"")
    said = cli(["push", str(copy), "me/prose"], status=1).err
    assert "model.safetensors: 0 bytes, expected" in said
    assert hub.private == {}


def test_a_run_that_did_not_succeed_is_not_uploaded(hub, words, tmp_path, monkeypatch, cli):
    from wellposed_lab.training.loop import train as training

    cancelled = SimpleNamespace(status="cancelled", exit_code=130, result={})
    monkeypatch.setattr(training, "train", lambda *_, **__: cancelled)
    said = cli(words, "--push-to-hub me/prose --out", [tmp_path / "run"], status=130).err
    assert "cancelled, so nothing was uploaded" in said
    assert hub.private == {}
