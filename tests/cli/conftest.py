"""Small finished runs for the tests of commands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.words import succeed
from tests.support.words import words as typed


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of a tiny classifier with a certificate; copy it before
    changing anything."""
    folder = tmp_path_factory.mktemp("small")
    rng = random.Random(0)
    rows = [
        (label, f"a {word} film {rng.choice('xyz')}")
        for label, word in (("pos", "good"), ("neg", "bad"))
    ] * 40
    (folder / "train.tsv").write_text(
        "label\ttext\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8"
    )
    words = typed(
        "train text_classification --data", [folder / "train.tsv"], "--max-length 6 --quiet"
    )
    words += ["--steps", "6", "--eval-every", "3", "--checkpoint-every", "3", "--batch-size", "8"]
    words += [
        "--model.hidden-size",
        "8",
        "--model.num-hidden-layers",
        "1",
        "--model.num-attention-heads",
        "2",
    ]
    words += ["--variant", "l2_contractive", "--model.norm", "none", "--out", str(folder / "run")]
    succeed(words)
    return folder / "run"
