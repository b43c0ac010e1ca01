"""Every example runs as printed, without a network."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LIGHTNING_SAYS = (".*LeafSpec.*", ".*does not have many workers.*")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bert", "penalty/total"),
        ("gpt2", "decoder.0.query"),
        ("vit", "err_orth / initial"),
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
def test_an_example_runs_and_prints(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert says in capsys.readouterr().out
