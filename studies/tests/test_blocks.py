"""A model that does as well without its blocks is not judged. Skipped blocks return their inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from studies.tests.support.finished_runs import finished

from wellposed.model_options import ModelOptions
from wellposed.models import build_model
from wellposed_lab.compare.variants import VARIANTS
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.loop.build import load_run_model
from wellposed_lab.training.loop.train import train
from wellposed_studies import blocks
from wellposed_studies.blocks import needs_blocks, skipped_blocks
from wellposed_studies.study import FinishedRun, unfit

SIZES = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2}
IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("wellposed", HEADS | {"norm": "post"}),
        ("wellposed", HEADS | {"norm": "none"}),
        ("transject", {"residual": "sigmoid"}),
    ],
)
def test_skipped_blocks_return_their_inputs(architecture, options):
    torch.manual_seed(0)
    model = build_model(architecture, "sequence_classification", **SIZES, **options).eval()

    def states():
        return model(IDS, output_hidden_states=True).hidden_states

    first, second, third = states()
    with skipped_blocks(model):
        assert all(torch.equal(state, first) for state in states())
    again = states()
    assert torch.equal(again[1], second)
    assert not torch.equal(second, first)
    assert torch.equal(again[2], third)


def test_a_skipped_lstm_leaves_embedding_and_head():
    torch.manual_seed(0)
    model: Any = build_model("lstm", "causal_lm", **SIZES, **HEADS).eval()
    expected = model.token.weight.detach().double()[IDS] @ model.lm_head.weight.detach().double().T
    with skipped_blocks(model):
        torch.testing.assert_close(model(IDS).logits.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_bert_without_layers_is_its_embedding(encoder):
    from transformers import BertModel

    model = BertModel.from_pretrained(encoder).eval()
    with skipped_blocks(model):
        assert torch.equal(model(IDS).last_hidden_state, model.embeddings(IDS))


@pytest.mark.parametrize("variant", ["post_ln", "pre_ln", "rezero", "lipschitz"])
@pytest.mark.parametrize("layers", [0, 1])
def test_a_trained_model_needs_the_blocks_that_it_has(variant, layers, tmp_path, monkeypatch):
    """The letter after an a depends on the one before it, which the embedding does not see."""
    (tmp_path / "letters.txt").write_text("aab" * 400)
    reads = {"data": str(tmp_path / "letters.txt"), "seq_len": 12}
    model = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=layers)
    schedule = TrainOptions(steps=40, batch_size=16, eval_every=20, learning_rate=1e-2)
    config = VARIANTS.get(variant)(RunConfig("char_lm", reads, model=model, train=schedule))
    run = FinishedRun.from_result(train(config, tmp_path / "run", progress=False))
    assert needs_blocks(config, run.folder) is run.needs_blocks is (layers > 0)

    def remembering(folder: Path) -> tuple[Any, None]:  # as frozen windows do
        model = load_run_model(folder)[0]
        outputs = {}

        def remembered(**batch: torch.Tensor) -> Any:
            key = str(batch["input_ids"])
            outputs[key] = outputs[key] if key in outputs else compute(**batch)
            return outputs[key]

        compute = model.forward
        model.forward = remembered
        return model, None

    monkeypatch.setattr(blocks, "load_run_model", remembering)
    assert needs_blocks(config, run.folder) is (layers > 0)


@pytest.mark.parametrize(
    ("options", "excused", "judged"),
    [
        ({}, False, True),
        ({"needs_blocks": False}, False, False),
        ({"needs_blocks": False, "depth": 0}, False, True),  # a control
        ({"needs_blocks": False}, True, True),  # the claim expects that it fails
    ],
)
def test_models_that_do_as_well_without_their_blocks_are_not_judged(options, excused, judged):
    metrics = {"accuracy,test": 0.9, "accuracy,valid": 0.9}
    runs = [
        finished("listops", "post_ln", metrics, seed=seed, reference={"accuracy": 0.5}, **options)
        for seed in range(3)
    ]
    reason = "post_ln of 1 layers on listops fits as well if its blocks return their inputs"
    assert unfit(runs, level=False, fails=lambda _: excused) == [reason] * (not judged)
