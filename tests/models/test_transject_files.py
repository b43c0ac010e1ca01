"""TransJect models come back from files: through the Auto classes, in a fresh process, body by
body, tied or not."""

import subprocess
import sys

import pytest
import torch
from tests.support.transject import CONFIG, IDS, MASK, SETTINGS, SIZES, awake
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from wellposed.models import (
    AutoModelForSequencePairClassification,
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectForSequencePairClassification,
    TransJectModel,
)

KINDS = [
    (TransJectModel, AutoModel),
    (TransJectForCausalLM, AutoModelForCausalLM),
    (TransJectForSequenceClassification, AutoModelForSequenceClassification),
    (TransJectForSequencePairClassification, AutoModelForSequencePairClassification),
]


@pytest.mark.parametrize(("cls", "auto"), KINDS)
@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_files_through_the_auto_classes(cls, auto, settings, tmp_path):
    torch.manual_seed(10)
    model = awake(cls(TransJectConfig(**SIZES, **settings)))
    model.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    given = {"input_ids": IDS, "attention_mask": MASK}
    given |= {"input_ids_pair": IDS, "attention_mask_pair": MASK} if "Pair" in cls.__name__ else {}
    assert torch.equal(loaded.eval()(**given)[0], model(**given)[0])


def test_a_head_on_a_body_from_a_file_is_fresh_and_the_body_is_not(tmp_path):
    body = awake(TransJectModel(CONFIG))
    body.save_pretrained(tmp_path)
    model = TransJectForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(
        model.model(input_ids=IDS).last_hidden_state, body(input_ids=IDS).last_hidden_state
    )
    assert float(model.classifier.weight.detach().abs().max()) > 0.0
    assert float(model.classifier.bias.detach().abs().max()) == 0.0


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_logits(tmp_path):
    model = awake(TransJectForCausalLM(CONFIG))
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, wellposed.models, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print([weight.flatten().tolist() for weight in model.state_dict().values()])\n"
        "print(model(input_ids=torch.tensor([[3, 1, 4]])).logits.flatten().tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    weights, logits = map(eval, done.stdout.splitlines()[-2:])
    assert weights == [weight.flatten().tolist() for weight in model.state_dict().values()]
    # The same weights in other places of memory: some CPUs then sum in another order.
    assert_close(
        torch.tensor([[logits]]), model(input_ids=IDS[:1, :3]).logits.flatten()[None, None]
    )


def test_a_tied_output_layer_is_the_embedding():
    model = TransJectForCausalLM(TransJectConfig(**SIZES, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.token.weight
    free = TransJectForCausalLM(TransJectConfig(**SIZES))
    assert free.lm_head.weight.shape == (13, 16)
    assert 0.1 < float(model(input_ids=IDS).logits.detach().std()) < 4.0
