"""Models of two texts in runs of the task ``retrieval``: trained, certified, attacked, asked."""

import json

import pytest
from tests.support.words import Cli
from tests.support.words import words as typed

from wellposed.certification import certify
from wellposed_lab.training.loop.build import load_run_model

SHORT = typed("--steps 20 --eval-every 20 --checkpoint-every 20 --batch-size 8 --quiet"
" --model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2")  # fmt: skip
FEW = typed("--num-train 24 --num-valid 8 --num-test 8 --max-length 12")


@pytest.mark.slow
def test_both_texts_of_a_pair_move_and_are_read_from_lines_with_a_tab(tmp_path, capsys):
    cli = Cli(capsys)
    words = ["compare", "retrieval", *FEW, *typed("--variants rezero,lipschitz:2 --seeds 1")]
    margin = typed("--certify 6 --margin-loss certified --margin-radius 0.05")
    cli([*words, *margin, *SHORT, "--out", str(tmp_path / "out")])
    for variant in ("rezero", "lipschitz-2"):
        run = tmp_path / "out" / variant / "seed-0"
        values = json.loads((run / "certified.json").read_text())
        certified = values["certified"]
        attacked = values["attacked"]
        assert all(sure <= share for sure, share in zip(certified, attacked, strict=True))
        assert values["examples"] == 6
    model, _ = load_run_model(run)
    assert type(model).__name__ == "WellposedForSequencePairClassification"
    assert values["total"] == pytest.approx(certify(model, seq_len=12).total, rel=1e-6)
    assert values["total"] <= 2
    output = cli(["certify", str(run), *typed("--examples 4 --attack-steps 2")]).out
    assert "both vectors move (B12)" in output
    assert "certified accuracy on test of retrieval" in output
    message = cli(["predict", str(run), "--text", "one text"], status=2).err
    assert "the model compares pairs of texts" in message
