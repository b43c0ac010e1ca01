"""What earlier versions wrote still loads: models with their configurations, and the configurations
of runs.

The files in `saved` were written by version 0.2 before its options were declared with their parts;
they are never written anew.
"""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.close import within

from wellposed.model_options import ModelOptions
from wellposed.models import build_model, load_saved_model, model_keywords
from wellposed.training.config import RunConfig

SAVED = Path(__file__).parent / "saved"
LOGITS = load_file(SAVED / "logits.safetensors")
RUNS = sorted(SAVED.glob("run_configs/*.toml"))
NOT_ATTRIBUTES = {"dtype", "id2label", "transformers_version"}  # of another type in memory
INPUTS = {
    "pair_cosine": {"input_ids_pair": torch.tensor([[5, 2]])},
    "seq2seq_l2": {"decoder_input_ids": torch.tensor([[1, 5]])},
}


@pytest.mark.parametrize("name", sorted(LOGITS))
def test_a_saved_model_gives_the_logits_it_gave(name):
    model = load_saved_model(SAVED / name)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 1, 4, 1]]), **INPUTS.get(name, {})).logits
    # A few float32 roundings of other kernels: logits are below 10, and sums have at most 16 terms.
    within(logits, LOGITS[name], 10 * 16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", sorted(LOGITS))
def test_every_option_of_a_saved_configuration_has_its_value(name, tmp_path):
    written = json.loads((SAVED / name / "config.json").read_text())
    config = load_saved_model(SAVED / name).config
    assert {name: getattr(config, name) for name in written.keys() - NOT_ATTRIBUTES} == {
        name: value for name, value in written.items() if name not in NOT_ATTRIBUTES
    }
    config.save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert {name: again[name] for name in again.keys() & written.keys()} == {
        name: written[name] for name in again.keys() & written.keys()
    }
    assert written.keys() - again.keys() <= type(config).part_options().keys()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_configuration_of_a_run_comes_back_and_makes_its_model(path):
    values = tomllib.loads(path.read_text())
    config = RunConfig.from_dict(values, where=str(path))
    again = config.to_dict()
    grown = ("model", "train", "constrain", "penalty")  # options were added since
    for section in grown:
        assert again[section].items() >= values[section].items()
    assert {name: again[name] for name in values if name not in grown} == {
        name: values[name] for name in values if name not in grown
    }
    model = build_model(
        config.model.architecture, "causal_lm", vocab_size=5, **model_keywords(config.model)
    )
    for name, value in values["model"].items():
        assert getattr(model.config, name, value) == value


def test_options_are_the_same_on_the_command_line_as_they_were():
    options = {name for path in RUNS for name in tomllib.loads(path.read_text())["model"]}
    assert options <= set(ModelOptions.__dataclass_fields__)
