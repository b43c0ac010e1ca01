"""The main job from the command line: compare, report, predict, measure, and what happens on bad
input."""

import gzip
import json
import shutil

import pytest
from tests.support.words import TINY, succeed
from tests.support.words import words as typed

TEXT = "the quick brown fox jumps over the lazy dog; five dozen liquor jugs.\n" * 60
SHORT = typed("--steps 4 --eval-every 2 --checkpoint-every 2 --batch-size 4", TINY)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Return a folder with a finished comparison of two variants and two seeds."""
    folder = tmp_path_factory.mktemp("main_job")
    with gzip.open(folder / "prose.txt.gz", "wt", encoding="utf-8") as file:
        file.write(TEXT)
    words = typed("compare char_lm --data", [folder / "prose.txt.gz"], "--seq-len 24", SHORT)
    succeed(words, "--variants post_ln,oc3:1e-3 --seeds 2 --out", [folder / "runs"])
    return folder


@pytest.mark.slow
def test_a_comparison_leaves_runs_and_one_report(workspace):
    page = (workspace / "runs" / "report.html").read_text(encoding="utf-8")
    assert "oc3:1e-3" in page
    assert page.count("<script") == 1
    for variant in ("post_ln", "oc3-1e-3"):
        for seed in (0, 1):
            folder = workspace / "runs" / variant / f"seed-{seed}"
            result = json.loads((folder / "result.json").read_text())
            assert result["train_info"]["status"] == "success"
            assert result["seed"] == seed


@pytest.mark.slow
def test_resume_keeps_finished_runs(workspace, capsys, cli):
    models = (workspace / "runs").glob("*/*/final/model.safetensors")
    before = {path: path.stat().st_mtime_ns for path in models}
    words = typed("compare char_lm --data", [workspace / "prose.txt.gz"], "--seq-len 24", SHORT)
    words += typed("--variants post_ln,oc3:1e-3 --seeds 2 --out", [workspace / "runs"])
    assert "--resume auto" in cli(words, status=2).err
    succeed([*words, "--resume", "auto"])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "difference" in capsys.readouterr().out


def test_predict_continues_a_text_past_the_positions(workspace, cli):
    run = str(workspace / "runs" / "post_ln" / "seed-0")
    first = cli(["predict", run, "--text", "the quick", "--max-new-tokens", "60"]).out
    assert first.startswith("the quick")
    assert len(first.rstrip("\n")) > len("the quick") + 40
    assert cli(["predict", run, "--text", "the quick", "--max-new-tokens", "60"]).out == first
    text = cli(["predict", run, "--text", "the quick", "--max-new-tokens", "60", "--seed", "1"]).out
    assert text != first


def test_a_text_is_sampled_from_the_logits_that_losses_read(workspace, tmp_path, cli):
    """At a million times the logits only the most probable token is left."""
    source = workspace / "runs" / "post_ln" / "seed-0"
    run = tmp_path / "run"
    shutil.copytree(source, run, ignore=shutil.ignore_patterns("manifest.json"))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("logit_scale = 1.0", "logit_scale = 1e6"))
    words = typed("predict", [run], "--text", ["the quick"], "--max-new-tokens 30 --temperature")
    assert cli(words, "0.8").out == cli(words, "0").out


def test_measure_prints_and_writes(workspace, tmp_path, cli):
    run = str(workspace / "runs" / "oc3-1e-3" / "seed-0")
    out = cli(["measure", run, "--out", str(tmp_path / "m")]).out
    assert "query" in out
    assert "feedforward_in" in out
    assert {path.suffix for path in (tmp_path / "m").iterdir()} >= {".csv", ".json", ".svg"}


def test_a_variant_that_no_model_can_be_made_of_is_refused_before_others_train(tmp_path, cli):
    words = typed("compare text_classification --data builtin --out", [tmp_path / "new"])
    (tmp_path / "pairs.tsv").write_text("de\ten\n" + "ein haus\ta house\n" * 60)
    pairs = typed("compare translation --src de --tgt en --data", [tmp_path / "pairs.tsv"])
    pairs += typed("--out", [tmp_path / "new"], "--variants post_ln,transject")
    assert "kind of transject model" in cli(pairs, status=2).err
    assert not (tmp_path / "new").exists()
    errors = cli(words, "--resume sometimes", status=2).err
    assert "resume = 'sometimes', expected 'never' or 'auto'" in errors
    assert "nearest: --model.norm, --model.qk-norm" in cli(words, "--model.nom a", status=2).err
