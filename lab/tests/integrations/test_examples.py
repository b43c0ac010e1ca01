"""Every example runs as printed, without a network, and the lines of the documentation that take a
checkpoint of one's own to a penalised Trainer run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint

import wellposed as wp
from wellposed_lab.training.folder.result import read_result

LIGHTNING_SAYS = (".*LeafSpec.*", ".*does not have many workers.*")
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "decoder.0.query"),
        ("vit", "err_orth (best scale)"),
        ("l2_attention", "loads as it was saved: True"),
        ("accelerate_loop", "step 19: penalty"),
        pytest.param(
            "lightning_module",
            "largest |W^T W - I| after training: ",
            marks=[pytest.mark.filterwarnings(f"ignore:{notice}") for notice in LIGHTNING_SAYS],
        ),
        pytest.param(
            "peft_lora",
            "penalty of the merged weights: ",
            marks=pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
        ),
    ],
)
def test_an_example_prints(name, message, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert message in capsys.readouterr().out


@pytest.mark.slow
def test_bert_shows_a_loss_and_a_penalty_that_fall(capsys):
    runpy.run_path(str(EXAMPLES / "bert.py"), run_name="__main__")
    progress = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert len(progress) == 4
    for line in progress:
        first, last = (float(number) for number in re.findall(r"\d\.\d+", line)[:2])
        assert last < 0.95 * first, line


def test_a_worker_of_ray_trains_a_run(tmp_path, monkeypatch):
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    example = runpy.run_path(str(EXAMPLES / "ray_train.py"))
    example["worker"]({"out": str(tmp_path / "run")})
    result = read_result(tmp_path / "run")
    assert (result and result.status) == "success"


@pytest.mark.slow
def test_ray_trains_a_run_in_two_workers():
    pytest.importorskip("ray", reason="needs ray, which is not ours: pip install 'ray[train]'")
    words = [sys.executable, str(EXAMPLES / "ray_train.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "by two workers" in done.stdout


PAGE = Path(__file__).parents[3] / "docs" / "howto" / "penalize.md"


def test_seven_lines_penalise_a_checkpoint(tmp_path, monkeypatch):
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 7
    make_checkpoint(tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    ids = [torch.tensor([2, 4 + row % 7, 3]) for row in range(64)]
    rows = [{"input_ids": input_ids, "labels": row % 2} for row, input_ids in enumerate(ids)]
    model = transformers.AutoModel.from_pretrained("my-checkpoint")
    began = wp.OrthogonalityPenalty(model, key=1e-2, form="paper")().item()
    names = vars(SimpleNamespace(rows=rows))
    quiet = 'learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no"'
    exec(code.replace('"out"', f'"out", {quiet}'), names)
    assert names["penalty"]().item() < 0.95 * began


def test_the_demo_reads_the_table_of_certified_words_alone():
    shares = runpy.run_path(str(EXAMPLES / "demo.py"))["shares"]
    printed = (
        "change  k  certified  attacked\nnone    0  0.8500     0.9500\nwords   1  0.6000     0.6200\n"
        "answer: code, 2 words\nwords that matter most against code: the share of the margin\n"
    )
    assert shares(printed, 2).split() == ["0.85", "0.60"]
    assert shares(printed, 3).split() == ["0.95", "0.62"]
